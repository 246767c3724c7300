//! Pawl's engine-core: the process that owns the model.
//!
//! Invariants: no HTTP and no gRPC here; `scheduler/` and `kv_cache/` import neither device, model
//! nor runner; everything that decides is a state machine with an injected clock.

pub mod bench;
pub mod config;
mod core;
pub mod device;
pub mod engine;
mod io;
pub mod kv_cache;
pub mod model;
pub mod runner;
pub mod scheduler;
pub mod step;

pub use config::{CoreConfig, RunnerChoice, Vitals};
pub use core::{run, unthreaded};
