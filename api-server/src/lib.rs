//! Pawl's api-server: the process that clients talk to.
//!
//! - [`engine_client`]: the way to the engine-core: submit a request, read what comes of it;
//! - [`output_handler`]: folds the core's frames into text, finish reasons and metrics;
//! - [`detokenizer`]: token ids to text, piece by piece, never splitting a character;
//! - [`metrics`]: the registry behind `/metrics` (the one folder that names the metrics crate).
//!
//! Invariant: nothing here names a device or a kernel.

pub mod detokenizer;
pub mod engine_client;
pub mod metrics;
pub mod output_handler;
