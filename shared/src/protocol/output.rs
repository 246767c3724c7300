//! Core → frontend: what came of a request in one step.

use super::wire::{Reader, Result, Wire, Writer, array_struct, map_struct, or_nil};
use super::{DecodeErrorKind as Kind, PrefillStats, RequestId, Tensor, Value};

/// `EngineCoreOutput`: one request's part of a step (19-element array, 18 before vLLM 0.33).
#[derive(Clone, Debug, PartialEq)]
pub struct EngineCoreOutput {
    /// Wire id.
    pub request_id: RequestId,
    /// May be empty on a finish. A stop token is included; the frontend drops its text.
    pub new_token_ids: Vec<u32>,
    /// One row per new token.
    pub new_logprobs: Option<LogprobsLists>,
    /// Once, with the first token.
    pub new_prompt_logprobs: Option<LogprobsTensors>,
    /// Pooling result, opaque.
    pub pooling_output: Option<Tensor>,
    /// Set on the last output.
    pub finish_reason: Option<FinishReason>,
    /// The stop token id (not for EOS), or why.
    pub stop_reason: Option<StopReason>,
    /// Usually all with the first output.
    pub events: Vec<EngineCoreEvent>,
    /// Opaque, last output.
    pub kv_transfer_params: Option<Value>,
    /// Opaque, last output.
    pub ec_transfer_params: Option<Value>,
    /// W3C trace headers.
    pub trace_headers: Option<Vec<(String, String)>>,
    /// First output only.
    pub prefill_stats: Option<PrefillStats>,
    /// MoE routing, opaque.
    pub routed_experts: Option<Tensor>,
    /// NaNs seen in this request's logits.
    pub num_nans_in_logits: u32,
    /// Multimodal cache misses.
    pub mm_cache_miss_hashes: Option<Vec<String>>,
    /// Opaque.
    pub new_sampling_mask: Option<Value>,
    /// Opaque.
    pub spec_decode_metrics: Option<Value>,
    /// Prompt-token-id logprobs.
    pub prompt_token_id_logprobs: Option<Tensor>,
    /// Set on an ERROR finish.
    pub error: Option<OutputError>,
}

impl EngineCoreOutput {
    /// An output that carries nothing yet.
    #[must_use]
    pub fn new(request_id: RequestId) -> Self {
        Self {
            request_id,
            new_token_ids: Vec::new(),
            new_logprobs: None,
            new_prompt_logprobs: None,
            pooling_output: None,
            finish_reason: None,
            stop_reason: None,
            events: Vec::new(),
            kv_transfer_params: None,
            ec_transfer_params: None,
            trace_headers: None,
            prefill_stats: None,
            routed_experts: None,
            num_nans_in_logits: 0,
            mm_cache_miss_hashes: None,
            new_sampling_mask: None,
            spec_decode_metrics: None,
            prompt_token_id_logprobs: None,
            error: None,
        }
    }
}

/// Why a request ended. The numbers are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum FinishReason {
    /// EOS, a stop token or a stop string.
    Stop = 0,
    /// `max_tokens` or the model's length.
    Length = 1,
    /// The client went away, or the server shut down.
    Abort = 2,
    /// Something failed; see [`EngineCoreOutput::error`].
    Error = 3,
    /// Repetition detected.
    Repetition = 4,
}

impl FinishReason {
    /// Every reason, in wire order.
    pub const ALL: [Self; 5] =
        [Self::Stop, Self::Length, Self::Abort, Self::Error, Self::Repetition];

    /// The name in API answers and in metric labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
            Self::Repetition => "repetition",
        }
    }
}

/// What exactly stopped the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token id.
    Token(u32),
    /// Text, such as `repetition_detected`.
    Text(String),
}

/// A request's way through the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// Taken into the waiting queue.
    Queued = 1,
    /// First scheduled, or scheduled again after a preemption.
    Scheduled = 2,
    /// Lost its blocks.
    Preempted = 3,
}

/// An event with the engine's monotonic time in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineCoreEvent {
    /// What happened.
    pub kind: EventKind,
    /// Engine clock, seconds.
    pub timestamp: f64,
}

/// An engine-side failure of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputError {
    /// `engine_paused`, `validation_error`, …
    pub code: String,
    /// For people.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

/// Logprobs of sampled tokens. Row i is for new token i; column 0 is the sampled token, columns
/// 1.. the top-k in order. All rows have the same width.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LogprobsLists {
    /// `[rows][k + 1]`
    pub token_ids: Vec<Vec<u32>>,
    /// `[rows][k + 1]`
    pub logprobs: Vec<Vec<f32>>,
    /// 1-based rank of the sampled token in the vocabulary, one per row.
    pub ranks: Vec<u32>,
}

/// Prompt logprobs: `prompt_len - 1` rows, same columns as [`LogprobsLists`].
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LogprobsTensors {
    /// `[rows][k + 1]`
    pub token_ids: Vec<Vec<u32>>,
    /// `[rows][k + 1]`
    pub logprobs: Vec<Vec<f32>>,
    /// One per row.
    pub ranks: Vec<u32>,
}

array_struct! {
    EngineCoreOutput, required 2;
    request_id, new_token_ids, new_logprobs, new_prompt_logprobs, pooling_output, finish_reason,
    stop_reason, events as or_nil, kv_transfer_params, ec_transfer_params, trace_headers,
    prefill_stats, routed_experts, num_nans_in_logits, mm_cache_miss_hashes, new_sampling_mask,
    spec_decode_metrics, prompt_token_id_logprobs, error,
}

map_struct! {
    OutputError,
    base OutputError { code: String::new(), message: String::new(), retryable: false };
    code, message, retryable,
}

/// A number. One that we do not know is an error, as in both of vLLM's frontends.
impl Wire for FinishReason {
    fn write(&self, w: &mut Writer) {
        w.unsigned(*self as u64);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let before = r.clone();
        let number: usize = r.integer("a finish reason, 0 to 4")?;
        let known = Self::ALL.get(number).copied();
        known.ok_or_else(|| before.unexpected(Kind::Range, "a finish reason, 0 to 4"))
    }
}

impl Wire for StopReason {
    fn write(&self, w: &mut Writer) {
        match self {
            Self::Token(token) => token.write(w),
            Self::Text(text) => w.text(text),
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        if r.is_text() {
            String::read(r).map(Self::Text)
        } else {
            r.integer("a token id or text").map(Self::Token)
        }
    }
}

impl Wire for EngineCoreEvent {
    fn write(&self, w: &mut Writer) {
        w.map(2);
        w.text("type");
        w.unsigned(self.kind as u64);
        w.text("timestamp");
        w.float(self.timestamp);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let before = r.clone();
        let (mut kind, mut timestamp) = (None, None);
        r.keys(|r, key| {
            match key {
                "type" => kind = Some(EventKind::read(r)?),
                "timestamp" => timestamp = Some(r.float()?),
                _ => r.skip_unknown()?,
            }
            Ok(())
        })?;
        let (Some(kind), Some(timestamp)) = (kind, timestamp) else {
            return Err(before.unexpected(Kind::Missing, "an event with type and timestamp"));
        };
        Ok(Self { kind, timestamp })
    }
}

impl Wire for EventKind {
    fn write(&self, w: &mut Writer) {
        w.unsigned(*self as u64);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let before = r.clone();
        match r.integer("an event type, 1 to 3")? {
            1_i64 => Ok(Self::Queued),
            2 => Ok(Self::Scheduled),
            3 => Ok(Self::Preempted),
            _ => Err(before.unexpected(Kind::Range, "an event type, 1 to 3")),
        }
    }
}
