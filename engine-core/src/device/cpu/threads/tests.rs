use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Runs `count` pieces of work, claimed by whoever is there.
fn share(pool: &mut Pool, count: usize) -> usize {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    pool.run(&|_| {
        while next.fetch_add(1, Ordering::Relaxed) < count {
            done.fetch_add(1, Ordering::Relaxed);
        }
    });
    done.into_inner()
}

#[test]
fn all_work_is_done_whoever_comes() {
    for threads in [1, 2, 4] {
        let mut pool = Pool::new(threads).unwrap();
        for round in 0..300 {
            assert_eq!(share(&mut pool, round), round);
        }
    }
}

#[test]
fn a_sleeping_pool_wakes_up() {
    let mut pool = Pool::new(3).unwrap();
    for _ in 0..2 {
        // Until the workers sleep, as they do after their bounded spin.
        while pool.sleepers() < 2 {
            std::thread::yield_now();
        }
        let there = AtomicUsize::new(0);
        pool.run(&|_| {
            there.fetch_add(1, Ordering::SeqCst);
            while there.load(Ordering::SeqCst) < 3 {
                std::thread::yield_now();
            }
        });
    }
}

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
                                assert_eq!(ran[stage - 1], expected(stage - 1), "stage {stage}");
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
