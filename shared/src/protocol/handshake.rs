//! vLLM's start-up messages.

use super::Value;

/// Engine → handshake socket.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineHello {
    /// HELLO or READY.
    pub status: HelloStatus,
    /// Started by the same supervisor.
    pub local: bool,
    /// Without frontends of its own.
    pub headless: bool,
}

/// Where an engine is in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloStatus {
    /// First contact.
    Hello,
    /// Loaded and connected.
    Ready,
}

/// Frontend → engine: where to connect.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct HandshakeInit {
    /// Input addresses, by client index.
    pub inputs: Vec<String>,
    /// Output addresses, by client index.
    pub outputs: Vec<String>,
    /// Data parallel only.
    pub coordinator_input: Option<String>,
    /// Data parallel only.
    pub coordinator_output: Option<String>,
    /// Data parallel only.
    pub frontend_stats_publish_address: Option<String>,
    /// Empty but for MoE data parallel.
    pub parallel_config: Vec<(String, Value)>,
}

/// `EngineCoreReadyResponse`: the first frame on every input socket.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // vLLM's names.
pub struct ReadyResponse {
    pub max_model_len: u64,
    pub num_gpu_blocks: u64,
    pub block_size: u64,
    pub dp_stats_address: Option<String>,
    /// `float32`, `float16`, `bfloat16`
    pub dtype: String,
    pub vllm_version: String,
    pub world_size: u64,
    pub data_parallel_size: u64,
    pub tensor_parallel_size: u64,
    pub pipeline_parallel_size: u64,
    pub decode_context_parallel_size: u64,
    pub data_parallel_rank: u64,
    pub max_num_seqs: u64,
    pub max_num_batched_tokens: u64,
    pub instance_id: String,
    pub supports_lora: bool,
    pub max_loras: u64,
    pub kv_cache_size_tokens: Option<u64>,
    pub kv_cache_max_concurrency: Option<f64>,
    /// Every other key as it came, and those of ours (`pawl_…`): vLLM's frontends ignore them.
    pub extra: Vec<(String, Value)>,
}
