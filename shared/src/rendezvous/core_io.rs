//! What goes into the core's machine and what comes out.

use bytes::Bytes;

use super::message::{ControlMessage, Role};

/// The client index: given in order, never twice in a core's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u32);

/// Who a client is, as far as it says.
#[derive(Clone, PartialEq, Eq)]
pub struct Peer {
    /// For people: `frontend 5f0c (pid 7, epoch 3)`.
    pub text: String,
    /// Process id, of a client that joined natively.
    pub pid: Option<u32>,
    /// Of its link, likewise.
    pub epoch: Option<u64>,
    /// The address at which it serves its own taps, if it does.
    pub taps: Option<String>,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// As text: it says it all.
impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

/// Who sent a control message, as the control socket names them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(pub Bytes);

/// Why a client is gone. Its requests must be aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaveReason {
    /// It said LEAVE.
    #[error("it left")]
    Left,
    /// One of its sockets closed: it died, or its link broke.
    #[error("its connection closed")]
    Disconnected,
    /// It was not heard for too long.
    #[error("it was silent for too long")]
    Silent,
    /// It did not take its outputs.
    #[error("it did not read its outputs")]
    CutOff,
    /// The same frontend joined anew.
    #[error("it joined again")]
    Replaced,
    /// The core could not connect to its sockets.
    #[error("its sockets could not be reached: {0}")]
    Unreachable(String),
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum CoreInput {
    /// A message on the control socket.
    Control {
        /// Who sent it.
        from: PeerId,
        /// Its only frame.
        message: Bytes,
    },
    /// A control connection closed.
    ControlGone {
        /// Whose.
        from: PeerId,
    },
    /// A vLLM frontend's INIT named its addresses, one pair per client.
    Init {
        /// Which of the handshakes.
        dialer: u32,
        /// Input addresses.
        inputs: Vec<String>,
        /// Output addresses.
        outputs: Vec<String>,
    },
    /// A handshake broke before it was over.
    HandshakeGone {
        /// Which of the handshakes.
        dialer: u32,
    },
    /// A link stands and its ready response was sent.
    LinkUp {
        /// Whose.
        client: ClientId,
    },
    /// A link could not be made, or is lost.
    LinkDown {
        /// Whose.
        client: ClientId,
        /// Why.
        reason: LeaveReason,
    },
    /// The model is loaded: from now on joins are answered.
    Ready,
    /// The core stops: from now on frontends are told so.
    Stopping,
    /// Time passed.
    Tick,
}

/// What to do about it, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum CoreAction {
    /// Send this on the control socket.
    Reply {
        /// To whom.
        to: PeerId,
        /// What.
        message: ControlMessage,
    },
    /// Connect to a client's sockets and send the ready response.
    OpenLink {
        /// For whom.
        client: ClientId,
        /// Its ROUTER.
        input: String,
        /// Its PULL.
        output: String,
        /// Whether it acknowledges what it takes.
        acknowledges: bool,
        /// What it wants.
        role: Role,
    },
    /// Close the link, whatever state it is in.
    CloseLink {
        /// Whose.
        client: ClientId,
    },
    /// The client is served from now on.
    Joined {
        /// Who.
        client: ClientId,
        /// Who that is.
        peer: Peer,
        /// As what.
        role: Role,
    },
    /// The client is gone.
    Left {
        /// Who.
        client: ClientId,
        /// Why.
        reason: LeaveReason,
        /// What it was.
        role: Role,
    },
    /// The client took this many bytes since its link began.
    Acknowledged {
        /// Who.
        client: ClientId,
        /// Total.
        bytes: u64,
    },
    /// All links of a vLLM frontend stand: say READY.
    HandshakeDone {
        /// Which of the handshakes.
        dialer: u32,
    },
    /// All links of a vLLM frontend are gone: start from the beginning.
    HandshakeAgain {
        /// Which of the handshakes.
        dialer: u32,
    },
}
