//! The core's end: who is there, what they ask, and what is sent to them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::control_socket::{ControlEvent, ControlSocket};
use super::dialer::{DialCommand, DialEvent, Dialer};
use super::guard::{CONTROL_CONNECTIONS_MAX, Limits};
use super::link::{self, LinkEvent, LinkPlan};
use super::outbox::SharedOutbox;
use super::tap::Taps;
use super::thread::Thread;
use super::{Address, SendRefused, TransportError, listen};
use crate::clock::{Clock, SystemClock};
use crate::protocol::HandshakeInit;
use crate::rendezvous::message::Role;
use crate::rendezvous::{
    ClientId, CoreAction, CoreInput, CoreRendezvous, HeartbeatConfig, LeaveReason,
    OUTBOX_BYTES_MAX, Outbox, Peer, WINDOW_BYTES,
};
use crate::tap::Passed;

/// Messages from all links that wait for [`CoreEndpoint::next`]. When full, links stop reading, and
/// the frontends' sends wait.
const LINK_EVENTS_MAX: usize = 1024;
/// A handshake has at most two things to tell before it is answered; when full, it waits.
const DIAL_EVENTS_MAX: usize = 64;

/// The notice vLLM's frontends know: nothing comes after it.
const ENGINE_CORE_DEAD: &[u8] = b"ENGINE_CORE_DEAD";

/// Where a core listens and whom it dials.
pub struct CoreEndpointConfig {
    /// Where frontends may join.
    pub listen: Vec<Address>,
    /// Handshake sockets of vLLM frontends.
    pub handshake: Vec<Address>,
    /// Which engine this is; two bytes on the wire.
    pub engine_index: u32,
    /// How long silence is borne.
    pub heartbeat: HeartbeatConfig,
    /// The clock.
    pub clock: Arc<dyn Clock>,
}

impl CoreEndpointConfig {
    /// Engine 0 listening at `listen`, with the usual figures.
    #[must_use]
    pub fn new(listen: Vec<Address>) -> Self {
        Self {
            listen,
            handshake: Vec::new(),
            engine_index: 0,
            heartbeat: HeartbeatConfig::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// What happened at the core's end.
#[derive(Clone, Debug, PartialEq)]
pub enum CoreEvent {
    /// A client is there and may be sent to.
    Joined {
        /// Who.
        client: ClientId,
        /// Who that is.
        peer: Peer,
    },
    /// A client is gone: its requests must be aborted. Nothing more comes from it.
    Left {
        /// Who.
        client: ClientId,
        /// Why.
        reason: LeaveReason,
    },
    /// A message of the input socket, `[type, payload, aux…]`, not decoded.
    Message {
        /// From whom.
        client: ClientId,
        /// As they came.
        frames: Vec<Bytes>,
    },
}

struct Link {
    thread: Thread,
    outbox: SharedOutbox,
    joined: bool,
    role: Role,
    /// A native frontend notices by itself that the core is gone.
    native: bool,
}

/// All clients of a core.
pub struct CoreEndpoint {
    engine_index: u32,
    clock: Arc<dyn Clock>,
    rendezvous: CoreRendezvous,
    taps: Taps,
    control: ControlSocket,
    // One per member of the rendezvous, which bounds them.
    links: BTreeMap<ClientId, Link>,
    link_events: mpsc::Receiver<LinkEvent>,
    link_sender: mpsc::Sender<LinkEvent>,
    // One per `--handshake`, in order.
    dialers: Vec<Dialer>,
    dial_events: mpsc::Receiver<DialEvent>,
    ready: Vec<Bytes>,
    // What one input led to; emptied before the next is taken.
    pending: VecDeque<CoreEvent>,
}

impl CoreEndpoint {
    /// Listens at once. Joins are held until [`CoreEndpoint::set_ready`].
    #[expect(clippy::unused_async, reason = "sockets may need the runtime to be bound")]
    pub async fn bind(config: CoreEndpointConfig) -> Result<Self, TransportError> {
        let taps = Taps::new(Arc::clone(&config.clock));
        Self::bind_with(config, taps, false)
    }

    /// An endpoint that admits nobody but taps, which are fed through `taps`.
    pub(super) fn bind_for_taps(
        config: CoreEndpointConfig,
        taps: Taps,
    ) -> Result<Self, TransportError> {
        Self::bind_with(config, taps, true)
    }

    fn bind_with(
        config: CoreEndpointConfig,
        taps: Taps,
        taps_only: bool,
    ) -> Result<Self, TransportError> {
        if config.engine_index > u32::from(u16::MAX) {
            return Err(TransportError::EngineIndex(config.engine_index));
        }
        let mut bound = Vec::new();
        for address in &config.listen {
            if !address.is_local() {
                tracing::warn!(
                    %address,
                    "the core listens beyond this machine: nothing is encrypted or authenticated; \
                     use an isolated network"
                );
            }
            bound.push(listen::bind(address, Limits::CONTROL, CONTROL_CONNECTIONS_MAX)?);
        }
        let control = ControlSocket::start(bound)?;
        let now = config.clock.now();
        let (link_sender, link_events) = mpsc::channel(LINK_EVENTS_MAX);
        let (dial_sender, dial_events) = mpsc::channel(DIAL_EVENTS_MAX);
        let mut dialers = Vec::new();
        for (dialer, address) in (0..).zip(config.handshake) {
            let events = dial_sender.clone();
            dialers.push(Dialer::start(dialer, address, config.engine_index, events)?);
        }
        let rendezvous = CoreRendezvous::new(config.engine_index, config.heartbeat, now);
        Ok(Self {
            engine_index: config.engine_index,
            rendezvous: if taps_only { rendezvous.taps_only() } else { rendezvous },
            taps,
            clock: config.clock,
            control,
            links: BTreeMap::new(),
            link_events,
            link_sender,
            dialers,
            dial_events,
            ready: Vec::new(),
            pending: VecDeque::new(),
        })
    }

    /// Where it listens, with the ports that the system chose.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        self.control.addresses()
    }

    /// From now on joins are answered, each with this encoded ready response.
    pub fn set_ready(&mut self, ready: Vec<Bytes>) {
        self.ready = ready;
        self.input(CoreInput::Ready);
    }

    /// What PONGs tell: grows with each thing the core finishes.
    pub fn set_progress(&mut self, counter: u64) {
        self.rendezvous.set_progress(counter);
    }

    /// Whether there is work, so that a standing counter means a hang.
    pub fn set_busy(&mut self, busy: bool) {
        self.rendezvous.set_busy(busy);
    }

    /// Tells every native frontend that the core stops, so that it sends no more requests. vLLM's
    /// are told by [`CoreEndpoint::broadcast_end`] at the end.
    pub fn set_stopping(&mut self) {
        self.input(CoreInput::Stopping);
    }

    /// Control messages that could not be read or made no sense.
    #[must_use]
    pub fn control_messages_ignored(&self) -> u64 {
        self.rendezvous.ignored()
    }

    /// The next event. Cancel-safe. Must be polled for joins and pings to be answered.
    pub async fn next(&mut self) -> CoreEvent {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return event;
            }
            let wait = self.rendezvous.next_tick().since(self.clock.now());
            tokio::select! {
                event = self.control.next() => match event {
                    ControlEvent::Message { from, message } => {
                        self.input(CoreInput::Control { from, message });
                    }
                    ControlEvent::Garbage => self.rendezvous.count_ignored(),
                    ControlEvent::Gone { from } => self.input(CoreInput::ControlGone { from }),
                },
                Some(event) = self.link_events.recv() => self.on_link_event(event),
                Some(event) = self.dial_events.recv() => match event {
                    DialEvent::Init { dialer, init } => {
                        let HandshakeInit { inputs, outputs, .. } = init;
                        self.input(CoreInput::Init { dialer, inputs, outputs });
                    }
                    DialEvent::Gone { dialer } => {
                        self.input(CoreInput::HandshakeGone { dialer });
                    }
                },
                () = tokio::time::sleep(wait) => self.input(CoreInput::Tick),
            }
        }
    }

    /// Sends to a client. Never blocks: what its credit does not allow waits in its outbox, and
    /// when that is full the client is cut off.
    pub fn send(&mut self, client: ClientId, frames: Vec<Bytes>) -> Result<(), SendRefused> {
        let link = self.links.get(&client).filter(|link| link.joined).ok_or(SendRefused::Down)?;
        let outbox = link.outbox.clone();
        self.taps.offer(client.0, || Passed::ToClient(frames.clone()));
        let sent = outbox.push(frames);
        if sent == Err(SendRefused::Full) {
            tracing::warn!(client = client.0, "a client does not read its outputs and is cut off");
            self.input(CoreInput::LinkDown { client, reason: LeaveReason::CutOff });
        }
        sent
    }

    /// Tells every client that the core is dead. Nothing must be sent after it.
    pub fn broadcast_dead(&mut self) {
        self.say_dead(|_| true);
    }

    /// Tells vLLM's frontends alone that nothing comes any more, of a core that ends as it was told
    /// to. They neither watch their sockets nor shake hands a second time: without the notice they
    /// would take requests for ever and answer none. Nothing must be sent after it.
    pub fn broadcast_end(&mut self) {
        self.say_dead(|native| !native);
    }

    fn say_dead(&mut self, to: impl Fn(bool) -> bool) {
        let told = |link: &Link| link.role == Role::Frontend && to(link.native);
        let clients: Vec<ClientId> =
            self.links.iter().filter(|(_, link)| told(link)).map(|(client, _)| *client).collect();
        for client in clients {
            // One that takes no more is cut off, which tells it as well.
            let _ = self.send(client, vec![Bytes::from_static(ENGINE_CORE_DEAD)]);
        }
    }

    /// Sends what waits, for at most `linger`, and closes.
    pub async fn close(mut self, linger: Duration) {
        let deadline = tokio::time::Instant::now() + linger;
        // Nobody takes events any more; a link that waits to tell one must not wait for ever.
        self.link_events.close();
        let links = std::mem::take(&mut self.links);
        for link in links.values() {
            link.thread.finish(linger);
        }
        futures::future::join_all(links.into_values().map(|link| link.thread.ended(deadline)))
            .await;
        self.control.close(deadline).await;
    }

    fn on_link_event(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Up { client } => self.input(CoreInput::LinkUp { client }),
            LinkEvent::Down { client, reason } => {
                self.input(CoreInput::LinkDown { client, reason });
            }
            // What a link had read before it was closed is of no use to anybody.
            LinkEvent::Message { client, frames } => {
                let link = self.links.get(&client).filter(|link| link.joined);
                // A tap has nothing to say.
                if link.is_some_and(|link| link.role == Role::Frontend) {
                    self.taps.offer(client.0, || Passed::ToCore(frames.clone()));
                    self.pending.push_back(CoreEvent::Message { client, frames });
                }
            }
        }
    }

    fn input(&mut self, input: CoreInput) {
        let now = self.clock.now();
        // An action may fail at once and so be an input itself.
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for action in self.rendezvous.handle(now, input) {
                inputs.extend(self.act(action));
            }
        }
    }

    fn act(&mut self, action: CoreAction) -> Option<CoreInput> {
        match action {
            CoreAction::Reply { to, message } => self.control.reply(to, message.encode()),
            CoreAction::OpenLink { client, input, output, acknowledges, role } => {
                let window = acknowledges.then_some(WINDOW_BYTES);
                let bytes_max = match role {
                    Role::Frontend => OUTBOX_BYTES_MAX,
                    Role::Tap => super::tap::OUTBOX_BYTES_MAX,
                };
                let outbox = SharedOutbox::new(Outbox::new(bytes_max, window));
                let (engine_index, ready) = (self.engine_index, self.ready.clone());
                let plan = LinkPlan { client, engine_index, input, output, ready };
                match link::start(plan, outbox.clone(), self.link_sender.clone()) {
                    Ok(thread) => {
                        let (joined, native) = (false, acknowledges);
                        self.links.insert(client, Link { thread, outbox, joined, role, native });
                    }
                    Err(error) => {
                        let reason = LeaveReason::Unreachable(error.to_string());
                        return Some(CoreInput::LinkDown { client, reason });
                    }
                }
            }
            CoreAction::CloseLink { client } => {
                self.links.remove(&client);
                self.taps.remove(client);
            }
            CoreAction::Joined { client, peer, role } => {
                let link = self.links.get_mut(&client)?;
                link.joined = true;
                tracing::info!(client = client.0, %peer, "client joined");
                match role {
                    Role::Frontend => {
                        self.taps.member_joined(client.0, peer.epoch, &peer.text);
                        self.pending.push_back(CoreEvent::Joined { client, peer });
                    }
                    Role::Tap => self.taps.add(client, link.outbox.clone()),
                }
            }
            CoreAction::Left { client, reason, role } => {
                tracing::info!(client = client.0, %reason, "client left");
                if role == Role::Frontend {
                    self.taps.member_left(client.0, &reason.to_string());
                    self.pending.push_back(CoreEvent::Left { client, reason });
                }
            }
            CoreAction::Acknowledged { client, bytes } => {
                if let Some(link) = self.links.get(&client) {
                    link.outbox.acknowledge(bytes);
                }
            }
            CoreAction::HandshakeDone { dialer } => self.dial(dialer, DialCommand::Done),
            CoreAction::HandshakeAgain { dialer } => self.dial(dialer, DialCommand::Again),
        }
        None
    }

    fn dial(&self, dialer: u32, command: DialCommand) {
        if let Some(dialer) = self.dialers.get(dialer as usize) {
            dialer.tell(command);
        }
    }
}
