//! Scheduler statistics: the state after a step, and what changed since the last frame.

use super::Value;
use super::wire::{Reader, Result, Wire, Writer, map_struct};

/// `SchedulerStats`. There is deliberately no `Default`: a frame's stats are a scheduler's.
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

impl SchedulerStats {
    /// What reads as zero where another engine left it away. Not a `Default`: whoever sends stats
    /// has to say them all.
    pub(super) fn nothing() -> Self {
        Self {
            num_running_reqs: 0,
            num_waiting_reqs: 0,
            num_skipped_waiting_reqs: 0,
            num_kv_fetch_reqs_by_stage: [0; 3],
            step_counter: 0,
            current_wave: 0,
            kv_cache_usage: 0.0,
            prefix_cache_stats: PrefixCacheStats::default(),
            spec_decoding_stats: None,
            iteration_details: None,
            kv_cache_eviction_events: Vec::new(),
            waiting_lora_adapters: Vec::new(),
            running_lora_adapters: Vec::new(),
            pawl: None,
        }
    }
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

map_struct! {
    PrefixCacheStats, base Self::default();
    reset, requests, queries, hits, preempted_requests, preempted_queries, preempted_hits,
    hits_by_source,
}

map_struct! {
    SpecDecodingStats, base Self::default();
    num_spec_tokens, num_drafts, num_draft_tokens, num_accepted_tokens,
    num_accepted_tokens_per_pos, num_draft_tokens_per_pos,
}

map_struct! {
    KvCacheEvictionEvent, base Self::default();
    lifetime_seconds, idle_seconds, reuse_gaps_seconds,
}

map_struct! {
    PrefillStats, base Self::default();
    num_prompt_tokens, num_computed_tokens, num_cached_tokens, num_local_cached_tokens,
    num_external_cached_tokens, num_cache_creation_tokens,
}

map_struct! {
    PawlStats, base Self::default();
    num_preemptions, schedule_seconds, execute_seconds, update_seconds, num_scheduled_tokens,
    resent,
}

/// The keys of `num_kv_fetch_reqs_by_stage`, in the order of the array.
const KV_FETCH_STAGES: [&str; 3] = ["waiting_to_start", "in_progress", "completed_waiting"];

/// vLLM's keys that Pawl has no numbers for: sent as nil, passed over when read.
const NIL_KEYS: [&str; 5] = [
    "connector_prefix_cache_stats",
    "kv_connector_stats",
    "ec_connector_stats",
    "cudagraph_stats",
    "perf_stats",
];

/// All of vLLM's 18 keys, always: its Rust frontend dies of a missing one. Then ours, if any.
impl Wire for SchedulerStats {
    fn write(&self, w: &mut Writer) {
        fn field(w: &mut Writer, key: &str, value: &impl Wire) {
            w.text(key);
            value.write(w);
        }
        w.map(18 + usize::from(self.pawl.is_some()));
        field(w, "num_running_reqs", &self.num_running_reqs);
        field(w, "num_waiting_reqs", &self.num_waiting_reqs);
        field(w, "num_skipped_waiting_reqs", &self.num_skipped_waiting_reqs);
        w.text("num_kv_fetch_reqs_by_stage");
        w.map(KV_FETCH_STAGES.len());
        for (stage, count) in KV_FETCH_STAGES.iter().zip(&self.num_kv_fetch_reqs_by_stage) {
            field(w, stage, count);
        }
        field(w, "step_counter", &self.step_counter);
        field(w, "current_wave", &self.current_wave);
        field(w, "kv_cache_usage", &self.kv_cache_usage);
        field(w, "iteration_details", &self.iteration_details);
        field(w, "prefix_cache_stats", &self.prefix_cache_stats);
        field(w, "kv_cache_eviction_events", &self.kv_cache_eviction_events);
        field(w, "spec_decoding_stats", &self.spec_decoding_stats);
        field(w, "waiting_lora_adapters", &self.waiting_lora_adapters);
        field(w, "running_lora_adapters", &self.running_lora_adapters);
        for key in NIL_KEYS {
            w.text(key);
            w.nil();
        }
        if let Some(pawl) = &self.pawl {
            field(w, "pawl", pawl);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let mut stats = Self::nothing();
        r.keys(|r, key| {
            match key {
                "num_running_reqs" => stats.num_running_reqs = Wire::read(r)?,
                "num_waiting_reqs" => stats.num_waiting_reqs = Wire::read(r)?,
                "num_skipped_waiting_reqs" => stats.num_skipped_waiting_reqs = Wire::read(r)?,
                "num_kv_fetch_reqs_by_stage" => r.keys(|r, stage| {
                    match KV_FETCH_STAGES.iter().position(|name| *name == stage) {
                        Some(at) => stats.num_kv_fetch_reqs_by_stage[at] = Wire::read(r)?,
                        None => r.skip_unknown()?,
                    }
                    Ok(())
                })?,
                "step_counter" => stats.step_counter = Wire::read(r)?,
                "current_wave" => stats.current_wave = Wire::read(r)?,
                "kv_cache_usage" => stats.kv_cache_usage = Wire::read(r)?,
                "iteration_details" => stats.iteration_details = Wire::read(r)?,
                "prefix_cache_stats" => stats.prefix_cache_stats = Wire::read(r)?,
                "kv_cache_eviction_events" => stats.kv_cache_eviction_events = Wire::read(r)?,
                "spec_decoding_stats" => stats.spec_decoding_stats = Wire::read(r)?,
                "waiting_lora_adapters" => stats.waiting_lora_adapters = Wire::read(r)?,
                "running_lora_adapters" => stats.running_lora_adapters = Wire::read(r)?,
                "pawl" => stats.pawl = Wire::read(r)?,
                key if NIL_KEYS.contains(&key) && r.take_nil() => {}
                _ => r.skip_unknown()?,
            }
            Ok(())
        })?;
        Ok(stats)
    }
}
