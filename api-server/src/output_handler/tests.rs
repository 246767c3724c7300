//! Frames in, metrics and updates out, on a clock that the test moves.

mod aborts;
mod faults;
mod folding;
mod texts;

use std::collections::BTreeMap;
use std::time::Duration;

use pawl_shared::clock::{Clock, ManualClock};
use pawl_shared::protocol::{
    EngineCoreEvent, EventKind, PawlStats, PrefillStats, PrefixCacheStats, StepFrame,
    testing::idle_stats,
};

use super::*;
use crate::detokenizer::tests::TokenTable;
use crate::engine_client::Finish;
use crate::metrics::{Format, MetricsConfig};

/// Token i is byte i; 256.. are the words of the stop-string cases; 270 is special.
pub(super) const WORDS: [&str; 6] = [" red", " green", " blue", " violet", " amber", "plain"];
pub(super) const END: u32 = 270;

fn vocabulary() -> Arc<TokenTable> {
    let bytes = (0..=255u8).map(|byte| (vec![byte], false));
    let words = WORDS.iter().map(|word| (word.as_bytes().to_vec(), false));
    let filler = (0..END - 262).map(|_| (Vec::new(), false));
    let special = [(b"<|end|>".to_vec(), true)];
    let tokens = bytes.chain(words).chain(filler).chain(special).collect();
    Arc::new(TokenTable { tokens, strips_first_space: false })
}

/// A handler with a clock, and the engine's clock, which has another origin.
pub(super) struct Bench {
    pub clock: ManualClock,
    pub metrics: Arc<Metrics>,
    pub handler: OutputHandler,
    primed: BTreeMap<String, String>,
    next: u32,
}

/// One submitted request.
pub(super) struct Sent {
    pub key: u64,
    pub ids: Vec<RequestId>,
    pub mailbox: Arc<Mailbox>,
}

impl Bench {
    pub fn new() -> Self {
        Self::with_limits(DeliveryLimits::default())
    }

    pub fn with_limits(limits: DeliveryLimits) -> Self {
        let clock = ManualClock::at(1_000_000_000_000);
        let metrics = Metrics::new(MetricsConfig {
            clock: Arc::new(clock.clone()),
            process: false,
            ..MetricsConfig::default()
        });
        let metrics = Arc::new(metrics.expect("no custom buckets"));
        let mut handler = OutputHandler::new(metrics.clone(), limits, false, clock.now());
        handler.set_engine(metrics.engine("m", 0, 64), 0);
        let primed = samples(&metrics);
        Self { clock, metrics, handler, primed, next: 0 }
    }

    pub fn pass(&self, milliseconds: u64) {
        self.clock.advance(Duration::from_millis(milliseconds));
    }

    /// Submits a request that arrived 100 ms ago.
    pub fn send(&mut self, prompt_tokens: u64, params: &SamplingParams) -> Sent {
        self.send_prompts(&[prompt_tokens], params).remove(0)
    }

    /// The same with several prompts.
    pub fn send_prompts(&mut self, prompts: &[u64], params: &SamplingParams) -> Vec<Sent> {
        let arrival = self.clock.now();
        self.pass(100);
        let mut sent = Vec::new();
        let mut news = Vec::new();
        for &prompt_tokens in prompts {
            let ids: Vec<RequestId> = (0..params.n)
                .map(|choice| {
                    self.next += 1;
                    RequestId::from(format!("{choice}_r-{}", self.next))
                })
                .collect();
            let mailbox = Arc::new(Mailbox::new(params.n));
            news.push(NewRequest {
                external_id: "r".into(),
                ids: ids.clone(),
                prompt_tokens,
                params,
                max_tokens: params.max_tokens.expect("set in every case"),
                vocabulary: vocabulary(),
                arrival,
                sent: self.clock.now(),
                mailbox: mailbox.clone(),
            });
            sent.push(Sent { key: 0, ids, mailbox });
        }
        for (key, sent) in self.handler.add(news).zip(&mut sent) {
            sent.key = key;
        }
        sent
    }

    /// One frame, stamped `at` seconds by the engine's clock.
    pub fn frame(
        &mut self,
        at: f64,
        stats: SchedulerStats,
        outputs: Vec<EngineCoreOutput>,
    ) -> Folded {
        let stamp = Stamp::from_nanos((at * 1e9).round() as u64);
        let frames = StepFrame::new(stamp, stats, 0, outputs).encode();
        self.handler.fold(&frames, self.clock.now())
    }

    /// The samples that differ from the primed page.
    pub fn moved(&self) -> String {
        let now = samples(&self.metrics);
        let moved = now.iter().filter(|(name, value)| self.primed.get(*name) != Some(value));
        moved.map(|(name, value)| format!("{name} {value}\n")).collect()
    }

    /// The same without buckets and frame sizes: counts and sums are what the cases are about.
    pub fn moved_briefly(&self) -> String {
        let brief = |line: &&str| !line.contains("_bucket{") && !line.contains("frame_bytes");
        self.moved().lines().filter(brief).map(|line| format!("{line}\n")).collect()
    }
}

/// Every sample of the page by its name and labels.
pub(super) fn samples(metrics: &Metrics) -> BTreeMap<String, String> {
    let (_, page) = metrics.render(Format::Text004);
    let page = String::from_utf8(page).expect("the page is text");
    page.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a sample has a value");
            // The labels that are the same everywhere would drown the rest.
            let labels = |text: String, label: &str| {
                text.replace(&format!("{label},"), "").replace(&format!(",{label}"), "")
            };
            let name = labels(labels(name.to_string(), "engine=\"0\""), "model_name=\"m\"");
            let name = name.replace("{model_name=\"m\"}", "").replace("{engine=\"0\"}", "");
            (name, value.to_string())
        })
        .collect()
}

/// What has been delivered and not been read.
pub(super) fn read(sent: &Sent, bench: &Bench) -> Vec<Update> {
    let mut updates = Vec::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        loop {
            tokio::select! {
                biased;
                update = sent.mailbox.take(&bench.clock) => match update {
                    Some(update) => updates.push(update),
                    None => break,
                },
                () = std::future::ready(()) => break,
            }
        }
    });
    updates
}

/// The text, tokens and ends of one choice, put together.
pub(super) fn answer(updates: &[Update], choice: u32) -> (String, Vec<u32>, Vec<Finish>) {
    let mut text = String::new();
    let mut tokens = Vec::new();
    let mut ends = Vec::new();
    for update in updates.iter().filter(|update| update.choice == choice) {
        assert!(ends.is_empty(), "an update after the last one: {update:?}");
        text.push_str(&update.text);
        tokens.extend(&update.token_ids);
        ends.extend(update.finish.clone());
    }
    (text, tokens, ends)
}

pub(super) fn output(id: &RequestId, tokens: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput { new_token_ids: tokens.to_vec(), ..EngineCoreOutput::new(id.clone()) }
}

pub(super) fn last(id: &RequestId, tokens: &[u32], reason: FinishReason) -> EngineCoreOutput {
    EngineCoreOutput { finish_reason: Some(reason), ..output(id, tokens) }
}

/// A first output: queued and scheduled at the engine's seconds, with `cached` of the prompt.
pub(super) fn first(
    id: &RequestId,
    tokens: &[u32],
    queued: f64,
    scheduled: f64,
    (prompt, cached): (u64, u64),
) -> EngineCoreOutput {
    let mut output = output(id, tokens);
    output.events = vec![
        EngineCoreEvent { kind: EventKind::Queued, timestamp: queued },
        EngineCoreEvent { kind: EventKind::Scheduled, timestamp: scheduled },
    ];
    output.prefill_stats = Some(PrefillStats {
        num_prompt_tokens: prompt,
        num_computed_tokens: prompt - cached,
        num_cached_tokens: cached,
        num_local_cached_tokens: cached,
        num_external_cached_tokens: 0,
        num_cache_creation_tokens: 0,
    });
    output
}

pub(super) fn running(requests: u64, kv_cache_usage: f64) -> SchedulerStats {
    SchedulerStats { num_running_reqs: requests, kv_cache_usage, ..idle_stats() }
}

pub(super) fn max_tokens(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::default() }
}
