//! Drives an [`Engine`] as its thread would, with a clock that only the test moves.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use pawl_shared::clock::ManualClock;
use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineCoreRequest, EngineMessage, RequestId, SamplingParams,
    SchedulerStats, UtilityCall, Value,
};
use pawl_shared::transport::{ClientId, Peer};

use super::super::{Batch, Engine, EngineConfig, Inbox, Outgoing};
use crate::kv_cache::CacheConfig;
use crate::runner::mock::{MockConfig, MockRunner, Script};
use crate::scheduler::SchedulerConfig;
use crate::step::{Progress, Runner, StepPlan, StepResult};

/// How long a step takes.
pub const STEP: Duration = Duration::from_millis(10);

pub struct Harness {
    pub engine: Engine,
    pub clock: ManualClock,
    pub progress: Progress,
    runner: MockRunner,
    plans: VecDeque<StepPlan>,
    pub frames: Vec<(ClientId, EngineMessage)>,
    /// The last gauges that the io thread would repeat.
    pub gauges: Option<SchedulerStats>,
}

pub fn config(depth: usize) -> EngineConfig {
    EngineConfig {
        engine_index: 0,
        depth,
        scheduler: SchedulerConfig { max_model_len: 256, ..SchedulerConfig::default() },
        cache: CacheConfig { num_blocks: 65, block_size: 4, prefix_caching: true },
        vocab_size: 512,
        seed: 0,
        card: Value::Text("the card".into()),
        shutdown_timeout: Duration::ZERO,
    }
}

/// A frontend that has joined natively.
pub fn peer() -> Peer {
    let taps = Some("ipc:///taps".into());
    Peer { text: "a frontend".into(), pid: Some(7), epoch: Some(9), taps }
}

impl Harness {
    pub fn new(config: EngineConfig, clients: u32) -> Self {
        let mock = MockConfig {
            script: Some(Script(Arc::new([10, 11, 12, 13]))),
            num_blocks: config.cache.num_blocks,
            block_size: config.cache.block_size,
            ..MockConfig::default()
        };
        let clock = ManualClock::at(1_000_000_000);
        let progress = Progress::default();
        let engine = Engine::new(config, Arc::new(clock.clone()), Arc::clone(&progress)).unwrap();
        let mut harness = Self {
            engine,
            clock,
            progress,
            runner: MockRunner::new(mock),
            plans: VecDeque::new(),
            frames: Vec::new(),
            gauges: None,
        };
        for client in 0..clients {
            harness.engine.handle(Inbox::Joined(ClientId(client), peer()));
        }
        harness
    }

    /// The part of a turn before the wait.
    pub fn fill(&mut self) {
        self.plans.extend(std::iter::from_fn(|| self.engine.next_plan()));
        self.engine.settle();
        self.collect_batch();
    }

    /// The oldest step in flight ends.
    pub fn finish_step(&mut self) {
        let plan = self.plans.pop_front().expect("a step is in flight");
        self.clock.advance(STEP);
        let mut result = StepResult::default();
        self.runner.execute(&plan, &Progress::default(), &mut result).unwrap();
        result.execute = STEP;
        self.engine.complete(&result).unwrap();
        self.collect_batch();
    }

    /// Turns until there is nothing to wait for but messages.
    pub fn run_until_idle(&mut self) {
        loop {
            self.fill();
            if self.plans.is_empty() {
                return;
            }
            self.finish_step();
        }
    }

    fn collect_batch(&mut self) {
        let Batch { frames, gauges } = self.engine.take_batch();
        self.gauges = gauges.or(self.gauges.take());
        for frame in frames {
            let (client, encoded) = match frame {
                Outgoing::Step(client, frame) => (client, frame.encode()),
                Outgoing::Utility(client, frame) => (client, frame.encode()),
            };
            self.frames.push((client, EngineMessage::decode(&encoded).unwrap()));
        }
    }

    pub fn say(&mut self, client: u32, message: ClientMessage) {
        self.engine.handle(Inbox::Message(ClientId(client), message));
    }

    pub fn add(&mut self, client: u32, id: &str, prompt: &[u32], max_tokens: u32) {
        self.say(client, ClientMessage::Add(Box::new(request(id, prompt, max_tokens))));
    }

    pub fn abort(&mut self, client: u32, ids: &[&str]) {
        let ids = ids.iter().map(|&id| RequestId::from(id)).collect();
        self.say(client, ClientMessage::Abort(ids));
    }

    pub fn call(&mut self, client: u32, method: &str, args: Vec<Value>) {
        let call = UtilityCall { client_index: 0, call_id: 1 << 63, method: method.into(), args };
        self.say(client, ClientMessage::Utility(call));
    }

    /// Each frame as a line, each output as an indented one, and forgets them.
    pub fn told(&mut self) -> String {
        let mut text = String::new();
        for (client, message) in self.frames.drain(..) {
            write!(text, "to {}: ", client.0).unwrap();
            match message {
                EngineMessage::Step { timestamp, stats, outputs, finished_requests, .. } => {
                    write!(text, "at {timestamp:.3}").unwrap();
                    write_stats(&mut text, &stats.expect("every frame of ours has stats"));
                    for output in &outputs {
                        write_output(&mut text, output);
                    }
                    if !finished_requests.is_empty() {
                        let ids: Vec<_> = finished_requests.iter().map(RequestId::as_str).collect();
                        write!(text, "\n    finished {ids:?}").unwrap();
                    }
                }
                EngineMessage::Utility { timestamp, reply, .. } => {
                    write!(text, "at {timestamp:.3} {:?}", reply.result).unwrap();
                }
                EngineMessage::Dead => text.push_str("dead"),
            }
            text.push('\n');
        }
        text
    }
}

pub fn request(id: &str, prompt: &[u32], max_tokens: u32) -> EngineCoreRequest {
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ..SamplingParams::default()
    };
    EngineCoreRequest::new(id.into(), prompt.to_vec(), sampling)
}

fn write_stats(text: &mut String, stats: &SchedulerStats) {
    let SchedulerStats { num_running_reqs, num_waiting_reqs, kv_cache_usage, .. } = stats;
    let blocks = kv_cache_usage * 64.0;
    write!(text, " step {}", stats.step_counter).unwrap();
    write!(text, " running {num_running_reqs} waiting {num_waiting_reqs} blocks {blocks}").unwrap();
    let prefix = &stats.prefix_cache_stats;
    if prefix.requests > 0 {
        write!(text, " queries {} hits {}", prefix.queries, prefix.hits).unwrap();
    }
    let pawl = stats.pawl.expect("every frame of ours has this part");
    if pawl.num_scheduled_tokens > 0 {
        let millis = pawl.execute_seconds * 1e3;
        write!(text, " ran {} in {millis:.0} ms", pawl.num_scheduled_tokens).unwrap();
    }
    if pawl.resent {
        text.push_str(" resent");
    }
}

fn write_output(text: &mut String, output: &EngineCoreOutput) {
    write!(text, "\n    {} {:?}", output.request_id, output.new_token_ids).unwrap();
    for event in &output.events {
        write!(text, " {:?} {:.3}", event.kind, event.timestamp).unwrap();
    }
    if let Some(prefill) = &output.prefill_stats {
        let (all, cached) = (prefill.num_prompt_tokens, prefill.num_cached_tokens);
        write!(text, " prompt {all} cached {cached}").unwrap();
    }
    if let Some(reason) = output.finish_reason {
        write!(text, " finish {}", reason.as_str()).unwrap();
    }
    if let Some(error) = &output.error {
        let again = if error.retryable { ", retryable" } else { "" };
        write!(text, "\n      {}{again}: {}", error.code, error.message).unwrap();
    }
}
