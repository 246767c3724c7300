//! `POST /v1/completions`: the request.

use super::body::{self, Body, PromptField, RawPrompt};
use super::error::ApiError;
use super::fields::{Fields, missing};
use super::sampling::{Bounds, COMMON_FIELDS, Common};

/// A completion request, checked as far as that is possible before its prompt is tokenized.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// One or more prompts.
    pub prompts: Vec<Prompt>,
    /// Answer with the prompt's text before the new text.
    pub echo: bool,
    /// As asked for; the default is [`CompletionRequest::MAX_TOKENS_DEFAULT`].
    pub max_tokens: Option<u32>,
    /// The rest.
    pub common: Common,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenized.
    Text(String),
    /// Tokens already, each below the vocabulary's size.
    Ids(Vec<u32>),
}

const FIELDS: &[&str] =
    &["max_tokens", "echo", "suffix", "logprobs", "prompt_embeds", "max_completion_tokens"];

impl CompletionRequest {
    /// OpenAI's default.
    pub const MAX_TOKENS_DEFAULT: u32 = 16;

    /// Reads a body.
    pub fn parse(bytes: &[u8], bounds: &Bounds) -> Result<Self, ApiError> {
        let prompt = PromptField { name: "prompt", vocab_size: bounds.vocab_size };
        let body = body::parse(bytes, prompt, &[COMMON_FIELDS, FIELDS])?;
        log_unknown(&body.unknown);
        Self::read(body, bounds)
    }

    /// Reads the fields of a body, whatever it was written in.
    pub fn read(mut body: Body, bounds: &Bounds) -> Result<Self, ApiError> {
        let fields = &mut body.fields;
        if fields.value("prompt_embeds").is_some() {
            return Err(ApiError::unsupported("prompt_embeds", "send text or token ids"));
        }
        let prompt = body
            .prompt
            .ok_or_else(|| missing("prompt", "send a text, token ids, or a list of either"))?;
        let prompts = prompts("prompt", prompt)?;
        if fields.text("suffix", usize::MAX)?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "the models served only go forward"));
        }
        let mut common = Common::read(fields, bounds, prompts.len())?;
        let echo = fields.flag("echo", false)?;
        common.sampling.logprobs = logprobs("logprobs", fields, bounds)?;
        if echo && common.sampling.logprobs.is_some() {
            return Err(ApiError::unsupported(
                "logprobs with echo",
                "logprobs of prompt tokens are not computed; ask for one of the two",
            )
            .at("logprobs"));
        }
        let max_tokens = fields.count("max_tokens", 1..=u32::MAX)?;
        let max_tokens = max_tokens.or(fields.count("max_completion_tokens", 1..=u32::MAX)?);
        let default = Self::MAX_TOKENS_DEFAULT;
        check_min_tokens(&common, max_tokens.unwrap_or(default))?;
        Ok(Self { prompts, echo, max_tokens, common })
    }
}

/// The prompts of a field, none of them without tokens as far as that can be seen yet.
pub fn prompts(name: &str, raw: RawPrompt) -> Result<Vec<Prompt>, ApiError> {
    let prompts: Vec<Prompt> = match raw {
        RawPrompt::Text(text) => vec![Prompt::Text(text)],
        RawPrompt::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
        RawPrompt::Ids(ids) => vec![Prompt::Ids(ids)],
        RawPrompt::IdLists(lists) => lists.into_iter().map(Prompt::Ids).collect(),
    };
    for prompt in &prompts {
        let Prompt::Ids(ids) = prompt else { continue };
        if ids.is_empty() {
            return Err(empty_prompt(name));
        }
    }
    Ok(prompts)
}

/// A prompt of no tokens.
pub fn empty_prompt(name: &str) -> ApiError {
    ApiError::invalid(name, "is empty: a prompt needs at least one token")
}

/// How many of the most likely tokens to tell beside the chosen one.
pub fn logprobs(name: &str, fields: &mut Fields, bounds: &Bounds) -> Result<Option<i32>, ApiError> {
    let asked = fields.count(name, 0..=bounds.max_logprobs).map_err(|error| {
        let message = format!("{} (--max-logprobs)", error.message);
        ApiError { message, ..error }
    })?;
    Ok(asked.map(|count| i32::try_from(count).unwrap_or(i32::MAX)))
}

/// Refuses `min_tokens` above `max_tokens`.
pub fn check_min_tokens(common: &Common, max_tokens: u32) -> Result<(), ApiError> {
    let min_tokens = common.sampling.min_tokens;
    if min_tokens <= max_tokens {
        return Ok(());
    }
    Err(ApiError::invalid(
        "min_tokens",
        format!("{min_tokens} is more than max_tokens ({max_tokens}); raise max_tokens"),
    ))
}

/// Fields that a route does not know are ignored, as elsewhere, but not in silence.
pub fn log_unknown(names: &[String]) {
    if !names.is_empty() {
        tracing::debug!(fields = ?names, "request fields that are not known here were ignored");
    }
}
