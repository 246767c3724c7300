//! The engine-core wire: vLLM 0.33's messages as typed Rust.
//!
//! Public types say what a message *means*. The arrays and maps that travel are private to the
//! modules that encode and decode them, and nothing outside this folder names a msgpack crate.

mod frame;
mod handshake;
mod output;
mod request;
mod sampling;
mod stats;
mod tensor;
mod utility;

pub use frame::{EngineMessage, StepFrame, UtilityFrame};
pub use handshake::*;
pub use output::*;
pub use request::*;
pub use sampling::*;
pub use stats::*;
pub use tensor::*;
pub use utility::*;
