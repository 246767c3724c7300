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
            book.count_answer(entry);
            let ends = by_request.remove(entry.id.as_str()).unwrap_or_default();
            if entry.refused.is_some() || entry.max_tokens == 0 {
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
        for reason in ["queue_full", "draining", "engine_unavailable"] {
            self.add("vllm:admission_rejections_total", &[("reason", reason)], 0.0);
        }
        for name in ["decode_errors_total", "negative_intervals_total", "slow_reader_aborts_total"]
        {
            self.add(&format!("pawl:{name}"), &[], 0.0);
        }
    }

    fn count_answer(&mut self, entry: &Entry) {
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
        if let Some(code) = &entry.refused {
            self.fate(entry, code);
            if code == "queue_full" {
                self.add("vllm:admission_rejections_total", &[("reason", code)], 1.0);
            }
        }
    }

    fn count_request(&mut self, entry: &Entry, ends: &[&ChoiceEnd]) {
        let completed = |end: &&&ChoiceEnd| end.finish == "stop" || end.finish == "length";
        for end in ends {
            let begun = end.generation_tokens > 0;
            self.fate(entry, if begun { &end.finish } else { "abort before a token" });
            self.add("vllm:request_success_total", &[("finished_reason", &end.finish)], 1.0);
            let tokens = end.generation_tokens as f64;
            self.add("vllm:generation_tokens_total", &[], tokens);
            self.add("vllm:num_preemptions_total", &[], end.preemptions as f64);
            if begun {
                self.count_prompt(end);
                self.add("vllm:time_to_first_token_seconds_count", &[], 1.0);
                self.add("vllm:inter_token_latency_seconds_count", &[], tokens - 1.0);
                self.add("vllm:iteration_tokens_total_sum", &[], tokens);
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

    fn count_prompt(&mut self, end: &ChoiceEnd) {
        let (prompt, cached) = (end.prompt_tokens as f64, end.cached_tokens as f64);
        self.add("vllm:prompt_tokens_total", &[], prompt);
        self.add("vllm:prompt_tokens_cached_total", &[], cached);
        self.add("vllm:iteration_tokens_total_sum", &[], prompt - cached);
        let by_source = "vllm:prompt_tokens_by_source_total";
        self.add(by_source, &[("source", "local_compute")], prompt - cached);
        self.add(by_source, &[("source", "local_cache_hit")], cached);
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
            let met = self.fates.contains_key(&(kind, fate.to_owned()));
            assert!(met, "no request was {kind:?} and met {fate:?}: {:#?}", self.fates);
        }
    }
}

/// Client and log agree as far as the client could see.
fn agree(entry: &Entry, ends: &[&ChoiceEnd]) {
    let told = format!("{entry:#?} {ends:#?}");
    assert_eq!(ends.len() as u64, entry.n, "choices of {told}");
    for end in ends {
        assert_eq!(end.prompt_tokens, entry.prompt_tokens, "prompt of {told}");
        let seen = entry.choices.get(&end.choice).cloned().unwrap_or_default();
        if let Some(finish) = &seen.finish {
            assert_eq!(end.finish, *finish, "end of {told}");
        } else {
            assert!(entry.left, "{told}");
        }
        if entry.left {
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
            let labels: Vec<(&str, &str)> = labels.iter().map(|(l, v)| (*l, v.as_str())).collect();
            let at = |scrape: &Scrape| scrape.sum_if_any(name, &labels);
            let moved = at(after) - at(before);
            // Sums of whole numbers are exact in a float.
            (moved != *expected)
                .then(|| format!("{name} {labels:?}: the ledger says {expected}, /metrics {moved}"))
        })
        .collect()
}
