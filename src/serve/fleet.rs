//! What the supervisor knows of its children from what they say: whether they live, whether one
//! hangs, and what their metrics add up to. A state machine without sockets, processes or a clock.

use std::time::Duration;

use pawl_api_server::metrics::{FleetSum, Snapshot};
use pawl_shared::clock::Stamp;
use pawl_shared::lifeline::{FromChild, Health, Heard, REPORT_EVERY, ToChild};
use pawl_shared::transport::{HeartbeatConfig, OwnClock};

/// How long the frontends may take to report when a sum is wanted; of those that do not, the last
/// report is taken. A report takes a millisecond.
const REPORT_PATIENCE: Duration = Duration::from_millis(500);

/// A frontend that is silent for so long is killed, however long the core may be: the kernel goes
/// on giving it its part of the new clients.
const FRONTEND_SILENCE_MAX: Duration = Duration::from_secs(10);

/// Sums that are wanted at once; more are not answered, and their pages are errors.
const WANTED_MAX: usize = 1024;

/// What a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It is given the time after which frontends, too, count it as dead.
    Core,
    /// One that is silent keeps getting its share of the port's new clients: it is replaced soon.
    Frontend,
}

/// One process at one place: the second at the same place is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    pub slot: usize,
    pub number: u64,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell the child at this place.
    Send(usize, ToChild),
    /// Kill the child at this place: it hangs, as the text says.
    Kill(usize, String),
}

/// See the module.
#[derive(Debug)]
pub struct Fleet {
    heartbeat: HeartbeatConfig,
    own_clock: OwnClock,
    last_tick: Stamp,
    members: Vec<Member>,
    sum: FleetSum,
    /// At most [`WANTED_MAX`].
    wanted: Vec<(Life, u64)>,
    round: Option<Round>,
    last_round: u64,
}

#[derive(Debug)]
struct Member {
    role: Role,
    life: u64,
    /// Whether a process at this place has ever been able to serve.
    was_ready: bool,
    /// Whether its line is open.
    talks: bool,
    heard: Stamp,
    health: Health,
    progressed: Stamp,
    /// Killed for hanging: it is not judged again.
    condemned: bool,
}

/// All frontends have been asked for a report, for sums that were wanted before.
#[derive(Debug)]
struct Round {
    seq: u64,
    until: Stamp,
    missing: Vec<Life>,
    wanted: Vec<(Life, u64)>,
}

impl Fleet {
    /// A fleet of children, none of them started.
    #[must_use]
    pub fn new(roles: &[Role], heartbeat: HeartbeatConfig, now: Stamp) -> Self {
        let member = |role: &Role| Member {
            role: *role,
            life: 0,
            was_ready: false,
            talks: false,
            heard: now,
            health: Health::default(),
            progressed: now,
            condemned: false,
        };
        Self {
            heartbeat,
            own_clock: OwnClock::new(now),
            last_tick: now,
            members: roles.iter().map(member).collect(),
            sum: FleetSum::new(roles.len()),
            wanted: Vec::new(),
            round: None,
            last_round: 0,
        }
    }

    /// A process was started at `slot`.
    pub fn started(&mut self, slot: usize, now: Stamp) -> Life {
        let member = &mut self.members[slot];
        *member = Member {
            role: member.role,
            life: member.life + 1,
            was_ready: member.was_ready,
            talks: true,
            heard: now,
            health: Health::default(),
            progressed: now,
            condemned: false,
        };
        Life { slot, number: member.life }
    }

    /// Whether a process at `slot` has ever been able to serve.
    #[must_use]
    pub fn was_ready(&self, slot: usize) -> bool {
        self.members[slot].was_ready
    }

    /// Whether a core may be told of the frontends' sockets: each of them says so.
    #[must_use]
    pub fn awaits_core(&self) -> bool {
        let mut frontends = self.members.iter().filter(|member| member.role == Role::Frontend);
        frontends.all(|member| member.talks && member.health.awaits_core)
    }

    /// A child said something, or its line has ended.
    pub fn heard(&mut self, life: Life, heard: Heard, now: Stamp) -> Vec<Action> {
        match heard {
            Heard::Message(FromChild::Health(health)) => self.health(life, health, now),
            Heard::Message(FromChild::Report { seq, snapshot }) => {
                match Snapshot::decode(&snapshot) {
                    Ok(snapshot) => self.sum.report(life.slot, life.number, snapshot),
                    Err(error) => tracing::error!("a report of metrics cannot be read: {error}"),
                }
                self.reported(life, seq);
            }
            Heard::Message(FromChild::SumWanted { seq }) => {
                if self.wanted.len() < WANTED_MAX {
                    self.wanted.push((life, seq));
                }
            }
            Heard::End => {
                self.sum.retire(life.slot, life.number);
                if self.lives(life) {
                    self.members[life.slot].talks = false;
                }
                self.answered(life);
            }
        }
        self.rounds(now)
    }

    /// To be called at [`Fleet::deadline`].
    pub fn tick(&mut self, now: Stamp) -> Vec<Action> {
        self.last_tick = now;
        let mut actions = self.rounds(now);
        self.own_clock.jumped(now, &self.heartbeat);
        if !self.own_clock.has_read_since(now, &self.heartbeat) {
            return actions;
        }
        for (slot, member) in self.members.iter_mut().enumerate() {
            if member.condemned || !member.talks {
                continue;
            }
            if let Some(why) = member.hangs(&self.heartbeat, now) {
                member.condemned = true;
                actions.push(Action::Kill(slot, why));
            }
        }
        actions
    }

    /// When [`Fleet::tick`] is due.
    #[must_use]
    pub fn deadline(&self) -> Stamp {
        let tick = self.last_tick + REPORT_EVERY;
        self.round.as_ref().map_or(tick, |round| round.until.min(tick))
    }

    fn lives(&self, life: Life) -> bool {
        self.members[life.slot].life == life.number
    }

    fn health(&mut self, life: Life, health: Health, now: Stamp) {
        if self.lives(life) {
            let member = &mut self.members[life.slot];
            member.heard = now;
            if health.progress != member.health.progress {
                member.progressed = now;
            }
            member.was_ready |= health.ready;
            member.health = health;
        }
    }

    /// Ends the round if it is complete or late, and begins the next if sums are wanted.
    fn rounds(&mut self, now: Stamp) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(round) = self.round.take_if(|r| r.missing.is_empty() || now >= r.until) {
            let sum = bytes::Bytes::from(self.sum.sum().encode());
            for (life, seq) in round.wanted {
                if self.lives(life) {
                    actions.push(Action::Send(life.slot, ToChild::Sum { seq, sum: sum.clone() }));
                }
            }
        }
        if self.round.is_none() && !self.wanted.is_empty() {
            self.last_round += 1;
            let seq = self.last_round;
            let ready = |(_, member): &(usize, &Member)| {
                member.role == Role::Frontend && member.talks && member.health.ready
            };
            let frontends = self.members.iter().enumerate().filter(ready);
            let missing: Vec<Life> =
                frontends.map(|(slot, member)| Life { slot, number: member.life }).collect();
            let ask = |life: &Life| Action::Send(life.slot, ToChild::AskReport { seq });
            actions.extend(missing.iter().map(ask));
            let wanted = std::mem::take(&mut self.wanted);
            self.round = Some(Round { seq, until: now + REPORT_PATIENCE, missing, wanted });
        }
        actions
    }

    fn reported(&mut self, life: Life, seq: u64) {
        if self.round.as_ref().is_some_and(|round| round.seq == seq) {
            self.answered(life);
        }
    }

    fn answered(&mut self, life: Life) {
        if let Some(round) = &mut self.round {
            round.missing.retain(|missing| *missing != life);
        }
    }
}

impl Member {
    /// Why it must be killed.
    fn hangs(&self, heartbeat: &HeartbeatConfig, now: Stamp) -> Option<String> {
        let patience = match self.role {
            Role::Core => heartbeat.dead,
            Role::Frontend => FRONTEND_SILENCE_MAX,
        };
        let silent = now.since(self.heard);
        if silent >= patience {
            return Some(format!("it has said nothing for {} s", silent.as_secs()));
        }
        let standing = now.since(self.progressed);
        (standing >= patience).then(|| format!("it has done nothing for {} s", standing.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of the core in these tests.
    const CORE: usize = 0;
    const AT: u64 = 1_000_000_000;

    fn at(millis: u64) -> Stamp {
        Stamp::from_nanos(AT + millis * 1_000_000)
    }

    /// A core and `frontends` that have been ready since 0 ms.
    fn fleet(frontends: usize) -> (Fleet, Vec<Life>) {
        fleet_with(frontends, HeartbeatConfig::default())
    }

    fn fleet_with(frontends: usize, heartbeat: HeartbeatConfig) -> (Fleet, Vec<Life>) {
        let roles = [&[Role::Core][..], &vec![Role::Frontend; frontends]].concat();
        let mut fleet = Fleet::new(&roles, heartbeat, at(0));
        let lives: Vec<Life> = (0..=frontends).map(|slot| fleet.started(slot, at(0))).collect();
        for life in &lives {
            assert_eq!(fleet.heard(*life, health(1), at(0)), []);
        }
        (fleet, lives)
    }

    fn health(progress: u64) -> Heard {
        Heard::Message(FromChild::Health(Health { ready: true, awaits_core: false, progress }))
    }

    fn report(seq: u64) -> Heard {
        let snapshot = Snapshot::default().encode().into();
        Heard::Message(FromChild::Report { seq, snapshot })
    }

    fn wanted(seq: u64) -> Heard {
        Heard::Message(FromChild::SumWanted { seq })
    }

    /// Ticks from one second to another, all children talking but `silent`; the first action.
    fn run(
        fleet: &mut Fleet,
        lives: &[Life],
        seconds: std::ops::Range<u64>,
        silent: usize,
    ) -> Option<(u64, Action)> {
        for half in seconds.start * 2..seconds.end * 2 {
            let now = at(half * 500);
            for life in lives.iter().filter(|life| life.slot != silent) {
                assert_eq!(fleet.heard(*life, health(half), now), []);
            }
            if let Some(action) = fleet.tick(now).pop() {
                return Some((half / 2, action));
            }
        }
        None
    }

    #[test]
    fn a_frontend_that_is_silent_for_ten_seconds_is_killed_once() {
        let (mut fleet, lives) = fleet(2);
        let killed = run(&mut fleet, &lives, 0..60, 2);
        let why = "it has said nothing for 10 s".to_string();
        assert_eq!(killed, Some((10, Action::Kill(2, why))));
        assert_eq!(run(&mut fleet, &lives, 11..60, 2), None, "killed twice");
        // The next one at that place is judged anew.
        let next = fleet.started(2, at(60_000));
        assert_eq!(run(&mut fleet, &[lives[0], lives[1], next], 60..100, 9), None);
    }

    /// The flags for a core that hangs are for the core alone.
    #[test]
    fn a_frontend_is_given_ten_seconds_whatever_a_core_is_given() {
        for seconds in [2, 30] {
            let silence = Duration::from_secs(seconds);
            let (mut fleet, lives) =
                fleet_with(1, HeartbeatConfig { silence, ..HeartbeatConfig::default() });
            let killed = run(&mut fleet, &lives, 0..60, 1);
            let why = "it has said nothing for 10 s".to_string();
            assert_eq!(killed, Some((10, Action::Kill(1, why))));
        }
    }

    #[test]
    fn a_core_is_given_a_minute() {
        let (mut fleet, lives) = fleet(1);
        let killed = run(&mut fleet, &lives, 0..100, CORE);
        assert_eq!(killed, Some((60, Action::Kill(0, "it has said nothing for 60 s".into()))));
    }

    #[test]
    fn a_core_that_talks_but_does_nothing_hangs() {
        let (mut fleet, lives) = fleet(1);
        let first = (0..200).find_map(|half| {
            let now = at(half * 500);
            fleet.heard(lives[0], health(1), now);
            fleet.heard(lives[1], health(half), now);
            fleet.tick(now).pop().map(|action| (half / 2, action))
        });
        let why = "it has done nothing for 60 s".to_string();
        assert_eq!(first, Some((60, Action::Kill(0, why))));
    }

    #[test]
    fn one_that_was_itself_stopped_reads_before_it_judges() {
        let (mut fleet, lives) = fleet(1);
        assert_eq!(run(&mut fleet, &lives, 0..5, 9), None);
        // Stopped for a minute; what the children said meanwhile has not been read yet.
        assert_eq!(fleet.tick(at(65_000)), []);
        assert_eq!(run(&mut fleet, &lives, 65..90, 9), None);
    }

    #[test]
    fn a_sum_is_of_reports_that_were_asked_for_after_it() {
        let (mut fleet, lives) = fleet(2);
        let ask = |slot, seq| Action::Send(slot, ToChild::AskReport { seq });
        assert_eq!(fleet.heard(lives[1], wanted(7), at(1)), [ask(1, 1), ask(2, 1)]);
        assert_eq!(fleet.heard(lives[1], report(1), at(2)), []);
        // Too late for the round under way: it waits for the next.
        assert_eq!(fleet.heard(lives[2], wanted(8), at(3)), []);
        // Unasked, or of another round.
        assert_eq!(fleet.heard(lives[2], report(0), at(4)), []);
        let sum = |slot, seq| {
            let sum = Snapshot::default().encode().into();
            Action::Send(slot, ToChild::Sum { seq, sum })
        };
        let second = [sum(1, 7), ask(1, 2), ask(2, 2)];
        assert_eq!(fleet.heard(lives[2], report(1), at(5)), second);
        // One that ends is not waited for, one that stands still not for long.
        assert_eq!(fleet.heard(lives[1], Heard::End, at(6)), []);
        assert_eq!(fleet.deadline(), at(500));
        assert_eq!(fleet.tick(at(500)), []);
        assert_eq!(fleet.deadline(), at(505));
        assert_eq!(fleet.tick(at(504)), []);
        assert_eq!(fleet.tick(at(505)), [sum(2, 8)]);
    }

    #[test]
    fn sums_that_wait_are_bounded() {
        let (mut fleet, lives) = fleet(1);
        fleet.heard(lives[1], wanted(0), at(1));
        for seq in 1..2 * WANTED_MAX as u64 {
            assert_eq!(fleet.heard(lives[1], wanted(seq), at(1)), []);
        }
        assert_eq!(fleet.wanted.len(), WANTED_MAX);
    }

    #[test]
    fn a_core_may_come_when_every_frontend_awaits_one() {
        let roles = [Role::Frontend; 2];
        let mut fleet = Fleet::new(&roles, HeartbeatConfig::default(), at(0));
        let lives = [0, 1].map(|slot| fleet.started(slot, at(0)));
        let says = |awaits_core| {
            Heard::Message(FromChild::Health(Health { ready: true, awaits_core, progress: 1 }))
        };
        assert!(!fleet.awaits_core());
        fleet.heard(lives[0], says(true), at(1));
        assert!(!fleet.awaits_core());
        fleet.heard(lives[1], says(true), at(2));
        assert!(fleet.awaits_core());
        fleet.heard(lives[0], says(false), at(3));
        assert!(!fleet.awaits_core());
        fleet.heard(lives[0], says(true), at(4));
        // What the dead said before does not count.
        fleet.heard(lives[1], Heard::End, at(5));
        assert!(!fleet.awaits_core());
        let next = fleet.started(1, at(6));
        fleet.heard(lives[1], says(true), at(7));
        assert!(!fleet.awaits_core());
        fleet.heard(next, says(true), at(8));
        assert!(fleet.awaits_core());
    }
}
