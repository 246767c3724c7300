//! A scheduler, a fake runner, and the loop between them at a given depth, on a clock of its own.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{FinishReason, SamplingParams};

use super::fake_runner::{FakeRunner, mix, next_token, root};
use crate::kv_cache::CacheConfig;
use crate::scheduler::{
    AdmittedRequest, ClientIndex, Rejected, RequestOutput, Scheduler, SchedulerConfig,
};
use crate::step::{RequestKey, StepPlan, StepResult};

/// A request as a test asks for it.
#[derive(Clone, Debug)]
pub struct Ask {
    pub key: u64,
    pub client: u32,
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    pub priority: i64,
    pub salt: Option<String>,
}

/// What a request was asked for and what came of it.
#[derive(Debug)]
pub struct Fate {
    pub ask: Ask,
    pub delivered: Vec<u32>,
    pub finish: Option<FinishReason>,
    pub aborted: bool,
}

pub struct World {
    pub scheduler: Scheduler,
    pub runner: FakeRunner,
    pub fates: BTreeMap<u64, Fate>,
    pub now: Stamp,
    /// What a step takes on the device.
    pub per_step: Duration,
    pub per_token: Duration,
    pub last_plan: StepPlan,
    depth: usize,
    in_flight: VecDeque<StepResult>,
}

impl World {
    pub fn new(config: SchedulerConfig, cache: CacheConfig, depth: usize) -> Self {
        Self {
            scheduler: Scheduler::new(config, cache).expect("a test's settings are sound"),
            runner: FakeRunner::new(cache.num_blocks, cache.block_size),
            fates: BTreeMap::new(),
            now: Stamp::from_nanos(1_000_000_000),
            per_step: Duration::ZERO,
            per_token: Duration::ZERO,
            last_plan: StepPlan::default(),
            depth,
            in_flight: VecDeque::new(),
        }
    }

    pub fn add(&mut self, ask: Ask) -> Result<(), Rejected> {
        let key = RequestKey(ask.key);
        let request = AdmittedRequest {
            key,
            id: format!("r{}", ask.key).into(),
            client: ClientIndex(ask.client),
            prompt: ask.prompt.clone().into(),
            sampling: Arc::new(ask.sampling.clone()),
            seed: 0,
            priority: ask.priority,
            cache_salt: ask.salt.as_deref().map(Into::into),
        };
        self.scheduler.add(request, self.now)?;
        self.runner.roots.insert(key, root(ask.salt.as_deref()));
        let fate = Fate { delivered: Vec::new(), finish: None, aborted: false, ask };
        self.fates.insert(fate.ask.key, fate);
        Ok(())
    }

    pub fn abort(&mut self, key: u64) -> bool {
        let known = self.scheduler.abort(RequestKey(key));
        if known {
            self.fates.get_mut(&key).expect("known requests were added").aborted = true;
        }
        known
    }

    pub fn abort_client(&mut self, client: u32) {
        self.scheduler.abort_client(ClientIndex(client));
        for fate in self.fates.values_mut() {
            fate.aborted |= fate.ask.client == client && fate.finish.is_none();
        }
    }

    /// First half of a turn of the engine's loop: plans and submits a step. `false` if there is
    /// nothing to run.
    pub fn submit(&mut self) -> bool {
        self.now = self.now + Duration::from_secs(1);
        self.last_plan = self.scheduler.schedule(self.now);
        if self.last_plan.scheduled.is_empty() {
            return false;
        }
        // Steps run in order, so a step can as well run when it is submitted.
        let sampled = self.runner.execute(&self.last_plan);
        let execute = self.per_step + self.per_token * self.last_plan.num_tokens();
        self.in_flight.push_back(StepResult { step: self.last_plan.step, sampled, execute });
        true
    }

    /// Second half: the oldest result, unless the pipeline was just filled and has room for more.
    pub fn collect(&mut self, submitted: bool) -> Option<(u64, Vec<RequestOutput>)> {
        if submitted && self.in_flight.len() < self.depth {
            return None;
        }
        let result = self.in_flight.pop_front()?;
        let outputs = self.scheduler.update(&result);
        outputs.iter().for_each(|output| self.deliver(output));
        Some((result.step, outputs))
    }

    pub fn idle(&self) -> bool {
        !self.scheduler.has_work() && self.in_flight.is_empty()
    }

    fn deliver(&mut self, output: &RequestOutput) {
        let key = output.key.0;
        let fate = self.fates.get_mut(&key).expect("outputs are of requests");
        assert_eq!(output.client.0, fate.ask.client, "an output went to somebody else");
        assert_eq!(output.output.request_id.as_str(), format!("r{key}"));
        assert!(fate.finish.is_none(), "request {key} got an output after its last");
        assert!(!fate.aborted, "request {key} got an output after its abort");
        fate.delivered.extend(&output.output.new_token_ids);
        fate.finish = output.output.finish_reason;
    }
}

/// What a request must be told if it runs to its end, computed without any scheduler.
pub fn expected(ask: &Ask, longest: u32) -> (Vec<u32>, FinishReason) {
    let push = |digest, token: u32| mix(digest, u64::from(token));
    let mut digest = ask.prompt.iter().fold(root(ask.salt.as_deref()), |d, t| push(d, *t));
    let mut outputs = Vec::new();
    loop {
        let token = next_token(digest, 0);
        digest = push(digest, token);
        outputs.push(token);
        let may_stop = outputs.len() >= ask.sampling.min_tokens as usize;
        let stops = ask.sampling.eos_token_id == Some(token)
            || ask.sampling.stop_token_ids.contains(&token);
        if may_stop && stops {
            return (outputs, FinishReason::Stop);
        }
        let full = ask.prompt.len() + outputs.len() >= longest as usize;
        if full || Some(outputs.len() as u32) == ask.sampling.max_tokens {
            return (outputs, FinishReason::Length);
        }
    }
}
