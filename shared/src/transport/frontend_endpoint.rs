//! A frontend's end: joins, tells what the core says, and joins again when the core is gone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, mpsc};

use super::epoch::{self, Ended};
use super::listed::ListedPair;
use super::outbox::SharedOutbox;
use super::tap::{TapServer, Taps};
use super::thread::{self, Thread, Wishes};
use super::{Address, SendRefused, SocketDir, TransportError};
use crate::clock::{Clock, SystemClock};
use crate::rendezvous::message::Role;
use crate::rendezvous::{
    AckPolicy, FrontendAction, FrontendInput, FrontendRendezvous, HeartbeatConfig, WINDOW_BYTES,
};
use crate::tap::Passed;

/// Messages that wait for [`FrontendEndpoint::next`]. When full the output socket is not read, and
/// the core keeps what its credit does not cover.
const DELIVERIES_MAX: usize = 1024;

/// How a frontend and a core meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoreAt {
    /// The core listens there.
    Join(Address),
    /// A core dials this handshake socket of ours.
    AwaitCore(Address),
    /// A core dials our supervisor's handshake socket, which lists this pair of ours.
    Listed(ListedPair),
}

/// What a frontend needs to have a core.
pub struct FrontendEndpointConfig {
    /// How they meet.
    pub core: CoreAt,
    /// What is wanted of a core that is joined.
    pub role: Role,
    /// Where unix sockets go; one of its own when none is given.
    pub socket_dir: Option<Arc<SocketDir>>,
    /// The host the core finds us at, if not the one that faces it.
    pub advertise: Option<String>,
    /// Whether taps may join here to see what passes, in a socket of its own in the folder.
    pub taps: bool,
    /// How long silence is borne.
    pub heartbeat: HeartbeatConfig,
    /// The clock.
    pub clock: Arc<dyn Clock>,
}

impl FrontendEndpointConfig {
    /// The usual figures.
    #[must_use]
    pub fn new(core: CoreAt) -> Self {
        Self {
            core,
            role: Role::Frontend,
            socket_dir: None,
            advertise: None,
            taps: false,
            heartbeat: HeartbeatConfig::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// What happened at a frontend's end.
#[derive(Clone, Debug, PartialEq)]
pub enum FrontendEvent {
    /// A core serves us. From now on [`FrontendSender::try_send`] works.
    Up {
        /// The encoded ready response.
        ready: Bytes,
        /// The index the core gave us.
        client_index: u32,
        /// Unlike any other epoch of any frontend: wire ids carry it. Fits 53 bits.
        epoch: u64,
        /// Which engine.
        engine_index: u32,
    },
    /// A message of the output socket, not decoded.
    Message {
        /// As they came.
        frames: Vec<Bytes>,
    },
    /// The pair is bound and no core has it: a core may be told of it now. Only of a
    /// [`CoreAt::Listed`] pair.
    Waiting,
    /// The core is silent or makes no progress; it may come back.
    Hung {
        /// For how long.
        silent_for: Duration,
    },
    /// The core is back, nothing is lost.
    Resumed,
    /// The core stops: what is open may finish, what is asked from now on is refused.
    Stopping,
    /// The epoch is over, and every request of it is lost. Also told when a join is refused. The
    /// endpoint goes on trying.
    Down {
        /// For people.
        reason: String,
    },
}

/// What goes from the sockets' thread to the endpoint.
pub(super) enum Delivery {
    Up { event: FrontendEvent, outbox: SharedOutbox, taken: Taken },
    Event(FrontendEvent),
    Message { frames: Vec<Bytes>, cost: u64 },
}

/// Bytes that the user has taken in one epoch.
#[derive(Clone, Default)]
pub(super) struct Taken(Arc<TakenInner>);

#[derive(Default)]
struct TakenInner {
    total: AtomicU64,
    /// The thread has been woken and has not yet looked at what is owed.
    told: AtomicBool,
    changed: Notify,
}

impl Taken {
    fn add(&self, cost: u64) {
        const STEP: u64 = WINDOW_BYTES / 8;
        let before = self.0.total.fetch_add(cost, Ordering::SeqCst);
        // The thread has a timer for what is owed: it is woken for the first bytes since it
        // acknowledged, and then now and then, not for each message.
        let first = !self.0.told.swap(true, Ordering::SeqCst);
        if first || (before + cost) / STEP != before / STEP {
            self.0.changed.notify_one();
        }
    }

    pub(super) async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

/// What outlives an epoch on the sockets' thread.
pub(super) struct Driver {
    pub(super) machine: FrontendRendezvous,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) socket_dir: Option<Arc<SocketDir>>,
    pub(super) advertise: Option<String>,
    pub(super) deliveries: mpsc::Sender<Delivery>,
    pub(super) taken: Taken,
    pub(super) ack: AckPolicy,
}

impl Driver {
    pub(super) fn handle(&mut self, input: FrontendInput) -> Vec<FrontendAction> {
        let now = self.clock.now();
        self.machine.handle(now, input)
    }

    pub(super) fn begin_epoch(&mut self) {
        self.taken = Taken::default();
        self.ack = AckPolicy::default();
    }

    /// The bytes to acknowledge now, if any.
    pub(super) fn due_acknowledgement(&mut self) -> Option<u64> {
        let taken = self.taken.0.total.load(Ordering::SeqCst);
        let acknowledge = self.ack.on_taken(self.clock.now(), taken)?;
        self.taken.0.told.store(false, Ordering::SeqCst);
        // Bytes taken between the two lines above woke nobody.
        if self.taken.0.total.load(Ordering::SeqCst) != taken {
            self.taken.0.changed.notify_one();
        }
        Some(acknowledge)
    }

    /// The host in the address becomes the advertised one.
    pub(super) fn advertised(&self, address: Address) -> Address {
        match (address, &self.advertise) {
            (Address::Tcp { port, .. }, Some(host)) => Address::Tcp { host: host.clone(), port },
            (address, _) => address,
        }
    }

    /// Waits until the endpoint has room; `false` if it is wanted no more.
    pub(super) async fn deliver(&self, delivery: Delivery, wishes: &mut Wishes) -> bool {
        tokio::select! {
            sent = self.deliveries.send(delivery) => sent.is_ok(),
            _ = wishes.changed() => false,
        }
    }

    fn run(mut self, core: &CoreAt, mut wishes: Wishes) {
        while let Some((epoch, wait)) = self.machine.next_open(self.clock.now()) {
            // A fresh runtime per epoch: dropping it frees all that the old sockets held.
            let runtime = match thread::runtime() {
                Ok(runtime) => runtime,
                Err(error) => {
                    tracing::error!(%error, "no runtime for sockets, will try again");
                    std::thread::sleep(Duration::from_secs(1));
                    continue;
                }
            };
            self.begin_epoch();
            let mut ended = Ended::Stopped;
            thread::run_on(runtime, async {
                ended = epoch::run(&mut self, core, epoch, wait, &mut wishes).await;
            });
            if ended == Ended::Stopped {
                return;
            }
        }
    }
}

/// A frontend's link to its core, through all its epochs.
pub struct FrontendEndpoint {
    deliveries: mpsc::Receiver<Delivery>,
    taken: Taken,
    /// Cost of the message handed out last: it counts as taken when the next one is asked for.
    owed: u64,
    sender: FrontendSender,
    thread: Thread,
    taps: Option<TapServer>,
}

impl FrontendEndpoint {
    /// Starts to look for the core, and goes on until dropped or [`FrontendEndpoint::leave`].
    pub async fn start(
        config: FrontendEndpointConfig,
    ) -> Result<(Self, FrontendSender), TransportError> {
        let address = match &config.core {
            CoreAt::Join(address) | CoreAt::AwaitCore(address) => address,
            CoreAt::Listed(pair) => &pair.input,
        };
        let socket_dir = match (config.socket_dir, address) {
            (None, Address::Ipc(_)) => Some(Arc::new(SocketDir::create_default()?)),
            (None, _) if config.taps => Some(Arc::new(SocketDir::create_default()?)),
            (dir, _) => dir,
        };
        let taps = Taps::new(Arc::clone(&config.clock));
        let tap_server = match &socket_dir {
            Some(dir) if config.taps => Some(TapServer::start(dir.clone(), taps.clone()).await?),
            _ => None,
        };
        let taps_at = tap_server.as_ref().map(|server| server.address().to_string());
        let id = uuid::Uuid::new_v4();
        // 32 random bits keep the epochs of different processes apart, 20 count within one.
        let epoch_base = (id.as_u128() as u64 & 0xffff_ffff) << 20;
        let (delivery_sender, deliveries) = mpsc::channel(DELIVERIES_MAX);
        let now = config.clock.now();
        let machine = match &config.core {
            CoreAt::Join(_) => {
                let (instance, pid) = (id.simple().to_string(), std::process::id());
                FrontendRendezvous::new(instance, pid, epoch_base, config.heartbeat, now)
                    .with_role(config.role)
                    .with_taps(taps_at)
            }
            CoreAt::AwaitCore(_) => FrontendRendezvous::awaiting(epoch_base, config.heartbeat, now),
            CoreAt::Listed(ListedPair { client_index, .. }) => {
                FrontendRendezvous::listed(*client_index, epoch_base, config.heartbeat, now)
            }
        };
        let driver = Driver {
            machine,
            clock: config.clock,
            socket_dir,
            advertise: config.advertise,
            deliveries: delivery_sender,
            taken: Taken::default(),
            ack: AckPolicy::default(),
        };
        let core = config.core;
        let thread = Thread::start("pawl-frontend", move |wishes| driver.run(&core, wishes))?;
        let shared = SenderShared { session: Mutex::default(), taps };
        let sender = FrontendSender(Arc::new(shared));
        let endpoint = Self {
            deliveries,
            taken: Taken::default(),
            owed: 0,
            sender: sender.clone(),
            thread,
            taps: tap_server,
        };
        Ok((endpoint, sender))
    }

    /// Where taps may join to see what passes here.
    #[must_use]
    pub fn taps_address(&self) -> Option<&Address> {
        self.taps.as_ref().map(TapServer::address)
    }

    /// The next event. Cancel-safe. Asking for it says that the message before has been handled.
    pub async fn next(&mut self) -> FrontendEvent {
        let owed = std::mem::take(&mut self.owed);
        if owed > 0 {
            self.taken.add(owed);
        }
        let Some(delivery) = self.deliveries.recv().await else {
            // The thread ends only when this endpoint wants it to.
            return std::future::pending().await;
        };
        match delivery {
            Delivery::Message { frames, cost } => {
                self.owed = cost;
                self.sender.show(&frames);
                FrontendEvent::Message { frames }
            }
            Delivery::Up { event, outbox, taken } => {
                // Only now: a request that is sent belongs to the epoch its sender has seen.
                if let FrontendEvent::Up { client_index, epoch, engine_index, .. } = &event {
                    let client = *client_index;
                    let text = format!("engine-core {engine_index}");
                    self.sender.0.taps.member_joined(client, Some(*epoch), &text);
                    self.sender.set(Some(Session { client, outbox }));
                }
                self.taken = taken;
                event
            }
            Delivery::Event(event) => {
                if let FrontendEvent::Down { reason } = &event
                    && let Some(session) = self.sender.set(None)
                {
                    self.sender.0.taps.member_left(session.client, reason);
                }
                event
            }
        }
    }

    /// Says LEAVE, waits for the answer at most until `deadline` is over, and closes.
    pub async fn leave(mut self, deadline: Duration) {
        self.sender.set(None);
        self.deliveries.close();
        self.thread.finish(deadline);
        self.thread.ended(tokio::time::Instant::now() + deadline).await;
    }
}

/// Sends requests to the core of the current epoch, in order. Clones share one queue.
#[derive(Clone)]
pub struct FrontendSender(Arc<SenderShared>);

struct SenderShared {
    session: Mutex<Option<Session>>,
    taps: Taps,
}

/// The core that serves us.
struct Session {
    client: u32,
    outbox: SharedOutbox,
}

impl FrontendSender {
    fn session(&self) -> MutexGuard<'_, Option<Session>> {
        self.0.session.lock().expect("no code panics while it holds the session")
    }

    /// The session that was before.
    fn set(&self, session: Option<Session>) -> Option<Session> {
        std::mem::replace(&mut self.session(), session)
    }

    /// A message from the core, for taps.
    fn show(&self, frames: &[Bytes]) {
        if !self.0.taps.any() {
            return;
        }
        let client = self.session().as_ref().map(|session| session.client);
        if let Some(client) = client {
            self.0.taps.offer(client, || Passed::ToClient(frames.to_vec()));
        }
    }

    /// Queues `[type, payload, aux…]`. Never blocks: refused when there is no core, or when 64 MiB
    /// wait because the core does not read. Taken is not delivered: a link may be lost.
    pub fn try_send(&self, frames: Vec<Bytes>) -> Result<(), SendRefused> {
        // Held to the end, so that taps see messages in the order in which they go out.
        let session = self.session();
        let Session { client, outbox } = session.as_ref().ok_or(SendRefused::Down)?;
        let seen = self.0.taps.any().then(|| frames.clone());
        outbox.push(frames)?;
        if let Some(frames) = seen {
            self.0.taps.offer(*client, || Passed::ToCore(frames));
        }
        Ok(())
    }
}
