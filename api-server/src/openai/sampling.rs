//! The fields that say how tokens are chosen and when a request stops: the same for completions and
//! chats. Defaults: the request's value, else the model's own, else vLLM's neutral one.

use std::collections::BTreeMap;

use pawl_shared::protocol::{OutputKind, SamplingParams};
use serde_json::Value;

use super::error::{ApiError, ErrorCode};
use super::fields::{
    Fields, NumberRange, check_entries, excerpt, integer_of, no_token_id, wrong_kind,
};
use super::limits::{
    ALLOWED_TOKEN_IDS_MAX, BAD_WORD_BYTES_MAX, BAD_WORDS_MAX, ID_BYTES_MAX, LOGIT_BIAS_MAX,
    LOGIT_BIAS_VALUE_MAX, PENALTY_MAX, REPETITION_PENALTY_MAX, STOP_BYTES_MAX, STOP_MAX,
    STOP_TOKEN_IDS_MAX, TEMPERATURE_MAX,
};

/// What the model and the server's flags allow.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Prompt and completion together, in tokens.
    pub max_model_len: u32,
    /// `--max-logprobs`
    pub max_logprobs: u32,
    /// `--max-n`
    pub max_n: u32,
    /// `--max-choices`: prompts × `n`.
    pub max_choices: u32,
    /// `--max-num-queued-reqs`: answers that this frontend makes at once; one request cannot have
    /// more.
    pub answers_max: Option<u32>,
    /// Whether the core schedules by priority.
    pub priority: bool,
    /// The model's own defaults.
    pub defaults: SamplingDefaults,
}

/// The sampling values a model's author recommends.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
#[allow(missing_docs)] // The names are those of the request's fields.
pub struct SamplingDefaults {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<u32>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub max_tokens: Option<u32>,
}

/// What completions and chats have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// `model`, if it was given.
    pub model: Option<String>,
    /// Everything that goes to the core but `max_tokens` and `logprobs`, which differ in name.
    pub sampling: SamplingParams,
    /// Answer as server-sent events.
    pub stream: bool,
    /// `stream_options.include_usage`: a last chunk with the usage.
    pub include_usage: bool,
    /// `stream_options.continuous_usage_stats`: usage in every chunk.
    pub continuous_usage: bool,
    /// Answer with the token ids beside the text.
    pub return_token_ids: bool,
    /// Name tokens in logprobs as `token_id:17`, which is exact where texts are not.
    pub tokens_as_ids: bool,
    /// Keep only the last so many tokens of the prompt; -1 = as many as fit.
    pub truncate_prompt_tokens: Option<i64>,
    /// Add the tokenizer's own special tokens to the prompt; the default differs by route.
    pub add_special_tokens: Option<bool>,
    /// Lower runs earlier.
    pub priority: i64,
    /// `request_id` of the body; the header `X-Request-Id` goes before it.
    pub request_id: Option<String>,
    /// Separates prefix-cache entries of tenants.
    pub cache_salt: Option<String>,
}

/// The names read by [`Common::read`].
pub const COMMON_FIELDS: &[&str] = &[
    "model",
    "n",
    "best_of",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
    "priority",
    "request_id",
    "cache_salt",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "use_beam_search",
    "length_penalty",
    "prompt_logprobs",
    "logprob_token_ids",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
    "thinking_token_budget",
    "repetition_detection",
    "watermarking",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "return_weight_versions",
    "return_prompt_text",
    "stream_interval",
];

impl Common {
    /// Reads the fields named in [`COMMON_FIELDS`]; `prompts` is how many prompts the request has.
    pub fn read(fields: &mut Fields, bounds: &Bounds, prompts: usize) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let stream = fields.flag("stream", false)?;
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        Ok(Self {
            model: fields.text("model", usize::MAX)?,
            sampling: sampling(fields, bounds, prompts)?,
            stream,
            include_usage,
            continuous_usage,
            return_token_ids: fields.flag("return_token_ids", false)?,
            tokens_as_ids: fields.flag("return_tokens_as_token_ids", false)?,
            truncate_prompt_tokens: truncation(fields, bounds)?,
            add_special_tokens: fields.boolean("add_special_tokens")?,
            priority: priority(fields, bounds)?,
            request_id: fields.text("request_id", ID_BYTES_MAX)?,
            cache_salt: cache_salt(fields)?,
        })
    }
}

fn sampling(
    fields: &mut Fields,
    bounds: &Bounds,
    prompts: usize,
) -> Result<SamplingParams, ApiError> {
    let model = bounds.defaults;
    let neutral = SamplingParams::default();
    let unit = NumberRange::of(0.0, 1.0);
    let penalty = NumberRange::of(-PENALTY_MAX, PENALTY_MAX);
    let repetition = NumberRange::above(0.0, REPETITION_PENALTY_MAX);
    let mut sampling = SamplingParams {
        n: choices(fields, bounds, prompts)?,
        temperature: fields
            .number("temperature", NumberRange::of(0.0, TEMPERATURE_MAX))?
            .or(model.temperature)
            .unwrap_or(neutral.temperature),
        top_p: fields
            .number("top_p", NumberRange::above(0.0, 1.0))?
            .or(model.top_p)
            .unwrap_or(neutral.top_p),
        top_k: top_k(fields)?.or(model.top_k).unwrap_or(neutral.top_k),
        min_p: fields.number("min_p", unit)?.or(model.min_p).unwrap_or(neutral.min_p),
        presence_penalty: fields.number("presence_penalty", penalty)?.unwrap_or_default(),
        frequency_penalty: fields.number("frequency_penalty", penalty)?.unwrap_or_default(),
        repetition_penalty: fields
            .number("repetition_penalty", repetition)?
            .or(model.repetition_penalty)
            .unwrap_or(neutral.repetition_penalty),
        // As in vLLM, -1 is "no seed".
        seed: fields.integer("seed", i64::MIN..=i64::MAX)?.filter(|&seed| seed != -1),
        stop: fields.texts("stop", STOP_MAX, STOP_BYTES_MAX)?,
        stop_token_ids: fields
            .token_ids("stop_token_ids", STOP_TOKEN_IDS_MAX, bounds.vocab_size)?
            .unwrap_or_default(),
        include_stop_str_in_output: fields.flag("include_stop_str_in_output", false)?,
        ignore_eos: fields.flag("ignore_eos", false)?,
        min_tokens: fields.count("min_tokens", 0..=bounds.max_model_len)?.unwrap_or(0),
        skip_special_tokens: fields.flag("skip_special_tokens", true)?,
        logit_bias: logit_bias(fields, bounds)?,
        allowed_token_ids: allowed_token_ids(fields, bounds)?,
        bad_words: fields.texts("bad_words", BAD_WORDS_MAX, BAD_WORD_BYTES_MAX)?,
        output_kind: OutputKind::Delta,
        ..neutral
    };
    // Greedy needs no candidates cut away, and temperatures just above it overflow the softmax.
    if sampling.temperature < 1e-5 {
        sampling.temperature = 0.0;
        (sampling.top_p, sampling.top_k, sampling.min_p) = (1.0, 0, 0.0);
    } else if sampling.temperature < 0.01 {
        sampling.temperature = 0.01;
    }
    Ok(sampling)
}

fn choices(fields: &mut Fields, bounds: &Bounds, prompts: usize) -> Result<u32, ApiError> {
    let n = fields.count("n", 1..=bounds.max_n)?.unwrap_or(1);
    let best_of = fields.integer("best_of", 1..=i64::from(u32::MAX))?;
    if best_of.is_some_and(|best_of| best_of != i64::from(n)) {
        return Err(ApiError::unsupported("best_of", "set n, or leave best_of out"));
    }
    let choices = prompts as u64 * u64::from(n);
    let (max, flag) = match bounds.answers_max {
        Some(most) if most < bounds.max_choices => (most, " (--max-num-queued-reqs)"),
        _ => (bounds.max_choices, ""),
    };
    if choices > u64::from(max) {
        return Err(ApiError::invalid(
            if n == 1 { "prompt" } else { "n" },
            format!(
                "{prompts} prompts × n {n} make {choices} answers, at most {max} are allowed in \
                 one request{flag}; send fewer prompts at once or lower n"
            ),
        ));
    }
    Ok(n)
}

fn top_k(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    // -1 is an older spelling of "all".
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    Ok(top_k.map(|k| u32::try_from(k).unwrap_or(0)))
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok((false, false)) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "only allowed with stream: true"));
    }
    let mut options = Fields::new(options);
    let blame = |error: ApiError| error.at("stream_options");
    let include = options.flag("include_usage", false).map_err(blame)?;
    let continuous = options.flag("continuous_usage_stats", false).map_err(blame)?;
    Ok((include, include && continuous))
}

fn logit_bias(
    fields: &mut Fields,
    bounds: &Bounds,
) -> Result<Option<BTreeMap<u32, f64>>, ApiError> {
    const NAME: &str = "logit_bias";
    let Some(entries) = fields.object(NAME)? else { return Ok(None) };
    check_entries(NAME, entries.len(), LOGIT_BIAS_MAX)?;
    let range = NumberRange::of(-LOGIT_BIAS_VALUE_MAX, LOGIT_BIAS_VALUE_MAX);
    let entry = |(key, value): (String, Value)| {
        let id = key.parse::<u32>().ok().filter(|&id| id < bounds.vocab_size);
        let id = id.ok_or_else(|| {
            let shown = excerpt(&Value::from(key.as_str()));
            no_token_id(NAME, shown, bounds.vocab_size)
        })?;
        let bias = value.as_f64().ok_or_else(|| wrong_kind(NAME, "token id: number", &value))?;
        Ok((id, range.check(NAME, bias, &excerpt(&value))?))
    };
    entries.into_iter().map(entry).collect::<Result<_, _>>().map(Some)
}

fn allowed_token_ids(fields: &mut Fields, bounds: &Bounds) -> Result<Option<Vec<u32>>, ApiError> {
    const NAME: &str = "allowed_token_ids";
    let ids = fields.token_ids(NAME, ALLOWED_TOKEN_IDS_MAX, bounds.vocab_size)?;
    if ids.as_ref().is_some_and(Vec::is_empty) {
        return Err(ApiError::invalid(NAME, "an empty list allows nothing; leave it out"));
    }
    Ok(ids)
}

fn truncation(fields: &mut Fields, bounds: &Bounds) -> Result<Option<i64>, ApiError> {
    if let Some(side) = fields.text("truncation_side", ID_BYTES_MAX)?
        && side != "left"
    {
        return Err(ApiError::unsupported("truncation_side", "only \"left\" is"));
    }
    let truncate =
        fields.integer("truncate_prompt_tokens", -1..=i64::from(bounds.max_model_len))?;
    if truncate == Some(0) {
        return Err(ApiError::invalid(
            "truncate_prompt_tokens",
            "0 leaves no prompt; use -1 for as many tokens as fit",
        ));
    }
    Ok(truncate)
}

fn priority(fields: &mut Fields, bounds: &Bounds) -> Result<i64, ApiError> {
    let priority = fields.integer("priority", i64::MIN..=i64::MAX)?.unwrap_or(0);
    if priority != 0 && !bounds.priority {
        return Err(ApiError::unsupported(
            "priority",
            "the engine schedules first come, first served; start it with \
             --scheduling-policy priority",
        ));
    }
    Ok(priority)
}

fn cache_salt(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let salt = fields.text("cache_salt", ID_BYTES_MAX)?;
    if salt.as_deref() == Some("") {
        return Err(ApiError::invalid("cache_salt", "an empty text is not allowed; leave it out"));
    }
    Ok(salt)
}

/// Refuses by name what is known elsewhere and asks for something that is not done here: to ignore
/// it would be to answer another question than the one put.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(format) = fields.object("response_format")? {
        let kind = format.get("type").and_then(Value::as_str).unwrap_or("(no type)");
        if kind != "text" {
            let kind = excerpt(&Value::from(kind));
            return Err(ApiError::unsupported(
                "response_format",
                format!("type {kind}; only \"text\" is served"),
            ));
        }
    }
    const NO_STRUCTURE: &str = "structured output is not served yet; leave it out";
    const NO_TRANSFER: &str = "caches are not moved between engines; leave it out";
    const REFUSED: &[(&str, &str)] = &[
        ("structured_outputs", NO_STRUCTURE),
        ("structural_tag", NO_STRUCTURE),
        ("guided_json", NO_STRUCTURE),
        ("guided_regex", NO_STRUCTURE),
        ("guided_choice", NO_STRUCTURE),
        ("guided_grammar", NO_STRUCTURE),
        ("guided_decoding_backend", NO_STRUCTURE),
        ("guided_whitespace_pattern", NO_STRUCTURE),
        ("prompt_logprobs", "only the logprobs of new tokens are; use logprobs"),
        ("logprob_token_ids", "use logprobs"),
        ("thinking_token_budget", "use max_tokens"),
        ("repetition_detection", "use repetition_penalty"),
        ("kv_transfer_params", NO_TRANSFER),
        ("ec_transfer_params", NO_TRANSFER),
        ("vllm_xargs", "there are no custom arguments here; leave it out"),
    ];
    for (name, remedy) in REFUSED {
        if fields.value(name).is_some() {
            return Err(ApiError::unsupported(name, remedy));
        }
    }
    const REFUSED_IF_TRUE: &[(&str, &str)] = &[
        ("use_beam_search", "use n for several answers"),
        ("watermarking", "leave it out"),
        ("return_weight_versions", "leave it out"),
        ("return_prompt_text", "use echo"),
    ];
    for (name, remedy) in REFUSED_IF_TRUE {
        if fields.flag(name, false)? {
            return Err(ApiError::unsupported(name, remedy));
        }
    }
    if !fields.flag("spaces_between_special_tokens", true)? {
        return Err(ApiError::unsupported("spaces_between_special_tokens: false", "leave it out")
            .at("spaces_between_special_tokens"));
    }
    if let Some(penalty) = fields.value("length_penalty")
        && penalty.as_f64() != Some(1.0)
    {
        return Err(ApiError::unsupported("length_penalty", "it only matters to beam search"));
    }
    if let Some(interval) = fields.value("stream_interval") {
        integer_of("stream_interval", &interval, 1..=1)
            .map_err(|error| ApiError { code: ErrorCode::Unsupported, ..error })?;
    }
    Ok(())
}

/// The number of new tokens a prompt of `prompt_tokens` may have, given what was asked for.
///
/// # Errors
/// When the prompt leaves no room, or less than was asked for: both lengths are named.
pub fn fit_context(
    prompt_tokens: usize,
    asked: Option<u32>,
    default: Option<u32>,
    max_model_len: u32,
    prompt_field: &str,
) -> Result<u32, ApiError> {
    let room = u32::try_from(prompt_tokens)
        .ok()
        .and_then(|tokens| max_model_len.checked_sub(tokens))
        .filter(|&room| room > 0);
    let Some(room) = room else {
        return Err(ApiError::new(
            ErrorCode::ContextLength,
            format!(
                "{prompt_field}: the prompt has {prompt_tokens} tokens; the model's context length \
                 is {max_model_len} tokens for prompt and completion together. Shorten the prompt, \
                 or set truncate_prompt_tokens"
            ),
        )
        .at(prompt_field));
    };
    match asked {
        Some(asked) if asked > room => Err(ApiError::new(
            ErrorCode::ContextLength,
            format!(
                "max_tokens: the prompt has {prompt_tokens} tokens and max_tokens is {asked}; the \
                 model's context length is {max_model_len} tokens for both together. Lower \
                 max_tokens to {room}, or shorten the prompt"
            ),
        )
        .at("max_tokens")),
        Some(asked) => Ok(asked),
        None => Ok(default.map_or(room, |default| default.min(room))),
    }
}
