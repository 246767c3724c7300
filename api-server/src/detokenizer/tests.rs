use proptest::prelude::*;

use std::sync::Arc;

use pawl_shared::model_card::ModelCard;

use super::*;

/// A vocabulary made by hand: `(bytes, special)` by id.
pub(crate) struct TokenTable {
    pub tokens: Vec<(Vec<u8>, bool)>,
    pub strips_first_space: bool,
}

impl TokenText for TokenTable {
    fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], |(bytes, _)| bytes)
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokens.get(id as usize).is_some_and(|(_, special)| *special)
    }

    fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// A vocabulary of single bytes, then some words and pieces of characters, then a special token.
fn byte_level() -> TokenTable {
    let bytes = (0..=255u8).map(|byte| (vec![byte], false));
    let words: [&[u8]; 6] =
        [b" hello", "ü".as_bytes(), "日本".as_bytes(), &[0xF0, 0x9F], &[0x98, 0x80], b"\xE6\x97"];
    let words = words.into_iter().map(|word| (word.to_vec(), false));
    let tokens = bytes.chain(words).chain([(b"<|end|>".to_vec(), true)]).collect();
    TokenTable { tokens, strips_first_space: false }
}

fn deltas(table: &dyn TokenText, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(skip_special);
    let mut pieces: Vec<String> = ids
        .iter()
        .map(|&id| {
            let mut piece = String::new();
            detokenizer.push(table, id, &mut piece);
            piece
        })
        .collect();
    let mut rest = String::new();
    detokenizer.finish(&mut rest);
    pieces.push(rest);
    pieces
}

#[test]
fn one_delta_carries_the_whole_character() {
    let emoji = "a😀b".bytes().map(u32::from).collect::<Vec<_>>();
    assert_eq!(deltas(&byte_level(), &emoji, true), ["a", "", "", "", "😀", "b", ""]);
}

#[test]
fn an_unfinished_character_shows_only_at_the_end() {
    let cut = "a😀".bytes().take(4).map(u32::from).collect::<Vec<_>>();
    assert_eq!(deltas(&byte_level(), &cut, true), ["a", "", "", "", "\u{FFFD}"]);
}

#[test]
fn special_tokens_show_only_when_asked_for_and_unknown_ids_have_no_text() {
    let ids = [256, 262, 9999];
    assert_eq!(deltas(&byte_level(), &ids, true).concat(), " hello");
    assert_eq!(deltas(&byte_level(), &ids, false).concat(), " hello<|end|>");
}

#[test]
fn a_vocabulary_of_marked_words_loses_its_first_space_only() {
    let words = [" a", " b", " "].map(|word| (word.as_bytes().to_vec(), false));
    let table = TokenTable { tokens: words.into(), strips_first_space: true };
    assert_eq!(deltas(&table, &[0, 1, 2, 0], true).concat(), "a b  a");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// The deltas joined are one decode of all the bytes.
    #[test]
    fn deltas_joined_are_one_decode(ids in proptest::collection::vec(0u32..263, 0..64)) {
        let table = byte_level();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| table.bytes(id).to_vec()).collect();
        prop_assert_eq!(
            deltas(&table, &ids, false).concat(),
            String::from_utf8_lossy(&bytes).into_owned()
        );
    }

    /// The same against the tokenizer of a served model, with its special tokens.
    #[test]
    fn deltas_joined_are_the_tokenizers_decode(
        ids in proptest::collection::vec(0u32..520, 0..64),
        skip_special: bool,
    ) {
        let tokenizer = mock_tokenizer();
        prop_assert_eq!(
            deltas(&*tokenizer, &ids, skip_special).concat(),
            tokenizer.decode(&ids, skip_special)
        );
    }
}

fn mock_tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: std::sync::OnceLock<Arc<Tokenizer>> = std::sync::OnceLock::new();
    let make = || Arc::new(Tokenizer::from_card(&ModelCard::mock()).expect("the mock is sound"));
    TOKENIZER.get_or_init(make).clone()
}
