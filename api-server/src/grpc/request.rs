//! From a message to the fields of a completion request. The fields are then read by the same code
//! as those of a body over HTTP, so that bounds and messages are the same.

use pawl_proto::candidate_tokens::Select;
use pawl_proto::generate_request::Prompt;
use pawl_proto::{
    DecodingParameters, GenerateRequest, KvCacheParameters, RandomSampling, ResponseOptions,
    StoppingCriteria,
};
use serde_json::{Map, Number, Value};

use crate::openai::body::{Body, RawPrompt};
use crate::openai::completion::CompletionRequest;
use crate::openai::error::ApiError;
use crate::openai::fields::{Fields, check_entries, no_token_id};
use crate::openai::limits::{
    ALLOWED_TOKEN_IDS_MAX, BAD_WORDS_MAX, LOGIT_BIAS_MAX, STOP_MAX, STOP_TOKEN_IDS_MAX,
};
use crate::openai::sampling::Bounds;

/// What an answer is to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// The prompt's token ids.
    pub prompt_token_ids: bool,
    /// The text.
    pub text: bool,
    /// The token ids.
    pub token_ids: bool,
    /// Each token's logprob and rank.
    pub logprobs: bool,
    /// The likeliest tokens of each position.
    pub candidates: bool,
}

impl Told {
    /// As asked for.
    pub fn new(options: Option<&ResponseOptions>) -> Self {
        let options = options.cloned().unwrap_or_default();
        Self {
            prompt_token_ids: options.prompt_token_ids,
            text: options.output_text.unwrap_or(true),
            token_ids: options.output_token_ids,
            logprobs: options.output_logprobs,
            candidates: options.output_logprobs && options.output_candidates.is_some(),
        }
    }
}

/// Reads and checks a message; `stream` is whether the answer is told piece by piece.
///
/// # Errors
/// As for a body over HTTP, and when a field of gRPC's own asks for what is not offered.
pub fn read(
    request: GenerateRequest,
    stream: bool,
    bounds: &Bounds,
) -> Result<CompletionRequest, ApiError> {
    refuse_unsupported(&request, stream)?;
    let mut fields = Written::default();
    let GenerateRequest { request_id, model, prompt, temperature, priority, .. } = request;
    fields.text("request_id", request_id);
    fields.text("model", model);
    fields.put("stream", Some(stream));
    fields.number("temperature", temperature);
    fields.put("priority", Some(priority).filter(|&priority| priority != 0));
    let truncate = request.truncate_prompt_tokens;
    fields.put("truncate_prompt_tokens", Some(truncate).filter(|&keep| keep != 0));
    fields.put("add_special_tokens", request.add_special_tokens);
    fields.sampling(request.sampling.unwrap_or_default());
    fields.decoding(request.decoding.unwrap_or_default())?;
    fields.stopping(request.stopping.unwrap_or_default())?;
    fields.response(&request.response.unwrap_or_default());
    fields.text("cache_salt", request.kv.unwrap_or_default().cache_salt);
    let prompt = prompt.map(|prompt| match prompt {
        Prompt::Text(text) => Ok(RawPrompt::Text(text)),
        Prompt::TokenIds(ids) => match ids.ids.iter().find(|&&id| id >= bounds.vocab_size) {
            Some(id) => Err(no_token_id("prompt", id, bounds.vocab_size)),
            None => Ok(RawPrompt::Ids(ids.ids)),
        },
    });
    let prompt = prompt.transpose()?;
    let body = Body { prompt, fields: Fields::new(fields.0), unknown: Vec::new() };
    CompletionRequest::read(body, bounds)
}

/// Refuses by name what only vLLM's messages can ask for.
fn refuse_unsupported(request: &GenerateRequest, stream: bool) -> Result<(), ApiError> {
    const LEAVE_OUT: &str = "leave it out";
    let sequences = request.sampling.as_ref().map_or(0, |sampling| sampling.num_sequences);
    if !stream && sequences > 1 {
        return Err(ApiError::invalid(
            "n",
            format!("Generate answers with one sequence, got {sequences}; use GenerateStream"),
        ));
    }
    let none = ResponseOptions::default();
    let response = request.response.as_ref().unwrap_or(&none);
    let select = response.output_candidates.as_ref().and_then(|tokens| tokens.select.as_ref());
    if response.output_candidates.is_some() && !response.output_logprobs {
        return Err(ApiError::invalid(
            "response.output_candidates",
            "only allowed with response.output_logprobs",
        ));
    }
    let none = KvCacheParameters::default();
    let kv = request.kv.as_ref().unwrap_or(&none);
    const ONLY_NEW: &str = "only the logprobs of new tokens are; use output_logprobs";
    const ONLY_TOP: &str = "only top_n is";
    const NO_TRANSFER: &str = "caches are not moved between engines; leave it out";
    let session = request.session_id.as_ref().is_some_and(|id| !id.is_empty());
    let refused = [
        (session, "session_id", LEAVE_OUT),
        (request.media.is_some(), "media", "the models served read text; leave it out"),
        (!request.lora_name.is_empty(), "lora_name", "there are no adapters; leave it out"),
        (response.prompt_logprobs, "response.prompt_logprobs", ONLY_NEW),
        (response.prompt_candidates.is_some(), "response.prompt_candidates", ONLY_NEW),
        (
            matches!(select, Some(Select::TokenIds(_))),
            "response.output_candidates.token_ids",
            ONLY_TOP,
        ),
        (matches!(select, Some(Select::All(true))), "response.output_candidates.all", ONLY_TOP),
        (kv.bypass_prefix_cache, "kv.bypass_prefix_cache", "use another kv.cache_salt"),
        (kv.kv_transfer_params.is_some(), "kv.kv_transfer_params", NO_TRANSFER),
        (kv.ec_transfer_params.is_some(), "kv.ec_transfer_params", NO_TRANSFER),
    ];
    match refused.into_iter().find(|(asked, ..)| *asked) {
        Some((_, field, remedy)) => Err(ApiError::unsupported(field, remedy)),
        None => Ok(()),
    }
}

/// The fields of a body, as they would have come over HTTP.
#[derive(Default)]
struct Written(Map<String, Value>);

impl Written {
    fn put(&mut self, name: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.0.insert(name.to_owned(), value.into());
        }
    }

    /// An empty text is the same as none.
    fn text(&mut self, name: &str, text: String) {
        self.put(name, Some(text).filter(|text| !text.is_empty()));
    }

    fn number(&mut self, name: &str, number: Option<f32>) {
        self.put(name, number.map(number_of));
    }

    /// The count is checked first: values take more room than what they are made of.
    fn list<T: Into<Value>>(
        &mut self,
        name: &str,
        entries: Vec<T>,
        max: usize,
    ) -> Result<(), ApiError> {
        check_entries(name, entries.len(), max)?;
        let list = entries.into_iter().map(Into::into).collect::<Vec<Value>>();
        self.put(name, Some(list).filter(|list| !list.is_empty()));
        Ok(())
    }

    fn sampling(&mut self, sampling: RandomSampling) {
        let n = sampling.num_sequences;
        self.put("n", Some(n).filter(|&n| n != 0));
        self.put("top_k", sampling.top_k);
        self.number("top_p", sampling.top_p);
        self.number("min_p", sampling.min_p);
        self.put("seed", sampling.seed);
    }

    fn decoding(&mut self, decoding: DecodingParameters) -> Result<(), ApiError> {
        self.number("presence_penalty", Some(decoding.presence_penalty));
        self.number("frequency_penalty", Some(decoding.frequency_penalty));
        self.number("repetition_penalty", decoding.repetition_penalty);
        check_entries("logit_bias", decoding.logit_bias.len(), LOGIT_BIAS_MAX)?;
        if !decoding.logit_bias.is_empty() {
            let entry = |(id, bias): (u32, f32)| (id.to_string(), number_of(bias));
            let entries: Map<String, Value> = decoding.logit_bias.into_iter().map(entry).collect();
            self.put("logit_bias", Some(entries));
        }
        self.list("allowed_token_ids", decoding.allowed_token_ids, ALLOWED_TOKEN_IDS_MAX)?;
        self.put("structured_outputs", decoding.structured_output.map(|_| true));
        self.list("bad_words", decoding.bad_words, BAD_WORDS_MAX)
    }

    fn stopping(&mut self, stopping: StoppingCriteria) -> Result<(), ApiError> {
        self.put("max_tokens", Some(stopping.max_new_tokens).filter(|&max| max != 0));
        self.put("min_tokens", Some(stopping.min_new_tokens));
        self.list("stop_token_ids", stopping.stop_token_ids, STOP_TOKEN_IDS_MAX)?;
        self.list("stop", stopping.stop_strings, STOP_MAX)?;
        self.put("include_stop_str_in_output", Some(stopping.include_stop_strings));
        self.put("ignore_eos", Some(stopping.ignore_eos));
        Ok(())
    }

    fn response(&mut self, response: &ResponseOptions) {
        self.put("skip_special_tokens", response.skip_special_tokens);
        let top = match response.output_candidates.as_ref().and_then(|told| told.select.as_ref()) {
            Some(Select::TopN(top)) => *top,
            _ => 0,
        };
        self.put("logprobs", response.output_logprobs.then_some(top));
    }
}

/// Through text, so that 0.2 stays 0.2 and does not become 0.20000000298.
fn number_of(number: f32) -> Value {
    let wide: Option<f64> = number.to_string().parse().ok();
    // What is no number is refused as the text that says so.
    wide.and_then(Number::from_f64).map_or_else(|| number.to_string().into(), Value::Number)
}

#[cfg(test)]
mod tests {
    use pawl_proto::{CandidateTokens, TokenIds};
    use serde_json::json;

    use super::*;
    use crate::openai::sampling::SamplingDefaults;

    fn bounds() -> Bounds {
        Bounds {
            vocab_size: 512,
            max_model_len: 64,
            max_logprobs: 20,
            max_n: 4,
            max_choices: 16,
            answers_max: None,
            priority: true,
            defaults: SamplingDefaults::default(),
        }
    }

    fn base() -> GenerateRequest {
        GenerateRequest { prompt: Some(Prompt::Text("Say hi".into())), ..Default::default() }
    }

    /// Every field that means the same over HTTP reads as it does there.
    #[test]
    fn a_message_reads_as_the_body_that_says_the_same() {
        let message = GenerateRequest {
            request_id: "me".into(),
            model: "mock".into(),
            prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1, 2, 3] })),
            temperature: Some(0.7),
            priority: -3,
            truncate_prompt_tokens: 2,
            add_special_tokens: Some(false),
            sampling: Some(RandomSampling {
                num_sequences: 3,
                top_k: Some(40),
                top_p: Some(0.9),
                min_p: Some(0.05),
                seed: Some(42),
            }),
            decoding: Some(DecodingParameters {
                presence_penalty: 0.3,
                frequency_penalty: -0.4,
                repetition_penalty: Some(1.1),
                logit_bias: [(7, -1.5)].into(),
                allowed_token_ids: vec![5, 6, 7],
                bad_words: vec!["no".into()],
                ..Default::default()
            }),
            stopping: Some(StoppingCriteria {
                max_new_tokens: 9,
                min_new_tokens: 2,
                stop_token_ids: vec![8],
                stop_strings: vec!["end".into()],
                include_stop_strings: true,
                ignore_eos: true,
            }),
            response: Some(ResponseOptions {
                output_logprobs: true,
                output_candidates: Some(CandidateTokens { select: Some(Select::TopN(4)) }),
                skip_special_tokens: Some(false),
                ..Default::default()
            }),
            kv: Some(KvCacheParameters { cache_salt: "tenant".into(), ..Default::default() }),
            ..Default::default()
        };
        let body = json!({
            "request_id": "me", "model": "mock", "prompt": [1, 2, 3], "stream": true,
            "temperature": 0.7, "priority": -3, "truncate_prompt_tokens": 2,
            "add_special_tokens": false, "n": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.05,
            "seed": 42, "presence_penalty": 0.3, "frequency_penalty": -0.4,
            "repetition_penalty": 1.1, "logit_bias": {"7": -1.5}, "allowed_token_ids": [5, 6, 7],
            "bad_words": ["no"], "max_tokens": 9, "min_tokens": 2, "stop_token_ids": [8],
            "stop": ["end"], "include_stop_str_in_output": true, "ignore_eos": true,
            "logprobs": 4, "skip_special_tokens": false, "cache_salt": "tenant"
        });
        let over_http = CompletionRequest::parse(body.to_string().as_bytes(), &bounds());
        assert_eq!(read(message, true, &bounds()), over_http);
    }

    #[test]
    fn what_is_left_out_has_the_same_defaults() {
        let over_http = CompletionRequest::parse(br#"{"prompt": "Say hi"}"#, &bounds());
        assert_eq!(read(base(), false, &bounds()), over_http);
    }

    #[test]
    fn refusals_are_those_of_http() {
        let sampling = |sampling| GenerateRequest { sampling: Some(sampling), ..base() };
        let top_p = |top_p| RandomSampling { top_p: Some(top_p), ..Default::default() };
        let stopping = |stopping| GenerateRequest { stopping: Some(stopping), ..base() };
        let cases = [
            (GenerateRequest { temperature: Some(-1.0), ..base() }, json!({"temperature": -1.0})),
            (sampling(top_p(0.0)), json!({"top_p": 0.0})),
            (sampling(top_p(f32::NAN)), json!({"top_p": "NaN"})),
            (
                stopping(StoppingCriteria { min_new_tokens: 17, ..Default::default() }),
                json!({"min_tokens": 17}),
            ),
            (
                stopping(StoppingCriteria { stop_token_ids: vec![512], ..Default::default() }),
                json!({"stop_token_ids": [512]}),
            ),
            (
                stopping(StoppingCriteria {
                    stop_strings: vec![String::from("x"); 17],
                    ..Default::default()
                }),
                json!({"stop": vec!["x"; 17]}),
            ),
        ];
        for (message, mut body) in cases {
            body["prompt"] = json!("Say hi");
            let over_http = CompletionRequest::parse(body.to_string().as_bytes(), &bounds());
            assert!(over_http.is_err(), "{body}");
            assert_eq!(read(message, false, &bounds()), over_http, "{body}");
        }
        let none = read(GenerateRequest::default(), false, &bounds()).expect_err("no prompt");
        assert_eq!(none.param.as_deref(), Some("prompt"));
    }

    #[test]
    fn what_only_a_message_can_ask_for_is_refused_by_name() {
        let response = |response| GenerateRequest { response: Some(response), ..base() };
        let kv = |kv| GenerateRequest { kv: Some(kv), ..base() };
        let select = |select| ResponseOptions {
            output_logprobs: true,
            output_candidates: Some(CandidateTokens { select: Some(select) }),
            ..Default::default()
        };
        let cases = [
            ("session_id", GenerateRequest { session_id: Some("s".into()), ..base() }),
            ("media", GenerateRequest { media: Some(vec![]), ..base() }),
            ("lora_name", GenerateRequest { lora_name: "a".into(), ..base() }),
            (
                "response.prompt_logprobs",
                response(ResponseOptions { prompt_logprobs: true, ..Default::default() }),
            ),
            (
                "response.output_candidates",
                response(ResponseOptions { output_logprobs: false, ..select(Select::TopN(1)) }),
            ),
            ("response.output_candidates.all", response(select(Select::All(true)))),
            (
                "response.output_candidates.token_ids",
                response(select(Select::TokenIds(TokenIds::default()))),
            ),
            (
                "kv.bypass_prefix_cache",
                kv(KvCacheParameters { bypass_prefix_cache: true, ..Default::default() }),
            ),
            (
                "kv.kv_transfer_params",
                kv(KvCacheParameters { kv_transfer_params: Some(vec![]), ..Default::default() }),
            ),
            (
                "n",
                GenerateRequest {
                    sampling: Some(RandomSampling { num_sequences: 2, ..Default::default() }),
                    ..base()
                },
            ),
        ];
        for (field, message) in cases {
            let refused = read(message, false, &bounds()).expect_err(field);
            assert_eq!(refused.param.as_deref(), Some(field), "{refused}");
        }
    }
}
