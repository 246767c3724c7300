//! What goes into a frontend's machine and what comes out.

use std::time::Duration;

use bytes::Bytes;

use super::message::ControlMessage;

/// Which socket of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairSocket {
    /// To the core's control ROUTER.
    Control,
    /// The ROUTER that requests go out of.
    Input,
    /// The PULL that outputs come in by.
    Output,
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum FrontendInput {
    /// The control connection stands and the pair is bound at these addresses.
    Opened {
        /// Of the ROUTER.
        input: String,
        /// Of the PULL.
        output: String,
    },
    /// The sockets could not be made.
    OpenFailed {
        /// For people.
        reason: String,
    },
    /// A message on the control socket.
    Control(Bytes),
    /// An engine says HELLO on our handshake socket (or, `ready`, that it has loaded and
    /// connected).
    Handshake {
        /// From the identity of the engine's socket.
        engine_index: u32,
        /// READY, not HELLO.
        ready: bool,
    },
    /// An engine connected to our input socket. It may have nothing to say.
    Connected {
        /// From the identity of the engine's socket.
        engine_index: u32,
        /// The last ready response that was said to this process or to one beside it.
        known: Option<Bytes>,
    },
    /// The engine's first message on the input socket.
    Ready {
        /// The encoded ready response.
        ready: Bytes,
        /// From the identity of the engine's socket.
        engine_index: u32,
    },
    /// The core's end of a socket closed.
    Disconnected(PairSocket),
    /// The output handler took this many bytes since the link began, and it is time to say so.
    Acknowledge(u64),
    /// The user wants to go.
    Leave,
    /// Time passed.
    Tick,
}

/// What to do about it, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum FrontendAction {
    /// Send this on the control socket.
    Send(ControlMessage),
    /// The pair is bound, and no core has it. Told only where a supervisor lists it.
    Waiting,
    /// Answer a HELLO with our addresses.
    SendInit {
        /// To whom.
        engine_index: u32,
    },
    /// The core serves us; requests may go out.
    Up {
        /// The encoded ready response.
        ready: Bytes,
        /// The index the core gave.
        client_index: u32,
        /// Of this pair.
        epoch: u64,
        /// Which engine.
        engine_index: u32,
    },
    /// The core is silent or makes no progress.
    Hung {
        /// For how long.
        silent_for: Duration,
    },
    /// It is back.
    Resumed,
    /// The core takes no new requests any more; what is open may finish. Told once, after
    /// [`FrontendAction::Up`].
    Stopping,
    /// The epoch is over (or a join was refused); what was asked in it is lost.
    Down {
        /// For people.
        reason: String,
    },
    /// Drop the sockets of this epoch.
    Close,
}
