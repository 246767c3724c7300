//! From a request to the tokens of its prompts. All of it is work for a processor, and some of it
//! grows faster than its input: it runs on blocking threads, a few at a time, and only on texts
//! that could fit the context at all.

use std::sync::Arc;

use pawl_shared::protocol::SamplingParams;

use super::App;
use super::model::LoadedModel;
use crate::chat_template::ChatTemplate;
use crate::openai::chat::{ChatRequest, Conversation};
use crate::openai::completion::{CompletionRequest, Prompt, empty_prompt};
use crate::openai::error::{ApiError, ErrorCode};
use crate::openai::sampling::{Common, fit_context};

/// A prompt ready for the core.
pub struct ReadyPrompt {
    /// At least one, fewer than the context length.
    pub tokens: Arc<[u32]>,
    /// What `echo` puts before the answer.
    pub echo: Option<String>,
    /// With `max_tokens` and the ids of the bad words filled in.
    pub params: SamplingParams,
}

impl App {
    /// Runs `work` on a blocking thread once it has a turn.
    pub async fn off_reactor<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = self.tokenizing.acquire().await;
        let _turn = turn.expect("the semaphore is never closed");
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
            // A fault of ours, or of a library: it ends the request, not the server.
            tracing::error!("preparing a request failed: {error}");
            Err(ApiError::new(ErrorCode::Internal, "the request could not be prepared"))
        })
    }
}

/// The prompts of a completion request.
pub fn of_completion(
    model: &LoadedModel,
    request: &CompletionRequest,
    bytes_max: usize,
) -> Result<Vec<ReadyPrompt>, ApiError> {
    const FIELD: &str = "prompt";
    let common = &request.common;
    let bad_words = bad_word_ids(model, &common.sampling.bad_words)?;
    let add_special = common.add_special_tokens.unwrap_or(true);
    let ready = |prompt: &Prompt| {
        let mut tokens = match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => tokenize(model, text, add_special, FIELD, bytes_max)?,
        };
        truncate(&mut tokens, common, request.max_tokens, model);
        if tokens.is_empty() {
            return Err(empty_prompt(FIELD));
        }
        let echo = match (request.echo, prompt) {
            (false, _) => None,
            (true, Prompt::Text(text)) => Some(text.clone()),
            (true, Prompt::Ids(ids)) => Some(model.served.tokenizer.decode(ids, true)),
        };
        let default = Some(CompletionRequest::MAX_TOKENS_DEFAULT);
        let max_tokens =
            fit_context(tokens.len(), request.max_tokens, default, context(model), FIELD)?;
        let params = params(common, max_tokens, bad_words.clone());
        Ok(ReadyPrompt { tokens: tokens.into(), echo, params })
    };
    request.prompts.iter().map(ready).collect()
}

/// The prompt of a chat request.
pub fn of_chat(
    model: &LoadedModel,
    request: &ChatRequest,
    bytes_max: usize,
) -> Result<ReadyPrompt, ApiError> {
    const FIELD: &str = "messages";
    let common = &request.common;
    let text = render(model, &request.conversation, bytes_max)?;
    let bad_words = bad_word_ids(model, &common.sampling.bad_words)?;
    // The template has written the special tokens already.
    let add_special = common.add_special_tokens.unwrap_or(false);
    let mut tokens = tokenize(model, &text, add_special, FIELD, bytes_max)?;
    truncate(&mut tokens, common, request.max_tokens, model);
    if tokens.is_empty() {
        return Err(empty_prompt(FIELD));
    }
    let default = model.bounds.defaults.max_tokens;
    let max_tokens = fit_context(tokens.len(), request.max_tokens, default, context(model), FIELD)?;
    let echo = request.echo.then(|| request.conversation.last_text());
    let params = params(common, max_tokens, bad_words);
    Ok(ReadyPrompt { tokens: tokens.into(), echo, params })
}

/// The text of a chat, by the request's own template if it has one.
pub fn render(
    model: &LoadedModel,
    conversation: &Conversation,
    bytes_max: usize,
) -> Result<String, ApiError> {
    match &conversation.chat_template {
        Some(source) => {
            let context = model.template_context.clone();
            ChatTemplate::parse_untrusted(source, context)?.render(conversation, bytes_max)
        }
        None => model.template.as_ref().map_err(Clone::clone)?.render(conversation, bytes_max),
    }
}

/// Token ids of a text that is not too long to be tokenized at all.
pub fn tokenize(
    model: &LoadedModel,
    text: &str,
    add_special: bool,
    field: &str,
    bytes_max: usize,
) -> Result<Vec<u32>, ApiError> {
    if text.len() > bytes_max {
        let context = context(model);
        return Err(ApiError::new(
            ErrorCode::ContextLength,
            format!(
                "{field}: {} bytes of text cannot fit the model's context length of {context} \
                 tokens (at most {bytes_max} bytes are looked at); shorten it",
                text.len()
            ),
        )
        .at(field));
    }
    model
        .served
        .tokenizer
        .encode(text, add_special)
        .map_err(|error| ApiError::invalid(field, format!("cannot be turned into tokens: {error}")))
}

fn context(model: &LoadedModel) -> u32 {
    model.bounds.max_model_len
}

/// Keeps the last tokens, as many as asked for: the end of a prompt is what is answered.
fn truncate(tokens: &mut Vec<u32>, common: &Common, max_tokens: Option<u32>, model: &LoadedModel) {
    let keep = match common.truncate_prompt_tokens {
        None => return,
        // As many as fit beside what is to be written.
        Some(-1) => context(model).saturating_sub(max_tokens.unwrap_or(1).max(1)),
        Some(keep) => u32::try_from(keep).unwrap_or(u32::MAX),
    };
    let excess = tokens.len().saturating_sub(keep as usize);
    tokens.drain(..excess);
}

fn params(common: &Common, max_tokens: u32, bad_words: Option<Vec<Vec<u32>>>) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens),
        bad_words_token_ids: bad_words,
        ..common.sampling.clone()
    }
}

/// The token sequences of each bad word: at the start of a text, and after a blank where that makes
/// another sequence of the same length (as in vLLM).
fn bad_word_ids(model: &LoadedModel, words: &[String]) -> Result<Option<Vec<Vec<u32>>>, ApiError> {
    if words.is_empty() {
        return Ok(None);
    }
    let mut sequences = Vec::new();
    for word in words {
        let bare = word.trim_start();
        let encode = |text: &str| tokenize(model, text, false, "bad_words", usize::MAX);
        let first = encode(bare)?;
        let after_blank = encode(&format!(" {bare}"))?;
        let differs = first.first() != after_blank.first() && first.len() == after_blank.len();
        if first.is_empty() {
            return Err(ApiError::invalid("bad_words", "a word of blanks alone is not allowed"));
        }
        sequences.push(first);
        if differs {
            sequences.push(after_blank);
        }
    }
    Ok(Some(sequences))
}
