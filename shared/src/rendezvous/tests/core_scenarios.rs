use super::*;

/// Lines: `join PEER INSTANCE EPOCH`, `version PEER N`, `leave|ping PEER EPOCH`, `ack PEER EPOCH N`,
/// `garbage PEER`, `gone PEER`, `up|down CLIENT`, `ready`, `stopping`, `beats N` (one tick a second), `tick`,
/// `progress N`, `init DIALER CLIENTS`, `handshake-gone DIALER`, `ignored`.
pub(super) fn check(script: &str) -> String {
    let clock = ManualClock::at(1_000_000_000);
    let mut core = CoreRendezvous::new(0, HeartbeatConfig::default(), clock.now());
    let manual = clock.clone();
    trace(script, &clock, |words| {
        let from = |message: ControlMessage| CoreInput::Control {
            from: peer(words.word(1)),
            message: message.encode(),
        };
        let inputs = match words.word(0) {
            "join" => vec![from(join_of(words.word(2), words.number(3)))],
            "version" => vec![from(ControlMessage::JoinOfVersion(words.number(2)))],
            "leave" => vec![from(ControlMessage::Leave { epoch: words.number(2) })],
            "ping" => vec![from(ControlMessage::Ping { epoch: words.number(2), seq: 1 })],
            "ack" => {
                let (epoch, bytes) = (words.number(2), words.number(3));
                vec![from(ControlMessage::Ack { epoch, bytes })]
            }
            "garbage" => vec![
                CoreInput::Control { from: peer(words.word(1)), message: Bytes::from_static(b"?") },
                from(ControlMessage::LeaveDone { epoch: 1 }),
            ],
            "gone" => vec![CoreInput::ControlGone { from: peer(words.word(1)) }],
            "up" => vec![CoreInput::LinkUp { client: ClientId(words.number(1) as u32) }],
            "down" => vec![CoreInput::LinkDown {
                client: ClientId(words.number(1) as u32),
                reason: LeaveReason::Disconnected,
            }],
            "ready" => vec![CoreInput::Ready],
            "stopping" => vec![CoreInput::Stopping],
            "tick" => vec![CoreInput::Tick],
            "init" => {
                let list = |kind: &str| -> Vec<String> {
                    (0..words.number(2)).map(|i| format!("ipc:///{kind}{i}")).collect()
                };
                vec![CoreInput::Init {
                    dialer: words.number(1) as u32,
                    inputs: list("in"),
                    outputs: list("out"),
                }]
            }
            "handshake-gone" => {
                vec![CoreInput::HandshakeGone { dialer: words.number(1) as u32 }]
            }
            "progress" => {
                core.set_progress(words.number(1));
                return Vec::new();
            }
            "ignored" => return vec![core.ignored().to_string()],
            "beats" => {
                let mut actions = Vec::new();
                for _ in 0..words.number(1) {
                    manual.advance(Duration::from_secs(1));
                    actions.extend(core.handle(manual.now(), CoreInput::Tick));
                }
                return actions.iter().map(show).collect();
            }
            other => panic!("no such step: {other}"),
        };
        let now = manual.now();
        inputs.into_iter().flat_map(|input| core.handle(now, input)).map(|a| show(&a)).collect()
    })
}

fn show(action: &CoreAction) -> String {
    match action {
        CoreAction::Reply { to, message } => {
            format!("reply to {}: {message:?}", String::from_utf8_lossy(&to.0))
        }
        CoreAction::OpenLink { client, input, acknowledges, .. } => {
            format!("open link {} to {input}, acknowledges: {acknowledges}", client.0)
        }
        other => format!("{other:?}"),
    }
}

#[test]
fn joins_are_held_until_the_core_is_ready_and_pings_answered_meanwhile() {
    insta::assert_snapshot!(check(
        "
        join A alice 5
        progress 42
        ping A 5
        beats 3
        ping A 5
        ready
        up 0
        join B tap 9
        up 1
        "
    ), @r#"
    > join A alice 5
    > progress 42
    > ping A 5
        reply to A: Pong { epoch: 5, seq: 1, progress: 42, busy: false }
    > beats 3
    > ping A 5
        reply to A: Pong { epoch: 5, seq: 1, progress: 42, busy: false }
    > ready
        open link 0 to ipc:///in-alice-5, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 5, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 5)", role: Frontend }
    > join B tap 9
        open link 1 to ipc:///in-tap-9, acknowledges: true
    > up 1
        reply to B: Welcome { client_index: 1, epoch: 9, engine_index: 0 }
        Joined { client: ClientId(1), peer: "tap tap (pid 7, epoch 9)", role: Tap }
    "#);
}

/// Told once each: those that are here, and those that join while what is open finishes. A tap and
/// a frontend of vLLM's hear nothing.
#[test]
fn a_core_that_stops_tells_its_frontends() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 5
        up 0
        join B tap 9
        up 1
        init 0 1
        up 2
        join C carol 7
        stopping
        stopping
        up 3
        "
    ), @r#"
    > ready
    > join A alice 5
        open link 0 to ipc:///in-alice-5, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 5, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 5)", role: Frontend }
    > join B tap 9
        open link 1 to ipc:///in-tap-9, acknowledges: true
    > up 1
        reply to B: Welcome { client_index: 1, epoch: 9, engine_index: 0 }
        Joined { client: ClientId(1), peer: "tap tap (pid 7, epoch 9)", role: Tap }
    > init 0 1
        open link 2 to ipc:///in0, acknowledges: false
    > up 2
        Joined { client: ClientId(2), peer: "vLLM frontend at ipc:///in0", role: Frontend }
        HandshakeDone { dialer: 0 }
    > join C carol 7
        open link 3 to ipc:///in-carol-7, acknowledges: true
    > stopping
        reply to A: Stopping { epoch: 5 }
    > stopping
    > up 3
        reply to C: Welcome { client_index: 3, epoch: 7, engine_index: 0 }
        reply to C: Stopping { epoch: 7 }
        Joined { client: ClientId(3), peer: "frontend carol (pid 7, epoch 7)", role: Frontend }
    "#);
}

/// What a core answers to a join at once; `None` if it opens a link.
fn answer(core: &mut CoreRendezvous, name: &str, instance: &str) -> Option<String> {
    let now = ManualClock::at(1_000_000_000).now();
    let message = join_of(instance, 1).encode();
    let actions = core.handle(now, CoreInput::Control { from: peer(name), message });
    match &actions[..] {
        [CoreAction::Reply { message: ControlMessage::Refused { reason, .. }, .. }] => {
            Some(reason.clone())
        }
        [CoreAction::OpenLink { .. }] => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn there_are_eight_taps_at_most_and_frontends_beside_them() {
    let now = ManualClock::at(1_000_000_000).now();
    let mut core = CoreRendezvous::new(0, HeartbeatConfig::default(), now);
    let _ = core.handle(now, CoreInput::Ready);
    for nth in 0..8 {
        let name = format!("tap{nth}");
        assert_eq!(answer(&mut core, &name, &name), None);
    }
    let ninth = answer(&mut core, "tap8", "tap8");
    assert_eq!(ninth.as_deref(), Some("8 taps are here already"));
    assert_eq!(answer(&mut core, "A", "alice"), None);
    let _ = core.handle(now, CoreInput::ControlGone { from: peer("tap3") });
    assert_eq!(answer(&mut core, "tap8", "tap8"), None);
}

#[test]
fn there_are_256_clients_at_most_and_a_handshake_that_does_not_fit_starts_again() {
    let now = ManualClock::at(1_000_000_000).now();
    let mut core = CoreRendezvous::new(0, HeartbeatConfig::default(), now);
    let _ = core.handle(now, CoreInput::Ready);
    for nth in 0..256 {
        let name = format!("f{nth}");
        assert_eq!(answer(&mut core, &name, &name), None);
    }
    let refused = answer(&mut core, "A", "alice");
    assert_eq!(refused.as_deref(), Some("the core serves 256 frontends already"));
    let (inputs, outputs) = (vec!["ipc:///in".into()], vec!["ipc:///out".into()]);
    let init = core.handle(now, CoreInput::Init { dialer: 0, inputs, outputs });
    assert!(matches!(init[..], [CoreAction::HandshakeAgain { dialer: 0 }]), "{init:?}");
    let _ = core.handle(now, CoreInput::ControlGone { from: peer("f3") });
    assert_eq!(answer(&mut core, "A", "alice"), None);
}

#[test]
fn where_only_taps_are_served_a_frontend_is_sent_to_the_core() {
    let now = ManualClock::at(1_000_000_000).now();
    let mut core = CoreRendezvous::new(0, HeartbeatConfig::default(), now).taps_only();
    let _ = core.handle(now, CoreInput::Ready);
    let refused = answer(&mut core, "A", "alice").expect("it is refused");
    assert!(refused.contains("go to the core's address"), "{refused}");
    assert_eq!(answer(&mut core, "B", "tap"), None);
}

#[test]
fn leave_undoes_a_join_and_may_come_twice() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 1
        up 0
        leave A 1
        leave A 1
        gone A
        join A alice 2
        "
    ), @r#"
    > ready
    > join A alice 1
        open link 0 to ipc:///in-alice-1, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 1)", role: Frontend }
    > leave A 1
        CloseLink { client: ClientId(0) }
        Left { client: ClientId(0), reason: Left, role: Frontend }
        reply to A: LeaveDone { epoch: 1 }
    > leave A 1
        reply to A: LeaveDone { epoch: 1 }
    > gone A
    > join A alice 2
        open link 1 to ipc:///in-alice-2, acknowledges: true
    "#);
}

#[test]
fn one_frontend_never_has_two_links() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 5
        join A alice 5
        up 0
        join A alice 5
        join A2 alice 6
        gone A
        up 1
        join A2 alice 5
        join A2 other 1
        "
    ), @r#"
    > ready
    > join A alice 5
        open link 0 to ipc:///in-alice-5, acknowledges: true
    > join A alice 5
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 5, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 5)", role: Frontend }
    > join A alice 5
        reply to A: Welcome { client_index: 0, epoch: 5, engine_index: 0 }
    > join A2 alice 6
        CloseLink { client: ClientId(0) }
        reply to A: Gone { epoch: 5, reason: "it joined again" }
        Left { client: ClientId(0), reason: Replaced, role: Frontend }
        open link 1 to ipc:///in-alice-6, acknowledges: true
    > gone A
    > up 1
        reply to A2: Welcome { client_index: 1, epoch: 6, engine_index: 0 }
        Joined { client: ClientId(1), peer: "frontend alice (pid 7, epoch 6)", role: Frontend }
    > join A2 alice 5
        reply to A2: Refused { version: 1, reason: "epoch 6 of it has joined since" }
    > join A2 other 1
        CloseLink { client: ClientId(1) }
        reply to A2: Gone { epoch: 6, reason: "it joined again" }
        Left { client: ClientId(1), reason: Replaced, role: Frontend }
        open link 2 to ipc:///in-other-1, acknowledges: true
    "#);
}

#[test]
fn another_version_is_refused_naming_both() {
    insta::assert_snapshot!(check("version A 2"), @r#"
    > version A 2
        reply to A: Refused { version: 1, reason: "the core speaks join version 1, the frontend 2: run both from the same build" }
    "#);
}

#[test]
fn a_closed_control_connection_or_a_lost_link_ends_a_client() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 1
        join B bob 1
        join C carol 1
        up 0
        up 1
        gone A
        down 1
        down 2
        ping B 1
        up 2
        gone C
        "
    ), @r#"
    > ready
    > join A alice 1
        open link 0 to ipc:///in-alice-1, acknowledges: true
    > join B bob 1
        open link 1 to ipc:///in-bob-1, acknowledges: true
    > join C carol 1
        open link 2 to ipc:///in-carol-1, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 1)", role: Frontend }
    > up 1
        reply to B: Welcome { client_index: 1, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(1), peer: "frontend bob (pid 7, epoch 1)", role: Frontend }
    > gone A
        CloseLink { client: ClientId(0) }
        reply to A: Gone { epoch: 1, reason: "its connection closed" }
        Left { client: ClientId(0), reason: Disconnected, role: Frontend }
    > down 1
        CloseLink { client: ClientId(1) }
        reply to B: Gone { epoch: 1, reason: "its connection closed" }
        Left { client: ClientId(1), reason: Disconnected, role: Frontend }
    > down 2
        CloseLink { client: ClientId(2) }
        reply to C: Gone { epoch: 1, reason: "its connection closed" }
    > ping B 1
        reply to B: Gone { epoch: 1, reason: "the core does not know it" }
    > up 2
    > gone C
    "#);
}

#[test]
fn silence_ends_a_client_but_not_one_that_pings() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 1
        join B bob 1
        up 0
        up 1
        beats 6
        ping B 1
        beats 3
        beats 1
        beats 5
        "
    ), @r#"
    > ready
    > join A alice 1
        open link 0 to ipc:///in-alice-1, acknowledges: true
    > join B bob 1
        open link 1 to ipc:///in-bob-1, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 1)", role: Frontend }
    > up 1
        reply to B: Welcome { client_index: 1, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(1), peer: "frontend bob (pid 7, epoch 1)", role: Frontend }
    > beats 6
    > ping B 1
        reply to B: Pong { epoch: 1, seq: 1, progress: 0, busy: false }
    > beats 3
    > beats 1
        CloseLink { client: ClientId(0) }
        reply to A: Gone { epoch: 1, reason: "it was silent for too long" }
        Left { client: ClientId(0), reason: Silent, role: Frontend }
    > beats 5
    "#);
}

#[test]
fn a_core_that_was_stopped_reads_before_it_judges() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 1
        join B bob 1
        up 0
        up 1
        beats 1
        wait 30000
        tick
        ping B 1
        beats 1
        beats 1
        "
    ), @r#"
    > ready
    > join A alice 1
        open link 0 to ipc:///in-alice-1, acknowledges: true
    > join B bob 1
        open link 1 to ipc:///in-bob-1, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 1)", role: Frontend }
    > up 1
        reply to B: Welcome { client_index: 1, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(1), peer: "frontend bob (pid 7, epoch 1)", role: Frontend }
    > beats 1
    > wait 30000
    > tick
    > ping B 1
        reply to B: Pong { epoch: 1, seq: 1, progress: 0, busy: false }
    > beats 1
    > beats 1
        CloseLink { client: ClientId(0) }
        reply to A: Gone { epoch: 1, reason: "it was silent for too long" }
        Left { client: ClientId(0), reason: Silent, role: Frontend }
    "#);
}

#[test]
fn a_core_that_was_stopped_in_its_first_second_reads_before_it_judges() {
    insta::assert_snapshot!(check(
        "
        ready
        join A alice 1
        join B bob 1
        up 0
        up 1
        wait 30000
        tick
        ping B 1
        beats 1
        beats 1
        "
    ), @r#"
    > ready
    > join A alice 1
        open link 0 to ipc:///in-alice-1, acknowledges: true
    > join B bob 1
        open link 1 to ipc:///in-bob-1, acknowledges: true
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 1)", role: Frontend }
    > up 1
        reply to B: Welcome { client_index: 1, epoch: 1, engine_index: 0 }
        Joined { client: ClientId(1), peer: "frontend bob (pid 7, epoch 1)", role: Frontend }
    > wait 30000
    > tick
    > ping B 1
        reply to B: Pong { epoch: 1, seq: 1, progress: 0, busy: false }
    > beats 1
    > beats 1
        CloseLink { client: ClientId(0) }
        reply to A: Gone { epoch: 1, reason: "it was silent for too long" }
        Left { client: ClientId(0), reason: Silent, role: Frontend }
    "#);
}

#[test]
fn garbage_is_counted_and_an_ack_needs_its_epoch() {
    insta::assert_snapshot!(check(
        "
        ready
        garbage X
        join A alice 3
        ack A 3 10
        up 0
        ack A 3 1000
        ack A 2 2000
        ack X 3 2000
        garbage A
        ignored
        "
    ), @r#"
    > ready
    > garbage X
    > join A alice 3
        open link 0 to ipc:///in-alice-3, acknowledges: true
    > ack A 3 10
    > up 0
        reply to A: Welcome { client_index: 0, epoch: 3, engine_index: 0 }
        Joined { client: ClientId(0), peer: "frontend alice (pid 7, epoch 3)", role: Frontend }
    > ack A 3 1000
        Acknowledged { client: ClientId(0), bytes: 1000 }
    > ack A 2 2000
    > ack X 3 2000
    > garbage A
    > ignored
        7
    "#);
}
