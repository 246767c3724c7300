//! The whole of it: time, what happens next, and the processes it happens to.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt::Arguments;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use pawl_engine_core::step::RequestKey;
use pawl_shared::clock::{Clock, ManualClock};
use pawl_shared::transport::ClientId;

use crate::chance::Chance;
use crate::checks::{PastGauges, Told};
use crate::core::{CoreProcess, Wanted};
use crate::faults::{Heal, nanos};
use crate::frontend::FrontendProcess;
use crate::net::{Conn, Net, Parcel, Side};
use crate::plan::{FRONTENDS, Plan};
use crate::trace::{History, Trace};

const CHECK_EVERY: Duration = Duration::from_millis(250);
/// A request to a quiet system is answered within this time.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// What happens. Those with a life are of no concern to a later life of the same process.
#[derive(Clone, Debug)]
pub enum Event {
    Arrive(Conn, Side),
    CoreReady(u32),
    CoreTimer(u32, u64),
    CoreTurn(u32),
    StepEnd(u32),
    Connect(u32, Wanted),
    FrontendStart(usize),
    FrontendOpen(usize, u32, u64),
    FrontendTake(usize, u32),
    FrontendTimer(usize, u32, u64),
    Submit,
    Read(usize, u32, u64),
    GoAway(usize, u32, u64),
    Fault,
    Heal(Heal),
    Check,
    CalmDown,
}

impl Event {
    pub fn is_timer(&self) -> bool {
        matches!(self, Self::CoreTimer(..) | Self::FrontendTimer(..))
    }
}

struct Due {
    at: u64,
    nth: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.nth == other.nth
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.nth).cmp(&(other.at, other.nth))
    }
}

pub struct World {
    pub plan: Plan,
    pub clock: ManualClock,
    pub chance: Chance,
    pub net: Net,
    queue: BinaryHeap<Reverse<Due>>,
    scheduled: u64,
    trace: Trace,

    pub core: Option<CoreProcess>,
    pub core_lives: u32,
    pub core_stopped: Option<u64>,
    pub core_went_on: u64,
    pub core_ended_at: u64,
    pub core_backlog: Vec<Event>,
    pub hung_at: u64,

    pub frontends: [Option<FrontendProcess>; FRONTENDS],
    pub frontend_lives: u32,
    pub stopped: [Option<u64>; FRONTENDS],
    pub went_on: [u64; FRONTENDS],
    pub backlogs: [Vec<Event>; FRONTENDS],
    pub slow_takers: [bool; FRONTENDS],
    /// Until when a frontend's trouble has a known cause.
    pub excused: [u64; FRONTENDS],
    /// The same for trouble that must not cost a frontend its core.
    pub hang_excused: u64,
    /// The core's life that a frontend's client last heard of.
    pub joined_core: [Option<u32>; FRONTENDS],
    /// When it last heard that it is up.
    pub up_at: [u64; FRONTENDS],

    pub calm: bool,
    /// By when everything has come to rest, once it is calm.
    pub settles_by: u64,
    /// Requests so far: of scripts, of clients.
    pub asked: u64,
    pub sent: u64,

    /// Of this life of the core: what clients were told, and what the plans say.
    pub told: BTreeMap<ClientId, Told>,
    pub looked_up: u64,
    pub orphans: BTreeMap<RequestKey, u64>,
    pub past_gauges: PastGauges,
    pub checks: u64,
    /// How often a frontend's gauges were looked at, and nothing excused them.
    pub gauges_checked: u64,
}

/// Runs a seed to its end; what broke, with the end of the trace, if anything did.
pub fn try_run(seed: u64) -> Result<History, String> {
    let mut world = World::new(seed, false);
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| world.run()));
    outcome.map_err(|panic| {
        let why = panic.downcast_ref::<String>().map(String::as_str);
        let why = why.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        let why = format!("seed {seed}: {why}\n{}", world.trace.end());
        // Whatever panicked may have left a lock poisoned, which its destructors would take.
        std::mem::forget(world);
        why
    })
}

impl World {
    pub fn new(seed: u64, shown: bool) -> Self {
        let mut chance = Chance::new(seed);
        let plan = Plan::new(&mut chance, seed);
        Self {
            plan,
            // An hour after the machine's start.
            clock: ManualClock::at(3_600_000_000_000),
            chance,
            net: Net::default(),
            queue: BinaryHeap::new(),
            scheduled: 0,
            trace: Trace::new(shown),
            core: None,
            core_lives: 0,
            core_stopped: None,
            core_went_on: 0,
            core_ended_at: 0,
            core_backlog: Vec::new(),
            hung_at: 0,
            frontends: [const { None }; FRONTENDS],
            frontend_lives: 0,
            stopped: [None; FRONTENDS],
            went_on: [0; FRONTENDS],
            backlogs: [const { Vec::new() }; FRONTENDS],
            slow_takers: [false; FRONTENDS],
            excused: [0; FRONTENDS],
            hang_excused: 0,
            joined_core: [None; FRONTENDS],
            up_at: [0; FRONTENDS],
            calm: false,
            settles_by: 0,
            asked: 0,
            sent: 0,
            told: BTreeMap::new(),
            looked_up: 0,
            orphans: BTreeMap::new(),
            past_gauges: PastGauges::default(),
            checks: 0,
            gauges_checked: 0,
        }
    }

    pub fn now(&self) -> u64 {
        self.clock.now().nanos()
    }

    pub fn note(&mut self, what: Arguments<'_>) {
        let now = self.now();
        self.trace.add(now - 3_600_000_000_000, what);
    }

    pub fn schedule(&mut self, wait: Duration, event: Event) {
        self.schedule_at(self.now() + nanos(wait), event);
    }

    pub fn schedule_at(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        let at = at.max(self.now());
        self.queue.push(Reverse(Due { at, nth: self.scheduled, event }));
    }

    /// How slow a new connection is at its slowest.
    pub fn draw_slowest(&mut self) -> Duration {
        let slow = self.plan.faults.is_some() && self.chance.percent(10);
        let millis = if slow { 400 } else { self.chance.pick(&[1, 2, 20, 50]) };
        Duration::from_millis(millis)
    }

    pub fn send(&mut self, conn: Conn, to: Side, parcel: Parcel) {
        let Some(slowest) = self.net.slowest(conn) else { return };
        let wait = self.chance.micros(20, slowest.as_micros() as u64);
        if let Some(at) = self.net.send(conn, to, parcel, self.now() + nanos(wait)) {
            self.schedule_at(at, Event::Arrive(conn, to));
        }
    }

    /// Control messages may come twice: whoever sends them may have to connect again.
    pub fn send_control(&mut self, conn: Conn, to: Side, parcel: Parcel) {
        if self.plan.faults.is_some() && !self.calm && self.chance.percent(3) {
            self.note(format_args!("(twice)"));
            self.send(conn, to, parcel.clone());
        }
        self.send(conn, to, parcel);
    }

    /// `side` closes its end; the other side hears of it after what was sent before.
    pub fn hang_up(&mut self, conn: Conn, side: Side) {
        self.send(conn, side.other(), Parcel::Closed);
        self.net.forget(conn, side);
    }

    /// Runs to the end: some time with faults, a calm, and one more request to each frontend.
    pub fn run(&mut self) -> History {
        self.excuse_all(Duration::from_secs(1));
        self.start_core(Duration::from_millis(300));
        for index in 0..FRONTENDS {
            self.start_frontend(index);
        }
        self.schedule(Duration::from_secs(1), Event::Submit);
        self.schedule(Duration::from_secs(2), Event::Fault);
        self.schedule(CHECK_EVERY, Event::Check);
        self.schedule(self.plan.lasts, Event::CalmDown);
        self.run_until_settled();
        for index in 0..FRONTENDS {
            self.submit(index, true);
        }
        self.settles_by = self.now() + nanos(ANSWERS_WITHIN);
        self.run_until_settled();
        self.check_end();
        self.trace.history(self.gauges_checked)
    }

    fn run_until_settled(&mut self) {
        let mut quiet_checks = 0;
        while let Some(Reverse(due)) = self.queue.pop() {
            self.clock.advance(Duration::from_nanos(due.at.saturating_sub(self.now())));
            let is_check = matches!(due.event, Event::Check);
            self.happen(due.event);
            if !is_check || !self.calm {
                continue;
            }
            let unsettled = self.unsettled();
            // Gauges are told once more when the core has become idle.
            quiet_checks = if unsettled.is_none() { quiet_checks + 1 } else { 0 };
            if quiet_checks == 8 {
                return;
            }
            if let Some(why) = unsettled {
                assert!(self.now() <= self.settles_by, "it does not come to rest: {why}");
            }
        }
    }

    fn frontend_is(&self, index: usize, life: u32) -> bool {
        self.frontends[index].as_ref().is_some_and(|frontend| frontend.life == life)
    }

    fn core_is(&self, life: u32) -> bool {
        self.core.as_ref().is_some_and(|core| core.life == life)
    }

    /// Keeps `event` for when the process goes on, if it is stopped.
    fn postponed(&mut self, event: &Event) -> bool {
        let frontend = match event {
            Event::Arrive(conn, Side::Frontend) => {
                self.net.of(*conn, Side::Frontend).map(|(_, index)| index)
            }
            Event::FrontendOpen(index, ..)
            | Event::FrontendTake(index, _)
            | Event::FrontendTimer(index, ..)
            | Event::Read(index, ..)
            | Event::GoAway(index, ..) => Some(*index),
            Event::Arrive(_, Side::Core)
            | Event::CoreReady(_)
            | Event::CoreTimer(..)
            | Event::CoreTurn(_)
            | Event::StepEnd(_)
            | Event::Connect(..) => {
                let stopped = self.core_stopped.is_some() && self.core.is_some();
                if stopped {
                    self.core_backlog.push(event.clone());
                }
                return stopped;
            }
            _ => None,
        };
        let Some(index) = frontend.filter(|index| self.stopped[*index].is_some()) else {
            return false;
        };
        self.backlogs[index].push(event.clone());
        true
    }

    fn happen(&mut self, event: Event) {
        if self.postponed(&event) {
            return;
        }
        match event {
            Event::Arrive(conn, side) => {
                let Some((_, index)) = self.net.of(conn, side) else { return };
                let Some(parcel) = self.net.receive(conn, side) else { return };
                match side {
                    Side::Core => self.core_receives(conn, parcel),
                    Side::Frontend => self.frontend_receives(index, conn, parcel),
                }
            }
            Event::CoreReady(life) if self.core_is(life) => self.core_ready(),
            Event::CoreTimer(life, at) if self.core_is(life) => self.core_timer(at),
            Event::CoreTurn(life) if self.core_is(life) => self.core_turn(),
            Event::StepEnd(life) if self.core_is(life) => self.step_ends(),
            Event::Connect(life, wanted) if self.core_is(life) => self.connect(wanted),
            Event::FrontendStart(index) if self.frontends[index].is_none() => {
                self.start_frontend(index);
            }
            Event::FrontendOpen(index, life, epoch) if self.frontend_is(index, life) => {
                self.open_epoch(index, epoch);
            }
            Event::FrontendTake(index, life) if self.frontend_is(index, life) => self.take(index),
            Event::FrontendTimer(index, life, at) if self.frontend_is(index, life) => {
                self.frontend_timer(index, at);
            }
            Event::Read(index, life, id) if self.frontend_is(index, life) => {
                self.read_some(index, id);
            }
            Event::GoAway(index, life, id) if self.frontend_is(index, life) => {
                self.go_away(index, id);
            }
            Event::Submit if !self.calm => {
                let index = self.chance.between(0, FRONTENDS as u64 - 1) as usize;
                self.submit(index, false);
                let (least, most) = self.plan.submit_every;
                let wait = self.chance.millis(least, most);
                self.schedule(wait, Event::Submit);
            }
            Event::Fault => self.fault(),
            Event::Heal(heal) => self.heal(&heal),
            Event::Check => {
                self.check();
                self.schedule(CHECK_EVERY, Event::Check);
            }
            Event::CalmDown => self.calm_down(),
            // Of a life that is over, or after all is done.
            _ => {}
        }
    }
}
