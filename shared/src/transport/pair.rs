//! A frontend's sockets for one epoch: a ROUTER for requests, a PULL for outputs, and one for
//! control: a DEALER to the core we join, or the handshake ROUTER that a core dials.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc as monitor;
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, PullSocket, RouterRecvHalf, RouterSendHalf,
    RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend, ZmqMessage,
};

use super::frontend_endpoint::Driver;
use super::guard::{self, CONTROL_CONNECTIONS_MAX, Limits, OpenGate};
use super::link::{engine_identity, socket_options};
use super::listen::{self, Bound, SocketFile};
use super::{Address, CoreAt, TransportError};
use crate::protocol::{EngineHello, HandshakeInit, HelloStatus};
use crate::rendezvous::message::Role;
use crate::rendezvous::{FrontendInput, PairSocket};

/// A core that listens answers at once; one that is hung is tried again.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_RETRY: Duration = Duration::from_millis(100);
/// That nobody listens is told after so long, and then each time it has been ten times as long.
const NOBODY_TOLD_AFTER: Duration = Duration::from_secs(2);

/// Connections over tcp to each socket of an epoch; a newcomer beyond is closed at once. They are
/// for the core that was told of them: what another peer said would be taken for the core's word,
/// and its bytes for bytes of the core's credit.
const CORES_MAX: usize = 1;

pub(super) struct Pair {
    pub(super) control: Control,
    pub(super) router: RouterRecvHalf,
    pub(super) router_sender: RouterSendHalf,
    pub(super) router_monitor: monitor::Receiver<SocketEvent>,
    pub(super) pull: PullSocket,
    pub(super) pull_monitor: monitor::Receiver<SocketEvent>,
    /// As the core must write them.
    pub(super) input: Address,
    pub(super) output: Address,
    _held: Held,
}

/// What goes with the sockets of an epoch.
#[derive(Default)]
struct Held {
    files: Vec<SocketFile>,
    gates: Vec<OpenGate>,
}

/// The socket of the first contact.
pub(super) enum Control {
    Joining {
        receiver: DealerRecvHalf,
        sender: DealerSendHalf,
        monitor: monitor::Receiver<SocketEvent>,
    },
    Awaiting {
        receiver: RouterRecvHalf,
        sender: RouterSendHalf,
    },
    /// A supervisor has it.
    Elsewhere,
}

impl Pair {
    /// Makes the sockets of an epoch. Where we join, waits for as long as no core listens.
    pub(super) async fn open(
        driver: &Driver,
        core: &CoreAt,
        epoch: u64,
    ) -> Result<Self, TransportError> {
        let mut held = Held::default();
        // The control connection first: nothing is bound for a core that is not there.
        let (control, address) = match core {
            CoreAt::Join(address) => (connect(address, driver.machine.role()).await, address),
            CoreAt::AwaitCore(address) => {
                let mut router = RouterSocket::new();
                bind(&mut router, address, &mut held, (Limits::CONTROL, CONTROL_CONNECTIONS_MAX))
                    .await?;
                let (sender, receiver) = router.split();
                (Control::Awaiting { receiver, sender }, address)
            }
            CoreAt::Listed(pair) => (Control::Elsewhere, &pair.input),
        };
        let (input, output) = match core {
            CoreAt::Listed(pair) => (pair.input.clone(), pair.output.clone()),
            _ => addresses(driver, address, epoch)?,
        };
        let mut router = RouterSocket::new();
        let router_monitor = router.monitor();
        let mut pull = PullSocket::new();
        let pull_monitor = pull.monitor();
        let input = bind(&mut router, &input, &mut held, (Limits::CONTROL, CORES_MAX)).await?;
        let output = bind(&mut pull, &output, &mut held, (Limits::DATA, CORES_MAX)).await?;
        let (router_sender, router) = router.split();
        Ok(Self {
            control,
            router,
            router_sender,
            router_monitor,
            pull,
            pull_monitor,
            input: driver.advertised(input),
            output: driver.advertised(output),
            _held: held,
        })
    }
}

/// Connects to a core, as soon as there is one. A frontend that finds nobody says so, as a slip of
/// the pen in the address would look like a core that takes its time; a tap's owner does it itself.
async fn connect(core: &Address, role: Role) -> Control {
    let since = tokio::time::Instant::now();
    let mut told_after = NOBODY_TOLD_AFTER;
    loop {
        let mut dealer = DealerSocket::with_options(socket_options(None, CONNECT_TIMEOUT));
        let monitor = dealer.monitor();
        match guard::connect(&mut dealer, core, Limits::CONTROL, CONNECT_TIMEOUT).await {
            Ok(()) => {
                let (sender, receiver) = dealer.split();
                return Control::Joining { receiver, sender, monitor };
            }
            Err(error) if role == Role::Frontend && since.elapsed() >= told_after => {
                let seconds = told_after.as_secs();
                tracing::warn!(
                    "no core listens at {core}, {seconds} s long ({error}): waiting for one; its \
                     --listen address must be this one"
                );
                told_after *= 10;
            }
            Err(error) => tracing::trace!(%core, %error, "core not there"),
        }
        tokio::time::sleep(CONNECT_RETRY).await;
    }
}

fn addresses(
    driver: &Driver,
    core: &Address,
    epoch: u64,
) -> Result<(Address, Address), TransportError> {
    if let (Address::Ipc(_), Some(dir)) = (core, &driver.socket_dir) {
        return Ok((dir.address(&format!("i{epoch:x}"))?, dir.address(&format!("o{epoch:x}"))?));
    }
    let host = listen::host_for(driver.advertise.as_deref(), core)?;
    let address = Address::Tcp { host, port: 0 };
    Ok((address.clone(), address))
}

async fn bind(
    socket: &mut impl Socket,
    address: &Address,
    held: &mut Held,
    (limits, connections_max): (Limits, usize),
) -> Result<Address, TransportError> {
    let Bound { listener, address, file, gate } = listen::bind(address, limits, connections_max)?;
    let failed = |cause| TransportError::Bind { address: address.to_string(), cause };
    held.files.extend(file);
    let bound = socket.bind_listener(listener).await;
    bound.map_err(|error| failed(std::io::Error::other(error)))?;
    if let Some(gate) = gate {
        held.gates.push(gate.open().map_err(failed)?);
    }
    Ok(address)
}

impl Control {
    /// What comes next; `None` for what means nothing. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<FrontendInput> {
        match self {
            Self::Joining { receiver, monitor, .. } => tokio::select! {
                message = receiver.recv() => Some(match message {
                    Ok(message) if message.len() == 1 => {
                        FrontendInput::Control(message.into_vec().remove(0))
                    }
                    // Not a control message; the machine counts it.
                    Ok(_) => FrontendInput::Control(Bytes::new()),
                    Err(_) => FrontendInput::Disconnected(PairSocket::Control),
                }),
                event = monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) => {
                        Some(FrontendInput::Disconnected(PairSocket::Control))
                    }
                    _ => None,
                },
            },
            Self::Awaiting { receiver, .. } => {
                let frames = receiver.recv().await.ok()?.into_vec();
                let [peer, hello] = &frames[..] else { return None };
                let engine_index = engine_index_of(peer)?;
                match EngineHello::decode(hello) {
                    Ok(hello) => {
                        let ready = hello.status == HelloStatus::Ready;
                        Some(FrontendInput::Handshake { engine_index, ready })
                    }
                    Err(error) => {
                        tracing::warn!(%error, "handshake message dropped");
                        None
                    }
                }
            }
            Self::Elsewhere => std::future::pending().await,
        }
    }

    /// Never waits: the crate takes 100,000 messages before it does. A peer that is gone is told
    /// by [`Control::next`].
    pub(super) async fn send(&mut self, message: Bytes) {
        if let Self::Joining { sender, .. } = self {
            let _ = sender.send(message.into()).await;
        }
    }

    pub(super) async fn send_init(&mut self, engine_index: u32, input: &Address, output: &Address) {
        if let Self::Awaiting { sender, .. } = self {
            let init = HandshakeInit {
                inputs: vec![input.to_string()],
                outputs: vec![output.to_string()],
                ..HandshakeInit::default()
            };
            let mut message = ZmqMessage::from(init.encode());
            message.push_front(engine_identity(engine_index));
            let _ = sender.send(message).await;
        }
    }
}

/// The engine index that an identity on the wire means.
pub(super) fn engine_index_of(identity: &[u8]) -> Option<u32> {
    let bytes = <[u8; 2]>::try_from(identity).ok()?;
    Some(u32::from(u16::from_le_bytes(bytes)))
}
