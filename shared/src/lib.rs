//! What both of Pawl's processes share.
//!
//! - [`protocol`]: the typed messages of the wire (the one folder that knows msgpack);
//! - [`model_card`], [`tokenizer`]: what a model is, read from its files and sent to frontends;
//! - [`clock`]: stamps, and the clock that state machines are given instead of asking the system;
//! - [`ready`], [`shutdown`], [`telemetry`]: how every process says that it is ready, stops, logs;
//! - [`lifeline`]: between the supervisor and its children;
//! - [`rendezvous`]: how a frontend and a core find, watch and leave each other, without sockets;
//! - [`transport`]: the sockets between them (the one folder that knows ZeroMQ).
//!
//! Invariant: nothing here knows HTTP, a scheduler or a device.

pub mod clock;
pub mod lifeline;
pub mod model_card;
pub mod protocol;
pub mod ready;
pub mod rendezvous;
pub mod shutdown;
pub mod tap;
pub mod telemetry;
pub mod tokenizer;
pub mod transport;
