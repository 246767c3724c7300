//! What one frame's outputs amount to: pure numbers, ready to be added to the registry.

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{EngineCoreEvent, EventKind, FinishReason, PrefillStats};

use crate::metrics::AdmissionReason;

/// The sums and observations of one frame. Built under one reading of the clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IterationStats {
    /// Outputs for requests that are open here.
    pub outputs: u64,
    /// Outputs for requests that have ended here.
    pub unknown_outputs: u64,
    /// New tokens, without those after a stop string.
    pub generation_tokens: u64,
    /// Prompts whose first token came.
    pub prompt: PromptTokens,
    /// Preemptions told by events.
    pub preemptions: u64,
    /// One for each first token.
    pub first_token_seconds: Vec<f64>,
    /// One for each later output with tokens.
    pub inter_token_seconds: Vec<f64>,
    /// One for each request that ended.
    pub finished: Vec<FinishedRequest>,
    /// One for each request whose choices have all completed.
    pub finished_parents: Vec<FinishedParent>,
    /// One for each client's request that the engine did not take.
    pub refused: Vec<AdmissionReason>,
    /// Intervals that were taken as 0 because their stamps were out of order.
    pub negative_intervals: u64,
}

/// Prompt tokens, by where their KV entries came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptTokens {
    /// All of them.
    pub total: u64,
    /// Run by the engine.
    pub computed: u64,
    /// Found in any cache.
    pub cached: u64,
    /// Found in the engine's cache.
    pub local_cached: u64,
    /// Found in another cache.
    pub external_cached: u64,
}

/// A request (choice) that ended.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedRequest {
    /// How.
    pub reason: FinishReason,
    /// Set when it ran to its end (stop, length, repetition): only those are observed in the
    /// histograms of whole requests. One that was cut short says nothing about how long one takes.
    pub completed: Option<CompletedRequest>,
}

/// One request's figures, taken when it completed.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletedRequest {
    /// This process's clock.
    pub e2e_seconds: f64,
    /// Engine's clock; `None` where the engine told no such stamp.
    pub queue_seconds: Option<f64>,
    /// Engine's clock.
    pub prefill_seconds: Option<f64>,
    /// Engine's clock.
    pub decode_seconds: Option<f64>,
    /// Engine's clock.
    pub inference_seconds: Option<f64>,
    /// Engine's clock; 0 with a single token.
    pub seconds_per_output_token: Option<f64>,
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated and kept.
    pub generation_tokens: u64,
    /// Prompt tokens that no cache held.
    pub prefill_computed_tokens: u64,
    /// Preemptions.
    pub preemptions: u32,
    /// The request's limit.
    pub max_tokens: u32,
}

/// A request whose `n` choices have all completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedParent {
    /// Choices.
    pub n: u32,
    /// The longest of them, in tokens.
    pub max_generation_tokens: u64,
}

/// What one frame told about one request, its text aside.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told<'a> {
    /// Tokens kept.
    pub new_tokens: u64,
    /// Events since the last output.
    pub events: &'a [EngineCoreEvent],
    /// With the first output.
    pub prefill: Option<&'a PrefillStats>,
    /// The frame's stamp, engine's clock, seconds.
    pub timestamp: f64,
    /// This process's clock.
    pub now: Stamp,
}

/// A request's stamps and counts, from arrival to end.
///
/// Stamps of the engine are seconds of its clock and are subtracted from one another only; the two
/// stamps of this process likewise.
#[derive(Clone, Debug)]
pub(super) struct Lifetime {
    /// This process: the request's arrival.
    pub arrival: Stamp,
    /// This process: handed to the core.
    pub sent: Stamp,
    /// As submitted.
    pub prompt_tokens: u64,
    /// As lowered.
    pub max_tokens: u32,
    pub generation_tokens: u64,
    pub preemptions: u32,
    prefill: Option<PrefillStats>,
    queued: Option<f64>,
    scheduled: Option<f64>,
    first_token: Option<f64>,
    last_token: Option<f64>,
}

impl Lifetime {
    pub fn new(arrival: Stamp, sent: Stamp, prompt_tokens: u64, max_tokens: u32) -> Self {
        Self {
            arrival,
            sent,
            prompt_tokens,
            max_tokens,
            generation_tokens: 0,
            preemptions: 0,
            prefill: None,
            queued: None,
            scheduled: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Prompt tokens found in a cache; known with the first output.
    pub fn cached_tokens(&self) -> u64 {
        self.prefill.map_or(0, |prefill| prefill.num_cached_tokens)
    }

    /// Takes in what a frame told, and adds it to the frame's sums.
    pub fn observe(&mut self, told: &Told<'_>, frame: &mut IterationStats) {
        frame.outputs += 1;
        for event in told.events {
            match event.kind {
                // The first of each counts: after a preemption a request is scheduled again, and
                // that wait belongs to its decode time, not to its queue time.
                EventKind::Queued => self.queued = self.queued.or(Some(event.timestamp)),
                EventKind::Scheduled => self.scheduled = self.scheduled.or(Some(event.timestamp)),
                EventKind::Preempted => {
                    self.preemptions += 1;
                    frame.preemptions += 1;
                }
            }
        }
        if let Some(prefill) = told.prefill {
            self.prefill = self.prefill.or(Some(*prefill));
        }
        if told.new_tokens == 0 {
            return;
        }
        self.generation_tokens += told.new_tokens;
        frame.generation_tokens += told.new_tokens;
        match self.last_token {
            None => {
                self.first_token = Some(told.timestamp);
                frame.first_token_seconds.push(told.now.since(self.arrival).as_secs_f64());
                self.count_prompt(&mut frame.prompt);
            }
            Some(last) => {
                let seconds = forward(last, told.timestamp, frame);
                frame.inter_token_seconds.push(seconds);
            }
        }
        self.last_token = Some(told.timestamp);
    }

    /// An engine that keeps no stats tells nothing of its prefill: then all of it was computed, as
    /// far as anybody here knows.
    fn count_prompt(&self, prompt: &mut PromptTokens) {
        let told = self.prefill.unwrap_or(PrefillStats {
            num_prompt_tokens: self.prompt_tokens,
            num_computed_tokens: self.prompt_tokens,
            ..PrefillStats::default()
        });
        prompt.total += told.num_prompt_tokens;
        prompt.computed += told.num_computed_tokens;
        prompt.cached += told.num_cached_tokens;
        prompt.local_cached += told.num_local_cached_tokens;
        prompt.external_cached += told.num_external_cached_tokens;
    }

    /// The request's end. Called once: the request leaves the table with it. Returns whether it
    /// completed.
    pub fn finish(&self, reason: FinishReason, now: Stamp, frame: &mut IterationStats) -> bool {
        let ran_to_its_end =
            matches!(reason, FinishReason::Stop | FinishReason::Length | FinishReason::Repetition);
        let completed = ran_to_its_end.then(|| self.completed(now, frame));
        frame.finished.push(FinishedRequest { reason, completed });
        ran_to_its_end
    }

    fn completed(&self, now: Stamp, frame: &mut IterationStats) -> CompletedRequest {
        let mut between = |from: Option<f64>, to: Option<f64>| match (from, to) {
            (Some(from), Some(to)) => Some(forward(from, to, frame)),
            _ => None,
        };
        let decode = between(self.first_token, self.last_token);
        let later_tokens = self.generation_tokens.saturating_sub(1);
        CompletedRequest {
            e2e_seconds: now.since(self.arrival).as_secs_f64(),
            queue_seconds: between(self.queued, self.scheduled),
            prefill_seconds: between(self.scheduled, self.first_token),
            decode_seconds: decode,
            inference_seconds: between(self.scheduled, self.last_token),
            seconds_per_output_token: decode
                .map(|decode| if later_tokens == 0 { 0.0 } else { decode / later_tokens as f64 }),
            prompt_tokens: self.prompt_tokens,
            generation_tokens: self.generation_tokens,
            prefill_computed_tokens: self.prompt_tokens.saturating_sub(self.cached_tokens()),
            preemptions: self.preemptions,
            max_tokens: self.max_tokens,
        }
    }

    /// Where the time went, for a request that ends `now`. The engine's parts are differences of
    /// its own stamps; what is left of the time here is the way there and back.
    pub fn timing(&self, now: Stamp) -> crate::engine_client::RequestTiming {
        let part = |from: Option<f64>, to: Option<f64>| match (from, to) {
            (Some(from), Some(to)) => {
                std::time::Duration::try_from_secs_f64(to - from).unwrap_or_default()
            }
            _ => std::time::Duration::ZERO,
        };
        let queue = part(self.queued, self.scheduled);
        let prefill = part(self.scheduled, self.first_token);
        let decode = part(self.first_token, self.last_token);
        crate::engine_client::RequestTiming {
            intake: self.sent.since(self.arrival),
            queue,
            prefill,
            decode,
            deliver: now.since(self.sent).saturating_sub(queue + prefill + decode),
        }
    }
}

/// From one stamp of the engine to a later one, in seconds. Stamps out of order are an error of the
/// engine: taken as 0 and counted, so that no histogram ever sees a negative time.
fn forward(from: f64, to: f64, frame: &mut IterationStats) -> f64 {
    let seconds = to - from;
    if seconds >= 0.0 {
        return seconds;
    }
    frame.negative_intervals += 1;
    0.0
}
