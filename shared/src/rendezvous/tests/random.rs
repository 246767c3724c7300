//! Anything may come over the wire, in any order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// A few names and numbers, so that they meet.
fn any_message() -> impl Strategy<Value = ControlMessage> {
    let epoch = 0_u64..4;
    let instance = prop::sample::select(vec!["alice", "bob", "tap"]);
    prop_oneof![
        (instance, epoch.clone()).prop_map(|(instance, epoch)| join_of(instance, epoch)),
        (2_u64..4).prop_map(ControlMessage::JoinOfVersion),
        (0_u32..4, epoch.clone(), 0_u32..2).prop_map(|(client_index, epoch, engine_index)| {
            ControlMessage::Welcome { client_index, epoch, engine_index }
        }),
        (1_u64..3, ".{0,8}")
            .prop_map(|(version, reason)| ControlMessage::Refused { version, reason }),
        epoch.clone().prop_map(|epoch| ControlMessage::Leave { epoch }),
        epoch.clone().prop_map(|epoch| ControlMessage::LeaveDone { epoch }),
        (epoch.clone(), any::<u64>()).prop_map(|(epoch, seq)| ControlMessage::Ping { epoch, seq }),
        (epoch.clone(), any::<u64>(), any::<bool>()).prop_map(|(epoch, progress, busy)| {
            ControlMessage::Pong { epoch, seq: 1, progress, busy }
        }),
        (epoch.clone(), any::<u64>())
            .prop_map(|(epoch, bytes)| ControlMessage::Ack { epoch, bytes }),
        epoch.clone().prop_map(|epoch| ControlMessage::Stopping { epoch }),
        (epoch, ".{0,8}").prop_map(|(epoch, reason)| ControlMessage::Gone { epoch, reason }),
    ]
}

fn any_whole() -> impl Strategy<Value = Bytes> {
    any_message().prop_map(|message| message.encode())
}

/// A message as it was, cut short, or with a byte changed.
fn any_bytes() -> impl Strategy<Value = Bytes> {
    let broken = (any_message(), any::<prop::sample::Index>(), any::<Option<u8>>()).prop_map(
        |(message, at, change)| {
            let mut bytes = message.encode().to_vec();
            let at = at.index(bytes.len());
            match change {
                Some(byte) => bytes[at] ^= byte,
                None => bytes.truncate(at),
            }
            Bytes::from(bytes)
        },
    );
    prop_oneof![3 => any_whole(), 1 => broken]
}

fn core_input(message: impl Strategy<Value = Bytes>) -> impl Strategy<Value = CoreInput> {
    let from = || prop::sample::select(vec!["A", "B", "C"]).prop_map(peer);
    let client = || (0_u32..12).prop_map(ClientId);
    let reason = prop::sample::select(vec![LeaveReason::Disconnected, LeaveReason::CutOff]).boxed();
    prop_oneof![
        8 => (from(), message)
            .prop_map(|(from, message)| CoreInput::Control { from, message }),
        1 => from().prop_map(|from| CoreInput::ControlGone { from }),
        4 => client().prop_map(|client| CoreInput::LinkUp { client }),
        1 => (client(), reason).prop_map(|(client, reason)| CoreInput::LinkDown { client, reason }),
        1 => Just(CoreInput::Ready),
        1 => Just(CoreInput::Stopping),
        2 => Just(CoreInput::Tick),
        1 => (0_usize..3, 0_usize..3).prop_map(|(inputs, outputs)| CoreInput::Init {
            dialer: 0,
            inputs: vec!["ipc:///i".into(); inputs],
            outputs: vec!["ipc:///o".into(); outputs],
        }),
        1 => Just(CoreInput::HandshakeGone { dialer: 0 }),
    ]
}

#[derive(Debug, PartialEq)]
enum LinkState {
    Open,
    Joined,
}

/// Links open and close in pairs, a client joins and leaves at most once, no id is given twice, and
/// no two links go to the same frontend, as `who` tells from its input address. (A link of a
/// handshake may open later than that of a younger client: it waits for the others of its group.)
fn drive_core(
    steps: Vec<(CoreInput, u64)>,
    who: impl Fn(&str) -> String,
) -> Result<(), TestCaseError> {
    let clock = ManualClock::at(1);
    let mut core = CoreRendezvous::new(0, HeartbeatConfig::default(), clock.now());
    let mut links: BTreeMap<ClientId, (String, LinkState)> = BTreeMap::new();
    let mut given = BTreeSet::new();
    for (input, wait) in steps {
        clock.advance(Duration::from_millis(wait));
        let mut closed_joined = None;
        for action in core.handle(clock.now(), input) {
            match action {
                CoreAction::OpenLink { client, input, acknowledges, .. } => {
                    prop_assert!(given.insert(client), "{client:?} is given again");
                    let who = who(&input);
                    let unknown = links.values().all(|(other, _)| *other != who);
                    prop_assert!(!acknowledges || unknown, "two links to {who}");
                    links.insert(client, (who, LinkState::Open));
                }
                CoreAction::CloseLink { client } => {
                    let Some((_, state)) = links.remove(&client) else {
                        return Err(TestCaseError::fail(format!("{client:?} had no link")));
                    };
                    prop_assert_eq!(closed_joined, None, "a joined client did not leave");
                    closed_joined = (state == LinkState::Joined).then_some(client);
                }
                CoreAction::Joined { client, .. } => {
                    let Some((_, state)) = links.get_mut(&client) else {
                        return Err(TestCaseError::fail(format!("{client:?} has no link")));
                    };
                    prop_assert_eq!(&*state, &LinkState::Open);
                    *state = LinkState::Joined;
                }
                CoreAction::Left { client, .. } => {
                    prop_assert_eq!(closed_joined.take(), Some(client));
                }
                CoreAction::Acknowledged { client, .. } => {
                    let state = links.get(&client).map(|(_, state)| state);
                    prop_assert_eq!(state, Some(&LinkState::Joined));
                }
                CoreAction::Reply { .. }
                | CoreAction::HandshakeDone { .. }
                | CoreAction::HandshakeAgain { .. } => {}
            }
        }
        prop_assert_eq!(closed_joined, None, "a joined client did not leave");
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_core_keeps_its_table_in_order(
        steps in prop::collection::vec((core_input(any_bytes()), 0_u64..3000), 1..200),
    ) {
        drive_core(steps, |input| input.to_owned())?;
    }

    /// One frontend, by instance, never has two links.
    #[test]
    fn the_core_never_links_to_one_frontend_twice(
        steps in prop::collection::vec((core_input(any_whole()), 0_u64..3000), 1..200),
    ) {
        // The address without its epoch is the instance.
        drive_core(steps, |input| input.rsplit_once('-').map_or(input, |(who, _)| who).to_owned())?;
    }

    /// Up and Down take turns (a refused join may tell Down without one), Hung and Resumed too, one
    /// that is up is told once that the core stops, and no message of another epoch brings a
    /// frontend up.
    #[test]
    fn a_frontend_tells_its_life_in_order(
        steps in prop::collection::vec((0_u8..12, any_bytes(), 0_u64..3000), 1..200),
    ) {
        let clock = ManualClock::at(1);
        let config = HeartbeatConfig::default();
        let mut frontend = FrontendRendezvous::new("alice".into(), 7, 0, config, clock.now());
        let (mut open, mut up, mut hung, mut last_epoch) = (false, false, false, 0);
        let mut stopping = false;
        for (kind, bytes, wait) in steps {
            clock.advance(Duration::from_millis(wait));
            if !open {
                let Some((epoch, _)) = frontend.next_open(clock.now()) else { break };
                prop_assert!(epoch > last_epoch);
                last_epoch = epoch;
                open = true;
            }
            let input = match kind {
                0 => FrontendInput::Opened { input: "i".into(), output: "o".into() },
                1 => FrontendInput::OpenFailed { reason: "x".into() },
                2 => FrontendInput::Ready { ready: bytes, engine_index: 0 },
                3 => FrontendInput::Disconnected(PairSocket::Input),
                4 => FrontendInput::Disconnected(PairSocket::Output),
                5 => FrontendInput::Disconnected(PairSocket::Control),
                6 => FrontendInput::Tick,
                7 => FrontendInput::Control(ControlMessage::Welcome {
                    client_index: 1, epoch: last_epoch, engine_index: 0,
                }.encode()),
                _ => FrontendInput::Control(bytes),
            };
            for action in frontend.handle(clock.now(), input) {
                match action {
                    FrontendAction::Up { epoch, .. } => {
                        prop_assert!(!std::mem::replace(&mut up, true));
                        prop_assert_eq!(epoch, last_epoch);
                        (hung, stopping) = (false, false);
                    }
                    FrontendAction::Stopping => {
                        prop_assert!(up && !std::mem::replace(&mut stopping, true));
                    }
                    FrontendAction::Hung { .. } => {
                        prop_assert!(up && !std::mem::replace(&mut hung, true));
                    }
                    FrontendAction::Resumed => {
                        prop_assert!(up && std::mem::replace(&mut hung, false));
                    }
                    FrontendAction::Down { .. } => up = false,
                    FrontendAction::Close => {
                        prop_assert!(!up, "closed without a Down");
                        open = false;
                    }
                    FrontendAction::Send(_)
                    | FrontendAction::SendInit { .. }
                    | FrontendAction::Waiting => {}
                }
            }
        }
    }

    #[test]
    fn a_control_message_is_read_as_it_was_written(message in any_message()) {
        prop_assert_eq!(ControlMessage::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn no_bytes_make_reading_a_control_message_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let _ = ControlMessage::decode(&bytes);
    }
}
