//! What a frontend makes of a core's silence, and of its own.

use super::frontend_scenarios::check;

#[test]
fn a_silent_core_hangs_and_resumes_and_dies_in_the_end() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        beats 9
        beats 1
        beats 5
        pong 101 1 idle
        beats 60
        open
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > welcome 101
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
    > beats 9
        9 pings
    > beats 1
        1 pings
        Hung { silent_for: 10s }
    > beats 5
        5 pings
    > pong 101 1 idle
        Resumed
    > beats 60
        60 pings
        Hung { silent_for: 10s }
        Down { reason: "the core hung for 60 s" }
        Close
    > open
        Some((102, 20ms))
    "#);
}

#[test]
fn a_busy_core_without_progress_hangs_and_an_idle_one_does_not() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        beats 30 5 idle
        beats 9 5 busy
        beats 2 5 busy
        beats 2 6 busy
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > welcome 101
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
    > beats 30 5 idle
        30 pings
    > beats 9 5 busy
        9 pings
    > beats 2 5 busy
        2 pings
        Hung { silent_for: 10s }
    > beats 2 6 busy
        2 pings
        Resumed
    "#);
}

#[test]
fn a_frontend_that_was_stopped_reads_before_it_judges() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        beats 1 1 idle
        wait 70000
        tick
        pong 101 1 idle
        beats 3 1 idle
        wait 70000
        tick
        beats 9
        beats 1
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > welcome 101
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
    > beats 1 1 idle
        1 pings
    > wait 70000
    > tick
        Send(Ping { epoch: 101, seq: 2 })
    > pong 101 1 idle
    > beats 3 1 idle
        3 pings
    > wait 70000
    > tick
        Send(Ping { epoch: 101, seq: 6 })
    > beats 9
        9 pings
    > beats 1
        1 pings
        Hung { silent_for: 10s }
    "#);
}
