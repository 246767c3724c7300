//! Threads that run a step together: how they wait ([`Event`]), who takes part ([`Pool`]), and how
//! they share the work ([`Team`]).
//!
//! What these need of the standard library is in `sync`. The model checker loom brings the same
//! names, so that it can run these very files: see `under_loom`.

mod cores;
mod event;
mod pool;
mod sync;
mod team;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod under_loom;

pub use cores::{allowed_cores, physical_cores};
pub use pool::Pool;
pub use team::{Cursor, Team};
