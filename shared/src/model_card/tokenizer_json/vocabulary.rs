//! The list of tokens in a GGUF file.

use std::collections::HashMap;

use super::super::{GgufFile, ModelError};
use super::pre_tokenizer;

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum TokenKind {
    /// A piece of text.
    Normal,
    /// Stands for what the vocabulary lacks.
    Unknown,
    /// Steers the model; not shown.
    Control,
    /// A text found whole before anything else is split.
    UserDefined,
    /// Never produced.
    Unused,
    /// One byte, `<0x0A>`.
    Byte,
}

/// The tokens of a file, borrowed from it.
pub(in super::super) struct Vocabulary<'a> {
    model: &'a str,
    texts: Vec<&'a str>,
    /// As long as `texts`.
    kinds: Vec<TokenKind>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Vocabulary<'a> {
    pub fn read(file: &'a GgufFile) -> Result<Self, ModelError> {
        let key = "tokenizer.ggml.model";
        let model = file.text(key)?.ok_or_else(|| GgufFile::missing(key))?;
        let key = "tokenizer.ggml.tokens";
        let texts = file.texts(key)?.ok_or_else(|| GgufFile::missing(key))?;
        if texts.is_empty() || u32::try_from(texts.len()).is_err() {
            let expected = "1 to 2^32 - 1 tokens";
            return Err(ModelError::field(format!("metadata key {key:?}"), expected, texts.len()));
        }
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in texts.iter().enumerate() {
            if let Some(first) = ids.insert(*text, id as u32) {
                let field = format!("the text {text:?} of tokens {first} and {id}");
                return Err(ModelError::Duplicate { field });
            }
        }
        let kinds = kinds(file, texts.len())?;
        check_rows(file, texts.len() as u64)?;
        Ok(Self { model, texts, kinds, ids })
    }

    /// `gpt2`, `llama`, …
    pub fn model(&self) -> &'a str {
        self.model
    }

    /// Number of tokens.
    pub fn len(&self) -> u32 {
        self.texts.len() as u32
    }

    /// All texts in the order of their ids.
    pub fn texts(&self) -> &[&'a str] {
        &self.texts
    }

    /// The text of an id below `len`.
    pub fn token(&self, id: u32) -> &'a str {
        self.texts[id as usize]
    }

    /// The kind of an id below `len`.
    pub fn kind(&self, id: u32) -> TokenKind {
        self.kinds[id as usize]
    }

    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The id under a metadata key, checked to be one of ours.
    pub fn id_at(&self, key: &str, file: &GgufFile) -> Result<Option<u32>, ModelError> {
        match file.u32(key)? {
            // Written by old converters for "there is none".
            Some(u32::MAX) | None => Ok(None),
            Some(id) if id < self.len() => Ok(Some(id)),
            Some(id) => {
                let expected = format!("below the vocabulary's {}", self.len());
                Err(ModelError::field(format!("metadata key {key:?}"), expected, id))
            }
        }
    }

    /// Whether begin-of-text goes first: as the file says, or as its tokenizer's family does.
    pub fn adds_bos(&self, file: &GgufFile) -> Result<bool, ModelError> {
        if let Some(said) = file.bool("tokenizer.ggml.add_bos_token")? {
            return Ok(said);
        }
        let by_family = match self.model {
            "llama" => true,
            _ => pre_tokenizer::adds_bos(file.text("tokenizer.ggml.pre")?),
        };
        Ok(by_family && self.id_at("tokenizer.ggml.bos_token_id", file)?.is_some())
    }
}

fn kinds(file: &GgufFile, tokens: usize) -> Result<Vec<TokenKind>, ModelError> {
    let key = "tokenizer.ggml.token_type";
    let Some(array) = file.array(key)? else { return Ok(vec![TokenKind::Normal; tokens]) };
    if array.len() != tokens as u64 {
        let expected = format!("{tokens} elements, one a token");
        return Err(ModelError::field(format!("metadata key {key:?}"), expected, array.len()));
    }
    let kind = |(index, value): (usize, super::super::MetadataValue<'_>)| match value.as_i64() {
        Some(1) => Ok(TokenKind::Normal),
        Some(2) => Ok(TokenKind::Unknown),
        Some(3) => Ok(TokenKind::Control),
        Some(4) => Ok(TokenKind::UserDefined),
        Some(5) => Ok(TokenKind::Unused),
        Some(6) => Ok(TokenKind::Byte),
        _ => {
            let field = format!("element {index} of metadata key {key:?}");
            Err(ModelError::field(field, "1 to 6", value))
        }
    };
    array.iter().enumerate().map(kind).collect()
}

/// More tokens than the model has embeddings for would read past the end of a tensor.
fn check_rows(file: &GgufFile, tokens: u64) -> Result<(), ModelError> {
    match file.tensor("token_embd.weight") {
        Some(tensor) if tensor.rows() < tokens => {
            let field = "the shape of tensor \"token_embd.weight\"";
            let expected = format!("at least the vocabulary's {tokens} rows");
            Err(ModelError::field(field, expected, format!("{:?}", tensor.shape)))
        }
        _ => Ok(()),
    }
}
