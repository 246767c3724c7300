//! The answers of completions and chats: whole ones and the chunks of a stream, in vLLM's shapes.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use pawl_shared::protocol::{FinishReason, StopReason};

use crate::engine_client::TokenLogprob;

/// Stands for minus infinity, which JSON cannot carry.
const LOGPROB_MIN: f32 = -9_999.0;

/// Tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct Usage {
    pub prompt_tokens: u64,
    pub total_tokens: u64,
    pub completion_tokens: u64,
    /// Only with `--enable-prompt-tokens-details`.
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// Where prompt tokens came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Found in the prefix cache.
    pub cached_tokens: u64,
}

/// What is the same in every answer and chunk of one request.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct Envelope {
    pub id: String,
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    pub model: String,
}

/// A whole answer, or one chunk: only the choices differ.
#[derive(Debug, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct Answer<'a, C> {
    #[serde(flatten)]
    pub envelope: &'a Envelope,
    pub choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// In whole answers only, and always null: there is nothing to compare it with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<Null>,
    /// Chats only; in a stream with the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}

/// Written as `null`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Null;

impl Serialize for Null {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit()
    }
}

/// One text of a completion, whole or a piece.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct CompletionChoice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// One answer of a chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatChoice {
    pub index: u32,
    pub message: ChatMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What the model said.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatMessage {
    pub role: String,
    pub content: String,
    pub refusal: Option<Null>,
}

/// A piece of an answer of a chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatChunkChoice {
    pub index: u32,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What is new.
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// What stopped a choice: a token's id, or a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum StopCause {
    Token(u32),
    Text(String),
}

impl From<StopReason> for StopCause {
    fn from(reason: StopReason) -> Self {
        match reason {
            StopReason::Token(id) => Self::Token(id),
            StopReason::Text(text) => Self::Text(text),
        }
    }
}

/// The text of `finish_reason`.
#[must_use]
pub fn finish_text(reason: FinishReason) -> &'static str {
    reason.as_str()
}

/// Logprobs as completions have them: parallel lists.
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct CompletionLogprobs {
    /// Where each token begins, in characters from the beginning of the choice.
    pub text_offset: Vec<u64>,
    pub token_logprobs: Vec<f32>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<TopMap>,
}

/// Token text to logprob, the chosen token first. Two tokens of one text share a key: the likelier
/// one has it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TopMap(Vec<(String, f32)>);

impl Serialize for TopMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

impl CompletionLogprobs {
    /// Adds tokens; `offset` is where the next one begins and moves on.
    pub fn extend(&mut self, tokens: &[TokenLogprob], as_ids: bool, offset: &mut u64) {
        for token in tokens {
            let text = shown(token.token_id, &token.text, as_ids);
            let mut top = vec![(text.clone(), finite(token.logprob))];
            for other in &token.top {
                let text = shown(other.token_id, &other.text, as_ids);
                if top.iter().all(|(known, _)| *known != text) {
                    top.push((text, finite(other.logprob)));
                }
            }
            self.text_offset.push(*offset);
            *offset += token.text.chars().count() as u64;
            self.token_logprobs.push(finite(token.logprob));
            self.tokens.push(text);
            self.top_logprobs.push(TopMap(top));
        }
    }
}

impl CompletionLogprobs {
    /// Adds those of a later piece.
    pub fn append(&mut self, later: Self) {
        self.text_offset.extend(later.text_offset);
        self.token_logprobs.extend(later.token_logprobs);
        self.tokens.extend(later.tokens);
        self.top_logprobs.extend(later.top_logprobs);
    }
}

/// Logprobs as chats have them: one entry per token.
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprob>,
}

/// One token of a chat's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatTokenLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
    pub top_logprobs: Vec<ChatTopLogprob>,
}

/// One of the most likely tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // OpenAI's names.
pub struct ChatTopLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Adds tokens.
    pub fn extend(&mut self, tokens: &[TokenLogprob], as_ids: bool) {
        self.content.extend(tokens.iter().map(|token| {
            ChatTokenLogprob {
                token: shown(token.token_id, &token.text, as_ids),
                logprob: finite(token.logprob),
                bytes: token.bytes.clone(),
                top_logprobs: token
                    .top
                    .iter()
                    .map(|top| ChatTopLogprob {
                        token: shown(top.token_id, &top.text, as_ids),
                        logprob: finite(top.logprob),
                        bytes: top.bytes.clone(),
                    })
                    .collect(),
            }
        }));
    }
}

fn shown(id: u32, text: &str, as_ids: bool) -> String {
    if as_ids { format!("token_id:{id}") } else { text.to_owned() }
}

/// NaN is written as the smallest as well: the comparison is false for it.
fn finite(logprob: f32) -> f32 {
    if logprob > LOGPROB_MIN { logprob } else { LOGPROB_MIN }
}
