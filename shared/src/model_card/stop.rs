//! The tokens that end an answer.

use std::collections::BTreeSet;

use super::tokenizer_json::{TokenKind, Vocabulary};
use super::{GgufFile, ModelError};

/// Keys under which a file names tokens that end something.
const KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Control tokens that end a turn or a text in the families that have them. Files often name one of
/// them under `eos_token_id` and leave the other out, while the model says either.
const TEXTS: [&str; 14] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "</s>",
];

/// All of them, the first end-of-text token included.
pub(super) fn token_ids(
    file: &GgufFile,
    vocabulary: &Vocabulary<'_>,
) -> Result<BTreeSet<u32>, ModelError> {
    let mut ids = BTreeSet::new();
    for key in KEYS {
        ids.extend(vocabulary.id_at(key, file)?);
    }
    ids.extend(TEXTS.iter().filter_map(|text| {
        // Only as a control token: a vocabulary may hold the same letters as a plain word.
        vocabulary.id_of(text).filter(|&id| vocabulary.kind(id) == TokenKind::Control)
    }));
    Ok(ids)
}
