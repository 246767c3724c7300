//! A handshake socket of vLLM's for several frontends: whoever owns it lists their pairs to the
//! core that dials in, and is no frontend itself.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{oneshot, watch};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::guard::{CONTROL_CONNECTIONS_MAX, Gate, Limits};
use super::listen::{self, Bound};
use super::pair::engine_index_of;
use super::thread::{self, Thread};
use super::{Address, ListedPairs, TransportError};
use crate::protocol::{EngineHello, HandshakeInit, HelloStatus};

/// A core's INIT is on its way when the socket is closed.
const LINGER: Duration = Duration::from_secs(1);

/// Answers cores that dial in, as long as it lives.
///
/// A core that says HELLO is told the pairs once [`HandshakeDesk::let_in`] says so. The latest to
/// ask is the one that is answered: engines of the same index cannot be told apart, and one that
/// asks again has begun anew.
pub struct HandshakeDesk {
    address: Address,
    open: watch::Sender<bool>,
    _thread: Thread,
}

impl HandshakeDesk {
    /// Binds `address`, to list `pairs` there.
    ///
    /// # Errors
    /// When the address cannot be had.
    pub async fn bind(address: &Address, pairs: &ListedPairs) -> Result<Self, TransportError> {
        let bound = listen::bind(address, Limits::CONTROL, CONTROL_CONNECTIONS_MAX)?;
        let address = bound.address.clone();
        let (inputs, outputs) = pairs.as_told().unzip();
        let init = HandshakeInit { inputs, outputs, ..HandshakeInit::default() }.encode();
        let (open, opened) = watch::channel(false);
        let (listening, is_listening) = oneshot::channel();
        let at = address.to_string();
        let thread = Thread::start("pawl-handshake", move |mut wishes| {
            let Ok(runtime) = thread::runtime() else { return };
            thread::run_on(runtime, async {
                let mut router = RouterSocket::new();
                let Bound { listener, file, gate, .. } = bound;
                let bound = async {
                    router.bind_listener(listener).await.map_err(std::io::Error::other)?;
                    gate.map(Gate::open).transpose()
                };
                let gate = match bound.await {
                    Ok(gate) => {
                        let _ = listening.send(Ok(()));
                        gate
                    }
                    Err(error) => {
                        let _ = listening.send(Err(error));
                        return;
                    }
                };
                tokio::select! {
                    () = answer(&mut router, init, opened) => {}
                    _ = wishes.changed() => {}
                }
                drop((router, gate));
                thread::writers_done(LINGER).await;
                drop(file);
            });
        })?;
        match is_listening.await {
            Ok(Ok(())) => Ok(Self { address, open, _thread: thread }),
            Ok(Err(cause)) => Err(TransportError::Bind { address: at, cause }),
            Err(_) => {
                let cause = std::io::Error::other("its thread has ended");
                Err(TransportError::Bind { address: at, cause })
            }
        }
    }

    /// Where cores dial: with the port that was chosen.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Whether a core may come now: all the pairs are bound, and none has one. A core that asks
    /// while it may not is answered when it may.
    pub fn let_in(&self, may_come: bool) {
        self.open.send_if_modified(|open| std::mem::replace(open, may_come) != may_come);
    }
}

async fn answer(router: &mut RouterSocket, init: Bytes, mut open: watch::Receiver<bool>) {
    // At most one: the latest HELLO.
    let mut waiting: Option<Bytes> = None;
    loop {
        if *open.borrow_and_update()
            && let Some(peer) = waiting.take()
        {
            let mut message = ZmqMessage::from(init.clone());
            message.push_front(peer);
            // A core that has gone meanwhile will ask again.
            let _ = router.send(message).await;
        }
        tokio::select! {
            message = router.recv() => {
                let Ok(message) = message else { continue };
                let frames = message.into_vec();
                let [peer, hello] = &frames[..] else { continue };
                let Some(engine_index) = engine_index_of(peer) else { continue };
                match EngineHello::decode(hello) {
                    Ok(EngineHello { status: HelloStatus::Hello, .. }) => {
                        tracing::info!(engine_index, "a core dials in");
                        waiting = Some(peer.clone());
                    }
                    Ok(EngineHello { status: HelloStatus::Ready, .. }) => {
                        tracing::info!(engine_index, "the core has connected");
                    }
                    Err(error) => tracing::warn!(%error, "handshake message dropped"),
                }
            }
            changed = open.changed() => if changed.is_err() {
                return;
            },
        }
    }
}
