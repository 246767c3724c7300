//! `SamplingParams`: how tokens are chosen and when a request stops.

use std::collections::{BTreeMap, BTreeSet};

use super::wire::{Reader, Result, Wire, Writer};
use super::{DecodeErrorKind as Kind, Tensor, Value};

/// When outputs are wanted; used by the frontend, carried on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OutputKind {
    /// Everything so far, each time.
    #[default]
    Cumulative,
    /// Only what is new.
    Delta,
    /// One output at the end.
    FinalOnly,
}

/// vLLM's sampling parameters, with its defaults. Fields that only a frontend reads are marked (F);
/// those that an engine needs and a frontend fills in are marked (E).
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // The names are OpenAI's and vLLM's; only units and exceptions are told.
pub struct SamplingParams {
    /// (F) Always 1 on the wire of ours: a frontend fans out.
    pub n: u32,
    pub presence_penalty: f64,
    pub frequency_penalty: f64,
    pub repetition_penalty: f64,
    /// 0 is greedy.
    pub temperature: f64,
    pub top_p: f64,
    /// 0 = all.
    pub top_k: u32,
    pub min_p: f64,
    pub seed: Option<i64>,
    /// (F)
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    /// `Some(-1)`: the whole vocabulary; `Some(0)`: the sampled token only.
    pub logprobs: Option<i32>,
    pub prompt_logprobs: Option<i32>,
    pub prompt_logprob_token_ids: Option<Tensor>,
    pub prompt_logprob_start: Option<u32>,
    pub logprob_token_ids: Option<Vec<u32>>,
    /// (F)
    pub flat_logprobs: bool,
    /// (F)
    pub detokenize: bool,
    /// (F)
    pub skip_special_tokens: bool,
    /// (F)
    pub spaces_between_special_tokens: bool,
    /// (F)
    pub include_stop_str_in_output: bool,
    /// (F)
    pub output_kind: OutputKind,
    /// (F)
    pub stream_interval: Option<u32>,
    /// (F)
    pub skip_clone: bool,
    /// (F)
    pub output_text_buffer_length: u32,
    /// (E) `_eos_token_id`: the engine stops on it; `None` with `ignore_eos`.
    pub eos_token_id: Option<u32>,
    /// (E) `_all_stop_token_ids`: masked until `min_tokens`, also with `ignore_eos`.
    pub all_stop_token_ids: BTreeSet<u32>,
    /// Opaque: structured output is refused by name until the engine has it.
    pub structured_outputs: Option<Value>,
    pub logit_bias: Option<BTreeMap<u32, f64>>,
    pub allowed_token_ids: Option<Vec<u32>>,
    pub extra_args: Option<Value>,
    /// (F)
    pub bad_words: Vec<String>,
    /// (E) `_bad_words_token_ids`
    pub bad_words_token_ids: Option<Vec<Vec<u32>>>,
    pub skip_reading_prefix_cache: Option<bool>,
    pub thinking_token_budget: Option<u32>,
    /// Opaque.
    pub repetition_detection: Option<Value>,
    pub routed_experts_prompt_start: u32,
    pub trace_decode_token_ids: Option<Vec<u32>>,
    pub watermarking: Option<bool>,
    /// `_watermarking_skipped`
    pub watermarking_skipped: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            max_tokens: Some(16),
            min_tokens: 0,
            logprobs: None,
            prompt_logprobs: None,
            prompt_logprob_token_ids: None,
            prompt_logprob_start: None,
            logprob_token_ids: None,
            flat_logprobs: false,
            detokenize: true,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            include_stop_str_in_output: false,
            output_kind: OutputKind::Cumulative,
            stream_interval: None,
            skip_clone: false,
            output_text_buffer_length: 0,
            eos_token_id: None,
            all_stop_token_ids: BTreeSet::new(),
            structured_outputs: None,
            logit_bias: None,
            allowed_token_ids: None,
            extra_args: None,
            bad_words: Vec::new(),
            bad_words_token_ids: None,
            skip_reading_prefix_cache: None,
            thinking_token_budget: None,
            repetition_detection: None,
            routed_experts_prompt_start: 0,
            trace_decode_token_ids: None,
            watermarking: None,
            watermarking_skipped: false,
        }
    }
}

/// Lists the fields with their keys. A field is left away where it has its default, as Python does;
/// those marked `always` are sent in any case, as Python does too. `as` names how a field is read.
macro_rules! sampling_params {
    ($($key:literal $field:ident $($always:ident)? $(=> $read:path)?),+ $(,)?) => {
        impl Wire for SamplingParams {
            fn write(&self, w: &mut Writer) {
                let default = Self::default();
                let sent = [$(sampling_params!(@sent self, default, $field $(, $always)?)),+];
                w.map(sent.iter().filter(|sent| **sent).count());
                $(
                    if sampling_params!(@sent self, default, $field $(, $always)?) {
                        w.text($key);
                        self.$field.write(w);
                    }
                )+
            }

            fn read(r: &mut Reader<'_>) -> Result<Self> {
                let mut params = Self::default();
                r.keys(|r, key| {
                    match key {
                        $($key => params.$field = sampling_params!(@read r $(, $read)?),)+
                        _ => r.skip_unknown()?,
                    }
                    Ok(())
                })?;
                Ok(params)
            }
        }
    };
    (@sent $self:ident, $default:ident, $field:ident) => { $self.$field != $default.$field };
    (@sent $self:ident, $default:ident, $field:ident, always) => { true };
    (@read $r:ident) => { Wire::read($r)? };
    (@read $r:ident, $read:path) => { $read($r)? };
}

sampling_params! {
    "n" n,
    "presence_penalty" presence_penalty,
    "frequency_penalty" frequency_penalty,
    "repetition_penalty" repetition_penalty,
    "temperature" temperature,
    "watermarking" watermarking,
    "top_p" top_p,
    "top_k" top_k => read_top_k,
    "min_p" min_p,
    "seed" seed => read_seed,
    "stop" stop always => read_texts,
    "stop_token_ids" stop_token_ids always,
    "ignore_eos" ignore_eos,
    "max_tokens" max_tokens,
    "min_tokens" min_tokens,
    "logprobs" logprobs,
    "prompt_logprobs" prompt_logprobs,
    "prompt_logprob_token_ids" prompt_logprob_token_ids,
    "prompt_logprob_start" prompt_logprob_start,
    "logprob_token_ids" logprob_token_ids,
    "flat_logprobs" flat_logprobs,
    "detokenize" detokenize,
    "skip_special_tokens" skip_special_tokens,
    "spaces_between_special_tokens" spaces_between_special_tokens,
    "include_stop_str_in_output" include_stop_str_in_output,
    "output_kind" output_kind,
    "stream_interval" stream_interval,
    "skip_clone" skip_clone,
    "output_text_buffer_length" output_text_buffer_length,
    "_eos_token_id" eos_token_id,
    "_all_stop_token_ids" all_stop_token_ids,
    "_watermarking_skipped" watermarking_skipped,
    "structured_outputs" structured_outputs,
    "logit_bias" logit_bias,
    "allowed_token_ids" allowed_token_ids,
    "extra_args" extra_args,
    "bad_words" bad_words always,
    "_bad_words_token_ids" bad_words_token_ids,
    "skip_reading_prefix_cache" skip_reading_prefix_cache,
    "thinking_token_budget" thinking_token_budget,
    "repetition_detection" repetition_detection,
    "routed_experts_prompt_start" routed_experts_prompt_start,
    "trace_decode_token_ids" trace_decode_token_ids,
}

/// vLLM takes -1 for "all" as it takes 0.
fn read_top_k(r: &mut Reader<'_>) -> Result<u32> {
    let before = r.clone();
    match r.integer::<i64>("top_k: -1 or more")? {
        -1 => Ok(0),
        top_k => u32::try_from(top_k)
            .map_err(|_| before.unexpected(Kind::Range, "top_k: -1 to 4294967295")),
    }
}

/// vLLM takes -1 for "no seed".
fn read_seed(r: &mut Reader<'_>) -> Result<Option<i64>> {
    Ok(Option::read(r)?.filter(|seed| *seed != -1))
}

/// One text may come bare.
fn read_texts(r: &mut Reader<'_>) -> Result<Vec<String>> {
    if r.is_text() { Ok(vec![String::read(r)?]) } else { Vec::read(r) }
}

impl Wire for OutputKind {
    fn write(&self, w: &mut Writer) {
        w.unsigned(match self {
            Self::Cumulative => 0,
            Self::Delta => 1,
            Self::FinalOnly => 2,
        });
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        const EXPECTED: &str = "an output kind, 0 to 2";
        let before = r.clone();
        match r.integer(EXPECTED)? {
            0_i64 => Ok(Self::Cumulative),
            1 => Ok(Self::Delta),
            2 => Ok(Self::FinalOnly),
            _ => Err(before.unexpected(Kind::Range, EXPECTED)),
        }
    }
}
