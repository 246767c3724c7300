//! What one frontend's numbers must be, kept by the hand of its readers.

use std::collections::BTreeMap;
use std::time::Duration;

use pawl_api_server::engine_client::{SubmitError, Update};
use pawl_api_server::metrics::{AdmissionReason, Snapshot};
use pawl_shared::protocol::{FinishReason, SchedulerStats};

/// Counts of one frontend process, by the fate table of docs/metrics.md.
#[derive(Debug, Default)]
pub struct Ledger {
    ended: BTreeMap<&'static str, u64>,
    generation_tokens: u64,
    prompt_tokens: u64,
    first_tokens: u64,
    later_outputs: u64,
    completed: u64,
    /// How long clients had waited for their first tokens and for whole answers, in seconds.
    waited_first: f64,
    waited_whole: f64,
    completed_requests: u64,
    rejected: BTreeMap<&'static str, u64>,
    slow_readers: u64,
    prefix_queries: u64,
    prefix_hits: u64,
    preemptions: u64,
    sessions: u64,
    /// As last told: running, waiting and deferred, share of the cache.
    pub gauges: (u64, u64, f64),
}

/// One choice's part of the ledger while it goes on.
#[derive(Debug, Default)]
pub struct Account {
    pub outputs: u64,
}

impl Ledger {
    pub fn refused(&mut self, error: &SubmitError) {
        self.rejected(match error {
            SubmitError::Unavailable { .. } => AdmissionReason::EngineUnavailable,
            SubmitError::QueueFull { .. } => AdmissionReason::QueueFull,
            SubmitError::Draining => AdmissionReason::Draining,
        });
    }

    /// A client's request that the core did not take.
    pub fn rejected(&mut self, reason: AdmissionReason) {
        *self.rejected.entry(reason.as_str()).or_default() += 1;
    }

    pub fn slow_reader(&mut self) {
        self.slow_readers += 1;
    }

    pub fn joined(&mut self) {
        self.sessions += 1;
    }

    /// An update of a choice, `waited` after its client had asked; `true` if the choice ended and
    /// was counted as complete.
    pub fn update(
        &mut self,
        account: &mut Account,
        prompt: u64,
        update: &Update,
        waited: Duration,
    ) -> bool {
        let tokens = update.token_ids.len() as u64;
        self.generation_tokens += tokens;
        if tokens > 0 {
            account.outputs += 1;
            if account.outputs == 1 {
                self.first_tokens += 1;
                self.prompt_tokens += prompt;
                self.waited_first += waited.as_secs_f64();
            } else {
                self.later_outputs += 1;
            }
        }
        let Some(finish) = &update.finish else { return false };
        let refused = update.error.as_ref().is_some_and(|error| error.refusal().is_some());
        if refused && account.outputs == 0 {
            return false;
        }
        *self.ended.entry(finish.reason.as_str()).or_default() += 1;
        let complete = matches!(
            finish.reason,
            FinishReason::Stop | FinishReason::Length | FinishReason::Repetition
        );
        self.completed += u64::from(complete);
        self.waited_whole += if complete { waited.as_secs_f64() } else { 0.0 };
        complete
    }

    /// Every choice of a request has completed.
    pub fn completed_request(&mut self) {
        self.completed_requests += 1;
    }

    /// A frame with stats was folded.
    pub fn stats(&mut self, stats: &SchedulerStats) {
        let waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs;
        self.gauges = (stats.num_running_reqs, waiting, stats.kv_cache_usage);
        let own = stats.pawl.expect("a core of ours tells its own part");
        if !own.resent {
            self.prefix_queries += stats.prefix_cache_stats.queries;
            self.prefix_hits += stats.prefix_cache_stats.hits;
            self.preemptions += own.num_preemptions;
        }
    }

    /// Every difference between what is shown and what is right.
    pub fn differences(&self, shown: &Snapshot) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut check = |family: &str, labels: &[(&str, &str)], right: u64| {
            let shown = shown.total(family, labels);
            if shown != right as f64 {
                wrong.push(format!("{family}{labels:?} shows {shown}, but {right} is right"));
            }
        };
        for reason in ["stop", "length", "abort", "error", "repetition"] {
            let right = self.ended.get(reason).copied().unwrap_or_default();
            check("vllm:request_success_total", &[("finished_reason", reason)], right);
        }
        for reason in ["queue_full", "draining", "engine_unavailable"] {
            let right = self.rejected.get(reason).copied().unwrap_or_default();
            check("vllm:admission_rejections_total", &[("reason", reason)], right);
        }
        check("vllm:generation_tokens_total", &[], self.generation_tokens);
        check("vllm:prompt_tokens_total", &[], self.prompt_tokens);
        check("vllm:time_to_first_token_seconds", &[], self.first_tokens);
        check("vllm:inter_token_latency_seconds", &[], self.later_outputs);
        for family in [
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_prompt_tokens",
            "vllm:request_generation_tokens",
            "vllm:request_num_preemptions",
        ] {
            check(family, &[], self.completed);
        }
        check("vllm:request_params_n", &[], self.completed_requests);
        check("vllm:request_max_num_generation_tokens", &[], self.completed_requests);
        check("vllm:prefix_cache_queries_total", &[], self.prefix_queries);
        check("vllm:prefix_cache_hits_total", &[], self.prefix_hits);
        check("pawl:scheduler_preemptions_total", &[], self.preemptions);
        check("pawl:slow_reader_aborts_total", &[], self.slow_readers);
        check("pawl:core_sessions_total", &[], self.sessions);
        check("pawl:negative_intervals_total", &[], 0);
        check("pawl:decode_errors_total", &[], 0);
        check("vllm:num_requests_running", &[], self.gauges.0);
        check("vllm:num_requests_waiting", &[], self.gauges.1);
        // A client hears of a token when it is counted, or later.
        for (family, most) in [
            ("vllm:time_to_first_token_seconds", self.waited_first),
            ("vllm:e2e_request_latency_seconds", self.waited_whole),
        ] {
            let shown = shown.observed(family);
            if shown > most + 1e-6 {
                wrong.push(format!("{family} adds up to {shown} s, clients waited for {most} s"));
            }
        }
        let usage = shown.total("vllm:kv_cache_usage_perc", &[]);
        if usage != self.gauges.2 {
            wrong.push(format!("the cache's usage shows {usage}, told was {}", self.gauges.2));
        }
        wrong
    }
}
