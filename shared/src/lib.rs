//! What both of Pawl's processes share.
//!
//! - [`protocol`]: the typed messages of the wire (the one folder that knows msgpack);
//! - [`clock`]: stamps, and the clock that state machines are given instead of asking the system;
//! - [`shutdown`], [`telemetry`]: how every process stops and logs.
//!
//! Invariant: nothing here knows HTTP, a scheduler or a device.

pub mod clock;
pub mod protocol;
pub mod shutdown;
pub mod telemetry;
