//! The core's side of vLLM's handshake: dials a frontend's handshake socket, and again from the
//! start whenever that frontend is gone.

use std::time::Duration;

use futures::channel::mpsc as monitor;
use tokio::sync::mpsc;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend};

use super::guard::{self, Limits};
use super::link::{engine_identity, lost, socket_options};
use super::thread::{self, Thread};
use super::{Address, TransportError};
use crate::protocol::{EngineHello, HandshakeInit, HelloStatus};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Between two tries.
const RETRY: Duration = Duration::from_millis(500);
/// As long as vLLM's engine waits for its INIT; then the handshake starts again.
const INIT_TIMEOUT: Duration = Duration::from_secs(300);
/// READY is on its way when the handshake socket is closed.
const LINGER: Duration = Duration::from_secs(5);
/// The endpoint says one thing per state of a handshake; more than this never waits.
const COMMANDS_MAX: usize = 8;

/// What handshakes tell the endpoint.
pub(super) enum DialEvent {
    /// The frontend listed its sockets.
    Init { dialer: u32, init: HandshakeInit },
    /// The handshake broke after that.
    Gone { dialer: u32 },
}

/// What the endpoint tells a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialCommand {
    /// All links stand.
    Done,
    /// All links are gone: from the start.
    Again,
}

pub(super) struct Dialer {
    _thread: Thread,
    commands: mpsc::Sender<DialCommand>,
}

impl Dialer {
    pub(super) fn start(
        dialer: u32,
        address: Address,
        engine_index: u32,
        events: mpsc::Sender<DialEvent>,
    ) -> Result<Self, TransportError> {
        let (commands, mut receiver) = mpsc::channel(COMMANDS_MAX);
        let thread = Thread::start(&format!("pawl-dial-{dialer}"), move |mut wishes| {
            let mut running = true;
            while running {
                let Ok(runtime) = thread::runtime() else {
                    std::thread::sleep(RETRY);
                    continue;
                };
                thread::run_on(runtime, async {
                    let handshake = Handshake { dialer, address: &address, engine_index };
                    tokio::select! {
                        () = handshake.run(&events, &mut receiver) => {}
                        _ = wishes.changed() => running = false,
                    }
                });
            }
        })?;
        Ok(Self { _thread: thread, commands })
    }

    pub(super) fn tell(&self, command: DialCommand) {
        let _ = self.commands.try_send(command);
    }
}

struct Handshake<'a> {
    dialer: u32,
    address: &'a Address,
    engine_index: u32,
}

impl Handshake<'_> {
    /// One handshake and the life of the frontend after it.
    async fn run(
        &self,
        events: &mpsc::Sender<DialEvent>,
        commands: &mut mpsc::Receiver<DialCommand>,
    ) {
        let dialer = self.dialer;
        let (mut dealer, mut monitor) = self.connect().await;
        self.say(&mut dealer, HelloStatus::Hello).await;
        let Some(init) = self.await_init(&mut dealer, &mut monitor).await else {
            return tokio::time::sleep(RETRY).await;
        };
        if init.coordinator_input.is_some() {
            tracing::warn!(address = %self.address, "its data-parallel coordinator is not served");
        }
        if events.send(DialEvent::Init { dialer, init }).await.is_err() {
            return;
        }
        // The model may take its time; the socket is read to notice a frontend that goes meanwhile.
        tokio::select! {
            command = commands.recv() => if command != Some(DialCommand::Done) {
                return tokio::time::sleep(RETRY).await;
            },
            () = closed(&mut dealer, &mut monitor) => {
                if events.send(DialEvent::Gone { dialer }).await.is_ok() {
                    // Answered by `Again`, once its links are closed.
                    until_again(commands).await;
                }
                return tokio::time::sleep(RETRY).await;
            }
        }
        self.say(&mut dealer, HelloStatus::Ready).await;
        drop(dealer);
        thread::writers_done(LINGER).await;
        until_again(commands).await;
        tokio::time::sleep(RETRY).await;
    }

    async fn connect(&self) -> (DealerSocket, monitor::Receiver<SocketEvent>) {
        loop {
            let identity = engine_identity(self.engine_index);
            let options = socket_options(Some(identity), CONNECT_TIMEOUT);
            let mut dealer = DealerSocket::with_options(options);
            let monitor = dealer.monitor();
            match guard::connect(&mut dealer, self.address, Limits::CONTROL, CONNECT_TIMEOUT).await
            {
                Ok(()) => return (dealer, monitor),
                Err(error) => tracing::trace!(address = %self.address, %error, "no handshake"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn say(&self, dealer: &mut DealerSocket, status: HelloStatus) {
        // What vLLM expects of an engine that it did not start itself.
        let hello = EngineHello { status, local: false, headless: true };
        // A frontend that is gone is noticed by the one who reads next.
        let _ = dealer.send(hello.encode().into()).await;
    }

    async fn await_init(
        &self,
        dealer: &mut DealerSocket,
        monitor: &mut monitor::Receiver<SocketEvent>,
    ) -> Option<HandshakeInit> {
        let init = async {
            loop {
                let message = tokio::select! {
                    message = dealer.recv() => message.ok()?,
                    () = lost(monitor) => return None,
                };
                match message.into_vec().as_slice() {
                    [payload] => match HandshakeInit::decode(payload) {
                        Ok(init) => return Some(init),
                        Err(error) => {
                            tracing::warn!(address = %self.address, %error, "INIT not readable");
                            return None;
                        }
                    },
                    _ => tracing::warn!(address = %self.address, "INIT is one frame"),
                }
            }
        };
        tokio::time::timeout(INIT_TIMEOUT, init).await.ok().flatten()
    }
}

async fn until_again(commands: &mut mpsc::Receiver<DialCommand>) {
    while !matches!(commands.recv().await, Some(DialCommand::Again) | None) {}
}

/// Waits until the socket has lost its peer, reading and dropping what still comes.
async fn closed(dealer: &mut DealerSocket, monitor: &mut monitor::Receiver<SocketEvent>) {
    loop {
        tokio::select! {
            message = dealer.recv() => if message.is_err() { return },
            () = lost(monitor) => return,
        }
    }
}
