//! Messages of an engine that does nothing, for tests of this and other crates.

use super::{PawlStats, ReadyResponse, SchedulerStats, Value};

/// The stats of an idle core of ours. Another engine's have no `pawl`.
#[must_use]
pub fn idle_stats() -> SchedulerStats {
    SchedulerStats { pawl: Some(PawlStats::default()), ..SchedulerStats::nothing() }
}

/// The ready response of a small engine.
#[must_use]
pub fn small_ready() -> ReadyResponse {
    ReadyResponse {
        max_model_len: 64,
        num_gpu_blocks: 128,
        block_size: 16,
        dp_stats_address: None,
        dtype: "float32".into(),
        vllm_version: "0.33.0".into(),
        world_size: 1,
        data_parallel_size: 1,
        tensor_parallel_size: 1,
        pipeline_parallel_size: 1,
        decode_context_parallel_size: 1,
        data_parallel_rank: 0,
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        instance_id: "test".into(),
        supports_lora: false,
        max_loras: 0,
        kv_cache_size_tokens: Some(2048),
        kv_cache_max_concurrency: None,
        extra: vec![("pawl_enable_prefix_caching".into(), Value::Bool(true))],
    }
}
