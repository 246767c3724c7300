//! What goes wrong, and how it ends.

use std::time::Duration;

use crate::net::{Parcel, Side};
use crate::plan::{ANSWER_MAX, FRONTENDS, PROMPT_MAX};
use crate::readers::Reader;
use crate::world::{Event, World};

/// After a fault is over, everything must be as before within this time.
const GRACE: Duration = Duration::from_secs(4);

/// Once nothing goes wrong any more, everything comes to rest within this time, and the time that
/// the work takes which is left: ten seconds until the last silence is noticed, and some more.
const SETTLES_WITHIN: Duration = Duration::from_secs(30);

/// A core that stands still for no longer loses no frontend, even if it does so twice in a row.
const BORNE: Duration = Duration::from_secs(25);

/// The end of something that went wrong.
#[derive(Clone, Debug)]
pub enum Heal {
    StartCore,
    ContinueCore(u32),
    ContinueFrontend(usize, u32),
    Unhang(u32),
    TakeFast(usize),
}

impl World {
    /// `index` may lose its core, or find it hung, within this time without anybody's fault.
    pub fn excuse(&mut self, index: usize, lasts: Duration) {
        let until = self.now() + nanos(lasts);
        self.excused[index] = self.excused[index].max(until);
    }

    pub fn excuse_all(&mut self, lasts: Duration) {
        for index in 0..FRONTENDS {
            self.excuse(index, lasts);
        }
    }

    /// The core stands still, which shows, but is borne unless it is for very long.
    fn excuse_standstill(&mut self, lasts: Duration) {
        let until = self.now() + nanos(lasts + GRACE);
        self.hang_excused = self.hang_excused.max(until);
        if lasts > BORNE {
            self.excuse_all(lasts + GRACE);
        }
    }

    /// Something goes wrong.
    pub fn fault(&mut self) {
        let Some((least, most)) = self.plan.faults else { return };
        if self.calm {
            return;
        }
        let next = self.chance.millis(least, most);
        self.schedule(next, Event::Fault);
        let index = self.chance.between(0, FRONTENDS as u64 - 1) as usize;
        match self.chance.between(0, 99) {
            0..15 => self.kill_frontend(index),
            15..25 => {
                self.end_core("it is killed");
                self.start_core_later();
            }
            25..30 => {
                if self.core.as_ref().is_some_and(|core| core.ready) && self.core_stopped.is_none()
                {
                    self.fail_core();
                    self.start_core_later();
                }
            }
            30..35 => {
                if self.core.as_ref().is_some_and(|core| core.ready) && self.core_stopped.is_none()
                {
                    self.excuse_all(Duration::from_secs(1));
                    self.shut_core_down();
                    self.start_core_later();
                }
            }
            35..52 => self.cut(index),
            52..65 => self.stop_frontend(index),
            65..77 => self.stop_core(),
            77..83 => self.hang_core(),
            83..88 => {
                let lasts = Duration::from_secs(self.chance.between(1, 15));
                if let Some(core) = &mut self.core {
                    core.slow_step = Some(lasts);
                    self.note(format_args!("the next step takes {lasts:?} longer"));
                }
            }
            88..94 => {
                if self.stopped[index].is_none() {
                    self.note(format_args!("frontend {index} leaves"));
                    self.excuse(index, Duration::from_secs(2));
                    self.leave(index);
                }
            }
            _ => {
                self.note(format_args!("frontend {index} takes slowly"));
                self.slow_takers[index] = true;
                let lasts = self.chance.millis(500, 6000);
                self.schedule(lasts, Event::Heal(Heal::TakeFast(index)));
            }
        }
    }

    fn kill_frontend(&mut self, index: usize) {
        if self.frontends[index].is_none() {
            return;
        }
        self.end_frontend(index, "it is killed");
        let wait = self.chance.millis(100, 3000);
        self.excuse(index, wait + GRACE);
        self.schedule(wait, Event::FrontendStart(index));
    }

    fn start_core_later(&mut self) {
        let wait = self.chance.millis(100, 2000);
        self.excuse_all(wait + Duration::from_secs(1) + GRACE);
        self.schedule(wait, Event::Heal(Heal::StartCore));
    }

    fn cut(&mut self, index: usize) {
        let mut conns = self.net.all(Side::Core, index);
        conns.extend(self.net.all(Side::Frontend, index));
        conns.sort_unstable();
        conns.dedup();
        let all = self.chance.percent(40);
        for conn in conns {
            if !all && self.chance.percent(60) {
                continue;
            }
            self.note(format_args!("connection {} of frontend {index} is cut", conn.0));
            self.excuse(index, GRACE);
            self.net.cut(conn);
            for side in [Side::Core, Side::Frontend] {
                self.send(conn, side, Parcel::Closed);
            }
        }
    }

    fn stop_frontend(&mut self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        if self.stopped[index].is_some() {
            return;
        }
        let life = frontend.life;
        let lasts = self.chance.pick(&[300, 1500, 3000, 9500, 15_000]);
        let lasts = Duration::from_millis(lasts);
        self.note(format_args!("frontend {index} is stopped for {lasts:?}"));
        self.stopped[index] = Some(self.now());
        self.excuse(index, lasts + GRACE);
        self.schedule(lasts, Event::Heal(Heal::ContinueFrontend(index, life)));
    }

    fn stop_core(&mut self) {
        let Some(core) = &self.core else { return };
        if self.core_stopped.is_some() {
            return;
        }
        let life = core.life;
        let lasts = self.chance.pick(&[300, 1500, 3000, 8000, 12_000, 15_000, 64_000]);
        let lasts = Duration::from_millis(lasts);
        self.note(format_args!("core {life} is stopped for {lasts:?}"));
        self.core_stopped = Some(self.now());
        self.excuse_standstill(lasts);
        self.schedule(lasts, Event::Heal(Heal::ContinueCore(life)));
    }

    fn hang_core(&mut self) {
        let now = self.now();
        let Some(core) = &mut self.core else { return };
        if core.hung || core.stopping {
            return;
        }
        core.hung = true;
        self.hung_at = now;
        let life = core.life;
        let lasts = self.chance.pick(&[2000, 8000, 13_000, 64_000]);
        let lasts = Duration::from_millis(lasts);
        self.note(format_args!("the runner of core {life} hangs for {lasts:?}"));
        self.excuse_standstill(lasts);
        self.schedule(lasts, Event::Heal(Heal::Unhang(life)));
    }

    pub fn heal(&mut self, heal: &Heal) {
        match *heal {
            Heal::StartCore => {
                if self.core.as_ref().is_some_and(|core| core.stopping) {
                    // It has not ended yet.
                    self.schedule(Duration::from_millis(100), Event::Heal(Heal::StartCore));
                } else if self.core.is_none() {
                    let loads = self.chance.millis(0, 1000);
                    self.start_core(loads);
                }
            }
            Heal::ContinueCore(life) => {
                if self.core_stopped.is_some()
                    && self.core.as_ref().is_some_and(|core| core.life == life)
                {
                    self.note(format_args!("core {life} goes on"));
                    self.core_stopped = None;
                    self.core_went_on = self.now();
                    let backlog = std::mem::take(&mut self.core_backlog);
                    self.catch_up(backlog);
                }
            }
            Heal::ContinueFrontend(index, life) => {
                if self.stopped[index].is_some()
                    && self.frontends[index].as_ref().is_some_and(|f| f.life == life)
                {
                    self.note(format_args!("frontend {index} goes on"));
                    self.stopped[index] = None;
                    self.went_on[index] = self.now();
                    let backlog = std::mem::take(&mut self.backlogs[index]);
                    self.catch_up(backlog);
                }
            }
            Heal::Unhang(life) => {
                if self.core.as_ref().is_some_and(|core| core.life == life && core.hung) {
                    self.note(format_args!("the runner of core {life} goes on"));
                    if self.core_stopped.is_some() {
                        self.core_backlog.push(Event::Heal(heal.clone()));
                    } else {
                        self.unhang();
                    }
                }
            }
            Heal::TakeFast(index) => self.slow_takers[index] = false,
        }
    }

    /// What lay waiting while a process was stopped: its timers first, or its sockets.
    fn catch_up(&mut self, backlog: Vec<Event>) {
        let timers_first = self.chance.percent(50);
        let (mut first, rest): (Vec<_>, Vec<_>) =
            backlog.into_iter().partition(|event| event.is_timer() == timers_first);
        first.extend(rest);
        for event in first {
            self.schedule(Duration::ZERO, event);
        }
    }

    /// Nothing goes wrong any more, and what is wrong is mended.
    pub fn calm_down(&mut self) {
        self.note(format_args!("from here on nothing goes wrong"));
        self.calm = true;
        self.settles_by = self.now() + nanos(SETTLES_WITHIN + self.work_left());
        if let Some(life) = self.core.as_ref().map(|core| core.life) {
            self.heal(&Heal::ContinueCore(life));
            self.heal(&Heal::Unhang(life));
            if let Some(core) = &mut self.core {
                core.slow_step = None;
            }
        } else {
            self.heal(&Heal::StartCore);
        }
        for index in 0..FRONTENDS {
            self.slow_takers[index] = false;
            match self.frontends[index].as_ref().map(|frontend| frontend.life) {
                Some(life) => self.heal(&Heal::ContinueFrontend(index, life)),
                None => self.start_frontend(index),
            }
            self.read_all(index);
            self.flush_requests(index);
            if let Some(frontend) = &mut self.frontends[index] {
                for request in frontend.requests.values_mut() {
                    request.reader = Reader::Prompt;
                }
            }
        }
    }

    /// How long the work that is left may take.
    fn work_left(&self) -> Duration {
        let plan = &self.plan;
        let open: u64 =
            self.frontends.iter().flatten().map(|f| f.client.client().in_flight()).sum();
        let tokens = ANSWER_MAX + PROMPT_MAX;
        // At worst one token of one request at a time, each request once more after a preemption.
        let step = plan.step_base + plan.step_per_token * plan.scheduler.max_num_batched_tokens;
        let to_run = step * (2 * open * tokens) as u32;
        // A window at a time, acknowledged after a tenth of a second, over the slowest link.
        let links = self.core.iter().flat_map(|core| core.links.values());
        let waiting: u64 = links.map(|link| link.outbox.waiting_bytes()).sum();
        to_run + Duration::from_secs(waiting / plan.window)
    }
}

pub fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}
