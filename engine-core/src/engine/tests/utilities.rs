//! Calls, pauses and the end.

use std::time::Duration;

use pawl_shared::protocol::{EngineMessage, EventKind, Value};

use super::harness::{Harness, STEP, config};
use crate::engine::EngineConfig;
use crate::scheduler::SchedulerConfig;

#[test]
fn calls_are_answered() {
    let mut harness = Harness::new(config(1), 1);
    for method in [
        "reset_mm_cache",
        "get_supported_tasks",
        "get_model_card",
        "reset_prefix_cache",
        "reset_encoder_cache",
        "is_sleeping",
        "is_scheduler_paused",
        "list_loras",
        "get_weight_version",
        "profile",
        "no_such_method",
    ] {
        harness.call(0, method, vec![]);
    }
    harness.fill();
    insta::assert_snapshot!(harness.told());
}

/// While a step is in flight no pause is reached, and all who asked for one wait.
#[test]
fn pauses_beyond_the_bound_are_refused() {
    let mut harness = Harness::new(config(1), 1);
    harness.add(0, "a", &[1, 2, 3, 4, 5], 4);
    harness.fill();
    harness.told();
    let keep = || vec![Value::Text("keep".into()), Value::Bool(true)];
    (0..64).for_each(|_| harness.call(0, "pause_generation", keep()));
    harness.fill();
    assert_eq!(harness.told(), "");
    harness.call(0, "pause_generation", keep());
    harness.fill();
    let refused = harness.told();
    assert!(refused.contains("64 calls already wait for the pause"), "{refused}");
    harness.finish_step();
    harness.fill();
    assert_eq!(harness.told().matches("Ok(").count(), 64);
}

/// A request that is preempted again and again in the middle of its prompt has nobody to tell: the
/// first events are kept, which intervals are computed from.
#[test]
fn events_that_wait_to_be_told_are_bounded() {
    let parts =
        SchedulerConfig { max_num_batched_tokens: 4, max_num_seqs: 4, ..config(1).scheduler };
    let mut harness = Harness::new(EngineConfig { scheduler: parts, ..config(1) }, 1);
    let prompt: Vec<u32> = (0..12).collect();
    harness.add(0, "a", &prompt, 1);
    for _ in 0..40 {
        harness.fill();
        let running_too = vec![Value::Bool(true), Value::Bool(false)];
        harness.call(0, "reset_prefix_cache", running_too);
        harness.finish_step();
    }
    harness.run_until_idle();
    let outputs = harness.frames.iter().filter_map(|(_, message)| match message {
        EngineMessage::Step { outputs, .. } => Some(outputs),
        _ => None,
    });
    let events: Vec<_> = outputs.flatten().flat_map(|output| &output.events).collect();
    assert_eq!(events.len(), 64);
    assert_eq!((events[0].kind, events[1].kind), (EventKind::Queued, EventKind::Scheduled));
}

/// Two requests run, with `depth` steps in flight, when the cache is reset; what they are told.
fn check_reset(depth: usize, args: Vec<Value>) -> (String, String) {
    let mut harness = Harness::new(config(depth), 1);
    harness.add(0, "a", &[1, 2, 3, 4, 5], 4);
    harness.add(0, "b", &[1, 2, 3, 4, 6], 4);
    harness.fill();
    harness.finish_step();
    harness.fill();
    harness.told();
    harness.call(0, "reset_prefix_cache", args);
    harness.fill();
    let answer = harness.told();
    harness.run_until_idle();
    (answer, harness.told())
}

#[test]
fn the_cache_is_not_reset_under_running_requests() {
    let (answer, after) = check_reset(1, vec![Value::Bool(false), Value::Bool(false)]);
    assert!(answer.contains("Ok(Bool(false))"), "{answer}");
    assert!(!after.contains("Preempted"), "{after}");
}

#[test]
fn running_requests_give_their_blocks_up_for_a_reset_and_go_on() {
    for depth in [1, 2] {
        let (answer, after) = check_reset(depth, vec![Value::Bool(true), Value::Bool(false)]);
        assert!(answer.contains("Ok(Bool(true))"), "{answer}");
        insta::assert_snapshot!(format!("reset_running_at_depth_{depth}"), after);
    }
    let (answer, _) = check_reset(1, vec![Value::Integer(1)]);
    let refused = "reset_running_requests must be true or false";
    assert!(answer.contains(refused), "{answer}");
}

fn pause(harness: &mut Harness, mode: &str) {
    harness.call(0, "pause_generation", vec![Value::Text(mode.into()), Value::Bool(true)]);
    harness.fill();
}

/// One request is running when generation is paused, one comes after, then it is resumed.
fn check_pause(mode: &str) -> String {
    let mut harness = Harness::new(config(1), 1);
    harness.add(0, "running", &[1], 2);
    harness.fill();
    harness.told();
    pause(&mut harness, mode);
    let mut said = format!("paused:\n{}", harness.told());
    harness.add(0, "newcomer", &[2], 1);
    harness.call(0, "is_scheduler_paused", vec![]);
    harness.run_until_idle();
    said += &format!("a newcomer:\n{}", harness.told());
    harness.call(0, "resume_scheduler", vec![]);
    harness.run_until_idle();
    said + &format!("resumed:\n{}", harness.told())
}

#[test]
fn pausing_by_abort_ends_what_runs() {
    insta::assert_snapshot!(check_pause("abort"));
}

#[test]
fn pausing_by_wait_is_answered_when_all_is_done() {
    insta::assert_snapshot!(check_pause("wait"));
}

#[test]
fn pausing_by_keep_holds_everything_still() {
    insta::assert_snapshot!(check_pause("keep"));
}

/// What `sleep` with these arguments and `wake_up` with these tags lead to.
fn check_sleep(sleep: Vec<Value>, tags: Vec<Value>) -> String {
    let mut harness = Harness::new(config(1), 1);
    harness.add(0, "running", &[1], 3);
    harness.fill();
    harness.told();
    harness.call(0, "sleep", sleep);
    harness.run_until_idle();
    harness.call(0, "is_sleeping", vec![]);
    harness.call(0, "is_scheduler_paused", vec![]);
    harness.fill();
    let asleep = harness.told();
    harness.call(0, "wake_up", tags);
    harness.call(0, "is_sleeping", vec![]);
    harness.run_until_idle();
    format!("asleep:\n{asleep}woken:\n{}", harness.told())
}

#[test]
fn sleeping_is_a_pause_that_wake_up_ends() {
    let level = |level| Value::Integer(level);
    let text = |text: &str| Value::Text(text.into());
    insta::assert_snapshot!(
        "sleep_kept",
        check_sleep(vec![level(0), text("keep")], vec![Value::Nil])
    );
    insta::assert_snapshot!("sleep_by_default", check_sleep(vec![], vec![]));
    let tags = Value::Array(vec![text("weights")]);
    insta::assert_snapshot!("sleep_wakes_in_part", check_sleep(vec![level(1)], vec![tags]));
    let tags = Value::Array(vec![text("soul")]);
    insta::assert_snapshot!("sleep_refused", check_sleep(vec![level(2)], vec![tags]));
}

#[test]
fn a_pause_that_makes_no_sense_is_refused() {
    let mut harness = Harness::new(config(1), 1);
    harness.fill();
    harness.told();
    pause(&mut harness, "nap");
    harness.call(0, "pause_scheduler", vec![Value::Integer(3)]);
    harness.fill();
    insta::assert_snapshot!(harness.told(), @r#"
    to 0: at 1.000 Err("Call to pause_generation method failed: mode is \"nap\"; it must be abort, wait or keep")
    to 0: at 1.000 Err("Call to pause_scheduler method failed: mode must be text: abort, wait or keep")
    "#);
}

#[test]
fn shutting_down_at_once_ends_everything_with_abort() {
    let mut harness = Harness::new(config(2), 2);
    harness.add(0, "a", &[1], 50);
    harness.add(1, "b", &[2], 50);
    harness.fill();
    harness.finish_step();
    harness.told();
    harness.engine.handle(super::super::Inbox::Shutdown);
    harness.add(1, "late", &[3], 1);
    harness.call(0, "is_sleeping", vec![]);
    harness.fill();
    assert!(harness.engine.is_stopped());
    insta::assert_snapshot!(harness.told(), @r#"
    to 0: at 1.010 Err("Server shutting down")
    to 0: at 1.010 step 1 running 0 waiting 0 blocks 0
        a [] finish abort
          engine_stopping, retryable: the engine core is stopping; send the request again once another one serves
        finished ["a"]
    to 1: at 1.010 step 1 running 0 waiting 0 blocks 0
        late [] finish abort
          engine_stopping, retryable: the engine core is stopping; send the request again once another one serves
        b [] finish abort
          engine_stopping, retryable: the engine core is stopping; send the request again once another one serves
        finished ["late", "b"]
    "#);
}

/// Shuts down with two steps' time left and a request that needs `max_tokens` more.
fn check_drain(max_tokens: u32) -> (String, u32) {
    let mut patient = config(1);
    patient.shutdown_timeout = STEP * 2 + Duration::from_millis(5);
    let mut harness = Harness::new(patient, 1);
    harness.add(0, "a", &[1], max_tokens);
    harness.fill();
    harness.told();
    harness.engine.handle(super::super::Inbox::Shutdown);
    let mut steps = 0;
    harness.fill();
    while !harness.engine.is_stopped() {
        harness.finish_step();
        harness.fill();
        steps += 1;
    }
    (harness.told(), steps)
}

#[test]
fn shutting_down_with_time_lets_requests_finish() {
    let (said, steps) = check_drain(2);
    assert_eq!(steps, 2);
    insta::assert_snapshot!(said, @r"
    to 0: at 1.010 step 1 running 1 waiting 0 blocks 1 ran 1 in 10 ms
        a [10] Queued 1.000 Scheduled 1.000 prompt 1 cached 0
    to 0: at 1.020 step 2 running 0 waiting 0 blocks 0 ran 1 in 10 ms
        a [11] finish length
    ");
}

#[test]
fn shutting_down_ends_at_its_deadline() {
    let (said, steps) = check_drain(50);
    assert_eq!(steps, 3);
    insta::assert_snapshot!(said, @r#"
    to 0: at 1.010 step 1 running 1 waiting 0 blocks 1 ran 1 in 10 ms
        a [10] Queued 1.000 Scheduled 1.000 prompt 1 cached 0
    to 0: at 1.020 step 2 running 1 waiting 0 blocks 1 ran 1 in 10 ms
        a [11]
    to 0: at 1.030 step 3 running 1 waiting 0 blocks 1 ran 1 in 10 ms
        a [12]
    to 0: at 1.030 step 3 running 0 waiting 0 blocks 0
        a [] finish abort
          engine_stopping, retryable: the engine core is stopping; send the request again once another one serves
        finished ["a"]
    "#);
}

/// The answer to `pawl_status`, as JSON.
macro_rules! status {
    ($harness:expr, $listed:expr) => {{
        $harness.call(0, "pawl_status", $listed);
        $harness.fill();
        let reply = $harness.frames.drain(..).find_map(|(_, message)| match message {
            EngineMessage::Utility { reply, .. } => Some(reply.result.unwrap()),
            _ => None,
        });
        reply.expect("an answer").to_json_value()
    }};
}

#[test]
fn the_status_says_where_each_request_stands() {
    let mut harness = Harness::new(config(1), 2);
    harness.add(0, "a", &[1, 2, 3], 9);
    harness.fill();
    let during = status!(harness, vec![]);
    assert_eq!(during["requests"][0]["state"], "decode", "as it will be after the step: {during}");
    assert_eq!(during["step_in_flight_seconds"], 0.0);
    harness.finish_step();
    harness.add(1, "b", &[1; 40], 9);
    harness.clock.advance(Duration::from_secs(3));
    let status = status!(harness, vec![]);
    let (a, b) = (&status["requests"][0], &status["requests"][1]);
    for (field, value) in
        [("client", 0), ("prompt_tokens", 3), ("output_tokens", 1), ("computed_tokens", 3)]
    {
        assert_eq!(a[field], value, "{field} of {status}");
    }
    assert_eq!(a["id"], "a");
    assert_eq!((&a["age_seconds"], &a["idle_seconds"]), (&3.01.into(), &3.0.into()));
    assert_eq!((&b["id"], &b["client"], &b["state"]), (&"b".into(), &1.into(), &"waiting".into()));
    let frontend = &status["frontends"][1];
    assert_eq!((&frontend["running"], &frontend["waiting"]), (&0.into(), &1.into()));
    assert_eq!((&frontend["pid"], &frontend["taps"]), (&7.into(), &"ipc:///taps".into()));
    assert_eq!((&status["steps"], &status["tokens_sampled"]), (&1.into(), &1.into()));
    assert_eq!(
        (&status["tokens_scheduled"], &status["execute_seconds"]),
        (&3.into(), &0.01.into())
    );
    assert!(status["kv_blocks_used"].as_u64() >= Some(1), "{status}");
}

#[test]
fn the_status_lists_no_more_than_is_asked_for_nor_than_is_good() {
    let mut harness = Harness::new(config(1), 1);
    for nth in 0..1100 {
        harness.add(0, &format!("r{nth}"), &[1], 1);
    }
    let mut listed = |asked: Vec<Value>| {
        let status = status!(harness, asked);
        let requests = status["requests"].as_array().unwrap();
        assert_eq!(status["requests_live"], 1100);
        assert!(requests.is_empty() || requests[0]["id"] == "r0", "the oldest come first");
        requests.len()
    };
    assert_eq!(listed(vec![]), 64);
    assert_eq!(listed(vec![Value::Integer(0)]), 0);
    assert_eq!(listed(vec![Value::Integer(3)]), 3);
    assert_eq!(listed(vec![Value::Integer(1 << 40)]), 1024);
    assert_eq!(listed(vec![Value::Text("all".into())]), 64);
}
