//! The engine-core wire: vLLM 0.33's messages as typed Rust.
//!
//! Public types say what a message *means*. The arrays and maps that travel are private to the
//! modules that encode and decode them, and nothing outside this folder names a msgpack crate.

mod error;
mod frame;
mod handshake;
mod output;
mod request;
mod sampling;
mod stats;
mod tensor;
pub mod testing;
mod utility;
mod value;
mod wire;

pub use error::{DecodeError, DecodeErrorKind};
pub use frame::{ENGINE_CORE_DEAD, EngineMessage, StepFrame, UtilityFrame};
pub use handshake::*;
pub use output::*;
pub use request::*;
pub use sampling::*;
pub use stats::*;
pub use tensor::*;
pub use utility::*;
pub use value::{Value, decode_value, dump, encode_value};

#[cfg(test)]
mod tests;
