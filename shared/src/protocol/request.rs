//! Frontend → core: what a client asks for.

use std::sync::Arc;

use bytes::Bytes;

use super::wire::{
    ArrayItems, NAME_BYTES_MAX, Reader, Result, Unknown, Wire, Writer, array_struct,
};
use super::{DecodeError, DecodeErrorKind as Kind, SamplingParams, Tensor, UtilityCall, Value};

/// The id a request has on the wire: `<external>-<epoch><counter>`, never used twice.
/// Cheap to clone; every table is keyed by it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub Arc<str>);

impl RequestId {
    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RequestId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for RequestId {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// One message on the input socket.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientMessage {
    /// Start a request.
    Add(Box<EngineCoreRequest>),
    /// Forget these requests; unknown ids are ignored.
    Abort(Vec<RequestId>),
    /// Data-parallel wave control; only ever comes from a coordinator.
    StartDpWave {
        /// The wave to start.
        wave: u64,
        /// The engine that need not be told.
        exclude_engine: Option<u32>,
    },
    /// Call a method by name.
    Utility(UtilityCall),
}

/// `EngineCoreRequest`: the 22-element array of an ADD.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineCoreRequest {
    /// Internal id, unique for ever.
    pub request_id: RequestId,
    /// The prompt; `None` only with embeddings.
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Multimodal inputs, opaque.
    pub mm_features: Option<Value>,
    /// `None` for pooling requests.
    pub sampling_params: Option<SamplingParams>,
    /// Embedding/pooling requests, opaque.
    pub pooling_params: Option<Value>,
    /// Wall clock, seconds: for logs only, no interval is computed from it.
    pub arrival_time: f64,
    /// LoRA adapter.
    pub lora_request: Option<LoraRequest>,
    /// Separates prefix-cache entries of tenants.
    pub cache_salt: Option<String>,
    /// Explicit data-parallel rank.
    pub data_parallel_rank: Option<u32>,
    /// Prompt as embeddings.
    pub prompt_embeds: Option<Tensor>,
    /// Which positions of a mixed prompt are token ids.
    pub prompt_is_token_ids: Option<Vec<bool>>,
    /// Selects the output socket in vLLM; informational here: the core knows the client by the
    /// socket a message came in on.
    pub client_index: u32,
    /// Data-parallel wave.
    pub current_wave: u64,
    /// Lower runs earlier, under the priority policy.
    pub priority: i64,
    /// W3C trace headers.
    pub trace_headers: Option<Vec<(String, String)>>,
    /// Streaming-input session.
    pub resumable: bool,
    /// The id the client knows.
    pub external_req_id: Option<String>,
    /// Reasoning state for structured output.
    pub reasoning_ended: Option<bool>,
    /// Opaque.
    pub reasoning_parser_kwargs: Option<Value>,
    /// Abort as soon as added.
    pub abort_immediately: bool,
    /// Session affinity.
    pub session_id: Option<String>,
    /// Opaque.
    pub kv_hints: Option<Value>,
}

impl EngineCoreRequest {
    /// A text request with every optional field at its default.
    #[must_use]
    pub fn new(request_id: RequestId, prompt: Vec<u32>, sampling: SamplingParams) -> Self {
        Self {
            request_id,
            prompt_token_ids: Some(prompt),
            mm_features: None,
            sampling_params: Some(sampling),
            pooling_params: None,
            arrival_time: 0.0,
            lora_request: None,
            cache_salt: None,
            data_parallel_rank: None,
            prompt_embeds: None,
            prompt_is_token_ids: None,
            client_index: 0,
            current_wave: 0,
            priority: 0,
            trace_headers: None,
            resumable: false,
            external_req_id: None,
            reasoning_ended: None,
            reasoning_parser_kwargs: None,
            abort_immediately: false,
            session_id: None,
            kv_hints: None,
        }
    }
}

/// `LoRARequest`: array of 6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraRequest {
    /// Adapter name.
    pub lora_name: String,
    /// At least 1.
    pub lora_int_id: u32,
    /// Where the adapter lies.
    pub lora_path: String,
    /// Base model it was trained for.
    pub base_model_name: Option<String>,
    /// Reload even if loaded.
    pub load_inplace: bool,
    /// 3-D MoE weights.
    pub is_3d_lora_weight: bool,
}

// The type bytes, the first frame of each message on the input socket.
const ADD: u8 = 0;
const ABORT: u8 = 1;
const START_DP_WAVE: u8 = 2;
const UTILITY: u8 = 3;

impl ClientMessage {
    /// The frames to send: the type byte, the payload, and a frame for each large tensor.
    #[must_use]
    pub fn encode(&self) -> Vec<Bytes> {
        let type_byte = match self {
            Self::Add(_) => &[ADD],
            Self::Abort(_) => &[ABORT],
            Self::StartDpWave { .. } => &[START_DP_WAVE],
            Self::Utility(_) => &[UTILITY],
        };
        let mut w = match self {
            Self::Add(request) => {
                // 5 bytes a token at most; the rest is small.
                let tokens = request.prompt_token_ids.as_ref().map_or(0, Vec::len);
                Writer::with_capacity(512 + 5 * tokens)
            }
            _ => Writer::with_capacity(128),
        };
        match self {
            Self::Add(request) => request.write(&mut w),
            Self::Abort(ids) => ids.write(&mut w),
            Self::StartDpWave { wave, exclude_engine } => {
                w.array(2);
                wave.write(&mut w);
                exclude_engine.write(&mut w);
            }
            Self::Utility(call) => call.write(&mut w),
        }
        w.into_frames(Some(Bytes::from_static(type_byte)))
    }

    /// Reads the frames `[type, payload, aux…]`.
    ///
    /// # Errors
    /// Anything that is not such a message; nothing of it has been acted upon.
    pub fn decode(frames: &[Bytes]) -> std::result::Result<Self, DecodeError> {
        Self::decode_noting(frames, None)
    }

    /// What a message holds that this build does not know and passes over: where, and what.
    #[must_use]
    pub fn unknown_fields(frames: &[Bytes]) -> Vec<(String, Value)> {
        let unknown = Unknown::default();
        // What of it does not decode is told by whoever decodes it.
        let _ = Self::decode_noting(frames, Some(&unknown));
        unknown.into_found()
    }

    fn decode_noting(
        frames: &[Bytes],
        unknown: Option<&Unknown>,
    ) -> std::result::Result<Self, DecodeError> {
        let ([type_byte], Some(_)) =
            (frames.first().map_or(&[][..], |frame| &frame[..]), frames.get(1))
        else {
            let lengths: Vec<usize> = frames.iter().take(4).map(Bytes::len).collect();
            let text = format!(
                "expected a type byte and a payload, found {} frames of {lengths:?}… bytes",
                frames.len()
            );
            return Err(DecodeError::new(Kind::Frames, text).within("ClientMessage"));
        };
        let r = Reader::over_frames(&frames[1..]).noting(unknown);
        match *type_byte {
            ADD => r
                .whole("EngineCoreRequest", EngineCoreRequest::read)
                .map(|request| Self::Add(Box::new(request))),
            ABORT => r.whole("Abort", Vec::read).map(Self::Abort),
            START_DP_WAVE => r.whole("StartDpWave", |r| {
                let mut items = ArrayItems::open(r, 1)?;
                let wave = items.next(r, "wave", Wire::read)?;
                let exclude_engine = items.next(r, "exclude_engine", Wire::read)?;
                items.refuse_rest()?;
                Ok(Self::StartDpWave { wave, exclude_engine })
            }),
            UTILITY => r.whole("UtilityCall", UtilityCall::read).map(Self::Utility),
            other => {
                let text = format!("expected a type byte from 0 to 3, found {other}");
                Err(DecodeError::new(Kind::Frames, text).within("ClientMessage"))
            }
        }
    }
}

array_struct! {
    EngineCoreRequest, required 9;
    request_id, prompt_token_ids, mm_features, sampling_params, pooling_params, arrival_time,
    lora_request, cache_salt, data_parallel_rank, prompt_embeds, prompt_is_token_ids, client_index,
    current_wave, priority, trace_headers, resumable, external_req_id, reasoning_ended,
    reasoning_parser_kwargs, abort_immediately, session_id, kv_hints,
}

array_struct! {
    LoraRequest, required 3;
    lora_name, lora_int_id, lora_path, base_model_name, load_inplace, is_3d_lora_weight,
}

impl Wire for RequestId {
    fn write(&self, w: &mut Writer) {
        w.text(&self.0);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let text = r.short_text(NAME_BYTES_MAX)?;
        r.charge(text.len() + 2 * size_of::<usize>())?;
        Ok(text.into())
    }
}
