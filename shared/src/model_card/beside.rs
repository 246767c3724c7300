//! The text files that may lie beside a model file.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value as Json;

use super::tokenizer_json::Vocabulary;
use super::{GenerationDefaults, GgufFile, ModelError};

/// A larger one is refused unread: the largest tokenizers known are a third of this.
const BYTES_MAX: u64 = 128 << 20;

/// The text of the file `name` in the folder of the model, where there is one.
fn read(file: &GgufFile, name: &str) -> Result<Option<(PathBuf, String)>, ModelError> {
    let Some(path) = file.path().and_then(|path| path.parent()).map(|folder| folder.join(name))
    else {
        return Ok(None);
    };
    let metadata = match std::fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(ModelError::Read { path, cause }),
        Ok(metadata) => metadata,
    };
    if !metadata.is_file() {
        return Ok(None);
    }
    if metadata.len() > BYTES_MAX {
        let problem = format!("{} bytes long, at most {BYTES_MAX} are read", metadata.len());
        return Err(ModelError::Beside { path, problem });
    }
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(cause) => Err(ModelError::Read { path, cause }),
    }
}

/// The `tokenizer.json` beside the model. It must give each id the text that the model file gives
/// it: one left over from another model would answer in nonsense.
pub(super) fn tokenizer(
    file: &GgufFile,
    vocabulary: &Vocabulary<'_>,
) -> Result<Option<String>, ModelError> {
    let Some((path, text)) = read(file, "tokenizer.json")? else { return Ok(None) };
    let tokenizer = match tokenizers::Tokenizer::from_str(&text) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return Err(ModelError::Beside { path, problem: error.to_string() }),
    };
    for id in 0..vocabulary.len() {
        // Ids that the tokenizer lacks are padding of the model's.
        let Some(theirs) = tokenizer.id_to_token(id) else { continue };
        let ours = vocabulary.token(id);
        if theirs != ours {
            let problem = format!(
                "token {id} is {theirs:?} here and {ours:?} in the model: it belongs to another \
                 model; move it away"
            );
            return Err(ModelError::Beside { path, problem });
        }
    }
    Ok(Some(text))
}

/// What `generation_config.json` says.
#[derive(Default)]
pub(super) struct Generation {
    pub defaults: GenerationDefaults,
    pub eos_token_ids: BTreeSet<u32>,
}

pub(super) fn generation(file: &GgufFile) -> Result<Generation, ModelError> {
    let Some((path, text)) = read(file, "generation_config.json")? else {
        return Ok(Generation::default());
    };
    parse_generation(&text).map_err(|problem| ModelError::Beside { path, problem })
}

fn parse_generation(text: &str) -> Result<Generation, String> {
    let config: serde_json::Map<String, Json> =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let number = |key: &str, least: f64, most: f64| match config.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(value) => match value.as_f64().filter(|n| (least..=most).contains(n)) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(format!("{key} is {value}, expected a number from {least} to {most}")),
        },
    };
    let count = |key: &str| match config.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
            Some(count) => Ok(Some(count)),
            None => Err(format!("{key} is {value}, expected an integer from 0 to 2^32 - 1")),
        },
    };
    let id = |value: &Json| match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) => Ok(id),
        None => Err(format!("eos_token_id is {value}, expected a token id or a list of them")),
    };
    let eos_token_ids = match config.get("eos_token_id") {
        None | Some(Json::Null) => BTreeSet::new(),
        Some(Json::Array(ids)) => ids.iter().map(id).collect::<Result<_, _>>()?,
        Some(value) => BTreeSet::from([id(value)?]),
    };
    let defaults = GenerationDefaults {
        temperature: number("temperature", 0.0, f64::from(f32::MAX))?,
        top_p: number("top_p", 0.0, 1.0)?,
        top_k: count("top_k")?,
        min_p: number("min_p", 0.0, 1.0)?,
        repetition_penalty: number("repetition_penalty", 0.0, f64::from(f32::MAX))?,
        max_new_tokens: count("max_new_tokens")?,
    };
    Ok(Generation { defaults, eos_token_ids })
}
