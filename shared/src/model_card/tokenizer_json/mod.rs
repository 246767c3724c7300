//! The tokenizer in a GGUF file's metadata, rewritten as the text of a `tokenizer.json`.
//!
//! Two kinds exist in the files of today's models: byte-level BPE (`gpt2`), whose pre-tokenizer the
//! file only names, and SentencePiece BPE (`llama`), which has scores instead of merges. A
//! pre-tokenizer that is not known is refused by name: to guess it gives ids that look right and
//! are not.

mod pre_tokenizer;
mod sentencepiece;
mod vocabulary;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value as Json, json};

use super::{GgufFile, ModelError};
pub(super) use vocabulary::{TokenKind, Vocabulary};

/// The whole of a `tokenizer.json`, in the order that files have it.
#[derive(serde::Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: BpeModel<'a>,
}

#[derive(serde::Serialize)]
struct BpeModel<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<&'a str>,
    end_of_word_suffix: Option<&'a str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: TokenIds<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

/// Texts in the order of their ids, written as a map from text to id.
struct TokenIds<'a>(&'a [&'a str]);

impl Serialize for TokenIds<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (id, text) in self.0.iter().enumerate() {
            map.serialize_entry(text, &id)?;
        }
        map.end()
    }
}

/// The text of the `tokenizer.json`.
pub(super) fn build(file: &GgufFile, vocabulary: &Vocabulary<'_>) -> Result<String, ModelError> {
    let tokenizer = match vocabulary.model() {
        "gpt2" => byte_level(file, vocabulary)?,
        "llama" => sentencepiece::build(file, vocabulary)?,
        other => {
            return Err(ModelError::Unsupported {
                what: format!("tokenizer.ggml.model {other:?}"),
                remedy: "put the model's own tokenizer.json beside the GGUF file".into(),
            });
        }
    };
    Ok(serde_json::to_string(&tokenizer).expect("strings, numbers and lists only"))
}

fn byte_level<'a>(
    file: &'a GgufFile,
    vocabulary: &'a Vocabulary<'a>,
) -> Result<TokenizerJson<'a>, ModelError> {
    let prefix_key = "tokenizer.ggml.add_space_prefix";
    if file.bool(prefix_key)? == Some(true) {
        return Err(ModelError::Unsupported {
            what: format!("{prefix_key} of a byte-level tokenizer"),
            remedy: "put the model's own tokenizer.json beside the GGUF file".into(),
        });
    }
    let pre = pre_tokenizer::of(file.text("tokenizer.ggml.pre")?)?;
    Ok(TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: added_tokens(vocabulary),
        normalizer: pre.normalizer,
        pre_tokenizer: pre.pre_tokenizer,
        post_processor: post_processor(file, vocabulary)?,
        decoder: pre_tokenizer::byte_level(true),
        model: BpeModel {
            kind: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: pre.ignore_merges,
            vocab: TokenIds(vocabulary.texts()),
            merges: merges(file, vocabulary)?,
        },
    })
}

/// Pairs of texts, first merge first; each pair and what it makes is in the vocabulary.
fn merges<'a>(
    file: &'a GgufFile,
    vocabulary: &Vocabulary<'_>,
) -> Result<Vec<(&'a str, &'a str)>, ModelError> {
    let key = "tokenizer.ggml.merges";
    let texts = file.texts(key)?.ok_or_else(|| GgufFile::missing(key))?;
    let mut pairs = Vec::new();
    let mut joined = String::new();
    for (index, text) in texts.into_iter().enumerate() {
        // The first character may itself be a space in vocabularies that are not byte-level.
        let second = text.char_indices().nth(1).map_or(text.len(), |(at, _)| at);
        let pair = text[second..].split_once(' ').map(|(head, right)| {
            let left = &text[..second + head.len()];
            (left, right)
        });
        joined.clear();
        if let Some((left, right)) = pair {
            joined.extend([left, right]);
        }
        match pair {
            Some((left, right))
                if [left, right, &joined].iter().all(|t| vocabulary.id_of(t).is_some()) =>
            {
                pairs.push((left, right));
            }
            _ => {
                let field = format!("merge {index} of {key}");
                let expected = "two tokens that make a third, with a space between";
                return Err(ModelError::field(field, expected, format!("{text:?}")));
            }
        }
    }
    Ok(pairs)
}

/// Tokens that are found in the text before it is split.
fn added_tokens(vocabulary: &Vocabulary<'_>) -> Vec<Json> {
    let mut added = Vec::new();
    for (id, text) in vocabulary.texts().iter().enumerate() {
        let special = match vocabulary.kind(id as u32) {
            TokenKind::Control | TokenKind::Unknown => true,
            TokenKind::UserDefined => false,
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => continue,
        };
        // An empty text would be found everywhere.
        if !text.is_empty() {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": special,
            }));
        }
    }
    added
}

/// Puts begin-of-text first and end-of-text last, where the file says so.
fn post_processor(file: &GgufFile, vocabulary: &Vocabulary<'_>) -> Result<Json, ModelError> {
    let named = |key: &str| vocabulary.id_at(key, file)?.ok_or_else(|| GgufFile::missing(key));
    let bos =
        if vocabulary.adds_bos(file)? { Some(named("tokenizer.ggml.bos_token_id")?) } else { None };
    let eos = if file.bool("tokenizer.ggml.add_eos_token")? == Some(true) {
        Some(named("tokenizer.ggml.eos_token_id")?)
    } else {
        None
    };
    if bos.is_none() && eos.is_none() {
        return Ok(Json::Null);
    }
    let token = |id: Option<u32>, type_id: u32| {
        id.map(|id| json!({"SpecialToken": {"id": vocabulary.token(id), "type_id": type_id}}))
    };
    let part = |name: &str, type_id: u32| {
        let sequence = json!({"Sequence": {"id": name, "type_id": type_id}});
        [token(bos, type_id), Some(sequence), token(eos, type_id)].into_iter().flatten()
    };
    let special: serde_json::Map<String, Json> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|id| {
            let text = vocabulary.token(id);
            (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}))
        })
        .collect();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": part("A", 0).collect::<Vec<_>>(),
        "pair": part("A", 0).chain(part("B", 1)).collect::<Vec<_>>(),
        "special_tokens": special,
    }))
}
