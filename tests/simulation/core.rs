//! The core's process: its rendezvous, its clients' outboxes and its engine, and what the endpoint
//! does between them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use pawl_engine_core::unthreaded::{Sent, TICK, UnthreadedCore};
use pawl_shared::clock::{Clock, Stamp};
use pawl_shared::protocol::ENGINE_CORE_DEAD;
use pawl_shared::rendezvous::{
    CoreAction, CoreInput, CoreRendezvous, HeartbeatConfig, Outbox, PeerId,
};
use pawl_shared::transport::{ClientId, CoreEvent, LeaveReason};

use crate::checks::PastGauges;
use crate::net::{Conn, Parcel, Side, Socket};
use crate::world::{Event, World};

/// How often a link is tried to a frontend that does not answer, and how many times.
const CONNECT_RETRY: Duration = Duration::from_millis(100);
const CONNECT_TRIES: u32 = 50;

/// A link to one client.
pub struct Link {
    pub frontend: usize,
    pub epoch: u64,
    input: Conn,
    output: Conn,
    pub outbox: Outbox,
    pub joined: bool,
    /// When something last waited for credit.
    pub waited: u64,
}

/// A client that is to be connected to.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub client: ClientId,
    /// As in its address.
    pub frontend: usize,
    pub life: u32,
    pub epoch: u64,
    pub tries: u32,
}

/// One life of the core.
pub struct CoreProcess {
    pub life: u32,
    pub core: UnthreadedCore,
    rendezvous: CoreRendezvous,
    pub ready: bool,
    pub links: BTreeMap<ClientId, Link>,
    /// Links that are being made.
    opening: BTreeMap<ClientId, Wanted>,
    /// What the engine has no room for yet.
    pending: VecDeque<CoreEvent>,
    unread: VecDeque<(Conn, Parcel)>,
    turn_due: bool,
    timer_at: Option<u64>,
    next_io_tick: Stamp,
    /// Until when a step is to take longer, showing progress.
    pub slow_step: Option<Duration>,
    /// A step runs since then; while `hung` it does not end.
    pub step_since: Option<u64>,
    pub hung: bool,
    held_end: bool,
    pub stopping: bool,
}

impl World {
    /// A core process starts; its model takes until `ready` to load.
    pub fn start_core(&mut self, loads: Duration) {
        self.core_lives += 1;
        let life = self.core_lives;
        let config = self.plan.core(&self.clock);
        let core = UnthreadedCore::new(&config, self.plan.inbox_max).expect("a usable plan");
        let now = self.clock.now();
        let heartbeat = HeartbeatConfig::default();
        self.core = Some(CoreProcess {
            life,
            core,
            rendezvous: CoreRendezvous::new(0, heartbeat, now),
            ready: false,
            links: BTreeMap::new(),
            opening: BTreeMap::new(),
            pending: VecDeque::new(),
            unread: VecDeque::new(),
            turn_due: false,
            timer_at: None,
            next_io_tick: now,
            slow_step: None,
            step_since: None,
            hung: false,
            held_end: false,
            stopping: false,
        });
        self.told.clear();
        self.looked_up = 0;
        self.past_gauges = PastGauges::default();
        self.note(format_args!("core {life} starts"));
        self.schedule(loads, Event::CoreReady(life));
        self.set_core_timer();
    }

    pub fn core_ready(&mut self) {
        let Some(core) = &mut self.core else { return };
        core.ready = true;
        core.rendezvous.set_busy(true);
        self.core_input(CoreInput::Ready);
        self.pump_core();
    }

    /// The process is gone; what it has sent still arrives.
    pub fn end_core(&mut self, why: &str) {
        let Some(core) = self.core.take() else { return };
        self.note(format_args!("core {} ends: {why}", core.life));
        self.core_stopped = None;
        self.core_backlog.clear();
        self.core_ended_at = self.now();
        for frontend in 0..self.frontends.len() {
            for conn in self.net.all(Side::Core, frontend) {
                self.hang_up(conn, Side::Core);
            }
        }
    }

    /// The engine has failed: everyone is told, then the process ends.
    pub fn fail_core(&mut self) {
        let dead = vec![Bytes::from_static(ENGINE_CORE_DEAD)];
        let clients: Vec<ClientId> =
            self.core.iter().flat_map(|c| c.links.keys()).copied().collect();
        for client in clients {
            self.core_send(client, dead.clone());
        }
        self.finish_outboxes();
        self.end_core("its engine failed");
    }

    /// The process is told to stop: what is open ends with an abort.
    pub fn shut_core_down(&mut self) {
        let Some(core) = &mut self.core else { return };
        core.stopping = true;
        core.core.shut_down();
        self.core_turn();
    }

    /// What waits goes out without credit, as when an endpoint closes.
    fn finish_outboxes(&mut self) {
        let clients: Vec<ClientId> =
            self.core.iter().flat_map(|c| c.links.keys()).copied().collect();
        for client in clients {
            if let Some(link) = self.core.as_mut().and_then(|core| core.links.get_mut(&client)) {
                link.outbox.finish();
            }
            self.flush_link(client);
        }
    }

    /// Something arrives at the core.
    pub fn core_receives(&mut self, conn: Conn, parcel: Parcel) {
        let Some(core) = &mut self.core else { return };
        if !core.core.takes_events() || !core.pending.is_empty() {
            // The endpoint is not asked for more meanwhile.
            core.unread.push_back((conn, parcel));
            return;
        }
        self.core_reads(conn, parcel);
        self.pump_core();
    }

    fn core_reads(&mut self, conn: Conn, parcel: Parcel) {
        let Some((socket, frontend)) = self.net.of(conn, Side::Core) else { return };
        let from = PeerId(Bytes::copy_from_slice(&conn.0.to_be_bytes()));
        let client = self.client_of(conn);
        match (socket, parcel) {
            (Socket::Control, Parcel::Message(mut frames)) => {
                self.core_input(CoreInput::Control { from, message: frames.remove(0) });
            }
            (Socket::Control, Parcel::Closed) => {
                self.net.forget(conn, Side::Core);
                self.core_input(CoreInput::ControlGone { from });
            }
            (Socket::Input, Parcel::Message(frames)) => {
                let core = self.core.as_mut().expect("it reads");
                if let Some(client) = client.filter(|client| core.links[client].joined) {
                    core.pending.push_back(CoreEvent::Message { client, frames });
                }
            }
            (Socket::Output, Parcel::Message(_)) => unreachable!("a PULL says nothing"),
            (Socket::Input | Socket::Output, Parcel::Closed) => {
                self.net.forget(conn, Side::Core);
                if let Some(client) = client {
                    self.note(format_args!("core: link to frontend {frontend} is lost"));
                    let reason = LeaveReason::Disconnected;
                    self.core_input(CoreInput::LinkDown { client, reason });
                }
            }
        }
    }

    fn client_of(&self, conn: Conn) -> Option<ClientId> {
        let links = &self.core.as_ref()?.links;
        let found = links.iter().find(|(_, link)| link.input == conn || link.output == conn);
        found.map(|(client, _)| *client)
    }

    /// Hands the engine what it has room for, and wakes it.
    fn pump_core(&mut self) {
        loop {
            let Some(core) = &mut self.core else { return };
            let mut woken = false;
            while core.core.takes_events()
                && let Some(event) = core.pending.pop_front()
            {
                core.core.event(event);
                woken = true;
            }
            if woken && !core.turn_due {
                core.turn_due = true;
                let life = core.life;
                let wait = self.chance.micros(0, 500);
                self.schedule(wait, Event::CoreTurn(life));
            }
            let Some(core) = &mut self.core else { return };
            if !core.core.takes_events() || !core.pending.is_empty() {
                break;
            }
            let Some((conn, parcel)) = core.unread.pop_front() else { break };
            self.core_reads(conn, parcel);
        }
        self.set_core_timer();
    }

    /// A turn of the engine thread.
    pub fn core_turn(&mut self) {
        let Some(core) = &mut self.core else { return };
        core.turn_due = false;
        let sent = core.core.turn().expect("the engine goes on");
        self.core_sends(sent);
        self.begin_step();
        self.after_engine();
    }

    fn begin_step(&mut self) {
        let now = self.now();
        let Some(core) = &mut self.core else { return };
        let begun = core.core.begin_step().expect("the runner understands its plans");
        let Some(step) = begun else { return };
        let takes = step.takes + core.slow_step.take().unwrap_or_default();
        core.step_since = Some(now);
        let life = core.life;
        self.check_plan(&step.plan);
        self.schedule(takes, Event::StepEnd(life));
    }

    pub fn step_ends(&mut self) {
        let Some(core) = &mut self.core else { return };
        if core.hung {
            core.held_end = true;
            return;
        }
        core.step_since = None;
        let sent = core.core.end_step().expect("runner and engine agree");
        self.remember_gauges();
        self.core_sends(sent);
        self.core_turn();
    }

    /// The runner hangs no more.
    pub fn unhang(&mut self) {
        let Some(core) = &mut self.core else { return };
        core.hung = false;
        if std::mem::take(&mut core.held_end) {
            self.step_ends();
        }
    }

    fn after_engine(&mut self) {
        self.remember_gauges();
        self.pump_core();
        let stopped = |core: &CoreProcess| core.stopping && core.core.is_stopped();
        if self.core.as_ref().is_some_and(stopped) {
            self.finish_outboxes();
            self.end_core("it was told to stop");
        }
    }

    fn core_sends(&mut self, sent: Vec<Sent>) {
        for (client, frames) in sent {
            self.check_sent(client, &frames);
            self.core_send(client, frames);
        }
    }

    /// What the endpoint does with a message for a client.
    fn core_send(&mut self, client: ClientId, frames: Vec<Bytes>) {
        let core = self.core.as_mut().expect("it sends");
        let Some(link) = core.links.get_mut(&client).filter(|link| link.joined) else { return };
        if link.outbox.push(frames).is_err() {
            let frontend = link.frontend;
            self.note(format_args!("core: frontend {frontend} does not read and is cut off"));
            self.excuse(frontend, Duration::from_secs(3));
            self.core_input(CoreInput::LinkDown { client, reason: LeaveReason::CutOff });
            return;
        }
        self.flush_link(client);
    }

    fn flush_link(&mut self, client: ClientId) {
        let now = self.now();
        loop {
            let Some(core) = &mut self.core else { return };
            let Some(link) = core.links.get_mut(&client) else { return };
            let (output, frontend) = (link.output, link.frontend);
            let Some(frames) = link.outbox.pop() else {
                if link.outbox.waiting_bytes() > 0 {
                    link.waited = now;
                }
                return;
            };
            let bytes: usize = frames.iter().map(Bytes::len).sum();
            self.note(format_args!("core -> frontend {frontend}: {bytes} bytes"));
            self.send(output, Side::Frontend, Parcel::Message(frames));
        }
    }

    fn core_input(&mut self, input: CoreInput) {
        let now = self.clock.now();
        // An action may fail at once and so be an input itself.
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let Some(core) = &mut self.core else { return };
            for action in core.rendezvous.handle(now, input) {
                self.core_acts(action);
            }
        }
    }

    fn core_acts(&mut self, action: CoreAction) {
        match action {
            CoreAction::Reply { to, message } => {
                let bytes: [u8; 8] = to.0.as_ref().try_into().expect("its own identity");
                self.note(format_args!("core says {message:?}"));
                let parcel = Parcel::Message(vec![message.encode()]);
                self.send_control(Conn(u64::from_be_bytes(bytes)), Side::Frontend, parcel);
            }
            CoreAction::OpenLink { client, input, .. } => {
                let part = |nth| {
                    let text = input.split('/').nth(nth).expect("an address of the simulation");
                    text.parse::<u64>().expect("a number of the simulation")
                };
                let (frontend, life, epoch) = (part(2) as usize, part(3) as u32, part(4));
                let wanted = Wanted { client, frontend, life, epoch, tries: 0 };
                let core = self.core.as_mut().expect("it acts");
                core.opening.insert(client, wanted.clone());
                let life = core.life;
                let wait = self.chance.micros(100, 2000);
                self.schedule(wait, Event::Connect(life, wanted));
            }
            CoreAction::CloseLink { client } => {
                let core = self.core.as_mut().expect("it acts");
                core.opening.remove(&client);
                if let Some(link) = core.links.remove(&client) {
                    for conn in [link.input, link.output] {
                        self.hang_up(conn, Side::Core);
                    }
                }
            }
            CoreAction::Joined { client, peer, .. } => {
                let core = self.core.as_mut().expect("it acts");
                let link = core.links.get_mut(&client).expect("a link that is up");
                link.joined = true;
                core.pending.push_back(CoreEvent::Joined { client, peer });
                self.note(format_args!("core: client {} joined", client.0));
            }
            CoreAction::Left { client, reason, .. } => {
                self.note(format_args!("core: client {} left: {reason}", client.0));
                let core = self.core.as_mut().expect("it acts");
                core.pending.push_back(CoreEvent::Left { client, reason });
            }
            CoreAction::Acknowledged { client, bytes } => {
                let core = self.core.as_mut().expect("it acts");
                if let Some(link) = core.links.get_mut(&client) {
                    link.outbox.acknowledge(bytes);
                    self.flush_link(client);
                }
            }
            CoreAction::HandshakeDone { .. } | CoreAction::HandshakeAgain { .. } => {
                unreachable!("nobody shakes hands here")
            }
        }
    }

    /// A link is being made.
    pub fn connect(&mut self, mut wanted: Wanted) {
        let Some(core) = &mut self.core else { return };
        let client = wanted.client;
        if !core.opening.contains_key(&client) {
            return;
        }
        let life = core.life;
        let there = self.frontends[wanted.frontend].as_ref().filter(|frontend| {
            frontend.life == wanted.life && frontend.epoch == wanted.epoch && frontend.listens()
        });
        if there.is_none() || wanted.tries == CONNECT_TRIES {
            self.core.as_mut().expect("it connects").opening.remove(&client);
            let reason = LeaveReason::Unreachable("nobody listens".into());
            self.core_input(CoreInput::LinkDown { client, reason });
            self.pump_core();
            return;
        }
        if self.stopped[wanted.frontend].is_some() {
            wanted.tries += 1;
            self.schedule(CONNECT_RETRY, Event::Connect(life, wanted));
            return;
        }
        let frontend = wanted.frontend;
        let slowest = self.draw_slowest();
        let input = self.net.connect(Socket::Input, frontend, slowest);
        let output = self.net.connect(Socket::Output, frontend, slowest);
        let outbox = Outbox::new(self.plan.outbox_bytes, Some(self.plan.window));
        let core = self.core.as_mut().expect("it connects");
        core.opening.remove(&client);
        let ready = core.core.ready();
        let (epoch, waited) = (wanted.epoch, 0);
        let link = Link { frontend, epoch, input, output, outbox, joined: false, waited };
        core.links.insert(client, link);
        self.frontend_accepts(frontend, input, output);
        self.send(input, Side::Frontend, Parcel::Message(vec![ready]));
        self.core_input(CoreInput::LinkUp { client });
        self.pump_core();
    }

    fn set_core_timer(&mut self) {
        let Some(core) = &mut self.core else { return };
        let due = core.rendezvous.next_tick().min(core.next_io_tick).nanos();
        if core.timer_at.is_none_or(|at| due < at) {
            core.timer_at = Some(due);
            let life = core.life;
            self.schedule_at(due, Event::CoreTimer(life, due));
        }
    }

    pub fn core_timer(&mut self, at: u64) {
        let now = self.clock.now();
        let Some(core) = &mut self.core else { return };
        if core.timer_at != Some(at) {
            return;
        }
        core.timer_at = None;
        if now >= core.next_io_tick {
            core.next_io_tick = now + TICK;
            if core.step_since.is_some() && !core.hung {
                core.core.show_progress();
            }
            let progress = core.core.progress();
            core.rendezvous.set_progress(progress);
            let ready = core.ready;
            if ready {
                let sent = core.core.tick();
                self.core_sends(sent);
                let Some(core) = &mut self.core else { return };
                if !core.turn_due {
                    core.turn_due = true;
                    let life = core.life;
                    self.schedule(Duration::ZERO, Event::CoreTurn(life));
                }
            }
        }
        let due = |core: &CoreProcess| now >= core.rendezvous.next_tick();
        if self.core.as_ref().is_some_and(due) {
            self.core_input(CoreInput::Tick);
        }
        self.pump_core();
        self.set_core_timer();
    }
}
