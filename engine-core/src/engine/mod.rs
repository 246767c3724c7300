//! The engine: one loop for every batch-queue depth, without threads, sockets or a clock of its
//! own.
//!
//! [`Engine`] is driven from outside: messages go in by [`Engine::handle`], plans come out of
//! [`Engine::next_plan`] until as many are in flight as the depth allows, results go in by
//! [`Engine::complete`], and what is to be said leaves by [`Engine::take_batch`]. The thread that
//! does this with channels is in `driver`; a test does the same with a runner of its own and a
//! clock that it moves.

mod admission;
pub(crate) mod driver;
mod outbox;
mod requests;
mod status;
mod utility;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pawl_shared::clock::{Clock, Stamp};
use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineCoreRequest, FinishReason, OutputError, RequestId, Value,
};
use pawl_shared::transport::{ClientId, Peer};

use crate::kv_cache::CacheConfig;
use crate::runner::mock::mix;
use crate::scheduler::{AdmittedRequest, ClientIndex, ConfigError, Scheduler, SchedulerConfig};
use crate::step::{Progress, RequestKey, StepPlan, StepResult};
use admission::Limits;
pub(crate) use outbox::GAUGES_EVERY;
pub use outbox::{Batch, Outgoing};
use outbox::{Occasion, Outbox, Phases};
use requests::{LiveRequest, RequestTable};
use utility::Pause;

/// What the engine is told once the runner is loaded.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Carried in every frame.
    pub engine_index: u32,
    /// Steps that may be in flight at once, at least 1.
    pub depth: usize,
    /// How the scheduler decides.
    pub scheduler: SchedulerConfig,
    /// What it decides about.
    pub cache: CacheConfig,
    /// Rows of the logits: token ids are below it.
    pub vocab_size: u32,
    /// Seeds requests that bring no seed.
    pub seed: u64,
    /// What `get_model_card` answers.
    pub card: Value,
    /// On shutdown, how long admitted requests may go on. Zero: not at all.
    pub shutdown_timeout: Duration,
}

/// What reaches the engine from outside.
#[derive(Clone, Debug)]
pub enum Inbox {
    /// A client joined.
    Joined(ClientId, Peer),
    /// A client is gone, with all that it asked for.
    Left(ClientId),
    /// A client says something.
    Message(ClientId, ClientMessage),
    /// A client said something that does not decode.
    Undecodable {
        /// Who.
        client: ClientId,
        /// The id of the ADD, if that much could be read.
        request_id: Option<RequestId>,
        /// Of the error, for counting.
        kind: &'static str,
        /// Of the error.
        message: String,
    },
    /// The io thread asks for a sign of life, a few times a second.
    Tick,
    /// Stop: at once, or when the admitted requests are done.
    Shutdown,
    /// Stop at once, also where admitted requests may still go on.
    Hurry,
}

/// A step that was handed to the runner.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    step: u64,
    num_tokens: u64,
    begun: Stamp,
    schedule: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifecycle {
    Serving,
    /// No new requests; stopped when none is left, or at the deadline.
    Draining {
        deadline: Stamp,
    },
    Stopped,
}

/// What is counted for `pawl_status`.
#[derive(Clone, Debug, Default)]
struct Counters {
    spent: Phases,
    tokens_sampled: u64,
    requests_added: u64,
    requests_finished: BTreeMap<&'static str, u64>,
    requests_refused: BTreeMap<String, u64>,
    duplicate_ids: u64,
    undecodable: BTreeMap<&'static str, u64>,
    unexpected_messages: u64,
    /// Requests that a step failed: the model computed what is no number.
    requests_failed: u64,
}

/// See the module.
pub struct Engine {
    config: EngineConfig,
    clock: Arc<dyn Clock>,
    progress: Progress,
    scheduler: Scheduler,
    requests: RequestTable,
    outbox: Outbox,
    in_flight: VecDeque<InFlight>,
    lifecycle: Lifecycle,
    pause: Pause,
    counters: Counters,
    started: Stamp,
}

impl Engine {
    /// An engine with nothing to do.
    ///
    /// # Errors
    /// Settings that cannot serve any request, or not together.
    pub fn new(
        config: EngineConfig,
        clock: Arc<dyn Clock>,
        progress: Progress,
    ) -> Result<Self, ConfigError> {
        assert!(config.depth >= 1, "a step must be in flight for anything to happen");
        Ok(Self {
            scheduler: Scheduler::new(config.scheduler, config.cache)?,
            requests: RequestTable::default(),
            outbox: Outbox::new(config.engine_index),
            in_flight: VecDeque::with_capacity(config.depth),
            lifecycle: Lifecycle::Serving,
            pause: Pause::default(),
            counters: Counters::default(),
            started: clock.now(),
            config,
            clock,
            progress,
        })
    }

    /// The longest sequence, prompt and output, that is served.
    #[must_use]
    pub fn max_model_len(&self) -> u32 {
        self.scheduler.max_model_len()
    }

    /// Takes one message. What it leads to is said by the next [`Engine::settle`].
    pub fn handle(&mut self, message: Inbox) {
        match message {
            Inbox::Joined(client, peer) => self.outbox.join(client, peer),
            Inbox::Left(client) => self.client_left(client),
            Inbox::Message(client, message) if self.outbox.knows(client) => match message {
                ClientMessage::Add(request) => self.add(client, *request),
                ClientMessage::Abort(ids) => self.abort(client, &ids),
                ClientMessage::Utility(call) => self.call(client, call),
                ClientMessage::StartDpWave { .. } => {
                    self.counters.unexpected_messages += 1;
                    tracing::debug!(client = client.0, "START_DP_WAVE ignored: no coordinator");
                }
            },
            // It left while its message was under way.
            Inbox::Message(..) => self.counters.unexpected_messages += 1,
            Inbox::Undecodable { client, request_id, kind, message } => {
                self.undecodable(client, request_id, kind, message);
            }
            Inbox::Tick => {
                // With a step in flight only the runner can show progress: an answer from here
                // would hide a runner that hangs.
                if self.in_flight.is_empty() {
                    self.progress.fetch_add(1, Ordering::Relaxed);
                }
            }
            Inbox::Shutdown => self.shut_down(self.config.shutdown_timeout),
            Inbox::Hurry => self.hurry(),
        }
    }

    /// The next step to submit; `None` when the queue is full or nothing can run.
    pub fn next_plan(&mut self) -> Option<StepPlan> {
        if self.in_flight.len() >= self.config.depth
            || self.lifecycle == Lifecycle::Stopped
            || self.pause.holds_running()
            || !self.scheduler.has_work()
        {
            return None;
        }
        let begin = self.clock.now();
        let plan = self.scheduler.schedule(begin);
        if plan.scheduled.is_empty() {
            return None;
        }
        self.in_flight.push_back(InFlight {
            step: plan.step,
            num_tokens: u64::from(plan.num_tokens()),
            begun: begin,
            schedule: self.clock.now().since(begin),
        });
        Some(plan)
    }

    /// Steps submitted and not yet completed.
    #[must_use]
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Folds the result of the oldest step in flight and publishes what came of it.
    ///
    /// # Errors
    /// The result is of another step: the runner and the engine disagree, and the core must end.
    pub fn complete(&mut self, result: &StepResult) -> anyhow::Result<()> {
        let Some(submitted) = self.in_flight.pop_front() else {
            anyhow::bail!("the runner finished step {}, but none is in flight", result.step);
        };
        anyhow::ensure!(
            submitted.step == result.step,
            "the runner finished step {}, but step {} is the oldest in flight",
            result.step,
            submitted.step
        );
        let stamp = self.clock.now();
        for moved in self.scheduler.update(result) {
            self.request_moved(moved.key, moved.output, stamp);
        }
        self.progress.fetch_add(1, Ordering::Relaxed);
        let phases = Phases {
            schedule: submitted.schedule,
            execute: result.execute,
            update: self.clock.now().since(stamp),
            num_tokens: submitted.num_tokens,
        };
        self.counters.spent += phases;
        self.outbox.publish(&mut self.scheduler, stamp, Occasion::Step(phases));
        Ok(())
    }

    /// Ends a turn: answers pauses that are reached, stops if it is time to, and publishes what
    /// the turn's messages led to (refusals, a core that became busy or idle).
    pub fn settle(&mut self) {
        let now = self.clock.now();
        self.answer_reached_pauses(now);
        if let Lifecycle::Draining { deadline } = self.lifecycle
            && (self.requests.is_empty() || now >= deadline)
        {
            self.stop();
        }
        self.outbox.publish(&mut self.scheduler, now, Occasion::Turn);
    }

    /// The scheduler, to look at.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Requests that have not ended.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    /// Clients that are there.
    #[must_use]
    pub fn num_clients(&self) -> usize {
        self.outbox.num_clients()
    }

    /// What has been published since the last call.
    pub fn take_batch(&mut self) -> Batch {
        self.outbox.take_batch()
    }

    /// When [`Engine::settle`] must be called although nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Stamp> {
        match self.lifecycle {
            Lifecycle::Draining { deadline } => Some(deadline),
            Lifecycle::Serving | Lifecycle::Stopped => None,
        }
    }

    /// Whether the engine has shut down: nothing more will be said.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.lifecycle == Lifecycle::Stopped
    }

    fn add(&mut self, client: ClientId, request: EngineCoreRequest) {
        let id = request.request_id.clone();
        if self.requests.find(client, &id).is_some() {
            // Ids are never used twice, so this is a fault of the frontend. No output is sent: it
            // would be taken for the end of the older request.
            self.counters.duplicate_ids += 1;
            tracing::warn!(client = client.0, request = %id, "dropped an ADD: its id is live");
            return;
        }
        if self.lifecycle != Lifecycle::Serving {
            self.force_finish(client, id, FinishReason::Abort, Some(admission::stopping()));
            return;
        }
        if request.abort_immediately {
            return; // Aborted requests get no output, and this one would never run.
        }
        if let Err(error) = self.try_add(client, request) {
            *self.counters.requests_refused.entry(error.code.clone()).or_default() += 1;
            tracing::debug!(client = client.0, request = %id, %error.message, "refused");
            self.force_finish(client, id, FinishReason::Error, Some(error));
        }
    }

    fn try_add(&mut self, client: ClientId, request: EngineCoreRequest) -> Result<(), OutputError> {
        self.pause.admits_new()?;
        let (id, priority) = (request.request_id.clone(), request.priority);
        let cache_salt = request.cache_salt.as_deref().map(Arc::from);
        let limits =
            Limits { vocab_size: self.config.vocab_size, max_model_len: self.max_model_len() };
        let admissible = admission::check(request, limits)?;
        let key = self.requests.fresh_key();
        let now = self.clock.now();
        let prompt_tokens = admissible.prompt.len();
        let seed = match admissible.sampling.seed {
            Some(seed) => seed as u64,
            None => mix(self.config.seed ^ mix(key.0)),
        };
        let admitted = AdmittedRequest {
            key,
            id: id.clone(),
            client: ClientIndex(client.0),
            prompt: admissible.prompt,
            sampling: admissible.sampling,
            seed,
            priority,
            cache_salt,
        };
        self.scheduler.add(admitted, now).map_err(|why| why.to_output_error())?;
        self.counters.requests_added += 1;
        let live =
            LiveRequest { client, id, added: now, moved: now, prompt_tokens, output_tokens: 0 };
        self.requests.insert(key, live);
        Ok(())
    }

    /// Forgets requests of this client; says nothing, as the client has already forgotten them.
    fn abort(&mut self, client: ClientId, ids: &[RequestId]) {
        for id in ids {
            if let Some(key) = self.requests.find(client, id) {
                self.scheduler.abort(key);
                self.request_ended(key, FinishReason::Abort);
            }
        }
    }

    fn client_left(&mut self, client: ClientId) {
        self.scheduler.abort_client(ClientIndex(client.0));
        for (key, request) in self.requests.remove_client(client) {
            self.count_end(key, &request, FinishReason::Abort);
        }
        self.pause.forget(client);
        self.outbox.leave(client);
    }

    fn undecodable(
        &mut self,
        client: ClientId,
        request_id: Option<RequestId>,
        kind: &'static str,
        message: String,
    ) {
        let count = self.counters.undecodable.entry(kind).or_default();
        *count += 1;
        // A peer that sends nothing else must not fill the log.
        if count.is_power_of_two() {
            tracing::warn!(client = client.0, kind, count, "undecodable message: {message}");
        }
        match request_id {
            Some(id) if self.requests.find(client, &id).is_none() => {
                let error = admission::refusal(format!("the request does not decode: {message}"));
                self.force_finish(client, id, FinishReason::Error, Some(error));
            }
            _ => {}
        }
    }

    fn request_moved(&mut self, key: RequestKey, output: EngineCoreOutput, now: Stamp) {
        // Aborted requests are out of both tables before the scheduler folds a step.
        let live = self.requests.get_mut(key).expect("the scheduler moves only live requests");
        live.output_tokens += output.new_token_ids.len();
        live.moved = now;
        self.counters.tokens_sampled += output.new_token_ids.len() as u64;
        let client = live.client;
        if let Some(error) = &output.error {
            self.counters.requests_failed += 1;
            let failed = self.counters.requests_failed;
            // A broken model fails every request; that must not fill the log.
            if failed.is_power_of_two() {
                tracing::error!(
                    request = %output.request_id,
                    code = error.code,
                    failed,
                    "a request failed: {}",
                    error.message
                );
            }
        }
        if let Some(reason) = output.finish_reason {
            self.request_ended(key, reason);
        }
        self.outbox.push_output(client, output);
    }

    fn request_ended(&mut self, key: RequestKey, reason: FinishReason) {
        if let Some(request) = self.requests.remove(key) {
            self.count_end(key, &request, reason);
        }
    }

    fn count_end(&mut self, key: RequestKey, request: &LiveRequest, reason: FinishReason) {
        *self.counters.requests_finished.entry(reason.as_str()).or_default() += 1;
        tracing::debug!(
            request = %request.id,
            key = key.0,
            client = request.client.0,
            prompt_tokens = request.prompt_tokens,
            output_tokens = request.output_tokens,
            seconds = self.clock.now().since(request.added).as_secs_f64(),
            reason = reason.as_str(),
            "request ended"
        );
    }

    /// Tells a client that the core itself ended a request.
    fn force_finish(
        &mut self,
        client: ClientId,
        id: RequestId,
        reason: FinishReason,
        error: Option<OutputError>,
    ) {
        let output =
            EngineCoreOutput { finish_reason: Some(reason), error, ..EngineCoreOutput::new(id) };
        self.outbox.push_forced_finish(client, output);
    }

    /// Ends every request with an ABORT output that says why.
    fn abort_all(&mut self, why: &OutputError) {
        for (key, request) in self.requests.remove_all() {
            self.scheduler.abort(key);
            self.count_end(key, &request, FinishReason::Abort);
            let why = Some(why.clone());
            self.force_finish(request.client, request.id, FinishReason::Abort, why);
        }
    }

    fn shut_down(&mut self, wait: Duration) {
        if self.lifecycle != Lifecycle::Serving {
            return;
        }
        tracing::info!(
            requests = self.requests.len(),
            wait_seconds = wait.as_secs_f64(),
            "shutting down"
        );
        self.lifecycle = Lifecycle::Draining { deadline: self.clock.now() + wait };
    }

    fn hurry(&mut self) {
        self.shut_down(Duration::ZERO);
        if let Lifecycle::Draining { deadline } = &mut self.lifecycle {
            *deadline = self.clock.now();
        }
    }

    fn stop(&mut self) {
        self.abort_all(&admission::stopping());
        self.lifecycle = Lifecycle::Stopped;
    }
}
