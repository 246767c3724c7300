//! How a frontend and a core find, watch and leave each other.
//!
//! Everything here is a state machine without sockets: inputs come with the time they came at,
//! actions go out, and the one who drives it does the rest ([`crate::transport`] with real sockets,
//! a simulator with none). No tokio, no clock of its own.
//!
//! - [`message`]: what travels on the control socket;
//! - [`CoreRendezvous`]: the core's table of clients;
//! - [`FrontendRendezvous`]: one frontend's life through its epochs;
//! - [`Outbox`], [`AckPolicy`]: credit, counted in bytes;
//! - [`OwnClock`]: whether this process was itself stopped, and so must not judge yet.
//!
//! Invariants: a client id is never given twice; one frontend (by instance) never has two clients;
//! nothing that comes over the wire can make a machine panic, it is counted and dropped.

mod core_io;
mod core_member;
mod core_side;
mod credit;
mod frontend_io;
mod frontend_side;
mod heartbeat;
pub mod message;

#[cfg(test)]
mod tests;

pub use core_io::{ClientId, CoreAction, CoreInput, LeaveReason, Peer, PeerId};
pub use core_side::CoreRendezvous;
pub use credit::message_cost;
pub use credit::{ACK_INTERVAL, AckPolicy, OUTBOX_BYTES_MAX, Outbox, OutboxFull, WINDOW_BYTES};
pub use frontend_io::{FrontendAction, FrontendInput, PairSocket};
pub use frontend_side::FrontendRendezvous;
pub use heartbeat::{HeartbeatConfig, OwnClock};
