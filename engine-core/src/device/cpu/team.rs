//! How the threads of a run share its stages and wait for each other.
//!
//! A stage (an operation, or a phase of one) is split into one queue of units for each thread. A
//! thread takes the units of its own queue, so that it reads its own stretch of the weights; if the
//! stage is then not soon done, it takes what is left in the others' queues. A stage is done when
//! all its units are, not when all threads have come by: a thread that the system keeps from
//! running holds up nobody, and when it runs again it finds the past stages done and catches up.

use std::sync::atomic::{AtomicU64, Ordering};

use super::pool::Event;

/// Turns that a thread waits for the others before it takes their work: some microseconds. Less,
/// and threads that keep pace would fight for the last units.
const TURNS_BEFORE_HELPING: u32 = 60;

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
        for queue in &mut self.queues {
            *queue.0.get_mut() = 0;
        }
        *self.done.0.get_mut() = 0;
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
                self.done.0.fetch_add(1, Ordering::SeqCst);
            }
        };
        drain(thread);
        let all_done = || self.done.0.load(Ordering::SeqCst) >= target;
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
        let queue = &self.queues[queue].0;
        let mut seen = queue.load(Ordering::SeqCst);
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
            match queue.compare_exchange_weak(seen, next, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(taken),
                Err(now) => seen = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::device::cpu::pool::Pool;

    /// Stages of uneven queues, each of which needs what the one before it wrote.
    #[test]
    fn every_unit_runs_once_and_stages_follow_each_other() {
        const STAGES: usize = 200;
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            let mut team = Team::new(threads);
            for _ in 0..20 {
                team.reset();
                let ran = Mutex::new(vec![0_usize; STAGES]);
                let units = |stage: usize, queue: usize| (stage * 7 + queue * 3) % 4;
                let expected = |stage| (0..threads).map(|queue| units(stage, queue)).sum();
                pool.run(&|thread| {
                    let mut cursor = Cursor::default();
                    for stage in 0..STAGES {
                        team.stage(
                            thread,
                            &mut cursor,
                            |queue| units(stage, queue),
                            |_, _| {
                                let mut ran = ran.lock().unwrap();
                                ran[stage] += 1;
                                if stage > 0 {
                                    assert_eq!(
                                        ran[stage - 1],
                                        expected(stage - 1),
                                        "stage {stage}"
                                    );
                                }
                            },
                        );
                    }
                });
                let ran = ran.into_inner().unwrap();
                assert_eq!(ran, (0..STAGES).map(expected).collect::<Vec<usize>>());
            }
        }
    }
}
