//! `POST /tokenize` and `POST /detokenize`: requests and answers.

use serde::Serialize;

use super::body::{self, PromptField, RawPrompt};
use super::chat::{CONVERSATION_FIELDS, Conversation};
use super::completion::log_unknown;
use super::error::ApiError;
use super::fields::missing;

/// What to tokenize.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// Text or messages.
    pub input: TokenizeInput,
    /// `model`, if it was given.
    pub model: Option<String>,
    /// Add the tokenizer's own special tokens.
    pub add_special_tokens: bool,
    /// Answer with each token's text as well.
    pub return_token_strs: bool,
}

/// Text or messages.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput {
    /// One text.
    Text(String),
    /// A chat, to be rendered first.
    Chat(Conversation),
}

const FIELDS: &[&str] = &["model", "add_special_tokens", "return_token_strs"];

impl TokenizeRequest {
    /// Reads a body.
    pub fn parse(bytes: &[u8], vocab_size: u32, trust_template: bool) -> Result<Self, ApiError> {
        let prompt = PromptField { name: "prompt", vocab_size };
        let mut body = body::parse(bytes, prompt, &[FIELDS, CONVERSATION_FIELDS])?;
        log_unknown(&body.unknown);
        let fields = &mut body.fields;
        let model = fields.text("model", usize::MAX)?;
        let add_special_tokens = fields.boolean("add_special_tokens")?;
        let return_token_strs = fields.flag("return_token_strs", false)?;
        let (input, special_default) = match body.prompt {
            Some(_) if fields.value("messages").is_some() => {
                let text =
                    "cannot stand beside prompt; send a text as prompt, or a chat as messages";
                return Err(ApiError::invalid("messages", text));
            }
            Some(RawPrompt::Text(text)) => (TokenizeInput::Text(text), true),
            Some(_) => return Err(ApiError::invalid("prompt", "must be one text")),
            // The template has written the special tokens already.
            None => {
                let chat = Conversation::read(fields, trust_template).map_err(|error| {
                    if error.param.as_deref() == Some("messages")
                        && error.code == super::error::ErrorCode::MissingField
                    {
                        missing("prompt", "send a text as prompt, or a chat as messages")
                    } else {
                        error
                    }
                })?;
                (TokenizeInput::Chat(chat), false)
            }
        };
        let add_special_tokens = add_special_tokens.unwrap_or(special_default);
        Ok(Self { input, model, add_special_tokens, return_token_strs })
    }
}

/// The answer to [`TokenizeRequest`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenizeResponse {
    /// How many.
    pub count: usize,
    /// The model's context length.
    pub max_model_len: u32,
    /// The ids.
    pub tokens: Vec<u32>,
    /// The text of each, if asked for.
    pub token_strs: Option<Vec<String>>,
}

/// What to turn back into text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The ids, each below the vocabulary's size.
    pub tokens: Vec<u32>,
    /// `model`, if it was given.
    pub model: Option<String>,
}

impl DetokenizeRequest {
    /// Reads a body.
    pub fn parse(bytes: &[u8], vocab_size: u32) -> Result<Self, ApiError> {
        let prompt = PromptField { name: "tokens", vocab_size };
        let mut body = body::parse(bytes, prompt, &[&["model"]])?;
        log_unknown(&body.unknown);
        let model = body.fields.text("model", usize::MAX)?;
        let tokens = match body.prompt {
            None => return Err(missing("tokens", "send a list of token ids")),
            // An empty list is an empty text.
            Some(RawPrompt::Ids(ids)) => ids,
            Some(_) => return Err(ApiError::invalid("tokens", "must be one list of token ids")),
        };
        Ok(Self { tokens, model })
    }
}

/// The answer to [`DetokenizeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DetokenizeResponse {
    /// The text.
    pub prompt: String,
}
