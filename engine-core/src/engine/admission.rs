//! Which requests a core takes, and what it says of those that it does not.
//!
//! A frontend checks all this too and answers 400 with its own words; but any frontend may join, so
//! nothing that would break a step comes past here. What this engine does not do is refused by the
//! field's name, never served as if the field were not there.

use std::sync::Arc;

use pawl_shared::protocol::{EngineCoreRequest, OutputError, SamplingParams, Value};

/// The bounds of what can be asked of this core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Rows of the logits: token ids are below it.
    pub vocab_size: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
}

/// A request that can be scheduled.
pub(super) struct Admissible {
    pub prompt: Arc<[u32]>,
    pub sampling: Arc<SamplingParams>,
}

/// The codes of [`OutputError`] that this core gives.
pub(super) mod code {
    /// The request asks for something impossible or unsupported; a frontend answers 400.
    pub const VALIDATION: &str = "validation_error";
    /// An operator has paused generation.
    pub const PAUSED: &str = "engine_paused";
    /// The core stops.
    pub const STOPPING: &str = "engine_stopping";
}

pub(super) fn refusal(message: impl Into<String>) -> OutputError {
    OutputError { code: code::VALIDATION.into(), message: message.into(), retryable: false }
}

/// Why a core that stops ends a request, or does not take it.
pub(super) fn stopping() -> OutputError {
    OutputError {
        code: code::STOPPING.into(),
        message: "the engine core is stopping; send the request again once another one serves"
            .into(),
        retryable: true,
    }
}

/// Takes the request, or says which field is at fault and what to do about it.
pub(super) fn check(request: EngineCoreRequest, limits: Limits) -> Result<Admissible, OutputError> {
    refuse_unsupported(&request).map_err(refusal)?;
    let Some(mut sampling) = request.sampling_params else {
        return Err(refusal("sampling_params is missing"));
    };
    refuse_unsupported_sampling(&sampling).map_err(refusal)?;
    check_sampling(&sampling, limits).map_err(refusal)?;
    let Some(prompt) = request.prompt_token_ids else {
        return Err(refusal("prompt_token_ids is missing"));
    };
    check_prompt(&prompt, limits.vocab_size).map_err(refusal)?;
    // A frontend sets it; where one does not, the model's length is the bound.
    let room = limits.max_model_len.saturating_sub(prompt.len() as u32).max(1);
    sampling.max_tokens = Some(sampling.max_tokens.map_or(room, |asked| asked.min(room)));
    Ok(Admissible { prompt: prompt.into(), sampling: Arc::new(sampling) })
}

fn refuse_unsupported(request: &EngineCoreRequest) -> Result<(), String> {
    let asked = [
        ("mm_features", request.mm_features.as_ref().is_some_and(says_something)),
        ("pooling_params", request.pooling_params.as_ref().is_some_and(says_something)),
        ("prompt_embeds", request.prompt_embeds.is_some()),
        (
            "prompt_is_token_ids",
            request.prompt_is_token_ids.as_ref().is_some_and(|ids| ids.contains(&false)),
        ),
        ("lora_request", request.lora_request.is_some()),
        ("resumable", request.resumable),
    ];
    refuse_first(&asked)
}

fn refuse_unsupported_sampling(sampling: &SamplingParams) -> Result<(), String> {
    let asked = [
        ("structured_outputs", sampling.structured_outputs.as_ref().is_some_and(says_something)),
        ("prompt_logprobs", sampling.prompt_logprobs.is_some()),
        ("prompt_logprob_token_ids", sampling.prompt_logprob_token_ids.is_some()),
        (
            "repetition_detection",
            sampling.repetition_detection.as_ref().is_some_and(says_something),
        ),
        ("thinking_token_budget", sampling.thinking_token_budget.is_some()),
        ("trace_decode_token_ids", sampling.trace_decode_token_ids.is_some()),
    ];
    refuse_first(&asked)
}

fn refuse_first(asked: &[(&str, bool)]) -> Result<(), String> {
    match asked.iter().find(|(_, asked)| *asked) {
        Some((field, _)) => {
            Err(format!("{field} is not supported by this engine; leave it out of the request"))
        }
        None => Ok(()),
    }
}

/// Empty containers and nil stand for "not asked": some frontends send them always.
fn says_something(value: &Value) -> bool {
    match value {
        Value::Nil => false,
        Value::Array(items) => !items.is_empty(),
        Value::Map(entries) => !entries.is_empty(),
        _ => true,
    }
}

/// Its length is the scheduler's to judge, which knows what fits.
fn check_prompt(prompt: &[u32], vocab_size: u32) -> Result<(), String> {
    match prompt.iter().position(|&token| token >= vocab_size) {
        Some(at) => Err(no_token_id(&format!("prompt_token_ids[{at}]"), prompt[at], vocab_size)),
        None => Ok(()),
    }
}

/// In the words that a frontend has for it too.
fn no_token_id(field: &str, token: u32, vocab_size: u32) -> String {
    let last = vocab_size - 1;
    format!(
        "{field}: {token} is no token id of this model; they are whole numbers from 0 to {last}"
    )
}

fn check_sampling(sampling: &SamplingParams, limits: Limits) -> Result<(), String> {
    let ranged = [
        ("temperature", sampling.temperature, 0.0, f64::MAX),
        ("top_p", sampling.top_p, f64::MIN_POSITIVE, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, f64::MIN_POSITIVE, f64::MAX),
    ];
    for (field, value, least, most) in ranged {
        // Written so that NaN fails too.
        if !(value >= least && value <= most) {
            return Err(format!("{field} is {value}; it must be {}", wanted(least, most)));
        }
    }
    if sampling.max_tokens == Some(0) {
        return Err("max_tokens is 0; it must be at least 1".into());
    }
    if let Some(max) = sampling.max_tokens
        && sampling.min_tokens > max
    {
        let min = sampling.min_tokens;
        return Err(format!("min_tokens is {min}, more than max_tokens, which is {max}"));
    }
    if let Some(logprobs) = sampling.logprobs
        && (logprobs < -1 || i64::from(logprobs) > i64::from(limits.vocab_size))
    {
        return Err(format!(
            "logprobs is {logprobs}; it must be -1 (all) or 0 to {}",
            limits.vocab_size
        ));
    }
    let in_vocabulary = |field: &str, token: u32| {
        if token < limits.vocab_size {
            return Ok(());
        }
        Err(no_token_id(field, token, limits.vocab_size))
    };
    for &token in sampling.logprob_token_ids.iter().flatten() {
        in_vocabulary("logprob_token_ids", token)?;
    }
    for (&token, &bias) in sampling.logit_bias.iter().flatten() {
        in_vocabulary("logit_bias", token)?;
        if !bias.is_finite() {
            return Err(format!("logit_bias of token {token} is {bias}; it must be a number"));
        }
    }
    if let Some(allowed) = &sampling.allowed_token_ids {
        if allowed.is_empty() {
            return Err("allowed_token_ids is empty; name a token or leave it out".into());
        }
        for &token in allowed {
            in_vocabulary("allowed_token_ids", token)?;
        }
    }
    Ok(())
}

fn wanted(least: f64, most: f64) -> String {
    match (least, most) {
        (f64::MIN_POSITIVE, f64::MAX) => "a number above 0".into(),
        (least, f64::MAX) => format!("a number of at least {least}"),
        (f64::MIN_POSITIVE, most) => format!("above 0 and at most {most}"),
        (least, most) => format!("from {least} to {most}"),
    }
}
