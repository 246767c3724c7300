//! The core's control socket: a ROUTER bound at every `--listen` address.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc as monitor;
use tokio::sync::mpsc;
use zeromq::{
    RouterRecvHalf, RouterSendHalf, RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend,
    ZmqMessage,
};

use super::guard::Gate;
use super::listen::{Bound, SocketFile};
use super::thread::{self, Thread};
use super::{Address, TransportError};
use crate::rendezvous::PeerId;

/// Messages and closed connections that wait for the endpoint; when full the socket is not read.
const EVENTS_MAX: usize = 1024;
/// Replies that wait for the socket; when full, replies are dropped: their readers do not read.
const REPLIES_MAX: usize = 4096;

pub(super) enum ControlEvent {
    Message {
        from: PeerId,
        message: Bytes,
    },
    /// A message that is not one frame.
    Garbage,
    Gone {
        from: PeerId,
    },
}

pub(super) struct ControlSocket {
    thread: Option<Thread>,
    events: mpsc::Receiver<ControlEvent>,
    replies: mpsc::Sender<(PeerId, Bytes)>,
    addresses: Vec<Address>,
    // Removed on drop, after the thread has ended.
    _files: Vec<SocketFile>,
}

impl ControlSocket {
    pub(super) fn start(bound: Vec<Bound>) -> Result<Self, TransportError> {
        let (event_sender, events) = mpsc::channel(EVENTS_MAX);
        let (replies, reply_receiver) = mpsc::channel(REPLIES_MAX);
        let addresses = bound.iter().map(|bound| bound.address.clone()).collect();
        let mut listeners = Vec::new();
        let mut files = Vec::new();
        for bound in bound {
            listeners.push((bound.listener, bound.gate));
            files.extend(bound.file);
        }
        let runtime = thread::runtime().map_err(TransportError::Thread)?;
        let thread = Thread::start("pawl-control", move |mut wishes| {
            thread::run_on(runtime, async move {
                let served = serve(listeners, event_sender, reply_receiver);
                tokio::select! {
                    result = served => {
                        if let Err(error) = result {
                            tracing::error!(%error, "the control socket failed");
                        }
                    }
                    // The endpoint closes the replies first, and `serve` ends by itself.
                    () = wishes.stopped() => {}
                }
            });
        })?;
        Ok(Self { thread: Some(thread), events, replies, addresses, _files: files })
    }

    pub(super) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Cancel-safe. Pends for ever once the socket has failed.
    pub(super) async fn next(&mut self) -> ControlEvent {
        match self.events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    pub(super) fn reply(&self, to: PeerId, message: Bytes) {
        if self.replies.try_send((to, message)).is_err() {
            tracing::debug!("a control reply was dropped: too many wait");
        }
    }

    /// Sends the replies that wait, then closes.
    pub(super) async fn close(mut self, deadline: tokio::time::Instant) {
        let (closed, _) = mpsc::channel(1);
        self.replies = closed;
        if let Some(thread) = self.thread.take() {
            thread.ended(deadline).await;
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // The files must not outlive the socket, nor be removed before it is closed.
        if let Some(thread) = self.thread.take() {
            thread.stop_and_join();
        }
    }
}

async fn serve(
    listeners: Vec<(zeromq::Listener, Option<Gate>)>,
    events: mpsc::Sender<ControlEvent>,
    mut replies: mpsc::Receiver<(PeerId, Bytes)>,
) -> Result<(), zeromq::ZmqError> {
    let mut router = RouterSocket::new();
    let monitor = router.monitor();
    let mut gates = Vec::new();
    for (listener, gate) in listeners {
        router.bind_listener(listener).await?;
        if let Some(gate) = gate {
            gates.push(gate.open()?);
        }
    }
    let (mut sender, receiver) = router.split();
    tokio::select! {
        () = read(receiver, &events) => {}
        () = watch(monitor, &events) => {}
        () = write(&mut sender, &mut replies) => {}
    }
    drop((sender, gates));
    thread::writers_done(Duration::from_secs(60)).await;
    Ok(())
}

async fn read(mut router: RouterRecvHalf, events: &mpsc::Sender<ControlEvent>) {
    while let Ok(message) = router.recv().await {
        let mut frames = message.into_vecdeque();
        let from = frames.pop_front();
        let event = match (from, frames.pop_front()) {
            (Some(from), Some(message)) if frames.is_empty() => {
                ControlEvent::Message { from: PeerId(from), message }
            }
            _ => ControlEvent::Garbage,
        };
        if events.send(event).await.is_err() {
            return;
        }
    }
}

async fn watch(mut monitor: monitor::Receiver<SocketEvent>, events: &mpsc::Sender<ControlEvent>) {
    while let Some(event) = monitor.next().await {
        match event {
            SocketEvent::Disconnected(peer) => {
                let from = PeerId(peer.into());
                if events.send(ControlEvent::Gone { from }).await.is_err() {
                    return;
                }
            }
            SocketEvent::AcceptFailed(error) => {
                tracing::debug!(%error, "a connection to the control socket came to nothing");
            }
            _ => {}
        }
    }
}

/// Ends when the endpoint closes the replies.
async fn write(router: &mut RouterSendHalf, replies: &mut mpsc::Receiver<(PeerId, Bytes)>) {
    while let Some((PeerId(to), message)) = replies.recv().await {
        let mut frames = ZmqMessage::from(message);
        frames.push_front(to);
        // A peer that does not read has 100,000 messages waiting in the crate before this blocks;
        // it must not hold up the others. Unknown peers are gone.
        let _ = tokio::time::timeout(Duration::from_millis(10), router.send(frames)).await;
    }
}
