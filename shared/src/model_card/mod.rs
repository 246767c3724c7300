//! What a model is, read from its files and carried to whoever serves it.
//!
//! - [`GgufFile`]: the reader of GGUF files, checked before use;
//! - [`ModelCard`]: all that a frontend needs to serve the model, so that it needs no file itself:
//!   the core sends it as the answer to `get_model_card`;
//! - `tokenizer_json`: the tokenizer of a GGUF file rewritten as a `tokenizer.json`;
//! - [`DEFAULT_MODEL`]: what is served where nobody names a model;
//! - [`testing`]: writing tiny GGUF files.
//!
//! Invariant: nothing here computes with weights.

mod beside;
mod default_model;
mod error;
mod ggml_type;
mod gguf;
mod map;
mod mock;
mod stop;
pub mod testing;
mod tokenizer_json;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::protocol::Value;
pub use default_model::{DEFAULT_MODEL, PackagedModel, models_folder};
pub use error::ModelError;
pub use ggml_type::GgmlType;
pub use gguf::{GgufFile, GgufTensor, MetadataArray, MetadataValue};

/// What a frontend needs to know of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// What it can be called, best first. Names given by the user take precedence.
    pub names: Vec<String>,
    /// As the file calls it: `llama`.
    pub architecture: String,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Prompt and answer together, in tokens.
    pub max_model_len: u32,
    /// The text of a `tokenizer.json`.
    pub tokenizer_json: String,
    /// A Jinja template, where the model has one.
    pub chat_template: Option<String>,
    /// Begin of text.
    pub bos_token_id: Option<u32>,
    /// The first of the ids that end an answer.
    pub eos_token_id: Option<u32>,
    /// The other ids that end an answer (end of turn, end of text), sorted.
    pub stop_token_ids: Vec<u32>,
    /// For what fills the rest of a batch.
    pub pad_token_id: Option<u32>,
    /// Whether `add_special_tokens` puts begin-of-text first. The tokenizer does so by itself.
    pub add_bos: bool,
    /// Text of `bos_token_id`, for templates.
    pub bos_token: Option<String>,
    /// Text of `eos_token_id`, for templates.
    pub eos_token: Option<String>,
    /// What the model's makers advise where a request does not say.
    pub generation_defaults: GenerationDefaults,
}

/// Sampling values from `generation_config.json` beside the model; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerationDefaults {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// 0 to 1.
    pub top_p: Option<f32>,
    /// Number of tokens.
    pub top_k: Option<u32>,
    /// 0 to 1.
    pub min_p: Option<f32>,
    /// 1 is none.
    pub repetition_penalty: Option<f32>,
    /// Tokens of an answer.
    pub max_new_tokens: Option<u32>,
}

impl ModelCard {
    /// Reads the card from a model file and from `tokenizer.json` and `generation_config.json`
    /// beside it, where they are. A `tokenizer.json` must be that of the same vocabulary.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        if let Some(count) = file.u32("split.count")?.filter(|&count| count > 1) {
            return Err(ModelError::Unsupported {
                what: format!("a model split into {count} files"),
                remedy: "merge them with `llama-gguf-split --merge`".into(),
            });
        }
        let required = |key: &str, found: Option<u32>| found.ok_or_else(|| GgufFile::missing(key));
        let key = "general.architecture";
        let architecture = file.text(key)?.ok_or_else(|| GgufFile::missing(key))?.to_owned();
        let key = format!("{architecture}.context_length");
        let max_model_len = required(&key, file.u32(&key)?)?;
        if max_model_len == 0 {
            return Err(ModelError::field(format!("metadata key {key:?}"), "at least 1", 0));
        }

        let vocabulary = tokenizer_json::Vocabulary::read(file)?;
        let vocab_size = vocabulary.len();
        let beside = beside::tokenizer(file, &vocabulary)?;
        let tokenizer_json = match beside {
            Some(text) => text,
            None => tokenizer_json::build(file, &vocabulary)?,
        };
        let generation = beside::generation(file)?;

        let eos = vocabulary.id_at("tokenizer.ggml.eos_token_id", file)?;
        let mut stops = stop::token_ids(file, &vocabulary)?;
        for &id in &generation.eos_token_ids {
            if id >= vocab_size {
                let field = "eos_token_id of generation_config.json";
                return Err(ModelError::field(field, format!("below {vocab_size}"), id));
            }
            stops.insert(id);
        }
        let eos_token_id = eos.or_else(|| stops.first().copied());
        if let Some(id) = eos_token_id {
            stops.remove(&id);
        }
        let bos_token_id = vocabulary.id_at("tokenizer.ggml.bos_token_id", file)?;
        let text_of = |id: Option<u32>| id.map(|id| vocabulary.token(id).to_owned());
        let card = Self {
            names: names(file),
            architecture,
            vocab_size,
            max_model_len,
            tokenizer_json,
            chat_template: file.text("tokenizer.chat_template")?.map(str::to_owned),
            bos_token_id,
            eos_token_id,
            stop_token_ids: stops.into_iter().collect(),
            pad_token_id: vocabulary.id_at("tokenizer.ggml.padding_token_id", file)?,
            add_bos: vocabulary.adds_bos(file)?,
            bos_token: text_of(bos_token_id),
            eos_token: text_of(eos_token_id),
            generation_defaults: generation.defaults,
        };
        // Here and not first in a frontend, which has no file that its error could name.
        crate::tokenizer::Tokenizer::from_card(&card)?;
        Ok(card)
    }

    /// As the answer to `get_model_card`: one JSON text.
    pub fn to_value(&self) -> Value {
        Value::Text(serde_json::to_string(self).expect("strings, numbers and lists only"))
    }

    /// Reads what [`to_value`](Self::to_value) wrote. Fields that a newer core adds are ignored.
    pub fn from_value(value: &Value) -> Result<Self, ModelError> {
        let Value::Text(text) = value else {
            return Err(ModelError::Card("expected a JSON text from get_model_card".into()));
        };
        let card: Self =
            serde_json::from_str(text).map_err(|error| ModelError::Card(error.to_string()))?;
        let ids = [card.bos_token_id, card.eos_token_id, card.pad_token_id];
        let ids = ids.into_iter().flatten().chain(card.stop_token_ids.iter().copied());
        for id in ids {
            if id >= card.vocab_size {
                let size = card.vocab_size;
                return Err(ModelError::field(
                    "a token id of the card",
                    format!("below {size}"),
                    id,
                ));
            }
        }
        if card.max_model_len == 0 {
            return Err(ModelError::field("max_model_len of the card", "at least 1", 0));
        }
        Ok(card)
    }
}

/// The file's name without its ending, first also without the kind of its weights.
fn names(file: &GgufFile) -> Vec<String> {
    let stem = file.path().and_then(|path| path.file_stem()).and_then(|stem| stem.to_str());
    let Some(stem) = stem else { return vec!["model".into()] };
    let mut names = Vec::new();
    if let Some((base, kind)) = stem.rsplit_once(['.', '-'])
        && is_weight_kind(kind)
        && !base.is_empty()
    {
        names.push(base.to_owned());
    }
    names.push(stem.to_owned());
    names
}

/// `Q4_1`, `q4_k_m`, `IQ2_XS`, `BF16`.
fn is_weight_kind(text: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    if matches!(upper.as_str(), "F16" | "BF16" | "F32") {
        return true;
    }
    let digits = upper.strip_prefix("IQ").or_else(|| upper.strip_prefix('Q'));
    digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()) && rest.len() <= 7)
}
