//! The series of one engine and model: resolved once, then only atomics are touched.
//!
//! A scrape cannot delay the fold: counters and gauges are single atomics, and the crate's
//! histograms keep two shards of which a scrape takes the cold one and waits for the observer,
//! never the other way round. The locks of the families are taken only when a label set is new.

use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec,
};

use pawl_shared::protocol::{FinishReason, SchedulerStats};

use super::register::{Registrar, Resolve};
use super::table;
use crate::output_handler::IterationStats;

/// Families of the engine series; registered when the first model is known, because the bounds of
/// some depend on its length.
pub(super) struct EngineFamilies {
    running: GaugeVec,
    waiting: GaugeVec,
    waiting_by_reason: GaugeVec,
    kv_cache_usage: GaugeVec,
    sleep_state: GaugeVec,
    prefix_queries: IntCounterVec,
    prefix_hits: IntCounterVec,
    always_zero: Vec<IntCounterVec>,
    estimates: Vec<CounterVec>,
    cached_by_source: IntCounterVec,
    preemptions: IntCounterVec,
    prompt_tokens: IntCounterVec,
    prompt_by_source: IntCounterVec,
    prompt_cached: IntCounterVec,
    generation_tokens: IntCounterVec,
    success: IntCounterVec,
    iteration_tokens: HistogramVec,
    request_prompt_tokens: HistogramVec,
    request_generation_tokens: HistogramVec,
    request_max_generation_tokens: HistogramVec,
    request_params_n: HistogramVec,
    request_params_max_tokens: HistogramVec,
    request_prefill_computed: HistogramVec,
    request_preemptions: HistogramVec,
    first_token: HistogramVec,
    inter_token: HistogramVec,
    per_output_token: HistogramVec,
    e2e: HistogramVec,
    queue: HistogramVec,
    prefill: HistogramVec,
    decode: HistogramVec,
    inference: HistogramVec,
}

impl EngineFamilies {
    pub(super) fn register(at: &Registrar<'_>) -> Self {
        Self {
            running: at.gauge(&table::NUM_REQUESTS_RUNNING),
            waiting: at.gauge(&table::NUM_REQUESTS_WAITING),
            waiting_by_reason: at.gauge(&table::NUM_REQUESTS_WAITING_BY_REASON),
            kv_cache_usage: at.gauge(&table::KV_CACHE_USAGE),
            sleep_state: at.gauge(&table::ENGINE_SLEEP_STATE),
            prefix_queries: at.counter(&table::PREFIX_CACHE_QUERIES),
            prefix_hits: at.counter(&table::PREFIX_CACHE_HITS),
            always_zero: [
                &table::EXTERNAL_PREFIX_CACHE_QUERIES,
                &table::EXTERNAL_PREFIX_CACHE_HITS,
                &table::MM_CACHE_QUERIES,
                &table::MM_CACHE_HITS,
            ]
            .map(|spec| at.counter(spec))
            .into(),
            estimates: [
                &table::ESTIMATED_FLOPS,
                &table::ESTIMATED_READ_BYTES,
                &table::ESTIMATED_WRITE_BYTES,
            ]
            .map(|spec| at.float_counter(spec))
            .into(),
            cached_by_source: at.counter(&table::PROMPT_TOKENS_CACHED_BY_SOURCE),
            preemptions: at.counter(&table::NUM_PREEMPTIONS),
            prompt_tokens: at.counter(&table::PROMPT_TOKENS),
            prompt_by_source: at.counter(&table::PROMPT_TOKENS_BY_SOURCE),
            prompt_cached: at.counter(&table::PROMPT_TOKENS_CACHED),
            generation_tokens: at.counter(&table::GENERATION_TOKENS),
            success: at.counter(&table::REQUEST_SUCCESS),
            iteration_tokens: at.histogram(&table::ITERATION_TOKENS),
            request_prompt_tokens: at.histogram(&table::REQUEST_PROMPT_TOKENS),
            request_generation_tokens: at.histogram(&table::REQUEST_GENERATION_TOKENS),
            request_max_generation_tokens: at.histogram(&table::REQUEST_MAX_NUM_GENERATION_TOKENS),
            request_params_n: at.histogram(&table::REQUEST_PARAMS_N),
            request_params_max_tokens: at.histogram(&table::REQUEST_PARAMS_MAX_TOKENS),
            request_prefill_computed: at.histogram(&table::REQUEST_PREFILL_KV_COMPUTED_TOKENS),
            request_preemptions: at.histogram(&table::REQUEST_NUM_PREEMPTIONS),
            first_token: at.histogram(&table::TIME_TO_FIRST_TOKEN),
            inter_token: at.histogram(&table::INTER_TOKEN_LATENCY),
            per_output_token: at.histogram(&table::REQUEST_TIME_PER_OUTPUT_TOKEN),
            e2e: at.histogram(&table::E2E_REQUEST_LATENCY),
            queue: at.histogram(&table::REQUEST_QUEUE_TIME),
            prefill: at.histogram(&table::REQUEST_PREFILL_TIME),
            decode: at.histogram(&table::REQUEST_DECODE_TIME),
            inference: at.histogram(&table::REQUEST_INFERENCE_TIME),
        }
    }
}

/// Where prefix-cache hits were found; unknown names are counted under the last.
const CACHED_SOURCES: [&str; 5] = ["device", "host", "p2p", "disk", "external_unspecified"];

/// Resolved handles of one engine and model. Cloned handles share the series.
pub struct EngineHandles {
    running: Gauge,
    waiting: Gauge,
    waiting_capacity: Gauge,
    waiting_deferred: Gauge,
    kv_cache_usage: Gauge,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    cached_by_source: [IntCounter; CACHED_SOURCES.len()],
    preemptions: IntCounter,
    prompt_tokens: IntCounter,
    prompt_local_compute: IntCounter,
    prompt_local_hit: IntCounter,
    prompt_external: IntCounter,
    prompt_cached: IntCounter,
    generation_tokens: IntCounter,
    success: [IntCounter; FinishReason::ALL.len()],
    iteration_tokens: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    request_max_generation_tokens: Histogram,
    request_params_n: Histogram,
    request_params_max_tokens: Histogram,
    request_prefill_computed: Histogram,
    request_preemptions: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
}

impl EngineHandles {
    /// Resolves every series, which shows all of them at zero.
    pub(super) fn resolve(families: &EngineFamilies, model: &str, engine: &str) -> Self {
        let labels = [model, engine];
        let with = |extra: &'static str| [model, engine, extra];
        for (state, value) in [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)] {
            families.sleep_state.at(&with(state)).set(value);
        }
        for family in &families.always_zero {
            family.at(&labels);
        }
        for family in &families.estimates {
            let _: Counter = family.at(&labels);
        }
        Self {
            running: families.running.at(&labels),
            waiting: families.waiting.at(&labels),
            waiting_capacity: families.waiting_by_reason.at(&with("capacity")),
            waiting_deferred: families.waiting_by_reason.at(&with("deferred")),
            kv_cache_usage: families.kv_cache_usage.at(&labels),
            prefix_queries: families.prefix_queries.at(&labels),
            prefix_hits: families.prefix_hits.at(&labels),
            cached_by_source: CACHED_SOURCES
                .map(|source| families.cached_by_source.at(&with(source))),
            preemptions: families.preemptions.at(&labels),
            prompt_tokens: families.prompt_tokens.at(&labels),
            prompt_local_compute: families.prompt_by_source.at(&with("local_compute")),
            prompt_local_hit: families.prompt_by_source.at(&with("local_cache_hit")),
            prompt_external: families.prompt_by_source.at(&with("external_kv_transfer")),
            prompt_cached: families.prompt_cached.at(&labels),
            generation_tokens: families.generation_tokens.at(&labels),
            success: FinishReason::ALL.map(|reason| families.success.at(&with(reason.as_str()))),
            iteration_tokens: families.iteration_tokens.at(&labels),
            request_prompt_tokens: families.request_prompt_tokens.at(&labels),
            request_generation_tokens: families.request_generation_tokens.at(&labels),
            request_max_generation_tokens: families.request_max_generation_tokens.at(&labels),
            request_params_n: families.request_params_n.at(&labels),
            request_params_max_tokens: families.request_params_max_tokens.at(&labels),
            request_prefill_computed: families.request_prefill_computed.at(&labels),
            request_preemptions: families.request_preemptions.at(&labels),
            first_token: families.first_token.at(&labels),
            inter_token: families.inter_token.at(&labels),
            per_output_token: families.per_output_token.at(&labels),
            e2e: families.e2e.at(&labels),
            queue: families.queue.at(&labels),
            prefill: families.prefill.at(&labels),
            decode: families.decode.at(&labels),
            inference: families.inference.at(&labels),
        }
    }

    /// Counts what one frame's outputs amounted to.
    pub(super) fn record_iteration(&self, stats: &IterationStats) {
        self.prompt_tokens.inc_by(stats.prompt.total);
        self.prompt_cached.inc_by(stats.prompt.cached);
        self.prompt_local_compute.inc_by(stats.prompt.computed);
        self.prompt_local_hit.inc_by(stats.prompt.local_cached);
        self.prompt_external.inc_by(stats.prompt.external_cached);
        self.generation_tokens.inc_by(stats.generation_tokens);
        self.preemptions.inc_by(stats.preemptions);
        if stats.outputs > 0 {
            let tokens = stats.prompt.computed + stats.generation_tokens;
            self.iteration_tokens.observe(tokens as f64);
        }
        for &seconds in &stats.first_token_seconds {
            self.first_token.observe(seconds);
        }
        for &seconds in &stats.inter_token_seconds {
            self.inter_token.observe(seconds);
        }
        for finished in &stats.finished {
            self.success[finished.reason as usize].inc();
            let Some(done) = &finished.completed else { continue };
            self.e2e.observe(done.e2e_seconds);
            self.request_prompt_tokens.observe(done.prompt_tokens as f64);
            self.request_generation_tokens.observe(done.generation_tokens as f64);
            self.request_prefill_computed.observe(done.prefill_computed_tokens as f64);
            self.request_preemptions.observe(f64::from(done.preemptions));
            self.request_params_max_tokens.observe(f64::from(done.max_tokens));
            observe_if_told(&self.queue, done.queue_seconds);
            observe_if_told(&self.prefill, done.prefill_seconds);
            observe_if_told(&self.decode, done.decode_seconds);
            observe_if_told(&self.inference, done.inference_seconds);
            observe_if_told(&self.per_output_token, done.seconds_per_output_token);
        }
        for parent in &stats.finished_parents {
            self.request_params_n.observe(f64::from(parent.n));
            self.request_max_generation_tokens.observe(parent.max_generation_tokens as f64);
        }
    }

    /// Sets the gauges; counts the deltas unless `resent` says that they were told before.
    pub(super) fn record_scheduler(&self, stats: &SchedulerStats, resent: bool) {
        let waiting = stats.num_waiting_reqs as f64;
        let deferred = stats.num_skipped_waiting_reqs as f64;
        self.running.set(stats.num_running_reqs as f64);
        self.waiting.set(waiting + deferred);
        self.waiting_capacity.set(waiting);
        self.waiting_deferred.set(deferred);
        self.kv_cache_usage.set(stats.kv_cache_usage);
        if resent {
            return;
        }
        let prefix = &stats.prefix_cache_stats;
        self.prefix_queries.inc_by(prefix.queries);
        self.prefix_hits.inc_by(prefix.hits);
        if prefix.hits_by_source.is_empty() {
            // An engine with one cache does not name it.
            self.cached_by_source[0].inc_by(prefix.hits);
        }
        for (source, hits) in &prefix.hits_by_source {
            let known = CACHED_SOURCES.iter().position(|name| name == source);
            self.cached_by_source[known.unwrap_or(CACHED_SOURCES.len() - 1)].inc_by(*hits);
        }
    }

    /// The engine is gone: nothing runs and nothing waits in it any more.
    pub(super) fn engine_gone(&self) {
        for gauge in [
            &self.running,
            &self.waiting,
            &self.waiting_capacity,
            &self.waiting_deferred,
            &self.kv_cache_usage,
        ] {
            gauge.set(0.0);
        }
    }
}

/// Stamps of the engine may be missing; an interval that was not told is not observed.
fn observe_if_told(histogram: &Histogram, seconds: Option<f64>) {
    if let Some(seconds) = seconds {
        histogram.observe(seconds);
    }
}
