//! Sockets between frontends and cores. The one folder that names the `zeromq` crate.
//!
//! [`CoreEndpoint`] is the core's end, [`FrontendEndpoint`] and [`FrontendSender`] a frontend's.
//! What they decide is decided in [`crate::rendezvous`]; here it meets real sockets.
//!
//! What the crate does not do, and who does it here:
//! - a socket's memory and descriptor are freed for sure only with its runtime: every link of a
//!   core, every epoch of a frontend and the control socket run on a small runtime of their own
//!   ([`thread`]);
//! - no high-water mark below 100,000 messages: [`Outbox`](crate::rendezvous::Outbox) and credit;
//! - no linger: after its sockets are dropped a runtime is kept until the crate's writers have
//!   ended, at most until a deadline;
//! - a stale ipc file is not removed, and a file is removed after the next one may have been bound:
//!   [`listen`] hands over bound listeners;
//! - an idle PUSH does not notice its dead peer: each link also has a DEALER, always being read;
//! - `connect` retries for 30 s: links give up after 5 s.
//!
//! What guards these sockets: ipc lies in a folder with mode 0700 ([`SocketDir`]), its sockets have
//! mode 0600. A folder that somebody else made is told if others can enter it, and refused if they
//! can write into it. Over tcp every byte of a peer is checked before the crate sees it (`guard`),
//! but nobody is asked who he is and nothing is encrypted. So tcp belongs on loopback or on a
//! network of its own, and a core that listens on anything else says so.

mod address;
mod control_socket;
mod core_endpoint;
mod dialer;
mod epoch;
mod frontend_endpoint;
mod guard;
mod handshake_desk;
mod link;
mod listed;
mod listen;
mod outbox;
mod pair;
mod socket_dir;
mod tap;
mod thread;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use address::{Address, IPC_PATH_BYTES_MAX};
pub use core_endpoint::{CoreEndpoint, CoreEndpointConfig, CoreEvent};
pub use frontend_endpoint::{
    CoreAt, FrontendEndpoint, FrontendEndpointConfig, FrontendEvent, FrontendSender,
};
pub use guard::{Violation, violations};
pub use handshake_desk::HandshakeDesk;
pub use listed::{ListedPair, ListedPairs};
pub use socket_dir::SocketDir;
pub use tap::{Tap, TapEvent};

pub use crate::rendezvous::{ClientId, HeartbeatConfig, LeaveReason, OwnClock, Peer};

/// Why sockets could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// Not an address.
    #[error("{address:?} is no address: {why}")]
    BadAddress {
        /// As given.
        address: String,
        /// And how to write it.
        why: &'static str,
    },
    /// The kernel's limit.
    #[error(
        "the socket path {} takes {bytes} bytes, the system allows {IPC_PATH_BYTES_MAX}: choose a \
         shorter folder",
        path.display()
    )]
    PathTooLong {
        /// The path, or the folder it would lie in.
        path: PathBuf,
        /// What it would take.
        bytes: usize,
    },
    /// The folder for sockets.
    #[error("the folder for sockets {} cannot be made: {cause}", path.display())]
    SocketDir {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// Whoever may write into a folder can put another socket in the place of the one in it.
    #[error(
        "others may write into the folder {} (mode {mode:04o}) and put a socket of their own in \
         the place of ours: `chmod 700` it, or name one that is yours alone",
        path.display()
    )]
    OpenFolder {
        /// Which.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Somebody or something is there already.
    #[error("cannot listen at {address}: {why}")]
    InUse {
        /// Where.
        address: String,
        /// What is there.
        why: &'static str,
    },
    /// The system refused.
    #[error("cannot listen at {address}: {cause}")]
    Bind {
        /// Where.
        address: String,
        /// Why.
        cause: std::io::Error,
    },
    /// The wire has two bytes for it.
    #[error("engine index {0} is too large: the wire carries 0 to 65535")]
    EngineIndex(u32),
    /// The core's host.
    #[error("cannot find a way to {address}: {cause}; name our host with --advertise")]
    Resolve {
        /// Which.
        address: String,
        /// Why.
        cause: std::io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread for sockets: {0}")]
    Thread(std::io::Error),
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendRefused {
    /// There is no such link (any more).
    #[error("the link is down")]
    Down,
    /// Too much waits already.
    #[error("too much waits to be sent already")]
    Full,
}
