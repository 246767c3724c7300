//! vLLM's handshake, on both sides.

use super::core_scenarios::check as check_core;
use super::frontend_scenarios::{check_awaiting, check_listed};

#[test]
fn a_lost_pair_is_tried_again_while_another_of_its_handshake_stands() {
    insta::assert_snapshot!(check_core(
        "
        ready
        init 0 2
        up 0
        up 1
        down 0
        beats 1
        down 2
        beats 1
        up 3
        down 1
        down 3
        beats 3
        init 0 1
        "
    ), @r#"
    > ready
    > init 0 2
        open link 0 to ipc:///in0, acknowledges: false
        open link 1 to ipc:///in1, acknowledges: false
    > up 0
        Joined { client: ClientId(0), peer: "vLLM frontend at ipc:///in0", role: Frontend }
    > up 1
        Joined { client: ClientId(1), peer: "vLLM frontend at ipc:///in1", role: Frontend }
        HandshakeDone { dialer: 0 }
    > down 0
        CloseLink { client: ClientId(0) }
        Left { client: ClientId(0), reason: Disconnected, role: Frontend }
    > beats 1
        open link 2 to ipc:///in0, acknowledges: false
    > down 2
        CloseLink { client: ClientId(2) }
    > beats 1
        open link 3 to ipc:///in0, acknowledges: false
    > up 3
        Joined { client: ClientId(3), peer: "vLLM frontend at ipc:///in0", role: Frontend }
    > down 1
        CloseLink { client: ClientId(1) }
        Left { client: ClientId(1), reason: Disconnected, role: Frontend }
    > down 3
        CloseLink { client: ClientId(3) }
        Left { client: ClientId(3), reason: Disconnected, role: Frontend }
        HandshakeAgain { dialer: 0 }
    > beats 3
    > init 0 1
        open link 5 to ipc:///in0, acknowledges: false
    "#);
}

#[test]
fn a_handshake_is_done_when_all_its_links_stand_and_begins_again_when_none_does() {
    insta::assert_snapshot!(check_core(
        "
        init 0 2
        ready
        up 0
        up 1
        beats 20
        down 0
        down 1
        init 0 1
        down 3
        init 0 2
        up 4
        down 5
        init 0 0
        init 0 1
        handshake-gone 0
        handshake-gone 0
        "
    ), @r#"
    > init 0 2
    > ready
        open link 0 to ipc:///in0, acknowledges: false
        open link 1 to ipc:///in1, acknowledges: false
    > up 0
        Joined { client: ClientId(0), peer: "vLLM frontend at ipc:///in0", role: Frontend }
    > up 1
        Joined { client: ClientId(1), peer: "vLLM frontend at ipc:///in1", role: Frontend }
        HandshakeDone { dialer: 0 }
    > beats 20
    > down 0
        CloseLink { client: ClientId(0) }
        Left { client: ClientId(0), reason: Disconnected, role: Frontend }
    > down 1
        CloseLink { client: ClientId(1) }
        Left { client: ClientId(1), reason: Disconnected, role: Frontend }
        HandshakeAgain { dialer: 0 }
    > init 0 1
        open link 3 to ipc:///in0, acknowledges: false
    > down 3
        CloseLink { client: ClientId(3) }
        HandshakeAgain { dialer: 0 }
    > init 0 2
        open link 4 to ipc:///in0, acknowledges: false
        open link 5 to ipc:///in1, acknowledges: false
    > up 4
        Joined { client: ClientId(4), peer: "vLLM frontend at ipc:///in0", role: Frontend }
    > down 5
        CloseLink { client: ClientId(4) }
        Left { client: ClientId(4), reason: Disconnected, role: Frontend }
        CloseLink { client: ClientId(5) }
        HandshakeAgain { dialer: 0 }
    > init 0 0
        HandshakeAgain { dialer: 0 }
    > init 0 1
        open link 6 to ipc:///in0, acknowledges: false
    > handshake-gone 0
        CloseLink { client: ClientId(6) }
        HandshakeAgain { dialer: 0 }
    > handshake-gone 0
    "#);
}

#[test]
fn a_core_that_dials_is_up_after_hello_ready_response_and_ready() {
    insta::assert_snapshot!(check_awaiting(
        "
        open
        opened
        hello 1
        engine 1
        hello 1
        beats 100
        loaded 1
        engine 1
        hello 2
        beats 100
        ack 5
        lost input
        lost output
        open
        opened
        leave
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
    > hello 1
        SendInit { engine_index: 1 }
    > engine 1
    > hello 1
        SendInit { engine_index: 1 }
    > beats 100
        0 pings
    > loaded 1
    > engine 1
        Up { ready: b"ready", client_index: 0, epoch: 101, engine_index: 1 }
    > hello 2
    > beats 100
        0 pings
    > ack 5
    > lost input
    > lost output
        Down { reason: "the core is gone" }
        Close
    > open
        Some((102, 20ms))
    > opened
    > leave
        Close
    "#);
}

/// The first core speaks; the process that comes after ours is told nothing, and takes the core for
/// the one that was there before.
#[test]
fn a_listed_pair_is_up_with_the_ready_response_or_with_the_one_that_is_known() {
    insta::assert_snapshot!(check_listed(
        "
        open
        opened
        connected 0
        beats 5
        engine 0 first
        engine 0 first
        ack 10
        lost output
        open
        opened
        connected 0 second
        beats 1
        engine 0 third
        open
        opened
        connected 0
        beats 2
        hello 0
        ignored
        "
    ), @r#"
    > open
        Some((101, 0ns))
    > opened
        Waiting
    > connected 0
    > beats 5
        0 pings
    > engine 0 first
        Up { ready: b"first", client_index: 4, epoch: 101, engine_index: 0 }
    > engine 0 first
    > ack 10
    > lost output
        Down { reason: "the core is gone" }
        Close
    > open
        Some((102, 20ms))
    > opened
        Waiting
    > connected 0 second
    > beats 1
        0 pings
        Up { ready: b"second", client_index: 4, epoch: 102, engine_index: 0 }
    > engine 0 third
        Down { reason: "another core has come" }
        Close
    > open
        Some((103, 20ms))
    > opened
        Waiting
    > connected 0
    > beats 2
        0 pings
        Up { ready: b"third", client_index: 4, epoch: 103, engine_index: 0 }
    > hello 0
    > ignored
        2
    "#);
}
