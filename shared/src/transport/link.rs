//! The core's link to one client: a DEALER that reads requests, a PUSH that writes outputs.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc as monitor;
use tokio::sync::mpsc;
use zeromq::util::PeerIdentity;
use zeromq::{
    DealerRecvHalf, DealerSocket, PushSocket, Socket, SocketEvent, SocketOptions, SocketRecv,
    SocketSend, ZmqError, ZmqMessage,
};

use super::guard::{self, Limits};
use super::outbox::SharedOutbox;
use super::thread::{self, Thread, Wish};
use super::{Address, TransportError};
use crate::rendezvous::{ClientId, LeaveReason};

/// A client's sockets are bound before the core hears of them, so this is ample.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The crate blocks a send once it holds 100,000 messages. A client that has no credit is cut off
/// when one waits this long.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// What links tell the endpoint.
#[derive(Debug)]
pub(super) enum LinkEvent {
    Up { client: ClientId },
    Down { client: ClientId, reason: LeaveReason },
    Message { client: ClientId, frames: Vec<Bytes> },
}

/// Where and as whom to connect.
#[derive(Debug)]
pub(super) struct LinkPlan {
    pub(super) client: ClientId,
    pub(super) engine_index: u32,
    pub(super) input: String,
    pub(super) output: String,
    pub(super) ready: Vec<Bytes>,
}

/// The identity a core shows on each of its sockets.
pub(super) fn engine_identity(engine_index: u32) -> Bytes {
    // A larger index has been refused when the endpoint was bound.
    Bytes::copy_from_slice(&(engine_index as u16).to_le_bytes())
}

pub(super) fn socket_options(identity: Option<Bytes>, connect_timeout: Duration) -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(connect_timeout);
    if let Some(identity) = identity.and_then(|bytes| PeerIdentity::try_from(bytes).ok()) {
        options.peer_identity(identity);
    }
    options
}

/// Starts a link. It tells `events` about itself until its end; `outbox` feeds it.
pub(super) fn start(
    plan: LinkPlan,
    outbox: SharedOutbox,
    events: mpsc::Sender<LinkEvent>,
) -> Result<Thread, TransportError> {
    Thread::start(&format!("pawl-link-{}", plan.client.0), move |mut wishes| {
        let client = plan.client;
        let runtime = match thread::runtime() {
            Ok(runtime) => runtime,
            Err(error) => {
                let reason = LeaveReason::Unreachable(error.to_string());
                let _ = events.blocking_send(LinkEvent::Down { client, reason });
                return;
            }
        };
        thread::run_on(runtime, async move {
            let served = serve(plan, &outbox, &events);
            tokio::pin!(served);
            let reason = tokio::select! {
                reason = &mut served => reason,
                wish = wishes.changed() => {
                    if let Wish::Finish(linger) = wish {
                        outbox.finish();
                        tokio::select! {
                            _ = tokio::time::timeout(linger, &mut served) => {}
                            () = wishes.stopped() => {}
                        }
                    }
                    return;
                }
            };
            outbox.close();
            let Some(reason) = reason else { return };
            tokio::select! {
                _ = events.send(LinkEvent::Down { client, reason }) => {}
                () = wishes.stopped() => {}
            }
        });
    })
}

/// Serves the link until it is lost (with the reason), or until the outbox is finished and flushed.
async fn serve(
    plan: LinkPlan,
    outbox: &SharedOutbox,
    events: &mpsc::Sender<LinkEvent>,
) -> Option<LeaveReason> {
    let identity = engine_identity(plan.engine_index);
    let options = || socket_options(Some(identity.clone()), CONNECT_TIMEOUT);
    let mut dealer = DealerSocket::with_options(options());
    let mut push = PushSocket::with_options(options());
    let mut dealer_monitor = dealer.monitor();
    let mut push_monitor = push.monitor();
    if let Err(reason) = connect(&plan, &mut dealer, &mut push).await {
        return Some(reason);
    }
    let (sender, receiver) = dealer.split();
    let client = plan.client;
    if events.send(LinkEvent::Up { client }).await.is_err() {
        return None;
    }
    let reason = tokio::select! {
        reason = read(client, receiver, events) => Some(reason),
        () = lost(&mut dealer_monitor) => Some(LeaveReason::Disconnected),
        () = lost(&mut push_monitor) => Some(LeaveReason::Disconnected),
        reason = write(&mut push, outbox) => reason,
    };
    drop(sender);
    drop(push);
    if reason.is_none() {
        thread::writers_done(Duration::from_secs(60)).await;
    }
    reason
}

async fn connect(
    plan: &LinkPlan,
    dealer: &mut DealerSocket,
    push: &mut PushSocket,
) -> Result<(), LeaveReason> {
    let unreachable = |error: &dyn std::fmt::Display| LeaveReason::Unreachable(error.to_string());
    // Ours are stricter than the crate's, which panics on some addresses.
    let address = |text: &str| text.parse::<Address>().map_err(|error| unreachable(&error));
    let (input, output) = (address(&plan.input)?, address(&plan.output)?);
    guard::connect(dealer, &input, Limits::DATA, CONNECT_TIMEOUT)
        .await
        .map_err(|error| unreachable(&error))?;
    // Nothing is ever read from it.
    guard::connect(push, &output, Limits::CONTROL, CONNECT_TIMEOUT)
        .await
        .map_err(|error| unreachable(&error))?;
    let ready = ZmqMessage::try_from(plan.ready.clone()).map_err(|error| unreachable(&error))?;
    dealer.send(ready).await.map_err(|error| unreachable(&error))
}

/// Waits until the socket has lost its peer.
pub(super) async fn lost(events: &mut monitor::Receiver<SocketEvent>) {
    while let Some(event) = events.next().await {
        if matches!(event, SocketEvent::Disconnected(_)) {
            return;
        }
    }
}

async fn read(
    client: ClientId,
    mut dealer: DealerRecvHalf,
    events: &mpsc::Sender<LinkEvent>,
) -> LeaveReason {
    loop {
        match dealer.recv().await {
            Ok(message) => {
                let frames = message.into_vec();
                // While the endpoint's queue is full nothing is read: the kernel's buffers fill,
                // and the frontend's sends wait.
                // An endpoint that is closing takes none: they are dropped, while outputs still go.
                let _ = events.send(LinkEvent::Message { client, frames }).await;
            }
            Err(error) => {
                tracing::debug!(client = client.0, %error, "link lost");
                return LeaveReason::Disconnected;
            }
        }
    }
}

/// `None` when the outbox is finished.
async fn write(push: &mut PushSocket, outbox: &SharedOutbox) -> Option<LeaveReason> {
    while let Some(frames) = outbox.pop().await {
        let Ok(message) = ZmqMessage::try_from(frames) else { continue };
        match tokio::time::timeout(SEND_TIMEOUT, push.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(ZmqError::ReturnToSender { .. } | ZmqError::BufferFull(_))) => {
                return Some(LeaveReason::Disconnected);
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "output link lost");
                return Some(LeaveReason::Disconnected);
            }
            Err(_) => return Some(LeaveReason::CutOff),
        }
    }
    None
}
