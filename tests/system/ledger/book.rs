//! The fate table of `docs/metrics.md` as code: what `/metrics` must say of a list of requests.

use std::collections::BTreeMap;

use serde_json::Value;

use super::clients::Entry;
use crate::harness::Scrape;

/// How one choice ended, as the frontend's log tells it.
#[derive(Clone, Debug)]
pub struct ChoiceEnd {
    request: String,
    /// Its number among those of its request.
    choice: u64,
    finish: String,
    prompt_tokens: u64,
    cached_tokens: u64,
    pub generation_tokens: u64,
    preemptions: u64,
}

impl ChoiceEnd {
    /// The lines of a log in JSON that tell of choices.
    pub fn read(log: &str) -> Vec<Self> {
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter(|line| line["fields"]["message"] == "choice ended")
            .map(|line| {
                let fields = &line["fields"];
                let text = |name: &str| fields[name].as_str().unwrap().to_owned();
                let number = |name: &str| fields[name].as_u64().unwrap();
                let wire_id = text("wire_id");
                let choice = wire_id.split_once('_').map_or("0", |(choice, _)| choice);
                Self {
                    request: text("request"),
                    choice: choice.parse().unwrap_or_default(),
                    finish: text("finish"),
                    prompt_tokens: number("prompt_tokens"),
                    cached_tokens: number("cached_tokens"),
                    generation_tokens: number("generation_tokens"),
                    preemptions: number("preemptions"),
                }
            })
            .collect()
    }
}

/// The name of a family, and the labels that matter.
type Series = (String, Vec<(&'static str, String)>);

/// What must have been added to each series.
#[derive(Debug, Default)]
pub struct Book {
    sums: BTreeMap<Series, f64>,
    /// How often each kind of request met each fate.
    fates: BTreeMap<(&'static str, String), usize>,
}

/// The code of answers when there is no core, and the reason that refusals are counted by.
const CORE_AWAY: &str = "engine_unavailable";

const LEFT_OR_LOST: [&str; 2] = ["Canceled", "Unavailable"];

const HISTOGRAMS_OF_WHOLE_REQUESTS: [&str; 11] = [
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
];

impl Book {
    /// Reads `entries` by the table. `ends` has the last word on requests that were left; on all
    /// others it has to agree with the client.
    pub fn new(entries: &[Entry], ends: &[ChoiceEnd]) -> Self {
        let mut book = Self::default();
        book.open_all();
        let mut by_request: BTreeMap<&str, Vec<&ChoiceEnd>> = BTreeMap::new();
        for end in ends {
            by_request.entry(&end.request).or_default().push(end);
        }
        for entry in entries {
            let ends = by_request.remove(entry.id.as_str()).unwrap_or_default();
            if entry.died {
                assert!(ends.is_empty(), "{entry:?} has ended: {ends:?}");
                book.count_what_died(entry);
                continue;
            }
            book.count_answer(entry, !ends.is_empty());
            // An answer may be an error because the core died, which had the request by then.
            let core_died = entry.refused.as_deref() == Some(CORE_AWAY) && !ends.is_empty();
            if (entry.refused.is_some() && !core_died) || entry.max_tokens == 0 {
                assert!(ends.is_empty(), "{entry:?} reached the core: {ends:?}");
                continue;
            }
            agree(entry, &ends);
            book.count_request(entry, &ends);
        }
        assert!(by_request.is_empty(), "requests that nobody made: {by_request:?}");
        book
    }

    /// Every series that is compared, so that one that nothing was added to is compared too.
    fn open_all(&mut self) {
        for family in HISTOGRAMS_OF_WHOLE_REQUESTS {
            self.observe_times(family, 0.0);
        }
        for reason in ["stop", "length", "abort", "error", "repetition"] {
            self.add("vllm:request_success_total", &[("finished_reason", reason)], 0.0);
        }
        for reason in ["queue_full", "draining", CORE_AWAY] {
            self.add("vllm:admission_rejections_total", &[("reason", reason)], 0.0);
        }
        for name in ["decode_errors_total", "negative_intervals_total", "slow_reader_aborts_total"]
        {
            self.add(&format!("pawl:{name}"), &[], 0.0);
        }
    }

    fn count_answer(&mut self, entry: &Entry, reached_the_core: bool) {
        match entry.call {
            Some((method, code)) => {
                // One that leaves in the moment in which the core dies cannot know which it was.
                let either = method == "GenerateStream" && LEFT_OR_LOST.contains(&code);
                let either = either.then(|| LEFT_OR_LOST.join("|"));
                let code = either.as_deref().unwrap_or(code);
                let labels = [("grpc_method", method), ("grpc_code", code)];
                self.add("grpc_server_handled_total", &labels, 1.0);
                let labels = [("grpc_method", method)];
                self.add("grpc_server_handling_seconds_count", &labels, 1.0);
            }
            None => self.count_http_answer(entry),
        }
        if let Some(code) = &entry.refused {
            self.fate(entry, code);
            let for_want = ["queue_full", CORE_AWAY].contains(&code.as_str());
            if for_want && !reached_the_core {
                self.add("vllm:admission_rejections_total", &[("reason", code)], 1.0);
            }
        }
    }

    fn count_http_answer(&mut self, entry: &Entry) {
        let class = match entry.status {
            Some(200..300) => "2xx",
            Some(500..600) => "5xx",
            // A client that left before the head of its answer counts as a 499.
            _ => "4xx",
        };
        let method = if entry.method == "BREW" { "OTHER" } else { entry.method };
        let labels = [("method", method), ("handler", entry.route)];
        self.add("http_request_duration_seconds_count", &labels, 1.0);
        self.add("http_requests_total", &[&labels[..], &[("status", class)]].concat(), 1.0);
        self.add("http_requests_total", &[], 1.0);
        self.add("http_request_duration_highr_seconds_count", &[], 1.0);
    }

    /// A killed frontend had counted what its client has seen, and counts no end of it. Prompts of
    /// these requests have no beginning in common, so nothing of them was in the cache.
    fn count_what_died(&mut self, entry: &Entry) {
        for seen in entry.choices.values().filter(|seen| seen.tokens > 0) {
            self.fate(entry, "its frontend died");
            self.count_tokens(seen.tokens as f64, entry.prompt_tokens as f64, 0.0);
        }
        if entry.choices.is_empty() {
            self.fate(entry, "its frontend died before a token");
        }
    }

    /// What is counted of a choice that has begun, however it ends.
    fn count_tokens(&mut self, tokens: f64, prompt: f64, cached: f64) {
        self.add("vllm:generation_tokens_total", &[], tokens);
        self.add("vllm:time_to_first_token_seconds_count", &[], 1.0);
        self.add("vllm:inter_token_latency_seconds_count", &[], tokens - 1.0);
        self.add("vllm:iteration_tokens_total_sum", &[], tokens + prompt - cached);
        self.add("vllm:prompt_tokens_total", &[], prompt);
        self.add("vllm:prompt_tokens_cached_total", &[], cached);
        let by_source = "vllm:prompt_tokens_by_source_total";
        self.add(by_source, &[("source", "local_compute")], prompt - cached);
        self.add(by_source, &[("source", "local_cache_hit")], cached);
    }

    fn count_request(&mut self, entry: &Entry, ends: &[&ChoiceEnd]) {
        let completed = |end: &&&ChoiceEnd| end.finish == "stop" || end.finish == "length";
        for end in ends {
            let begun = end.generation_tokens > 0;
            let before = format!("{} before a token", end.finish);
            self.fate(entry, if begun { &end.finish } else { &before });
            self.add("vllm:request_success_total", &[("finished_reason", &end.finish)], 1.0);
            self.add("vllm:num_preemptions_total", &[], end.preemptions as f64);
            if begun {
                let (prompt, cached) = (end.prompt_tokens as f64, end.cached_tokens as f64);
                self.count_tokens(end.generation_tokens as f64, prompt, cached);
            }
        }
        for end in ends.iter().filter(completed) {
            for family in HISTOGRAMS_OF_WHOLE_REQUESTS {
                self.observe_times(family, 1.0);
            }
            let computed = end.prompt_tokens - end.cached_tokens;
            for (family, value) in [
                ("request_prompt_tokens", end.prompt_tokens),
                ("request_generation_tokens", end.generation_tokens),
                ("request_params_max_tokens", entry.max_tokens),
                ("request_prefill_kv_computed_tokens", computed),
                ("request_num_preemptions", end.preemptions),
            ] {
                self.add(&format!("vllm:{family}_sum"), &[], value as f64);
            }
        }
        if ends.iter().filter(completed).count() == ends.len() {
            let longest = ends.iter().map(|end| end.generation_tokens).max().unwrap_or_default();
            for (family, value) in [("params_n", entry.n), ("max_num_generation_tokens", longest)] {
                self.add(&format!("vllm:request_{family}_count"), &[], 1.0);
                self.add(&format!("vllm:request_{family}_sum"), &[], value as f64);
            }
        }
    }

    fn observe_times(&mut self, family: &str, times: f64) {
        self.add(&format!("vllm:{family}_count"), &[], times);
    }

    fn add(&mut self, name: &str, labels: &[(&'static str, &str)], value: f64) {
        let labels = labels.iter().map(|(label, value)| (*label, (*value).to_owned())).collect();
        *self.sums.entry((name.to_owned(), labels)).or_default() += value;
    }

    fn fate(&mut self, entry: &Entry, fate: &str) {
        *self.fates.entry((entry.kind, fate.to_owned())).or_default() += 1;
    }

    /// A ledger that is right because nothing happened proves nothing.
    pub fn assert_that_all_fates_occurred(&self) {
        for (kind, fate) in [
            ("length, text", "length"),
            ("EOS", "stop"),
            ("EOS at once, stream", "stop"),
            ("stop token", "stop"),
            ("stop token, stream", "stop"),
            ("stop string", "stop"),
            ("stop string, stream", "stop"),
            ("three choices, stream", "length"),
            ("chat", "length"),
            ("left at the head, short prompt", "abort"),
            ("left at the head, long prompt", "abort"),
            ("left unanswered", "abort"),
            ("left unanswered", "abort before a token"),
            ("left at its first token", "abort"),
            ("left in the middle", "abort"),
            ("left in the middle of two", "abort"),
            ("bad value", "invalid_value"),
            ("no JSON", "invalid_json"),
            ("unknown model", "model_not_found"),
            ("unknown route", "route_not_found"),
            ("wrong method", "method_not_allowed"),
            ("unknown method", "method_not_allowed"),
            ("body too large", "body_too_large"),
            ("over the context", "context_length_exceeded"),
            ("perhaps too many at once", "queue_full"),
        ] {
            self.assert_met(kind, fate);
        }
    }

    /// Some request of this kind met this fate.
    pub fn assert_met(&self, kind: &'static str, fate: &str) {
        let met = self.fates.contains_key(&(kind, fate.to_owned()));
        assert!(met, "no request was {kind:?} and met {fate:?}: {:#?}", self.fates);
    }

    /// So many preemptions of requests that never ended.
    pub fn add_preemptions(&mut self, preemptions: f64) {
        self.add("vllm:num_preemptions_total", &[], preemptions);
    }
}

/// How often the choices of `requests` were preempted that have ended.
pub fn preemptions_of(ends: &[ChoiceEnd], requests: &[&str]) -> f64 {
    let of = ends.iter().filter(|end| requests.contains(&end.request.as_str()));
    of.map(|end| end.preemptions as f64).sum()
}

/// Client and log agree as far as the client could see.
fn agree(entry: &Entry, ends: &[&ChoiceEnd]) {
    let told = format!("{entry:#?} {ends:#?}");
    assert_eq!(ends.len() as u64, entry.n, "choices of {told}");
    for end in ends {
        assert_eq!(end.prompt_tokens, entry.prompt_tokens, "prompt of {told}");
        let seen = entry.choices.get(&end.choice).cloned().unwrap_or_default();
        let unseen = entry.left || entry.refused.is_some();
        if let Some(finish) = &seen.finish {
            assert_eq!(end.finish, *finish, "end of {told}");
        } else if !entry.left {
            assert!(entry.failed || entry.refused.is_some(), "{told}");
            // Some of its choices may have ended before.
            assert!(end.finish == "error" || entry.refused.is_some(), "end of {told}");
        }
        if unseen {
            assert!(end.generation_tokens >= seen.tokens, "tokens of {told}");
        } else {
            assert_eq!(end.generation_tokens, seen.tokens, "tokens of {told}");
        }
    }
}

/// What differs between the ledger and what was added from `before` to `after`.
pub fn difference(book: &Book, before: &Scrape, after: &Scrape) -> Vec<String> {
    book.sums
        .iter()
        .filter_map(|((name, labels), expected)| {
            if name.starts_with("vllm:") || name.starts_with("pawl:") {
                // These are there from the start: one that is not has another name.
                after.get(name);
            }
            let labels: Vec<(&str, &str)> = labels.iter().map(|(l, v)| (*l, v.as_str())).collect();
            // The last label may have several values, all of which count.
            let (last, others) = labels.split_last().unzip();
            let at = |scrape: &Scrape| match last {
                None => scrape.sum_if_any(name, &[]),
                Some((label, values)) => {
                    let of = |value| [others.unwrap_or_default(), &[(*label, value)]].concat();
                    values.split('|').map(|value| scrape.sum_if_any(name, &of(value))).sum()
                }
            };
            let moved = at(after) - at(before);
            // Sums of whole numbers are exact in a float.
            (moved != *expected)
                .then(|| format!("{name} {labels:?}: the ledger says {expected}, /metrics {moved}"))
        })
        .collect()
}
