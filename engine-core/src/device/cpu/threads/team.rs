//! How the threads of a run share its stages and wait for each other.
//!
//! A stage (an operation, or a phase of one) is split into one queue of units for each thread. A
//! thread takes the units of its own queue, so that it reads its own stretch of the weights; if the
//! stage is then not soon done, it takes what is left in the others' queues. A stage is done when
//! all its units are, not when all threads have come by: a thread that the system keeps from
//! running holds up nobody, and when it runs again it finds the past stages done and catches up.

use std::sync::atomic::Ordering;

use super::event::Event;
use super::sync::{AtomicU64, TURNS_BEFORE_HELPING};

/// On a cache line of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Padded(AtomicU64);

/// What the threads of a run share.
#[derive(Debug)]
pub struct Team {
    /// For each thread's queue: the number of the last stage that took units of it (upper half) and
    /// how many are taken (lower half).
    queues: Vec<Padded>,
    /// Units done since the run began.
    done: Padded,
    event: Event,
}

/// Where a thread is in a run: every thread counts the same stages and units.
#[derive(Debug, Default)]
pub struct Cursor {
    stage: u64,
    /// Units of all stages so far.
    units: u64,
}

impl Team {
    /// For `threads` threads.
    pub fn new(threads: usize) -> Self {
        let queues = (0..threads).map(|_| Padded::default()).collect();
        Self { queues, done: Padded::default(), event: Event::default() }
    }

    /// Queues, one for each thread.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Before a run, while no thread is in it.
    pub fn reset(&mut self) {
        for queue in self.queues.iter().chain([&self.done]) {
            queue.0.store(0, Ordering::Relaxed);
        }
    }

    /// Runs the next stage: `work(queue, unit)` for each unit below `units(queue)` of each queue,
    /// on this thread or another, each once. Returns when all are done; what they wrote is then
    /// visible to all.
    pub fn stage(
        &self,
        thread: usize,
        cursor: &mut Cursor,
        units: impl Fn(usize) -> usize,
        mut work: impl FnMut(usize, usize),
    ) {
        cursor.stage += 1;
        cursor.units += (0..self.queues.len()).map(|queue| units(queue) as u64).sum::<u64>();
        let (stage, target) = (cursor.stage, cursor.units);
        let mut drain = |queue: usize| {
            while let Some(unit) = self.take(queue, stage, units(queue) as u64) {
                work(queue, unit as usize);
                self.done.0.fetch_add(1, Ordering::Release);
            }
        };
        drain(thread);
        let all_done = || self.done.0.load(Ordering::Acquire) >= target;
        if all_done() {
            self.event.notify();
            return;
        }
        if self.event.spin(TURNS_BEFORE_HELPING, &all_done) {
            return;
        }
        for ahead in 1..self.queues.len() {
            drain((thread + ahead) % self.queues.len());
        }
        if all_done() {
            self.event.notify();
        } else {
            self.event.wait(all_done);
        }
    }

    /// The next unit of `queue`, if `stage` has any left there.
    fn take(&self, queue: usize, stage: u64, units: u64) -> Option<u64> {
        // Relaxed: a unit that is taken brings nothing along. What it reads was written by earlier
        // stages, whose end this thread has seen.
        let queue = &self.queues[queue].0;
        let mut seen = queue.load(Ordering::Relaxed);
        loop {
            let taken = match (seen >> 32).cmp(&stage) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => seen & u64::from(u32::MAX),
                // This thread is late: the stage was done without it.
                std::cmp::Ordering::Greater => return None,
            };
            if taken >= units {
                return None;
            }
            let next = stage << 32 | (taken + 1);
            match queue.compare_exchange_weak(seen, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(taken),
                Err(now) => seen = now,
            }
        }
    }
}
