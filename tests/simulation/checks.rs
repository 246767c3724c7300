//! What must hold: after each step of the engine, at each message, and four times a second.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use pawl_api_server::engine_client::EngineStatus;
use pawl_engine_core::scheduler::ClientIndex;
use pawl_engine_core::step::StepPlan;
use pawl_shared::protocol::EngineMessage;
use pawl_shared::transport::{ClientId, FrontendEvent};

use crate::faults::nanos;
use crate::net::Side;
use crate::plan::FRONTENDS;
use crate::readers::Reader;
use crate::world::World;

/// How soon the requests of a dead frontend are gone, and the streams of a dead core ended.
const DEATH_NOTICED: Duration = Duration::from_secs(2);
/// How soon a hang shows: ten seconds of silence, seen at a ping, told at the next.
const HANG_NOTICED: Duration = Duration::from_millis(12_500);
/// How soon a silent frontend is let go: ten seconds, seen at a tick after the last ping.
const SILENCE_NOTICED: Duration = Duration::from_secs(11);
/// How old gauges may be where nothing is wrong, delays included.
const GAUGES_AGE: Duration = Duration::from_millis(1150);
/// How soon a frontend serves that nothing keeps from it.
const SERVES_WITHIN: Duration = Duration::from_secs(5);

/// Running, waiting and deferred, share of the cache.
type Gauges = (u64, u64, f64);

/// What the core has told one client in deltas, and what its outputs prove that it owed.
#[derive(Debug, Default)]
pub struct Told {
    queries: u64,
    proven: u64,
}

/// The core's gauges of the last seconds, each with when it began to be true.
#[derive(Debug, Default)]
pub struct PastGauges(VecDeque<(u64, Gauges)>);

impl PastGauges {
    fn add(&mut self, now: u64, gauges: Gauges) {
        if self.0.back().is_none_or(|(_, last)| *last != gauges) {
            self.0.push_back((now, gauges));
        }
        let old = now.saturating_sub(nanos(Duration::from_secs(5)));
        while self.0.get(1).is_some_and(|(since, _)| *since < old) {
            self.0.pop_front();
        }
    }

    fn since(&self, since: u64) -> String {
        let at = |(at, gauges): &(u64, Gauges)| format!("\n  {} {gauges:?}", *at as f64 / 1e9);
        let late = self.0.iter().filter(|(at, _)| *at + 3_000_000_000 > since);
        late.map(at).collect()
    }

    /// Whether `gauges` were true at any time from `since` on.
    fn held(&self, gauges: Gauges, since: u64) -> bool {
        let ends = self.0.iter().skip(1).map(|(at, _)| *at).chain([u64::MAX]);
        self.0.iter().zip(ends).any(|((_, held), until)| *held == gauges && until >= since)
    }
}

impl World {
    /// A step is about to run.
    pub fn check_plan(&mut self, plan: &StepPlan) {
        let config = &self.plan.scheduler;
        let (tokens, requests) = (plan.num_tokens(), plan.scheduled.len());
        assert!(tokens <= config.max_num_batched_tokens, "{tokens} tokens are planned");
        assert!(requests <= config.max_num_seqs as usize, "{requests} requests are planned");
        let keys: BTreeSet<_> = plan.scheduled.iter().map(|request| request.key).collect();
        assert_eq!(keys.len(), requests, "a request is twice in one plan");
        if self.plan.prefix_caching {
            let queries = plan.new_requests.iter().map(|new| new.prompt.len() as u64);
            self.looked_up += queries.sum::<u64>();
        }
        let step = plan.step;
        self.note(format_args!("step {step} runs {tokens} tokens of {requests} requests"));
    }

    /// The core tells a client something.
    pub fn check_sent(&mut self, client: ClientId, frames: &[Bytes]) {
        let message = EngineMessage::decode(frames).expect("what a core says can be read");
        let EngineMessage::Step { stats, outputs, .. } = message else { return };
        let stats = stats.expect("a core of ours keeps stats");
        let told = self.told.entry(client).or_default();
        if !stats.pawl.expect("it tells its own part").resent {
            told.queries += stats.prefix_cache_stats.queries;
        }
        let Some(link) = self.core.as_ref().and_then(|core| core.links.get(&client)) else {
            return;
        };
        for output in outputs {
            // `<name>-<epoch><ten digits>`: of this life of this client, or of no one.
            let id = output.request_id.as_str();
            let life = id.rsplit_once('-').map(|(_, life)| &life[..life.len() - 10]);
            let epoch = format!("{:x}", link.epoch);
            assert_eq!(life, Some(epoch.as_str()), "an output of another life: {id}");
            if let Some(prefill) = output.prefill_stats.filter(|_| self.plan.prefix_caching) {
                told.proven += prefill.num_prompt_tokens;
            }
        }
        let Told { queries, proven } = told;
        assert!(
            queries >= proven,
            "client {} was told of {queries} tokens looked up, its outputs tell of {proven}",
            client.0
        );
    }

    /// Each delta is told once: all that clients were told is what the plans did, or less.
    fn check_deltas(&self) {
        // A plan is known here once the runner has it.
        let Some(core) = self.core.as_ref().filter(|core| core.core.kept_of_requests()[3].1 == 0)
        else {
            return;
        };
        let all: u64 = self.told.values().map(|told| told.queries).sum();
        let looked_up = self.looked_up;
        assert!(all <= looked_up, "{all} tokens looked up were told, {looked_up} were");
        // Whoever left with something untold takes it along; if nobody did, it is all told soon.
        let idle = core.core.scheduler().requests().next().is_none();
        let settled = self.calm && idle && self.plan.faults.is_none() && self.unsettled().is_none();
        if settled {
            assert_eq!(all, looked_up, "tokens looked up that were told, that were");
        }
    }

    /// A frontend's client hears something.
    pub fn check_event(&self, index: usize, event: &FrontendEvent) {
        let now = self.now();
        let excused = match event {
            FrontendEvent::Down { .. } => self.excused[index],
            FrontendEvent::Hung { .. } => self.excused[index].max(self.hang_excused),
            _ => return,
        };
        assert!(now <= excused, "nothing explains why frontend {index} hears {event:?}");
    }

    pub fn remember_gauges(&mut self) {
        let now = self.now();
        let gauges = self.gauges();
        self.past_gauges.add(now, gauges);
    }

    fn gauges(&self) -> Gauges {
        let Some(core) = &self.core else { return (0, 0, 0.0) };
        let scheduler = core.core.scheduler();
        let (mut running, mut waiting) = (0, 0);
        for (key, _, _) in scheduler.requests() {
            *(if scheduler.is_running(key) { &mut running } else { &mut waiting }) += 1;
        }
        (running, waiting, scheduler.kv().usage())
    }

    /// Four times a second.
    pub fn check(&mut self) {
        self.checks += 1;
        // Somebody sets the wall clock, forward and back, every two seconds. Nothing may care.
        if self.checks.is_multiple_of(8) {
            let forward = self.checks.is_multiple_of(16);
            self.clock.put_wall_forward(if forward { 3600 } else { -3600 });
        }
        self.check_dead_frontends();
        self.check_bounds();
        self.check_deltas();
        for index in 0..FRONTENDS {
            self.check_dead_cores_streams(index);
            self.check_serving(index);
            self.check_leaving(index);
            self.check_gauges(index);
            if self.checks.is_multiple_of(16) {
                self.check_numbers(index);
            }
        }
    }

    /// Requests whose frontend is dead, or has begun another life, are gone from the core soon.
    fn check_dead_frontends(&mut self) {
        let now = self.now();
        let Some(core) = &self.core else { return self.orphans.clear() };
        let alive = |client: ClientIndex| {
            let link = core.links.get(&ClientId(client.0))?;
            let frontend = self.frontends[link.frontend].as_ref()?;
            // One that has been stopped for long is let go, unless the core stood still too.
            let since = self.stopped[link.frontend].map(|at| at.max(self.core_went_on));
            let silent = since.is_some_and(|since| now > since + nanos(SILENCE_NOTICED));
            (frontend.epoch == link.epoch && !silent).then_some(())
        };
        let mut orphans = BTreeMap::new();
        for (key, client, id) in core.core.scheduler().requests() {
            if alive(client).is_none() {
                let since = self.orphans.get(&key).copied().unwrap_or(now);
                let since = since.max(self.core_went_on);
                let late = self.core_stopped.is_none() && now > since + nanos(DEATH_NOTICED);
                assert!(!late, "{id} is still in the core after its frontend's life");
                orphans.insert(key, since);
            }
        }
        self.orphans = orphans;
    }

    /// The streams of a dead core end with an error soon.
    fn check_dead_cores_streams(&self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        // A client's task that takes slowly hears of it when it has taken what came before.
        if self.stopped[index].is_some() || self.slow_takers[index] {
            return;
        }
        let since = self.core_ended_at.max(self.went_on[index]);
        if self.now() <= since + nanos(DEATH_NOTICED) {
            return;
        }
        let life = self.core.as_ref().map_or(u32::MAX, |core| core.life);
        let mut lost = frontend.requests.iter();
        let lost = lost.find(|(_, r)| r.core_life < life && r.reader == Reader::Prompt);
        assert!(lost.is_none(), "client {:?} still waits for a dead core", lost.map(|(id, _)| id));
    }

    /// Whether nothing has been wrong with `index` or the core for a while.
    fn undisturbed(&self, index: usize, for_at_least: Duration) -> bool {
        let Some(core) = &self.core else { return false };
        let excused = self.excused[index].max(self.hang_excused);
        let quiet = self.now() > excused + nanos(for_at_least);
        quiet && core.ready && self.core_stopped.is_none() && self.stopped[index].is_none()
    }

    fn check_serving(&self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        let status = frontend.client.client().status();
        let leaving = frontend.leaving_since.is_some();
        if self.undisturbed(index, SERVES_WITHIN) && !leaving {
            assert_eq!(status, EngineStatus::Up, "nothing keeps frontend {index} from serving");
        }
        // A core that has stood still for long must not look well.
        let Some(core) = &self.core else { return };
        let now = self.now();
        // Whoever was not there, or was itself stopped, has seen no progress only since then.
        // And a core that was stopped may have progress to tell of the time before.
        let own = self.went_on[index].max(self.up_at[index]).max(self.core_went_on);
        let step_stands = core.step_since.filter(|_| core.hung);
        let stands_since = self.core_stopped.or(step_stands);
        if let Some(since) = stands_since
            && self.stopped[index].is_none()
            && now > since.max(own).max(self.hung_at) + nanos(HANG_NOTICED)
        {
            assert_ne!(status, EngineStatus::Up, "the core hangs, and frontend {index} is well");
        }
    }

    /// Taking leave takes no longer than an answer.
    fn check_leaving(&self, index: usize) {
        let Some(since) = self.frontends[index].as_ref().and_then(|f| f.leaving_since) else {
            return;
        };
        // Where the core is away or stands still, it waits for its time-out.
        let bound = if self.undisturbed(index, Duration::ZERO) { 3 } else { 90 };
        let late = self.now() > since + nanos(Duration::from_secs(bound));
        assert!(!late, "frontend {index} has been leaving for {bound} s");
    }

    /// Every frontend shows what was true of the core within the last second.
    fn check_gauges(&mut self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        let Some(core) = &self.core else { return };
        let mut link = core.links.values().filter(|link| link.frontend == index);
        let (Some(link), None) = (link.next(), link.next()) else { return };
        let age = Duration::from_secs(3);
        let waits = self.now() < link.waited + nanos(age) || !frontend.has_taken_all();
        let slow = self.net.all(Side::Frontend, index).into_iter().any(|conn| {
            self.net.slowest(conn).is_none_or(|slowest| slowest > Duration::from_millis(50))
        });
        let stalls = core.hung || self.slow_takers[index];
        if !self.undisturbed(index, age) || !frontend.is_up() || waits || slow || stalls {
            return;
        }
        let shown = frontend.ledger.gauges;
        self.gauges_checked += 1;
        let since = self.now().saturating_sub(nanos(GAUGES_AGE));
        assert!(
            self.past_gauges.held(shown, since),
            "frontend {index} shows {shown:?}; within {GAUGES_AGE:?} the core had {}",
            self.past_gauges.since(since)
        );
    }

    /// A frontend's numbers are those of its ledger.
    pub fn check_numbers(&self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        // Before the model's name is known, refusals are kept, but not shown.
        if frontend.client.client().model().is_none() {
            return;
        }
        // What lies unread at a slow reader is counted, but not yet known to the ledger.
        if frontend.requests.values().any(|request| request.reader != Reader::Prompt) {
            return;
        }
        let wrong = frontend.ledger.differences(&frontend.metrics.snapshot());
        assert!(
            wrong.is_empty(),
            "frontend {index}'s numbers are wrong:\n  {}",
            wrong.join("\n  ")
        );
    }

    fn check_bounds(&self) {
        // Control, input and output, of the life that is and of one that is ending.
        let connections = self.net.num_open();
        assert!(connections <= 6 * FRONTENDS + 6, "{connections} connections are open");
        let Some(core) = &self.core else { return };
        core.core.scheduler().check_invariants();
        assert!(core.links.len() <= 2 * FRONTENDS, "{} links are open", core.links.len());
        for (client, link) in &core.links {
            let waiting = link.outbox.waiting_bytes();
            let bound = self.plan.outbox_bytes + (64 << 10);
            assert!(waiting <= bound, "{waiting} bytes wait for client {}", client.0);
        }
    }

    /// Why not everything has come to rest, if so.
    pub fn unsettled(&self) -> Option<String> {
        let Some(core) = self.core.as_ref().filter(|core| core.ready) else {
            return Some("the core does not run".into());
        };
        for (index, frontend) in self.frontends.iter().enumerate() {
            let Some(frontend) = frontend else {
                return Some(format!("frontend {index} is not there"));
            };
            if !frontend.is_up() {
                let status = frontend.client.client().status();
                return Some(format!("frontend {index} is {status:?}"));
            }
            for (what, number) in frontend.client.kept() {
                if number > 0 {
                    return Some(format!("frontend {index} keeps {number} {what}"));
                }
            }
            if !frontend.requests.is_empty() {
                return Some(format!("clients of frontend {index} wait"));
            }
        }
        for (what, number) in core.core.kept_of_requests() {
            if number > 0 {
                return Some(format!("the core keeps {number} {what}"));
            }
        }
        for (what, number) in core.core.kept_of_clients() {
            if number > FRONTENDS {
                return Some(format!("the core keeps {number} {what}"));
            }
        }
        if core.links.len() != FRONTENDS {
            return Some(format!("the core has {} links", core.links.len()));
        }
        let waits = core.links.values().map(|link| link.outbox.waiting_bytes()).sum::<u64>();
        (waits > 0).then(|| format!("{waits} bytes wait for credit"))
    }

    /// At the end: every number is right, and what was owed has been told.
    pub fn check_end(&self) {
        for index in 0..FRONTENDS {
            self.check_numbers(index);
            let shown = self.frontends[index].as_ref().expect("it is up").ledger.gauges;
            assert_eq!(shown, (0, 0, 0.0), "frontend {index} shows an idle core as busy");
        }
        self.check_deltas();
    }
}
