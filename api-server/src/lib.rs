//! Pawl's api-server: the process that clients talk to.
//!
//! - [`engine_client`]: the way to the engine-core: submit a request, read what comes of it;
//! - [`output_handler`]: folds the core's frames into text, finish reasons and metrics;
//! - [`detokenizer`]: token ids to text, piece by piece, never splitting a character;
//! - [`server`], [`config`]: its life, and what it is started with;
//! - [`serving`]: what every surface stands on: admission, prompts, running requests;
//! - [`http`], [`admin`]: the routes of the two ports;
//! - [`grpc`]: the methods of a third one;
//! - [`embedded`]: the same routes without a port, for offline use;
//! - [`openai`]: requests and answers as types, checked field by field;
//! - [`chat_template`]: from a chat's messages to the text of a prompt;
//! - [`metrics`]: the registry behind `/metrics` (the one folder that names the metrics crate).
//!
//! Invariant: nothing here names a device or a kernel.

pub mod admin;
pub mod chat_template;
pub mod config;
pub mod detokenizer;
pub mod embedded;
pub mod engine_client;
pub mod grpc;
pub mod http;
pub mod metrics;
pub mod openai;
pub mod output_handler;
pub mod server;
pub mod serving;

pub use config::{FrontendConfig, HttpLimits, RequestTimingMode};
pub use embedded::Embedded;
pub use http::listener::bind_shared;
pub use server::run;
