//! What goes out to the clients, and the only place where a step's frame is stamped.

use std::collections::BTreeMap;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{
    EngineCoreOutput, PawlStats, PrefixCacheStats, RequestId, SchedulerStats, StepFrame,
    UtilityFrame, UtilityReply,
};
use pawl_shared::transport::{ClientId, Peer};

use crate::scheduler::{ClientIndex, Scheduler};

/// Every client hears the gauges at least this often.
pub(crate) const GAUGES_EVERY: Duration = Duration::from_secs(1);

/// A frame on its way to one client.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "nearly all are steps: a box would cost, not save")]
pub enum Outgoing {
    /// Outputs and stats.
    Step(ClientId, StepFrame),
    /// The answer to a utility call.
    Utility(ClientId, UtilityFrame),
}

/// What one turn of the engine has to say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// In this order.
    pub frames: Vec<Outgoing>,
    /// The gauges, if they are not those of the last batch: what the io thread repeats to clients
    /// that have heard nothing for a second. No deltas.
    pub gauges: Option<SchedulerStats>,
}

impl Batch {
    /// Whether there is nothing to say.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.gauges.is_none()
    }
}

/// What one step took. It belongs to the core, not to a client: everyone who gets a frame of the
/// step is told, like the gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Phases {
    /// Host time to plan it.
    pub schedule: Duration,
    /// Device time.
    pub execute: Duration,
    /// Host time to fold its result.
    pub update: Duration,
    /// Tokens that ran.
    pub num_tokens: u64,
}

impl std::ops::AddAssign for Phases {
    fn add_assign(&mut self, step: Self) {
        self.schedule += step.schedule;
        self.execute += step.execute;
        self.update += step.update;
        self.num_tokens += step.num_tokens;
    }
}

/// What one client has been told, and what it is about to be told.
#[derive(Debug)]
struct ClientBox {
    peer: Peer,
    outputs: Vec<EngineCoreOutput>,
    finished: Vec<RequestId>,
    told: Gauges,
    told_at: Option<Stamp>,
}

/// The part of the stats that is the same for everyone.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gauges {
    running: u64,
    waiting: u64,
    skipped: u64,
    kv_cache_usage: f64,
}

impl Gauges {
    const IDLE: Self = Self { running: 0, waiting: 0, skipped: 0, kv_cache_usage: 0.0 };

    fn of(stats: &SchedulerStats) -> Self {
        Self {
            running: stats.num_running_reqs,
            waiting: stats.num_waiting_reqs,
            skipped: stats.num_skipped_waiting_reqs,
            kv_cache_usage: stats.kv_cache_usage,
        }
    }

    /// No request is left. (Blocks may still be held by a step in flight.)
    fn is_idle(self) -> bool {
        self.running + self.waiting + self.skipped == 0
    }
}

/// Why [`Outbox::publish`] is called.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Occasion {
    /// A step has ended.
    Step(Phases),
    /// A turn of the loop in which none did.
    Turn,
}

/// The clients, and what waits for them between two calls of [`Outbox::publish`].
pub(super) struct Outbox {
    engine_index: u32,
    clients: BTreeMap<ClientId, ClientBox>,
    steps: u64,
    /// Of the last batch.
    gauges: Option<Gauges>,
    batch: Batch,
}

impl Outbox {
    pub fn new(engine_index: u32) -> Self {
        Self {
            engine_index,
            clients: BTreeMap::new(),
            steps: 0,
            gauges: None,
            batch: Batch::default(),
        }
    }

    pub fn join(&mut self, client: ClientId, peer: Peer) {
        let fresh = ClientBox {
            peer,
            outputs: Vec::new(),
            finished: Vec::new(),
            told: Gauges::IDLE,
            told_at: None,
        };
        self.clients.insert(client, fresh);
    }

    pub fn leave(&mut self, client: ClientId) {
        self.clients.remove(&client);
    }

    pub fn knows(&self, client: ClientId) -> bool {
        self.clients.contains_key(&client)
    }

    /// Steps that have ended.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    pub fn num_clients(&self) -> usize {
        self.clients.len()
    }

    /// Who is there.
    pub fn clients(&self) -> impl Iterator<Item = (ClientId, &Peer)> {
        self.clients.iter().map(|(client, waiting)| (*client, &waiting.peer))
    }

    /// An output of a step, for the next frame of its client. Bounded by the step: one output per
    /// live request, and every turn ends in a publish.
    pub fn push_output(&mut self, client: ClientId, output: EngineCoreOutput) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.outputs.push(output);
        }
    }

    /// The end of a request by the core's own decision (refused, paused, shut down).
    pub fn push_forced_finish(&mut self, client: ClientId, output: EngineCoreOutput) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.finished.push(output.request_id.clone());
            client.outputs.push(output);
        }
    }

    pub fn push_reply(&mut self, client: ClientId, stamp: Stamp, reply: UtilityReply) {
        if self.knows(client) {
            let frame = UtilityFrame::new(stamp, reply, self.engine_index);
            self.batch.frames.push(Outgoing::Utility(client, frame));
        }
    }

    /// Gives a frame to each client that has outputs, that is new, or for whom the core has just
    /// become busy or idle; after a step also to each that has heard nothing for a second. Every
    /// depth, every kind of end and every idle turn passes here: no other place makes a
    /// [`StepFrame`].
    pub fn publish(&mut self, scheduler: &mut Scheduler, stamp: Stamp, occasion: Occasion) {
        self.steps += u64::from(occasion != Occasion::Turn);
        let stats_now = SchedulerStats { step_counter: self.steps, ..gauges(scheduler) };
        let now = Gauges::of(&stats_now);
        for (&id, client) in &mut self.clients {
            let due = match client.told_at {
                None => true,
                Some(at) => occasion != Occasion::Turn && stamp.since(at) >= GAUGES_EVERY,
            };
            let became_busy = client.told.is_idle() && !now.is_idle();
            let became_idle = now.is_idle() && client.told != now;
            if client.outputs.is_empty() && !due && !became_busy && !became_idle {
                continue;
            }
            let mut stats = scheduler.take_stats(ClientIndex(id.0));
            // Counted where steps end, so that each step's frames bear its own number.
            stats.step_counter = self.steps;
            stats.pawl = Some(with_phases(stats.pawl, occasion));
            let outputs = std::mem::take(&mut client.outputs);
            let frame = StepFrame::new(stamp, stats, self.engine_index, outputs)
                .with_finished(std::mem::take(&mut client.finished));
            client.told = now;
            client.told_at = Some(stamp);
            self.batch.frames.push(Outgoing::Step(id, frame));
        }
        if self.gauges != Some(now) {
            self.gauges = Some(now);
            self.batch.gauges = Some(without_deltas(stats_now));
        }
    }

    pub fn take_batch(&mut self) -> Batch {
        std::mem::take(&mut self.batch)
    }
}

/// The state that is the same for everyone. Taken for a client that never joins, so no client's
/// deltas are in it.
pub(super) fn gauges(scheduler: &mut Scheduler) -> SchedulerStats {
    const NOBODY: ClientIndex = ClientIndex(u32::MAX);
    scheduler.take_stats(NOBODY)
}

fn with_phases(stats: Option<PawlStats>, occasion: Occasion) -> PawlStats {
    let counted = PawlStats {
        num_preemptions: stats.map_or(0, |stats| stats.num_preemptions),
        ..PawlStats::default()
    };
    match occasion {
        Occasion::Turn => counted,
        Occasion::Step(phases) => PawlStats {
            schedule_seconds: phases.schedule.as_secs_f64(),
            execute_seconds: phases.execute.as_secs_f64(),
            update_seconds: phases.update.as_secs_f64(),
            num_scheduled_tokens: phases.num_tokens,
            ..counted
        },
    }
}

/// A copy that may be told again and again: nothing in it is counted.
fn without_deltas(stats: SchedulerStats) -> SchedulerStats {
    SchedulerStats {
        prefix_cache_stats: PrefixCacheStats::default(),
        spec_decoding_stats: None,
        iteration_details: None,
        kv_cache_eviction_events: Vec::new(),
        pawl: Some(PawlStats { resent: true, ..PawlStats::default() }),
        ..stats
    }
}
