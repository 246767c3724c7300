//! Join, talk, leave.

use super::*;

async fn check_talks_both_ways(address: &Address) {
    let mut core = TestCore::ready(address).await;
    let (mut frontend, sender) = join(&core.address).await;
    let (client_index, _) = up(&mut frontend).await;
    let client = core.joined().await;
    assert_eq!(client.0, client_index);

    for i in 0..2000 {
        sender.try_send(frames(&format!("ADD request-{i}"))).unwrap();
    }
    for i in 0..2000 {
        let CoreEvent::Message { client: from, frames } = core.next().await else { panic!() };
        assert_eq!((from, text(&frames)), (client, format!("ADD request-{i}")));
    }
    core.tell(move |core| {
        for i in 0..2000 {
            core.send(client, frames(&format!("output-{i} aux"))).unwrap();
        }
    })
    .await;
    for i in 0..2000 {
        assert_eq!(message(&mut frontend).await, format!("output-{i} aux"));
    }

    frontend.leave(DEADLINE).await;
    assert_eq!(core.next().await, CoreEvent::Left { client, reason: LeaveReason::Left });
}

#[tokio::test]
async fn messages_go_both_ways_in_order_over_ipc() {
    let (_dir, address) = ipc();
    check_talks_both_ways(&address).await;
}

#[tokio::test]
async fn messages_go_both_ways_in_order_over_tcp() {
    check_talks_both_ways(&tcp()).await;
}

#[tokio::test]
async fn a_join_before_the_core_is_ready_is_held_and_then_answered() {
    let (_dir, address) = ipc();
    let mut core = TestCore::bind(&address).await;
    let (mut frontend, sender) = join(&address).await;
    // Two beats pass with PONGs and without an answer.
    let early = tokio::time::timeout(Duration::from_millis(2200), frontend.next()).await;
    assert!(early.is_err(), "{early:?}");
    assert_eq!(sender.try_send(frames("ADD early")), Err(SendRefused::Down));
    core.tell(|core| core.set_ready(frames("ready"))).await;
    up(&mut frontend).await;
    core.joined().await;
}

#[tokio::test]
async fn a_frontend_may_start_before_its_core() {
    let (_dir, address) = ipc();
    let (mut frontend, _sender) = join(&address).await;
    let early = tokio::time::timeout(Duration::from_millis(300), frontend.next()).await;
    assert!(early.is_err(), "{early:?}");
    let mut core = TestCore::ready(&address).await;
    up(&mut frontend).await;
    core.joined().await;
}

#[tokio::test]
async fn three_frontends_get_their_own_messages() {
    let (_dir, address) = ipc();
    let mut core = TestCore::ready(&address).await;
    let mut all = Vec::new();
    let mut epochs = std::collections::BTreeSet::new();
    for _ in 0..3 {
        let (mut frontend, sender) = join(&address).await;
        let (index, epoch) = up(&mut frontend).await;
        assert_eq!(core.joined().await, ClientId(index));
        assert!(epochs.insert(epoch), "two frontends have epoch {epoch:x}");
        assert!(epoch < 1 << 53, "epoch {epoch:x} does not fit a JSON number");
        all.push((ClientId(index), frontend, sender));
    }
    for (client, _, sender) in &all {
        sender.try_send(frames(&format!("ADD from-{}", client.0))).unwrap();
    }
    let mut got = Vec::new();
    for _ in 0..3 {
        let CoreEvent::Message { client, frames } = core.next().await else { panic!() };
        got.push((client.0, text(&frames)));
    }
    got.sort();
    let expected: Vec<_> = (0..3).map(|i| (i, format!("ADD from-{i}"))).collect();
    assert_eq!(got, expected);
    for (client, frontend, _) in &mut all {
        core.send(*client, &format!("to-{}", client.0)).await.unwrap();
        assert_eq!(message(frontend).await, format!("to-{}", client.0));
    }
}

#[tokio::test]
async fn another_join_version_is_refused_naming_both() {
    use zeromq::{Socket, SocketRecv, SocketSend};

    let (_dir, address) = ipc();
    let core = TestCore::bind(&address).await;
    let mut dealer = zeromq::DealerSocket::new();
    dealer.connect(&address.to_string()).await.unwrap();
    let join = crate::rendezvous::message::ControlMessage::JoinOfVersion(7);
    dealer.send(join.encode().into()).await.unwrap();
    let answer = tokio::time::timeout(DEADLINE, dealer.recv()).await.unwrap().unwrap();
    let answer = crate::rendezvous::message::ControlMessage::decode(answer.get(0).unwrap());
    insta::assert_debug_snapshot!(answer, @r#"
    Ok(
        Refused {
            version: 1,
            reason: "the core speaks join version 1, the frontend 7: run both from the same build",
        },
    )
    "#);
    drop(core);
}

#[tokio::test]
async fn garbage_on_the_control_socket_is_counted_and_dropped() {
    use zeromq::{Socket, SocketSend, ZmqMessage};

    let (_dir, address) = ipc();
    let mut core = TestCore::ready(&address).await;
    let mut dealer = zeromq::DealerSocket::new();
    dealer.connect(&address.to_string()).await.unwrap();
    for payload in [&b""[..], b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x81\xa4type\xa4JOIN"] {
        dealer.send(Bytes::from_static(payload).into()).await.unwrap();
    }
    dealer.send(ZmqMessage::try_from(frames("two frames")).unwrap()).await.unwrap();
    // The core still serves, and has counted all five once it has.
    let (mut frontend, _sender) = join(&address).await;
    up(&mut frontend).await;
    core.joined().await;
    let mut ignored = 0;
    let counted = async {
        while ignored < 5 {
            ignored = core.tell(|core| core.control_messages_ignored()).await;
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, counted).await.unwrap();
    assert_eq!(ignored, 5);
}
