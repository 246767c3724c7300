//! The same threads under loom, which runs a small model through every order in which its threads
//! may go on, and through every value that the orderings of its atomics let them see. What threads
//! hand over lies in cells that loom watches: a read that a write may overtake fails, as does a
//! thread that nobody wakes.

#![allow(clippy::duplicate_mod, reason = "the files that ship, over the checker's own atomics")]
#![allow(dead_code, reason = "the models do without some of what they hold")]

#[path = "event.rs"]
mod event;
#[path = "pool.rs"]
mod pool;
#[path = "team.rs"]
mod team;

/// As `sync`, but with little patience: more turns of spinning show nothing new, and multiply the
/// orders to try.
mod sync {
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
    pub use loom::sync::{Arc, Condvar, Mutex};
    pub use loom::thread::{Builder, JoinHandle, yield_now};

    pub const SPINS: u32 = 0;
    pub const YIELDS: u32 = 1;
    pub const TURNS_BEFORE_HELPING: u32 = 0;
}

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64};

use event::Event;
use pool::Pool;
use team::{Cursor, Team};

/// Runs `model` in every order in which no more than `switches` threads are stopped in mid-run.
fn check(switches: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(model);
}

/// A value that loom watches.
#[derive(Debug, Default)]
struct Watched(UnsafeCell<u64>);

// SAFETY: loom fails the model where two threads could meet in the cell.
unsafe impl Sync for Watched {}

impl Watched {
    fn get(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|value| unsafe { *value })
    }

    fn add(&self, more: u64) {
        // SAFETY: as above.
        self.0.with_mut(|value| unsafe { *value += more });
    }
}

#[test]
fn whoever_waits_is_woken_and_sees_what_was_written() {
    check(3, || {
        let shared = Arc::new((Event::default(), AtomicBool::new(false), Watched::default()));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (event, ready, value) = &*shared;
                    event.wait(|| ready.load(Ordering::Acquire));
                    assert_eq!(value.get(), 1);
                })
            })
            .collect();
        let (event, ready, value) = &*shared;
        value.add(1);
        ready.store(true, Ordering::Release);
        event.notify();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// Each unit of a stage writes a value of its own from all values of the stage before it.
#[test]
fn a_stage_sees_all_of_the_stage_before_it() {
    check(2, || {
        let team =
            Arc::new((Team::new(2), [[(); 2]; 2].map(|row| row.map(|()| Watched::default()))));
        let run = |team: &(Team, [[Watched; 2]; 2]), thread| {
            let (team, values) = team;
            let mut cursor = Cursor::default();
            for stage in 0..2 {
                team.stage(
                    thread,
                    &mut cursor,
                    |_| 1,
                    |queue, _| {
                        let before = match stage {
                            0 => 1,
                            _ => values[stage - 1].iter().map(Watched::get).sum(),
                        };
                        values[stage][queue].add(before);
                    },
                );
            }
            assert_eq!(values[1].each_ref().map(Watched::get), [2, 2]);
        };
        let other = Arc::clone(&team);
        let other = loom::thread::spawn(move || run(&other, 1));
        run(&team, 0);
        other.join().unwrap();
    });
}

/// What a task borrows is its caller's again when `run` returns, also where a worker came late.
#[test]
fn a_pool_returns_what_its_task_borrows() {
    check(2, || {
        let mut pool = Pool::new(2).unwrap();
        for _ in 0..2 {
            let (next, mut values) = (AtomicU64::new(0), [0; 2].map(|_| Watched::default()));
            pool.run(&|_| {
                while let Some(value) = values.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    value.add(1);
                }
            });
            for value in &mut values {
                value.add(1);
                assert_eq!(value.get(), 2);
            }
        }
    });
}

/// Both together, as a run of a program is: a team is used again by the next task.
#[test]
fn a_team_is_reused_from_run_to_run() {
    check(1, || {
        let (mut pool, mut team) = (Pool::new(2).unwrap(), Team::new(2));
        for _ in 0..2 {
            team.reset();
            let values = [0; 2].map(|_| Watched::default());
            let total = Watched::default();
            pool.run(&|thread| {
                let mut cursor = Cursor::default();
                team.stage(thread, &mut cursor, |_| 1, |queue, _| values[queue].add(1));
                let sum = |queue, _| {
                    assert_eq!(queue, 0);
                    total.add(values.iter().map(Watched::get).sum());
                };
                team.stage(thread, &mut cursor, |queue| 1 - queue, sum);
            });
            assert_eq!(total.get(), 2);
        }
    });
}
