//! The pre-tokenizers that files name and do not contain.

use serde_json::{Value as Json, json};

use super::super::ModelError;

/// The words of GPT-2: contractions, then letters, digits or other signs with a space before them.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Llama 3: digits in groups of at most three, line ends kept together.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Qwen 2: as Llama 3, digits one by one.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// What llama.cpp does where a file does not say: these splits one after the other.
const UNNAMED: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];

/// How a file's texts are split before merging.
pub(super) struct PreTokenizer {
    pub normalizer: Json,
    pub pre_tokenizer: Json,
    pub ignore_merges: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Family {
    Gpt2,
    SingleDigits,
    Llama3,
    Qwen2,
    Unnamed,
}

fn family(name: Option<&str>) -> Option<Family> {
    Some(match name {
        None | Some("default") => Family::Unnamed,
        Some("gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "roberta-bpe") => Family::Gpt2,
        Some("smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone") => {
            Family::SingleDigits
        }
        Some("llama-bpe" | "llama3" | "llama-v3" | "falcon3") => Family::Llama3,
        Some("qwen2" | "deepseek-r1-qwen" | "stablelm2") => Family::Qwen2,
        Some(_) => return None,
    })
}

/// Whether the family puts begin-of-text first where a file does not say.
pub(super) fn adds_bos(name: Option<&str>) -> bool {
    family(name) == Some(Family::Llama3)
}

/// Mapping bytes to the letters of a byte-level vocabulary; as a pre-tokenizer or decoder.
pub(super) fn byte_level(use_regex: bool) -> Json {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": use_regex,
    })
}

fn split(regex: &str) -> Json {
    json!({
        "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false,
    })
}

fn sequence(steps: Vec<Json>) -> Json {
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// The pre-tokenizer of `tokenizer.ggml.pre`.
pub(super) fn of(name: Option<&str>) -> Result<PreTokenizer, ModelError> {
    let Some(family) = family(name) else {
        return Err(ModelError::Unsupported {
            what: format!("tokenizer.ggml.pre {:?}", name.unwrap_or_default()),
            remedy: "put the model's own tokenizer.json beside the GGUF file".into(),
        });
    };
    let pre_tokenizer = match family {
        Family::Gpt2 => byte_level(true),
        Family::SingleDigits => {
            sequence(vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)])
        }
        Family::Llama3 => sequence(vec![split(LLAMA3), byte_level(false)]),
        Family::Qwen2 => sequence(vec![split(QWEN2), byte_level(false)]),
        Family::Unnamed => {
            sequence(UNNAMED.iter().map(|regex| split(regex)).chain([byte_level(false)]).collect())
        }
    };
    // Only Qwen's tokenizer composes characters first.
    let composes = name == Some("qwen2") || name == Some("deepseek-r1-qwen");
    let normalizer = if composes { json!({"type": "NFC"}) } else { Json::Null };
    Ok(PreTokenizer { normalizer, pre_tokenizer, ignore_merges: family == Family::Llama3 })
}
