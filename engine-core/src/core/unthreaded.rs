//! A core without threads and sockets: whoever holds it plays the endpoint, the clock and the time
//! that steps take.
//!
//! The simulator in `tests/simulation/` drives a core with it. It is the core as it is: what the
//! io thread does with an event and the engine thread in a turn are the same calls, over the same
//! bounded channels.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender};
use pawl_shared::model_card::ModelCard;
use pawl_shared::transport::{ClientId, CoreEvent};
use tokio::sync::{Notify, mpsc};

use super::{CoreConfig, OUT_MAX, RunnerChoice, engine_config, ready_response};
use crate::engine::driver::{self, EngineChannels};
use crate::engine::{Batch, Engine, Inbox};
use crate::io::{self, Io, IoContext};
use crate::runner::mock::MockRunner;
use crate::scheduler::Scheduler;
use crate::step::{Progress, Runner, StepPlan, StepResult};

/// How often [`UnthreadedCore::tick`] is to be called.
pub const TICK: Duration = io::TICK;

/// Messages as they go out to a client.
pub type Sent = (ClientId, Vec<Bytes>);

/// See the module.
pub struct UnthreadedCore {
    io: Io,
    engine: Engine,
    runner: MockRunner,
    progress: Progress,
    channels: EngineChannels,
    inbox: Sender<Inbox>,
    plans: Receiver<StepPlan>,
    out: mpsc::Receiver<Batch>,
    running: Option<StepResult>,
    ready: Bytes,
}

/// A step that the runner has begun.
pub struct BegunStep {
    /// What runs.
    pub plan: StepPlan,
    /// For how long.
    pub takes: Duration,
}

impl UnthreadedCore {
    /// A core on the mock runner whose model is loaded; at most `inbox_max` messages wait for its
    /// engine.
    ///
    /// # Errors
    /// Settings that do not go together, or another runner.
    pub fn new(config: &CoreConfig, inbox_max: usize) -> anyhow::Result<Self> {
        let RunnerChoice::Mock(mock) = &config.runner else {
            anyhow::bail!("only the mock runner's time can be made up");
        };
        let card = ModelCard::mock();
        let mock = mock.clone().with_vocabulary(card.vocab_size);
        let runner = MockRunner::new(mock);
        let spec = runner.spec();
        let engine_config = engine_config(config, spec, card)?;
        let depth = engine_config.depth;
        let progress = Arc::clone(&config.vitals.progress);
        let engine = Engine::new(engine_config, Arc::clone(&config.clock), Arc::clone(&progress))?;
        let ready = ready_response(config, spec, engine.max_model_len(), depth).encode();
        let (inbox, inbox_of_engine) = crossbeam_channel::bounded(inbox_max);
        let (plans_in, plans) = crossbeam_channel::bounded(depth);
        let (_, results) = crossbeam_channel::bounded(depth);
        let (spent, _) = crossbeam_channel::bounded(depth);
        let (out_in, out) = mpsc::channel(OUT_MAX);
        let mut io = Io::new(IoContext {
            engine_index: config.engine_index,
            clock: Arc::clone(&config.clock),
            progress: Arc::clone(&progress),
        });
        io.set_ready();
        let channels = EngineChannels {
            inbox: inbox_of_engine,
            inbox_space: Arc::new(Notify::new()),
            plans: plans_in,
            results,
            spent,
            out: out_in,
        };
        let running = None;
        Ok(Self { io, engine, runner, progress, channels, inbox, plans, out, running, ready })
    }

    /// The encoded ready response, for the links.
    #[must_use]
    pub fn ready(&self) -> Bytes {
        self.ready.clone()
    }

    /// Whether [`UnthreadedCore::event`] may be called: a message may be waiting for room.
    #[must_use]
    pub fn takes_events(&self) -> bool {
        !self.io.holds()
    }

    /// Something happened at the core's end.
    pub fn event(&mut self, event: CoreEvent) {
        let message = self.io.understand(event);
        self.io.hand_over(&self.inbox, message);
    }

    /// The core is told to stop; `is_stopped` tells when it has.
    pub fn shut_down(&mut self) {
        self.engine.handle(Inbox::Shutdown);
    }

    /// Whether nothing more will be said.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.engine.is_stopped()
    }

    /// What PONGs tell.
    #[must_use]
    pub fn progress(&self) -> u64 {
        self.io.progress()
    }

    /// The runner shows that it lives, as it does while a long step runs.
    pub fn show_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// The io thread's tick.
    pub fn tick(&mut self) -> Vec<Sent> {
        let mut sent = Vec::new();
        self.io.tick(&self.inbox, |client, frames| sent.push((client, frames)));
        sent
    }

    /// A turn of the engine thread, and what comes of it.
    ///
    /// # Errors
    /// As those of the engine thread: the core must end.
    pub fn turn(&mut self) -> anyhow::Result<Vec<Sent>> {
        driver::turn(&mut self.engine, &self.channels)?;
        self.io.hand_over_held(&self.inbox);
        Ok(self.sent())
    }

    /// The runner takes the next plan, if it is idle and there is one.
    ///
    /// # Errors
    /// The plan contradicts what the runner knows: the core must end.
    pub fn begin_step(&mut self) -> anyhow::Result<Option<BegunStep>> {
        if self.running.is_some() {
            return Ok(None);
        }
        let Ok(plan) = self.plans.try_recv() else { return Ok(None) };
        let result = self.runner.execute_at_once(&plan)?;
        let takes = result.execute;
        self.running = Some(result);
        Ok(Some(BegunStep { plan, takes }))
    }

    /// The step that runs has ended.
    ///
    /// # Errors
    /// As those of the engine thread: the core must end.
    pub fn end_step(&mut self) -> anyhow::Result<Vec<Sent>> {
        let Some(result) = self.running.take() else { return Ok(Vec::new()) };
        self.show_progress();
        driver::collect(&mut self.engine, &self.channels, result)?;
        self.io.hand_over_held(&self.inbox);
        Ok(self.sent())
    }

    fn sent(&mut self) -> Vec<Sent> {
        let mut sent = Vec::new();
        while let Ok(batch) = self.out.try_recv() {
            self.io.send_batch(batch, |client, frames| sent.push((client, frames)));
        }
        sent
    }

    /// The scheduler, to look at.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        self.engine.scheduler()
    }

    /// How much is kept of requests, by what it is: all of it must be 0 when nothing is open.
    #[must_use]
    pub fn kept_of_requests(&self) -> [(&'static str, usize); 4] {
        let scheduler = self.engine.scheduler();
        [
            ("requests of the engine", self.engine.num_requests()),
            ("requests of the scheduler", scheduler.requests().count()),
            ("blocks held", scheduler.kv().num_used() as usize),
            ("steps in flight", self.engine.num_in_flight()),
        ]
    }

    /// How much is kept of clients, by what it is: never more than there are clients.
    #[must_use]
    pub fn kept_of_clients(&self) -> [(&'static str, usize); 3] {
        [
            ("clients of the engine", self.engine.num_clients()),
            ("clients told the gauges", self.io.num_told()),
            // One more stands for nobody.
            ("clients owed deltas", self.engine.scheduler().num_owed().saturating_sub(1)),
        ]
    }
}
