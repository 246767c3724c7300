//! What threads are made of, and how patient they are.

pub use std::hint::spin_loop;
pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
pub use std::sync::{Arc, Condvar, Mutex};
pub use std::thread::{Builder, JoinHandle, yield_now};

/// Turns of spinning before the first yield: some tens of microseconds, longer than an operation.
pub const SPINS: u32 = 1_000;
/// Yields before the thread goes to sleep.
pub const YIELDS: u32 = 64;
/// Turns that a thread waits for the others before it takes their work: some microseconds. Less,
/// and threads that keep pace would fight for the last units.
pub const TURNS_BEFORE_HELPING: u32 = 60;
