//! Frontend → core: what a client asks for.

use std::sync::Arc;

use super::{SamplingParams, Tensor, UtilityCall, Value};

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
