use std::path::Path;

use proptest::prelude::*;
use serde::Deserialize;

use super::Tokenizer;
use crate::model_card::testing::{GgufWriter, default_model};
use crate::model_card::{GgufFile, ModelCard};

/// One line of `tests/goldens/tokenizer.json`.
#[derive(Deserialize)]
struct Golden {
    text: String,
    ids: Vec<u32>,
}

fn goldens() -> Vec<Golden> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/tokenizer.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn from_writer(writer: GgufWriter) -> Tokenizer {
    let writer = writer.text("general.architecture", "llama").u32("llama.context_length", 8);
    let card = ModelCard::from_gguf(&GgufFile::from_bytes(writer.bytes()).unwrap()).unwrap();
    Tokenizer::from_card(&card).unwrap()
}

/// Ids as the spellings of their tokens.
fn pieces(tokenizer: &Tokenizer, text: &str, add_special: bool) -> String {
    let ids = tokenizer.encode(text, add_special).unwrap();
    ids.into_iter().map(|id| tokenizer.piece(id).unwrap()).collect::<Vec<_>>().join("·")
}

#[test]
fn ids_of_the_default_model_equal_those_of_other_software() {
    let Some(path) = default_model() else { return };
    let card = ModelCard::from_gguf(&GgufFile::open(&path).unwrap()).unwrap();
    let tokenizer = Tokenizer::from_card(&card).unwrap();
    let goldens = goldens();
    assert!(goldens.len() >= 200);
    for Golden { text, ids } in goldens {
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn splits_as_the_named_pre_tokenizer_does() {
    let tokenizer = from_writer(GgufWriter::new().byte_vocabulary());
    let shown = ["the the 12", "<|im_start|>user\nhe~~<|im_end|>", "a\u{0}b\r\n", "é"]
        .map(|text| pieces(&tokenizer, text, true));
    insta::assert_snapshot!(shown.join("\n"), @r"
    t·he·Ġthe·Ġ·1·2
    <|im_start|>·u·s·e·r·Ċ·he·~~·<|im_end|>
    a·Ā·b·č·Ċ
    Ã·©
    ");
}

#[test]
fn begin_of_text_is_added_once_and_only_when_asked_for() {
    let writer = GgufWriter::new().byte_vocabulary().bool("tokenizer.ggml.add_bos_token", true);
    let tokenizer = from_writer(writer);
    assert_eq!(pieces(&tokenizer, "he", true), "<|im_start|>·he");
    assert_eq!(pieces(&tokenizer, "he", false), "he");
    assert_eq!(pieces(&tokenizer, "", true), "<|im_start|>");
}

#[test]
fn special_tokens_are_left_out_when_asked_for() {
    let tokenizer = Tokenizer::from_card(&ModelCard::mock()).unwrap();
    let ids = tokenizer.encode("<|im_start|>a<|im_end|>", false).unwrap();
    assert_eq!(ids, [257, 97, 258]);
    assert_eq!(tokenizer.decode(&ids, true), "a");
    assert_eq!(tokenizer.decode(&ids, false), "<|im_start|>a<|im_end|>");
    assert_eq!(tokenizer.decode(&[300, 511, 512, u32::MAX], true), " t300 t511");
    assert_eq!(tokenizer.token_bytes(0xe9), [0xe9]);
    assert_eq!(tokenizer.token_text(0xe9), "\u{fffd}");
    assert_eq!(tokenizer.vocab_size(), 512);
}

/// Pieces with scores, as SentencePiece has them: no merges in the file.
fn sentencepiece(prefix: bool) -> Tokenizer {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".into(), "</s>".into()];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"].map(String::from));
    let kinds: Vec<i32> = (0..tokens.len())
        .map(|id| match id {
            0 => 2,
            1 | 2 => 3,
            3..259 => 6,
            _ => 1,
        })
        .collect();
    let mut scores = vec![0.0; 259];
    scores.extend([-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -5.0, -6.0]);
    let writer = GgufWriter::new()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .f32s("tokenizer.ggml.scores", &scores)
        .bool("tokenizer.ggml.add_space_prefix", prefix)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2);
    from_writer(writer)
}

#[test]
fn sentencepiece_merges_by_score_and_falls_back_to_bytes() {
    let tokenizer = sentencepiece(true);
    let shown = ["abc", "ab", "a b", "é a"].map(|text| pieces(&tokenizer, text, true));
    insta::assert_snapshot!(shown.join("\n"), @"
    <s>·▁a·bc
    <s>·▁ab
    <s>·▁a·▁·b
    <s>·▁·<0xC3>·<0xA9>·▁a
    ");
    for text in ["abc", " abc", "é", "a  b", "日本 \n"] {
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
    assert_eq!(pieces(&sentencepiece(false), "ab", false), "ab");
}

proptest! {
    #[test]
    fn decoding_what_was_encoded_gives_the_text(text in "\\PC{0,40}|[ \\t\\n\\r0-9a-z]{0,40}") {
        for tokenizer in [
            Tokenizer::from_card(&ModelCard::mock()).unwrap(),
            from_writer(GgufWriter::new().byte_vocabulary()),
        ] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids, false), &text);
            let bytes: Vec<u8> =
                ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
            prop_assert_eq!(bytes, text.as_bytes());
        }
    }
}
