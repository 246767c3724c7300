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
