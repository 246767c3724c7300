//! A frontend's process: its rendezvous through its epochs, its credit and its client, and what
//! the endpoint does between them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use pawl_api_server::engine_client::unconnected::Unconnected;
use pawl_api_server::engine_client::{ClientConfig, EngineStatus};
use pawl_api_server::metrics::{Metrics, MetricsConfig};
use pawl_shared::clock::{Clock, Stamp};
use pawl_shared::protocol::EngineMessage;
use pawl_shared::rendezvous::{
    AckPolicy, FrontendAction, FrontendInput, FrontendRendezvous, HeartbeatConfig,
    OUTBOX_BYTES_MAX, Outbox, PairSocket, message_cost,
};
use pawl_shared::transport::{FrontendEvent, SendRefused};

use crate::ledger::Ledger;
use crate::net::{Conn, Parcel, Side, Socket};
use crate::readers::Request;
use crate::world::{Event, World};

const SECOND: Duration = Duration::from_secs(1);
/// How often a core that is not there is looked for.
const CONNECT_RETRY: Duration = Duration::from_millis(100);
/// Deliveries that wait for the client, beyond which the output socket is not read.
const DELIVERIES_MAX: usize = 16;

/// Where requests go out: the outbox of the epoch that the client has seen.
#[derive(Default)]
struct Sending {
    session: Option<(u64, Outbox)>,
    /// The last epoch of which nothing goes out any more.
    over: u64,
}

/// What goes from the sockets to the client, in order.
enum Delivery {
    Event(FrontendEvent),
    Message { frames: Vec<Bytes>, cost: u64, epoch: u64 },
}

/// One life of a frontend.
pub struct FrontendProcess {
    pub life: u32,
    rendezvous: FrontendRendezvous,
    ack: AckPolicy,
    taken: u64,
    pub epoch: u64,
    control: Option<Conn>,
    input: Option<Conn>,
    output: Option<Conn>,
    open: bool,
    sending: Arc<Mutex<Sending>>,
    pub client: Unconnected,
    pub metrics: Arc<Metrics>,
    deliveries: VecDeque<Delivery>,
    take_due: bool,
    /// Messages of the output socket that are not read yet.
    unread: VecDeque<Vec<Bytes>>,
    timer_at: Option<u64>,
    next_second: Stamp,
    pub leaving_since: Option<u64>,
    pub requests: BTreeMap<u64, Request>,
    pub ledger: Ledger,
}

impl FrontendProcess {
    /// Whether its pair of sockets is bound.
    pub fn listens(&self) -> bool {
        self.open
    }

    /// Nothing of the core's lies undelivered.
    pub fn has_taken_all(&self) -> bool {
        self.deliveries.is_empty() && self.unread.is_empty()
    }

    pub fn is_up(&self) -> bool {
        self.client.client().status() == EngineStatus::Up
    }
}

impl World {
    pub fn start_frontend(&mut self, index: usize) {
        self.frontend_lives += 1;
        let life = self.frontend_lives;
        let now = self.clock.now();
        let config = MetricsConfig {
            clock: Arc::new(self.clock.clone()),
            process: false,
            ..MetricsConfig::default()
        };
        let metrics = Arc::new(Metrics::new(config).expect("no custom buckets"));
        let sending = Arc::new(Mutex::new(Sending::default()));
        let out = Arc::clone(&sending);
        let send = move |frames| {
            let mut sending = out.lock().unwrap();
            let over = sending.over;
            let (epoch, outbox) = sending.session.as_mut().ok_or(SendRefused::Down)?;
            if *epoch <= over {
                return Err(SendRefused::Down);
            }
            outbox.push(frames).map_err(|_| SendRefused::Full)
        };
        let config = ClientConfig {
            clock: Arc::new(self.clock.clone()),
            limits: self.plan.limits,
            open_max: self.plan.open_max,
            ..ClientConfig::new(Arc::clone(&metrics))
        };
        let client = Unconnected::new(config, send);
        // As the endpoint draws it: apart from every other process's, with room to count.
        let epoch_base = u64::from(life) << 20;
        let rendezvous = FrontendRendezvous::new(
            format!("f{life}"),
            life,
            epoch_base,
            HeartbeatConfig::default(),
            now,
        );
        self.frontends[index] = Some(FrontendProcess {
            life,
            rendezvous,
            ack: AckPolicy::default(),
            taken: 0,
            epoch: 0,
            control: None,
            input: None,
            output: None,
            open: false,
            sending,
            client,
            metrics,
            deliveries: VecDeque::new(),
            take_due: false,
            unread: VecDeque::new(),
            timer_at: None,
            next_second: now,
            leaving_since: None,
            requests: BTreeMap::new(),
            ledger: Ledger::default(),
        });
        self.note(format_args!("frontend {index} starts, life {life}"));
        self.next_epoch(index);
        self.set_frontend_timer(index);
    }

    /// The process is gone, with its clients; what it has sent still arrives.
    pub fn end_frontend(&mut self, index: usize, why: &str) {
        let Some(frontend) = self.frontends[index].take() else { return };
        self.note(format_args!("frontend {index} ends: {why}"));
        self.stopped[index] = None;
        self.backlogs[index].clear();
        for conn in self.net.all(Side::Frontend, index) {
            self.hang_up(conn, Side::Frontend);
        }
        // Its generations must not be dropped before the client: nothing may be sent any more.
        frontend.sending.lock().unwrap().session = None;
    }

    /// It takes leave: what is open is aborted, then it says LEAVE.
    pub fn leave(&mut self, index: usize) {
        let now = self.now();
        let Some(frontend) = &mut self.frontends[index] else { return };
        frontend.leaving_since = Some(now);
        frontend.client.client().begin_drain();
        frontend.client.client().abort_all("the server is shutting down");
        self.flush_requests(index);
        self.read_all(index);
        self.frontend_input(index, FrontendInput::Leave);
    }

    fn next_epoch(&mut self, index: usize) {
        let now = self.clock.now();
        let Some(frontend) = &mut self.frontends[index] else { return };
        frontend.open = false;
        let Some((epoch, wait)) = frontend.rendezvous.next_open(now) else {
            self.end_frontend(index, "it has left");
            self.schedule(SECOND, Event::FrontendStart(index));
            return;
        };
        frontend.epoch = epoch;
        frontend.taken = 0;
        frontend.ack = AckPolicy::default();
        frontend.unread.clear();
        let life = frontend.life;
        self.schedule(wait, Event::FrontendOpen(index, life, epoch));
    }

    /// The sockets of an epoch are made, once there is a core to join.
    pub fn open_epoch(&mut self, index: usize, epoch: u64) {
        let Some(frontend) = &mut self.frontends[index] else { return };
        if frontend.epoch != epoch || frontend.open {
            return;
        }
        let life = frontend.life;
        if self.core.is_none() || self.core_stopped.is_some() {
            self.schedule(CONNECT_RETRY, Event::FrontendOpen(index, life, epoch));
            return;
        }
        let slowest = self.draw_slowest();
        let control = self.net.connect(Socket::Control, index, slowest);
        let frontend = self.frontends[index].as_mut().expect("it opens");
        frontend.open = true;
        frontend.control = Some(control);
        let address = |which| format!("ipc://{index}/{life}/{epoch}/{which}");
        let (input, output) = (address("i"), address("o"));
        self.frontend_input(index, FrontendInput::Opened { input, output });
    }

    /// The core has connected to both sockets.
    pub fn frontend_accepts(&mut self, index: usize, input: Conn, output: Conn) {
        let frontend = self.frontends[index].as_mut().expect("it listens");
        frontend.input = Some(input);
        frontend.output = Some(output);
    }

    /// Something arrives at a frontend.
    pub fn frontend_receives(&mut self, index: usize, conn: Conn, parcel: Parcel) {
        let Some((socket, _)) = self.net.of(conn, Side::Frontend) else { return };
        let Some(frontend) = &mut self.frontends[index] else { return };
        match (socket, parcel) {
            (Socket::Control, Parcel::Message(mut frames)) => {
                self.frontend_input(index, FrontendInput::Control(frames.remove(0)));
            }
            (Socket::Input, Parcel::Message(mut frames)) => {
                let (ready, engine_index) = (frames.remove(0), 0);
                self.frontend_input(index, FrontendInput::Ready { ready, engine_index });
            }
            (Socket::Output, Parcel::Message(frames)) => {
                frontend.unread.push_back(frames);
            }
            (socket, Parcel::Closed) => {
                self.net.forget(conn, Side::Frontend);
                let (slot, which) = match socket {
                    Socket::Control => (&mut frontend.control, PairSocket::Control),
                    Socket::Input => (&mut frontend.input, PairSocket::Input),
                    Socket::Output => (&mut frontend.output, PairSocket::Output),
                };
                *slot = None;
                // What is read already comes before the end of the socket.
                self.read_outputs(index);
                self.frontend_input(index, FrontendInput::Disconnected(which));
            }
        }
        self.read_outputs(index);
    }

    /// Takes from the output socket what there is room for.
    fn read_outputs(&mut self, index: usize) {
        let Some(frontend) = &mut self.frontends[index] else { return };
        while frontend.rendezvous.takes_outputs()
            && frontend.deliveries.len() < DELIVERIES_MAX
            && let Some(frames) = frontend.unread.pop_front()
        {
            let cost = message_cost(&frames);
            let epoch = frontend.epoch;
            frontend.deliveries.push_back(Delivery::Message { frames, cost, epoch });
        }
        self.wake_taker(index);
    }

    fn wake_taker(&mut self, index: usize) {
        let Some(frontend) = &mut self.frontends[index] else { return };
        if frontend.take_due || frontend.deliveries.is_empty() {
            return;
        }
        frontend.take_due = true;
        let life = frontend.life;
        let slow = self.slow_takers[index];
        let wait = if slow { self.chance.millis(20, 200) } else { self.chance.micros(0, 300) };
        self.schedule(wait, Event::FrontendTake(index, life));
    }

    /// The client's task takes what was delivered: all of it, or, being slow, one thing.
    pub fn take(&mut self, index: usize) {
        let slow = self.slow_takers[index];
        if let Some(frontend) = &mut self.frontends[index] {
            frontend.take_due = false;
        }
        loop {
            let now = self.clock.now();
            let Some(frontend) = &mut self.frontends[index] else { return };
            let Some(delivery) = frontend.deliveries.pop_front() else { break };
            let mut cost = 0;
            match delivery {
                Delivery::Event(event) => self.client_hears(index, event),
                Delivery::Message { frames, cost: of_message, epoch } => {
                    let frontend = self.frontends[index].as_mut().expect("it takes");
                    // What is left of an epoch that is over earns no credit in the next.
                    cost = if epoch == frontend.epoch { of_message } else { 0 };
                    let message = EngineMessage::decode(&frames).expect("a core's message");
                    let known = frontend.client.client().model().is_some();
                    frontend.client.event(FrontendEvent::Message { frames });
                    if let EngineMessage::Step { stats: Some(stats), .. } = &message
                        && known
                    {
                        frontend.ledger.stats(stats);
                    }
                    if message == EngineMessage::Dead {
                        self.note(format_args!("frontend {index} hears that the core is dead"));
                        let frontend = self.frontends[index].as_mut().expect("it takes");
                        frontend.ledger.gauges = (0, 0, 0.0);
                    }
                }
            }
            self.flush_requests(index);
            self.read_prompt_readers(index);
            let Some(frontend) = &mut self.frontends[index] else { return };
            frontend.taken += cost;
            if let Some(total) = frontend.ack.on_taken(now, frontend.taken) {
                self.frontend_input(index, FrontendInput::Acknowledge(total));
            }
            if slow {
                break;
            }
        }
        self.read_outputs(index);
        self.set_frontend_timer(index);
    }

    fn client_hears(&mut self, index: usize, event: FrontendEvent) {
        let now = self.now();
        let core_life = self.core.as_ref().map(|core| core.life);
        self.note(format_args!("frontend {index}: {}", name_of(&event)));
        self.check_event(index, &event);
        let frontend = self.frontends[index].as_mut().expect("it hears");
        match &event {
            FrontendEvent::Up { epoch, .. } => {
                // Requests wait here while the core does not read.
                let outbox = Outbox::new(OUTBOX_BYTES_MAX, None);
                frontend.sending.lock().unwrap().session = Some((*epoch, outbox));
                frontend.ledger.joined();
                self.joined_core[index] = core_life;
                self.up_at[index] = now;
            }
            FrontendEvent::Down { .. } => {
                frontend.sending.lock().unwrap().session = None;
                frontend.ledger.gauges = (0, 0, 0.0);
            }
            _ => {}
        }
        let frontend = self.frontends[index].as_mut().expect("it hears");
        frontend.client.event(event);
    }

    /// What the client has queued goes out.
    pub fn flush_requests(&mut self, index: usize) {
        loop {
            let Some(frontend) = &mut self.frontends[index] else { return };
            let mut sending = frontend.sending.lock().unwrap();
            let over = sending.over;
            let Some((epoch, outbox)) = &mut sending.session else { return };
            let Some(input) = frontend.input.filter(|_| *epoch > over && *epoch == frontend.epoch)
            else {
                // The socket has lost its peer: the writer closes the outbox.
                sending.over = over.max(*epoch);
                return;
            };
            let Some(frames) = outbox.pop() else { return };
            drop(sending);
            let kind = frames[0].first().copied().unwrap_or(255);
            let bytes: usize = frames.iter().map(Bytes::len).sum();
            self.note(format_args!("frontend {index} -> core: message {kind}, {bytes} bytes"));
            self.send(input, Side::Core, Parcel::Message(frames));
        }
    }

    fn frontend_input(&mut self, index: usize, input: FrontendInput) {
        let now = self.clock.now();
        let Some(frontend) = &mut self.frontends[index] else { return };
        let mut closed = false;
        for action in frontend.rendezvous.handle(now, input) {
            let frontend = self.frontends[index].as_mut().expect("it acts");
            match action {
                FrontendAction::Send(message) => {
                    let control = frontend.control;
                    self.note(format_args!("frontend {index} says {message:?}"));
                    if let Some(conn) = control {
                        let parcel = Parcel::Message(vec![message.encode()]);
                        self.send_control(conn, Side::Core, parcel);
                    }
                }
                FrontendAction::SendInit { .. } | FrontendAction::Waiting => {
                    unreachable!("it joins")
                }
                FrontendAction::Up { ready, client_index, epoch, engine_index } => {
                    let event = FrontendEvent::Up { ready, client_index, epoch, engine_index };
                    frontend.deliveries.push_back(Delivery::Event(event));
                }
                FrontendAction::Hung { silent_for } => {
                    let event = FrontendEvent::Hung { silent_for };
                    frontend.deliveries.push_back(Delivery::Event(event));
                }
                // A hang that is over before it was told is not told.
                FrontendAction::Resumed => match frontend.deliveries.back() {
                    Some(Delivery::Event(FrontendEvent::Hung { .. })) => {
                        frontend.deliveries.pop_back();
                    }
                    _ => frontend.deliveries.push_back(Delivery::Event(FrontendEvent::Resumed)),
                },
                FrontendAction::Stopping => {
                    frontend.deliveries.push_back(Delivery::Event(FrontendEvent::Stopping));
                }
                FrontendAction::Down { reason } => {
                    frontend.sending.lock().unwrap().over = frontend.epoch;
                    let event = FrontendEvent::Down { reason };
                    frontend.deliveries.push_back(Delivery::Event(event));
                }
                FrontendAction::Close => closed = true,
            }
        }
        if closed {
            let frontend = self.frontends[index].as_mut().expect("it closes");
            let sockets = [&mut frontend.control, &mut frontend.input, &mut frontend.output];
            let conns: Vec<Conn> = sockets.into_iter().filter_map(Option::take).collect();
            for conn in conns {
                self.hang_up(conn, Side::Frontend);
            }
            self.next_epoch(index);
        }
        self.wake_taker(index);
        self.set_frontend_timer(index);
    }

    pub fn set_frontend_timer(&mut self, index: usize) {
        let Some(frontend) = &mut self.frontends[index] else { return };
        let mut due = frontend.next_second;
        if frontend.open {
            due = due.min(frontend.rendezvous.next_tick());
            due = frontend.ack.due().map_or(due, |ack| due.min(ack));
        }
        let due = due.nanos();
        if frontend.timer_at.is_none_or(|at| due < at) {
            frontend.timer_at = Some(due);
            let life = frontend.life;
            self.schedule_at(due, Event::FrontendTimer(index, life, due));
        }
    }

    pub fn frontend_timer(&mut self, index: usize, at: u64) {
        let now = self.clock.now();
        let Some(frontend) = &mut self.frontends[index] else { return };
        if frontend.timer_at != Some(at) {
            return;
        }
        frontend.timer_at = None;
        if now >= frontend.next_second {
            frontend.next_second = now + SECOND;
            frontend.client.tick();
            self.flush_requests(index);
            self.read_prompt_readers(index);
        }
        let Some(frontend) = &mut self.frontends[index] else { return };
        if frontend.open {
            if let Some(total) = frontend.ack.on_taken(now, frontend.taken) {
                self.frontend_input(index, FrontendInput::Acknowledge(total));
            }
            let due = |frontend: &FrontendProcess| now >= frontend.rendezvous.next_tick();
            if self.frontends[index].as_ref().is_some_and(due) {
                self.frontend_input(index, FrontendInput::Tick);
            }
        }
        self.set_frontend_timer(index);
    }
}

fn name_of(event: &FrontendEvent) -> String {
    match event {
        FrontendEvent::Up { client_index, epoch, .. } => {
            format!("up as client {client_index}, epoch {epoch:x}")
        }
        FrontendEvent::Message { .. } => "a message".into(),
        FrontendEvent::Waiting => "waiting".into(),
        FrontendEvent::Hung { silent_for } => format!("hung for {silent_for:?}"),
        FrontendEvent::Resumed => "resumed".into(),
        FrontendEvent::Stopping => "stopping".into(),
        FrontendEvent::Down { reason } => format!("down: {reason}"),
    }
}
