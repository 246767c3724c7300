//! Taps: onlookers that are sent copies of what passes between a core and its frontends.
//!
//! [`Taps`] is what a process does for its taps, [`TapServer`] where a frontend lets them join
//! (a core has its control socket), and [`Tap`] the onlooker's own end.
//!
//! A tap joins like a frontend and is sent records over a link of its own, with its own credit.
//! Without taps a message costs one load of a counter. With one it costs a small header, a
//! reference to each of its frames, and a push into the tap's outbox. A tap that does not keep up
//! finds its outbox full and misses messages, of which it is told the number: nobody waits for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::core_endpoint::{CoreEndpoint, CoreEndpointConfig};
use super::frontend_endpoint::{CoreAt, FrontendEndpoint, FrontendEndpointConfig, FrontendEvent};
use super::outbox::SharedOutbox;
use super::thread::{self, Thread};
use super::{Address, ClientId, SendRefused, SocketDir, TransportError};
use crate::clock::Clock;
use crate::protocol::DecodeError;
use crate::rendezvous::message::Role;
use crate::tap::{Passed, TapRecord};

/// Bytes that may wait for a tap behind its window; beyond it the tap misses messages.
pub(super) const OUTBOX_BYTES_MAX: u64 = 8 << 20;

/// The taps of one process, and whom they watch. Clones are the same taps.
#[derive(Clone)]
pub(super) struct Taps(Arc<TapsInner>);

struct TapsInner {
    clock: Arc<dyn Clock>,
    /// How many taps there are: all that is looked at while it is 0.
    watching: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    // Bounded by the rendezvous, which refuses more taps, and more clients.
    taps: BTreeMap<ClientId, TapLink>,
    members: BTreeMap<u32, Member>,
}

struct TapLink {
    outbox: SharedOutbox,
    missed: u64,
}

struct Member {
    epoch: Option<u64>,
    text: String,
}

impl TapLink {
    fn send(&mut self, mut record: TapRecord) {
        record.missed = self.missed;
        if self.outbox.push(record.to_frames()) == Err(SendRefused::Full) {
            self.missed += 1;
        }
    }
}

impl Taps {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        let (watching, state) = (AtomicUsize::new(0), Mutex::default());
        Self(Arc::new(TapsInner { clock, watching, state }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("no code panics while it holds the taps")
    }

    fn record(&self, client: u32, epoch: Option<u64>, passed: Passed) -> TapRecord {
        TapRecord { at: self.0.clock.now().seconds(), client, epoch, missed: 0, passed }
    }

    /// Whether anybody watches. A tap that joins at this very moment sees the next message.
    pub(super) fn any(&self) -> bool {
        self.0.watching.load(Ordering::Relaxed) > 0
    }

    /// Shows every tap what passed; `passed` is asked for only if there is one.
    pub(super) fn offer(&self, client: u32, passed: impl FnOnce() -> Passed) {
        if !self.any() {
            return;
        }
        let mut state = self.state();
        let epoch = state.members.get(&client).and_then(|member| member.epoch);
        let record = self.record(client, epoch, passed());
        for tap in state.taps.values_mut() {
            tap.send(record.clone());
        }
    }

    pub(super) fn member_joined(&self, client: u32, epoch: Option<u64>, text: &str) {
        self.state().members.insert(client, Member { epoch, text: text.to_owned() });
        self.offer(client, || Passed::Joined(text.to_owned()));
    }

    pub(super) fn member_left(&self, client: u32, reason: &str) {
        self.offer(client, || Passed::Left(reason.to_owned()));
        self.state().members.remove(&client);
    }

    /// A tap has joined: it is told who is there, and then what passes.
    pub(super) fn add(&self, tap: ClientId, outbox: SharedOutbox) {
        let mut state = self.state();
        let mut link = TapLink { outbox, missed: 0 };
        for (client, member) in &state.members {
            link.send(self.record(*client, member.epoch, Passed::Joined(member.text.clone())));
        }
        state.taps.insert(tap, link);
        self.0.watching.store(state.taps.len(), Ordering::Relaxed);
    }

    pub(super) fn remove(&self, tap: ClientId) {
        let mut state = self.state();
        state.taps.remove(&tap);
        self.0.watching.store(state.taps.len(), Ordering::Relaxed);
    }
}

/// The socket's name in the process's folder.
const SOCKET: &str = "taps";

/// Where the taps of a frontend join. Dropping it sends them away.
pub(super) struct TapServer {
    thread: Option<Thread>,
    address: Address,
    // Its folder must not go before its socket.
    _dir: Arc<SocketDir>,
}

impl TapServer {
    /// Listens in `dir`; what taps are shown goes in through `taps`.
    pub(super) async fn start(dir: Arc<SocketDir>, taps: Taps) -> Result<Self, TransportError> {
        let address = dir.address(SOCKET)?;
        let (bound, is_bound) = oneshot::channel();
        let config = CoreEndpointConfig {
            clock: Arc::clone(&taps.0.clock),
            ..CoreEndpointConfig::new(vec![address.clone()])
        };
        let runtime = thread::runtime().map_err(TransportError::Thread)?;
        let thread = Thread::start("pawl-taps", move |mut wishes| {
            thread::run_on(runtime, async move {
                let mut endpoint = match CoreEndpoint::bind_for_taps(config, taps) {
                    Ok(endpoint) => endpoint,
                    Err(error) => return drop(bound.send(Err(error))),
                };
                // A tap reads no ready response.
                endpoint.set_ready(vec![Bytes::new()]);
                let _ = bound.send(Ok(()));
                let serve = async {
                    loop {
                        // Frontends are refused, so there is nothing to do about any event.
                        endpoint.next().await;
                    }
                };
                tokio::select! {
                    () = serve => {}
                    _ = wishes.changed() => {}
                }
            });
        })?;
        let stopped = || TransportError::Thread(std::io::Error::other("it ended at once"));
        is_bound.await.map_err(|_| stopped())??;
        Ok(Self { thread: Some(thread), address, _dir: dir })
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for TapServer {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop_and_join();
        }
    }
}

/// A place beside the wire.
pub struct Tap {
    endpoint: FrontendEndpoint,
}

/// What happened at a tap.
#[derive(Debug)]
pub enum TapEvent {
    /// Messages are copied from now on.
    Up,
    /// A message that passed.
    Record(Result<TapRecord, DecodeError>),
    /// The process is gone, or refuses; the tap goes on trying.
    Down {
        /// For people.
        reason: String,
    },
}

impl Tap {
    /// Looks for the process that serves taps at `address`, and goes on until closed. A core does
    /// so where it listens, a frontend at the address that it logs.
    ///
    /// # Errors
    /// When the tap's own sockets cannot be made.
    pub async fn start(address: Address) -> Result<Self, TransportError> {
        let config = FrontendEndpointConfig {
            role: Role::Tap,
            ..FrontendEndpointConfig::new(CoreAt::Join(address))
        };
        let (endpoint, _sender) = FrontendEndpoint::start(config).await?;
        Ok(Self { endpoint })
    }

    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> TapEvent {
        loop {
            match self.endpoint.next().await {
                FrontendEvent::Up { .. } => return TapEvent::Up,
                FrontendEvent::Message { frames } => {
                    return TapEvent::Record(TapRecord::from_frames(&frames));
                }
                FrontendEvent::Down { reason } => return TapEvent::Down { reason },
                // Messages stop meanwhile, and come after.
                FrontendEvent::Waiting
                | FrontendEvent::Hung { .. }
                | FrontendEvent::Resumed
                | FrontendEvent::Stopping => {}
            }
        }
    }

    /// Leaves.
    pub async fn close(self) {
        self.endpoint.leave(Duration::from_secs(1)).await;
    }
}
