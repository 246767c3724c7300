//! The periodic line of the log: what the engine did in the last ten seconds.

use std::collections::VecDeque;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{PrefixCacheStats, SchedulerStats};

use super::IterationStats;

const INTERVAL: Duration = Duration::from_secs(10);

/// Requests the hit rate is over.
const HIT_RATE_REQUESTS: u64 = 1000;

/// Adds up frames until the next line is due.
pub(super) struct StatsLog {
    engine_index: u32,
    since: Stamp,
    prompt_tokens: u64,
    generation_tokens: u64,
    preemptions: u64,
    running: u64,
    waiting: u64,
    deferred: u64,
    kv_cache_usage: f64,
    /// The latest lookups, together [`HIT_RATE_REQUESTS`] requests or little more.
    lookups: VecDeque<(u64, u64, u64)>,
    lookup_sums: (u64, u64, u64),
    idle_intervals: u32,
}

/// A line that is due.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    pub text: String,
    /// Whether nothing has happened for two intervals.
    pub idle: bool,
}

impl StatsLog {
    pub fn new(now: Stamp) -> Self {
        Self {
            engine_index: 0,
            since: now,
            prompt_tokens: 0,
            generation_tokens: 0,
            preemptions: 0,
            running: 0,
            waiting: 0,
            deferred: 0,
            kv_cache_usage: 0.0,
            lookups: VecDeque::new(),
            lookup_sums: (0, 0, 0),
            idle_intervals: 0,
        }
    }

    pub fn set_engine(&mut self, engine_index: u32) {
        self.engine_index = engine_index;
    }

    pub fn add(&mut self, frame: &IterationStats, stats: Option<&SchedulerStats>) {
        self.prompt_tokens += frame.prompt.computed;
        self.generation_tokens += frame.generation_tokens;
        self.preemptions += frame.preemptions;
        let Some(stats) = stats else { return };
        self.running = stats.num_running_reqs;
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs;
        self.deferred = stats.num_skipped_waiting_reqs;
        self.kv_cache_usage = stats.kv_cache_usage;
        if !stats.pawl.is_some_and(|own| own.resent) {
            self.add_lookups(&stats.prefix_cache_stats);
        }
    }

    fn add_lookups(&mut self, prefix: &PrefixCacheStats) {
        if prefix.reset {
            self.lookups.clear();
            self.lookup_sums = (0, 0, 0);
        }
        if prefix.requests == 0 {
            return;
        }
        let new = (prefix.requests, prefix.queries, prefix.hits);
        self.lookups.push_back(new);
        let sums = &mut self.lookup_sums;
        *sums = (sums.0 + new.0, sums.1 + new.1, sums.2 + new.2);
        while self.lookups.len() > 1 && sums.0 > HIT_RATE_REQUESTS {
            let old = self.lookups.pop_front().expect("more than one is left");
            *sums = (sums.0 - old.0, sums.1 - old.1, sums.2 - old.2);
        }
    }

    /// Writes the line when it is due: as information, or for debugging once idle for long.
    pub fn tick(&mut self, now: Stamp) {
        match self.due(now) {
            Some(Line { text, idle: false }) => tracing::info!("{text}"),
            Some(Line { text, idle: true }) => tracing::debug!("{text}"),
            None => {}
        }
    }

    pub fn due(&mut self, now: Stamp) -> Option<Line> {
        let elapsed = now.since(self.since);
        if elapsed < INTERVAL {
            return None;
        }
        let per_second = |tokens: u64| tokens as f64 / elapsed.as_secs_f64();
        let deferred = match self.deferred {
            0 => String::new(),
            deferred => format!(", Deferred: {deferred} reqs"),
        };
        let preemptions = match self.preemptions {
            0 => String::new(),
            preemptions => format!(", Preemptions: {preemptions}"),
        };
        let (_, queries, hits) = self.lookup_sums;
        let hit_rate = if queries == 0 { 0.0 } else { 100.0 * hits as f64 / queries as f64 };
        let text = format!(
            "Engine {:03}: Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: \
             {:.1} tokens/s, Running: {} reqs, Waiting: {} reqs{deferred}{preemptions}, KV cache \
             usage: {:.1}%, Prefix cache hit rate: {hit_rate:.1}%",
            self.engine_index,
            per_second(self.prompt_tokens),
            per_second(self.generation_tokens),
            self.running,
            self.waiting,
            100.0 * self.kv_cache_usage,
        );
        let quiet = self.prompt_tokens + self.generation_tokens + self.running + self.waiting == 0;
        self.idle_intervals = if quiet { self.idle_intervals + 1 } else { 0 };
        self.since = now;
        self.prompt_tokens = 0;
        self.generation_tokens = 0;
        self.preemptions = 0;
        Some(Line { text, idle: self.idle_intervals >= 2 })
    }
}

#[cfg(test)]
mod tests {
    use pawl_shared::protocol::testing::idle_stats;

    use super::*;
    use crate::output_handler::PromptTokens;

    #[test]
    fn a_line_each_ten_seconds_and_quieter_when_idle() {
        let at = |seconds: u64| Stamp::from_nanos(seconds * 1_000_000_000);
        let mut log = StatsLog::new(at(100));
        let frame = IterationStats {
            prompt: PromptTokens { computed: 50, ..PromptTokens::default() },
            generation_tokens: 125,
            preemptions: 3,
            ..IterationStats::default()
        };
        let mut busy = idle_stats();
        busy.num_running_reqs = 2;
        busy.num_waiting_reqs = 3;
        busy.num_skipped_waiting_reqs = 1;
        busy.kv_cache_usage = 0.125;
        busy.prefix_cache_stats.requests = 4;
        busy.prefix_cache_stats.queries = 400;
        busy.prefix_cache_stats.hits = 100;
        log.add(&frame, Some(&busy));
        let mut lines = vec![log.due(at(109)), log.due(at(110))];
        log.add(&IterationStats::default(), Some(&idle_stats()));
        lines.extend([log.due(at(120)), log.due(at(130)), log.due(at(140))]);
        insta::assert_debug_snapshot!(lines);
    }

    #[test]
    fn the_hit_rate_is_over_the_last_thousand_requests() {
        let mut log = StatsLog::new(Stamp::from_nanos(1));
        let mut old = idle_stats();
        old.prefix_cache_stats.requests = 900;
        old.prefix_cache_stats.queries = 9000;
        old.prefix_cache_stats.hits = 9000;
        log.add(&IterationStats::default(), Some(&old));
        let mut new = idle_stats();
        new.prefix_cache_stats.requests = 500;
        new.prefix_cache_stats.queries = 500;
        log.add(&IterationStats::default(), Some(&new));
        assert_eq!(log.lookup_sums, (500, 500, 0));
    }
}
