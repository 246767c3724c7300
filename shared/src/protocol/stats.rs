//! Scheduler statistics: the state after a step, and what changed since the last frame.

use super::Value;

/// `SchedulerStats`. There is deliberately no `Default`: a frame's stats are taken from a scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerStats {
    /// Requests in the running list.
    pub num_running_reqs: u64,
    /// Requests waiting for capacity.
    pub num_waiting_reqs: u64,
    /// Requests waiting for something else.
    pub num_skipped_waiting_reqs: u64,
    /// Remote-KV stages: waiting to start, in progress, completed waiting.
    pub num_kv_fetch_reqs_by_stage: [u64; 3],
    /// Steps so far.
    pub step_counter: u64,
    /// Data-parallel wave.
    pub current_wave: u64,
    /// Share of KV blocks in use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Prefix-cache deltas since the last stats, in tokens.
    pub prefix_cache_stats: PrefixCacheStats,
    /// Speculative decoding in this step.
    pub spec_decoding_stats: Option<SpecDecodingStats>,
    /// Per-step detail, opaque; only with `--enable-logging-iteration-details`.
    pub iteration_details: Option<Value>,
    /// Sampled evictions.
    pub kv_cache_eviction_events: Vec<KvCacheEvictionEvent>,
    /// Requests waiting per LoRA adapter.
    pub waiting_lora_adapters: Vec<(String, u64)>,
    /// Requests running per LoRA adapter.
    pub running_lora_adapters: Vec<(String, u64)>,
    /// Pawl's own part, under the extra key `pawl`; `None` from another engine.
    pub pawl: Option<PawlStats>,
}

/// What vLLM's stats have no place for. Unknown keys are ignored by vLLM's frontends.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct PawlStats {
    /// Preemptions since the last stats, attributed to this client.
    pub num_preemptions: u64,
    /// Seconds this step spent scheduling (host).
    pub schedule_seconds: f64,
    /// Seconds from submit to result (device).
    pub execute_seconds: f64,
    /// Seconds spent folding the result and building outputs (host).
    pub update_seconds: f64,
    /// Tokens that ran in the step.
    pub num_scheduled_tokens: u64,
    /// True for a copy re-sent by the io thread while a long step runs: gauges only, no deltas.
    pub resent: bool,
}

/// `PrefixCacheStats`: deltas, in tokens except `requests`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PrefixCacheStats {
    /// The cache was reset since the last stats.
    pub reset: bool,
    /// Requests looked up.
    pub requests: u64,
    /// Tokens looked up.
    pub queries: u64,
    /// Tokens found.
    pub hits: u64,
    /// The same for requests that come back after a preemption.
    pub preempted_requests: u64,
    /// Tokens looked up after a preemption.
    pub preempted_queries: u64,
    /// Tokens found after a preemption.
    pub preempted_hits: u64,
    /// Hits by where they were found.
    pub hits_by_source: Vec<(String, u64)>,
}

/// `SpecDecodingStats`: one step's drafts.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SpecDecodingStats {
    /// Drafted tokens per request, configured.
    pub num_spec_tokens: u64,
    /// Requests with drafts in the step.
    pub num_drafts: u64,
    /// Tokens drafted.
    pub num_draft_tokens: u64,
    /// Tokens accepted.
    pub num_accepted_tokens: u64,
    /// Accepted at each draft position.
    pub num_accepted_tokens_per_pos: Vec<u64>,
    /// Drafted at each draft position.
    pub num_draft_tokens_per_pos: Vec<u64>,
}

/// A KV block's life, told when it is evicted.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct KvCacheEvictionEvent {
    /// From allocation to eviction.
    pub lifetime_seconds: f64,
    /// From last use to eviction.
    pub idle_seconds: f64,
    /// Between uses.
    pub reuse_gaps_seconds: Vec<f64>,
}

/// `PrefillStats`: told once, with a request's first output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PrefillStats {
    /// Length of the prompt.
    pub num_prompt_tokens: u64,
    /// Prompt tokens that were run.
    pub num_computed_tokens: u64,
    /// Prompt tokens found in a cache.
    pub num_cached_tokens: u64,
    /// … of this engine.
    pub num_local_cached_tokens: u64,
    /// … of a connector.
    pub num_external_cached_tokens: u64,
    /// Prompt tokens newly put into the cache.
    pub num_cache_creation_tokens: u64,
}
