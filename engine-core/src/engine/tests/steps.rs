//! Steps, stats, and who is told what when.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pawl_shared::clock::{Clock, ManualClock, Stamp, WallTime};
use pawl_shared::protocol::{EngineMessage, SchedulerStats};
use pawl_shared::transport::ClientId;

use super::super::{Engine, GAUGES_EVERY, Inbox};
use super::harness::{Harness, STEP, config, request};
use crate::step::{Progress, StepResult};

#[test]
fn two_requests_of_four_tokens_at_depth_1() {
    insta::assert_snapshot!(two_requests_of_four_tokens(1));
}

#[test]
fn two_requests_of_four_tokens_at_depth_2() {
    insta::assert_snapshot!(two_requests_of_four_tokens(2));
}

fn two_requests_of_four_tokens(depth: usize) -> String {
    let mut harness = Harness::new(config(depth), 1);
    harness.fill();
    harness.add(0, "a", &[1], 4);
    harness.add(0, "b", &[2], 4);
    harness.run_until_idle();
    harness.told()
}

/// A clock that moves a millisecond whenever it is read, so that nothing takes no time.
struct BusyClock(ManualClock);

impl Clock for BusyClock {
    fn now(&self) -> Stamp {
        self.0.advance(Duration::from_millis(1));
        self.0.now()
    }

    fn wall(&self) -> WallTime {
        self.0.wall()
    }
}

#[test]
fn every_phase_of_a_step_is_timed() {
    let clock = BusyClock(ManualClock::at(1));
    let mut engine = Engine::new(config(1), Arc::new(clock), Progress::default()).unwrap();
    engine.handle(Inbox::Joined(ClientId(0), super::harness::peer()));
    engine.settle();
    engine.handle(Inbox::Message(
        ClientId(0),
        pawl_shared::protocol::ClientMessage::Add(Box::new(request("a", &[1], 1))),
    ));
    let plan = engine.next_plan().unwrap();
    engine.take_batch();
    let sampled =
        crate::step::Sampled { key: plan.scheduled[0].key, token: 5, logprobs: None, num_nans: 0 };
    let result = StepResult { step: plan.step, sampled: vec![sampled], execute: STEP };
    engine.complete(&result).unwrap();
    let batch = engine.take_batch();
    let [super::super::Outgoing::Step(_, frame)] = &batch.frames[..] else {
        panic!("one frame, not {:?}", batch.frames);
    };
    let EngineMessage::Step { stats, .. } = EngineMessage::decode(&frame.encode()).unwrap() else {
        panic!("a step's frame");
    };
    let pawl = stats.unwrap().pawl.unwrap();
    assert_eq!(
        (pawl.schedule_seconds, pawl.execute_seconds, pawl.update_seconds),
        (0.001, 0.010, 0.001)
    );
}

#[test]
fn a_lone_long_prefill_is_seen_before_its_first_token() {
    let mut long = config(2);
    long.scheduler.max_num_batched_tokens = 128;
    long.scheduler.max_step = None;
    long.scheduler.max_shared_step = None;
    let mut harness = Harness::new(long, 2);
    harness.fill();
    harness.told();
    harness.add(0, "long", &[7; 250], 1);
    harness.fill();
    insta::assert_snapshot!(harness.told(), @r"
    to 0: at 1.000 step 0 running 1 waiting 0 blocks 63 queries 250 hits 0
    to 1: at 1.000 step 0 running 1 waiting 0 blocks 63
    ");
    harness.finish_step();
    harness.abort(0, &["long"]);
    harness.fill();
    insta::assert_snapshot!(harness.told(), @r"
    to 0: at 1.010 step 1 running 0 waiting 0 blocks 0
    to 1: at 1.010 step 1 running 0 waiting 0 blocks 0
    ");
    harness.run_until_idle();
    insta::assert_snapshot!(harness.told(), @"");
}

#[test]
fn gauges_return_to_zero_after_the_last_abort() {
    let mut harness = Harness::new(config(2), 3);
    for (client, id) in [(0, "a"), (1, "b"), (1, "c")] {
        harness.add(client, id, &[1, 2, 3], 100);
    }
    harness.fill();
    harness.finish_step();
    harness.finish_step();
    harness.told();
    harness.abort(0, &["a"]);
    harness.engine.handle(Inbox::Left(ClientId(1)));
    harness.fill();
    // No step is in flight and none comes: the frames depend on the abort alone.
    insta::assert_snapshot!(harness.told(), @r"
    to 0: at 1.020 step 2 running 0 waiting 0 blocks 0
    to 2: at 1.020 step 2 running 0 waiting 0 blocks 0
    ");
    assert_eq!(harness.gauges.unwrap().num_running_reqs, 0);
}

/// Adds up what each client was told of what is told once.
fn sum_of_deltas(frames: &[(ClientId, EngineMessage)]) -> BTreeMap<u32, (u64, u64, u64)> {
    let mut sums = BTreeMap::<u32, (u64, u64, u64)>::new();
    for (client, message) in frames {
        let EngineMessage::Step { timestamp, stats: Some(stats), .. } = message else {
            panic!("a frame without stats: {message:?}");
        };
        assert!(*timestamp > 0.0);
        let SchedulerStats { prefix_cache_stats: prefix, pawl, .. } = stats;
        let pawl = pawl.unwrap();
        let sum = sums.entry(client.0).or_default();
        sum.0 += prefix.queries;
        sum.1 += prefix.hits;
        sum.2 += pawl.num_preemptions;
    }
    sums
}

#[test]
fn each_delta_is_told_once_and_to_whom_it_belongs() {
    let mut small = config(2);
    small.cache.num_blocks = 13; // 48 tokens, for three requests that come to 24 each.
    let mut harness = Harness::new(small, 3);
    let shared: Vec<u32> = (0..8).collect();
    for client in 0..3 {
        harness.add(client, "same name", &[&shared[..], &[client]].concat(), 15);
        harness.fill();
    }
    harness.run_until_idle();
    let sums = sum_of_deltas(&harness.frames);
    insta::assert_debug_snapshot!(sums, @r"
    {
        0: (
            9,
            0,
            0,
        ),
        1: (
            9,
            8,
            0,
        ),
        2: (
            9,
            8,
            1,
        ),
    }
    ");
    let preemptions: u64 = sums.values().map(|sum| sum.2).sum();
    assert!(preemptions > 0, "the cache was small enough for this test to mean something");
}

#[test]
fn a_client_without_requests_hears_the_gauges_each_second() {
    let mut harness = Harness::new(config(1), 2);
    harness.add(0, "a", &[1], 200);
    harness.fill();
    harness.frames.clear();
    let start = harness.clock.now();
    while harness.clock.now().since(start) < 2 * GAUGES_EVERY + STEP {
        harness.finish_step();
        harness.clock.advance(STEP * 9);
        harness.fill();
    }
    harness.frames.retain(|(client, _)| *client == ClientId(1));
    insta::assert_snapshot!(harness.told(), @r"
    to 1: at 2.010 step 11 running 1 waiting 0 blocks 3 ran 1 in 10 ms
    to 1: at 3.010 step 21 running 1 waiting 0 blocks 6 ran 1 in 10 ms
    ");
}

#[test]
fn progress_is_shown_by_steps_and_by_an_idle_engine_only() {
    let mut harness = Harness::new(config(1), 1);
    let count = |harness: &Harness| harness.progress.load(std::sync::atomic::Ordering::Relaxed);
    harness.engine.handle(Inbox::Tick);
    assert_eq!(count(&harness), 1);
    harness.add(0, "a", &[1], 1);
    harness.fill();
    harness.engine.handle(Inbox::Tick);
    assert_eq!(count(&harness), 1, "a step is in flight: only its end is progress");
    harness.finish_step();
    assert_eq!(count(&harness), 2);
}

#[test]
fn a_result_of_another_step_is_an_error() {
    let mut harness = Harness::new(config(2), 1);
    let result = |step| StepResult { step, sampled: vec![], execute: STEP };
    let unasked = harness.engine.complete(&result(1)).unwrap_err().to_string();
    insta::assert_snapshot!(unasked, @"the runner finished step 1, but none is in flight");
    harness.add(0, "a", &[1], 9);
    harness.fill();
    let wrong = harness.engine.complete(&result(2)).unwrap_err().to_string();
    insta::assert_snapshot!(wrong, @"the runner finished step 2, but step 1 is the oldest in flight");
}
