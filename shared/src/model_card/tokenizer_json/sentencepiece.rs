//! SentencePiece BPE: pieces with scores, from which the merges are found again.

use serde_json::json;

use super::super::{GgufFile, ModelError};
use super::{BpeModel, TokenIds, TokenKind, TokenizerJson, Vocabulary};

/// A longer piece is refused: finding its merges costs the square of its length.
const PIECE_BYTES_MAX: usize = 1024;

pub(super) fn build<'a>(
    file: &'a GgufFile,
    vocabulary: &'a Vocabulary<'a>,
) -> Result<TokenizerJson<'a>, ModelError> {
    let prefix = file.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let escape = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let normalizers = if prefix { vec![prepend, escape] } else { vec![escape] };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let byte_fallback =
        (0..=u8::MAX).all(|byte| vocabulary.id_of(&format!("<0x{byte:02X}>")).is_some());
    let unknown = match vocabulary.id_at("tokenizer.ggml.unknown_token_id", file)? {
        Some(id) => Some(id),
        None => (0..vocabulary.len()).find(|&id| vocabulary.kind(id) == TokenKind::Unknown),
    };
    Ok(TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: super::added_tokens(vocabulary),
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: serde_json::Value::Null,
        post_processor: super::post_processor(file, vocabulary)?,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: BpeModel {
            kind: "BPE",
            dropout: None,
            unk_token: unknown.map(|id| vocabulary.token(id)),
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: true,
            byte_fallback,
            ignore_merges: false,
            vocab: TokenIds(vocabulary.texts()),
            merges: merges(file, vocabulary)?,
        },
    })
}

/// Each way to make a piece of two others is a merge; the piece with the higher score goes first.
fn merges<'a>(
    file: &GgufFile,
    vocabulary: &Vocabulary<'a>,
) -> Result<Vec<(&'a str, &'a str)>, ModelError> {
    let scores = scores(file, vocabulary.len())?;
    let mut found = Vec::new();
    for (id, &text) in vocabulary.texts().iter().enumerate() {
        if !matches!(vocabulary.kind(id as u32), TokenKind::Normal | TokenKind::UserDefined) {
            continue;
        }
        if text.len() > PIECE_BYTES_MAX {
            let field = format!("the length of token {id}");
            return Err(ModelError::field(
                field,
                format!("at most {PIECE_BYTES_MAX} bytes"),
                text.len(),
            ));
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if vocabulary.id_of(left).is_some() && vocabulary.id_of(right).is_some() {
                found.push((scores[id], left, right));
            }
        }
    }
    // Of equal scores the longer left part first, as the makers of the format do; the sort is
    // stable, so what is equal in that too stays in the order of ids.
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.len().cmp(&a.1.len())));
    Ok(found.into_iter().map(|(_, left, right)| (left, right)).collect())
}

fn scores(file: &GgufFile, tokens: u32) -> Result<Vec<f64>, ModelError> {
    let key = "tokenizer.ggml.scores";
    let array = file.array(key)?.ok_or_else(|| GgufFile::missing(key))?;
    if array.len() != u64::from(tokens) {
        let expected = format!("{tokens} elements, one a token");
        return Err(ModelError::field(format!("metadata key {key:?}"), expected, array.len()));
    }
    let score = |(index, value): (usize, super::super::MetadataValue<'_>)| {
        value.as_f64().filter(|score| !score.is_nan()).ok_or_else(|| {
            let field = format!("element {index} of metadata key {key:?}");
            ModelError::field(field, "a number", value)
        })
    };
    array.iter().enumerate().map(score).collect()
}
