use super::*;

/// Lines: `open`, `opened`, `welcome EPOCH`, `refused VERSION`, `engine INDEX` (its ready response),
/// `pong EPOCH PROGRESS busy|idle`, `beats N [PROGRESS busy|idle]` (one tick a second, each answered
/// if so told), `tick`, `gone|stopping EPOCH`, `lost control|input|output`, `leave`, `left EPOCH`, `garbage`,
/// `hello|loaded INDEX`, `connected INDEX [KNOWN]`, `ack N`, `ignored`.
pub(super) fn check(script: &str) -> String {
    let clock = ManualClock::at(1_000_000_000);
    let heartbeat = HeartbeatConfig::default();
    run(script, &clock, FrontendRendezvous::new("alice".into(), 7, 100, heartbeat, clock.now()))
}

pub(super) fn check_awaiting(script: &str) -> String {
    let clock = ManualClock::at(1_000_000_000);
    run(script, &clock, FrontendRendezvous::awaiting(100, HeartbeatConfig::default(), clock.now()))
}

pub(super) fn check_listed(script: &str) -> String {
    let clock = ManualClock::at(1_000_000_000);
    let heartbeat = HeartbeatConfig::default();
    run(script, &clock, FrontendRendezvous::listed(4, 100, heartbeat, clock.now()))
}

fn run(script: &str, clock: &ManualClock, mut frontend: FrontendRendezvous) -> String {
    let manual = clock.clone();
    trace(script, clock, |words| {
        let control = |message: ControlMessage| FrontendInput::Control(message.encode());
        let pong = |epoch, progress, busy: &str| {
            let busy = busy == "busy";
            control(ControlMessage::Pong { epoch, seq: 1, progress, busy })
        };
        let input = match words.word(0) {
            "open" => return vec![format!("{:?}", frontend.next_open(manual.now()))],
            "opened" => FrontendInput::Opened { input: "ipc:///in".into(), output: "out".into() },
            "failed" => FrontendInput::OpenFailed { reason: "no room".into() },
            "welcome" => {
                let epoch = words.number(1);
                control(ControlMessage::Welcome { client_index: 3, epoch, engine_index: 0 })
            }
            "refused" => {
                let version = words.number(1);
                control(ControlMessage::Refused { version, reason: "so it says".into() })
            }
            "engine" => FrontendInput::Ready {
                ready: match words.0.get(2) {
                    Some(ready) => Bytes::copy_from_slice(ready.as_bytes()),
                    None => Bytes::from_static(b"ready"),
                },
                engine_index: words.number(1) as u32,
            },
            "connected" => FrontendInput::Connected {
                engine_index: words.number(1) as u32,
                known: words.0.get(2).map(|known| Bytes::copy_from_slice(known.as_bytes())),
            },
            "pong" => pong(words.number(1), words.number(2), words.word(3)),
            "gone" => {
                let epoch = words.number(1);
                control(ControlMessage::Gone { epoch, reason: "so it says".into() })
            }
            "lost" => FrontendInput::Disconnected(match words.word(1) {
                "control" => PairSocket::Control,
                "input" => PairSocket::Input,
                "output" => PairSocket::Output,
                other => panic!("no such socket: {other}"),
            }),
            "hello" | "loaded" => FrontendInput::Handshake {
                engine_index: words.number(1) as u32,
                ready: words.word(0) == "loaded",
            },
            "ack" => FrontendInput::Acknowledge(words.number(1)),
            "leave" => FrontendInput::Leave,
            "stopping" => control(ControlMessage::Stopping { epoch: words.number(1) }),
            "left" => control(ControlMessage::LeaveDone { epoch: words.number(1) }),
            "garbage" => FrontendInput::Control(Bytes::from_static(b"\xdd\xff\xff\xff\xff")),
            "tick" => FrontendInput::Tick,
            "ignored" => return vec![frontend.ignored().to_string()],
            "beats" => {
                let mut actions = Vec::new();
                for _ in 0..words.number(1) {
                    manual.advance(Duration::from_secs(1));
                    actions.extend(frontend.handle(manual.now(), FrontendInput::Tick));
                    if words.0.len() > 2 {
                        let answer = pong(101, words.number(2), words.word(3));
                        actions.extend(frontend.handle(manual.now(), answer));
                    }
                }
                return told(&actions);
            }
            other => panic!("no such step: {other}"),
        };
        let actions = frontend.handle(manual.now(), input);
        actions.iter().map(|action| format!("{action:?}")).collect()
    })
}

/// All actions, with pings only counted.
fn told(actions: &[FrontendAction]) -> Vec<String> {
    let is_ping = |action: &&FrontendAction| {
        matches!(action, FrontendAction::Send(ControlMessage::Ping { .. }))
    };
    let pings = actions.iter().filter(is_ping).count();
    let mut told = vec![format!("{pings} pings")];
    told.extend(actions.iter().filter(|a| !is_ping(a)).map(|action| format!("{action:?}")));
    told
}

#[test]
fn a_join_is_up_when_both_the_welcome_and_the_ready_response_are_there() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        beats 2 0 idle
        engine 0
        welcome 99
        welcome 101
        engine 0
        welcome 101
        ignored
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > beats 2 0 idle
        2 pings
    > engine 0
    > welcome 99
    > welcome 101
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
    > engine 0
    > welcome 101
    > ignored
        1
    "#);
}

#[test]
fn a_core_that_stops_is_told_once_and_until_the_next_one() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        stopping 101
        engine 0
        stopping 99
        stopping 101
        beats 1 0 idle
        lost control
        lost output
        open
        opened
        engine 0
        welcome 102
        stopping 101
        stopping 102
        ignored
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > welcome 101
    > stopping 101
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
        Stopping
    > stopping 99
    > stopping 101
    > beats 1 0 idle
        1 pings
    > lost control
    > lost output
        Down { reason: "the core is gone" }
        Close
    > open
        Some((102, 20ms))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 102, role: Frontend, taps: None }))
    > engine 0
    > welcome 102
        Up { ready: b"ready", client_index: 3, epoch: 102, engine_index: 0 }
    > stopping 101
    > stopping 102
        Stopping
    > ignored
        2
    "#);
}

#[test]
fn a_refusal_is_told_once_and_tried_again_slowly() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        refused 2
        open
        opened
        refused 2
        open
        failed
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > refused 2
        Down { reason: "the core speaks join version 2, this frontend 1: run both from the same build (so it says)" }
        Close
    > open
        Some((102, 1s))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 102, role: Frontend, taps: None }))
    > refused 2
        Close
    > open
        Some((103, 1s))
    > failed
        Down { reason: "no room" }
        Close
    "#);
}

#[test]
fn a_dead_core_is_down_once_its_outputs_are_read_and_joined_again_with_a_new_epoch() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        lost input
        lost control
        lost output
        lost output
        open
        opened
        welcome 102
        engine 0
        lost control
        wait 500
        tick
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
    > lost input
    > lost control
    > lost output
        Down { reason: "the core is gone" }
        Close
    > lost output
    > open
        Some((102, 20ms))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 102, role: Frontend, taps: None }))
    > welcome 102
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 102, engine_index: 0 }
    > lost control
    > wait 500
    > tick
        Down { reason: "the core is gone" }
        Close
    > open
        Some((103, 20ms))
    "#);
}

#[test]
fn the_cores_own_word_is_the_reason() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        lost output
        lost input
        gone 101
        open
        opened
        gone 101
        gone 102
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > welcome 101
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
    > lost output
    > lost input
    > gone 101
        Down { reason: "the core closed the link: so it says" }
        Close
    > open
        Some((102, 20ms))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 102, role: Frontend, taps: None }))
    > gone 101
    > gone 102
        Close
    "#);
}

#[test]
fn a_join_that_is_not_answered_is_made_anew_after_a_growing_wait() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        beats 10
        open
        opened
        lost control
        open
        opened
        lost input
        open
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > beats 10
        10 pings
        Close
    > open
        Some((102, 20ms))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 102, role: Frontend, taps: None }))
    > lost control
        Close
    > open
        Some((103, 40ms))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 103, role: Frontend, taps: None }))
    > lost input
        Close
    > open
        Some((104, 80ms))
    "#);
}

#[test]
fn leave_waits_for_its_answer() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        leave
        leave
        lost output
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
    > leave
        Send(Leave { epoch: 101 })
    > leave
    > lost output
        Close
    > open
        None
    "#);
    insta::assert_snapshot!(check(
        "
        open
        opened
        welcome 101
        engine 0
        ack 500
        leave
        ack 600
        left 99
        left 101
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
    > ack 500
        Send(Ack { epoch: 101, bytes: 500 })
    > leave
        Send(Leave { epoch: 101 })
    > ack 600
    > left 99
    > left 101
        Close
    > open
        None
    "#);
}

#[test]
fn garbage_is_counted_and_dropped() {
    insta::assert_snapshot!(check(
        "
        open
        opened
        garbage
        hello 0
        welcome 101
        engine 0
        garbage
        engine 1
        refused 1
        ignored
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Send(Join(Join { input: "ipc:///in", output: "out", pid: 7, instance: "alice", epoch: 101, role: Frontend, taps: None }))
    > garbage
    > hello 0
    > welcome 101
    > engine 0
        Up { ready: b"ready", client_index: 3, epoch: 101, engine_index: 0 }
    > garbage
    > engine 1
    > refused 1
    > ignored
        5
    "#);
}
