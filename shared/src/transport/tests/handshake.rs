//! vLLM's handshake, in both roles.

use zeromq::{PullSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::*;
use crate::protocol::{EngineHello, HandshakeInit};

async fn dialing(address: &Address) -> TestCore {
    let config = CoreEndpointConfig {
        handshake: vec![address.clone()],
        ..CoreEndpointConfig::new(Vec::new())
    };
    let mut core = TestCore::start(config).await;
    core.tell(|core| core.set_ready(frames("ready"))).await;
    core
}

async fn awaiting(address: &Address) -> (FrontendEndpoint, FrontendSender) {
    let core = CoreAt::AwaitCore(address.clone());
    FrontendEndpoint::start(FrontendEndpointConfig::new(core)).await.unwrap()
}

#[tokio::test]
async fn our_core_dials_our_frontend_and_both_find_a_successor() {
    let (_dir, address) = ipc();
    let mut core = dialing(&address).await;
    let (mut frontend, sender) = awaiting(&address).await;
    let (index, first) = up(&mut frontend).await;
    assert_eq!(index, 0);
    let client = core.joined().await;
    sender.try_send(frames("ADD x")).unwrap();
    assert_eq!(core.next().await, CoreEvent::Message { client, frames: frames("ADD x") });
    core.send(client, "y").await.unwrap();
    assert_eq!(message(&mut frontend).await, "y");

    // The core goes and another comes.
    drop(core.endpoint().await);
    let down = next(&mut frontend).await;
    assert!(matches!(down, FrontendEvent::Down { .. }), "{down:?}");
    let mut core = dialing(&address).await;
    let (_, second) = up(&mut frontend).await;
    assert!(second > first);
    let client = core.joined().await;

    // The frontend goes and another comes.
    drop(frontend);
    let reason = LeaveReason::Disconnected;
    assert_eq!(core.next().await, CoreEvent::Left { client, reason });
    let (mut frontend, sender) = awaiting(&address).await;
    up(&mut frontend).await;
    let client = core.joined().await;
    sender.try_send(frames("ADD z")).unwrap();
    assert_eq!(core.next().await, CoreEvent::Message { client, frames: frames("ADD z") });
}

/// A frontend as vLLM makes it: one handshake, several pairs, no control messages.
struct Foreign {
    handshake: RouterSocket,
    pairs: Vec<(RouterSocket, PullSocket)>,
    init: HandshakeInit,
}

impl Foreign {
    async fn bind(dir: &SocketDir, handshake: &Address, clients: usize) -> Self {
        let mut router = RouterSocket::new();
        router.bind(&handshake.to_string()).await.unwrap();
        let mut pairs = Vec::new();
        let mut init = HandshakeInit::default();
        for client in 0..clients {
            let name = |kind| dir.address(&format!("{kind}{client}")).unwrap().to_string();
            let (mut input, mut output) = (RouterSocket::new(), PullSocket::new());
            input.bind(&name("in")).await.unwrap();
            output.bind(&name("out")).await.unwrap();
            init.inputs.push(name("in"));
            init.outputs.push(name("out"));
            pairs.push((input, output));
        }
        Self { handshake: router, pairs, init }
    }

    async fn hello(&mut self) -> String {
        let frames = receive(&mut self.handshake).await;
        format!("{:?} {:?}", frames[0].as_ref(), EngineHello::decode(&frames[1]).unwrap())
    }

    async fn answer(&mut self) {
        let mut message = ZmqMessage::from(self.init.encode());
        message.push_front(Bytes::from_static(&[0, 0]));
        self.handshake.send(message).await.unwrap();
    }
}

async fn receive(socket: &mut impl SocketRecv) -> Vec<Bytes> {
    tokio::time::timeout(DEADLINE, socket.recv()).await.expect("a message").unwrap().into_vec()
}

#[tokio::test]
async fn a_vllm_frontend_with_two_clients_is_served_as_it_expects() {
    let (dir, address) = ipc();
    let mut core = dialing(&address).await;
    let mut foreign = Foreign::bind(&dir, &address, 2).await;
    let hello = foreign.hello().await;
    foreign.answer().await;
    let mut seen = vec![hello];
    for (input, _) in &mut foreign.pairs {
        let frames = receive(input).await;
        seen.push(format!("{:?} {}", frames[0].as_ref(), text(&frames[1..])));
    }
    seen.push(foreign.hello().await);
    insta::assert_snapshot!(seen.join("\n"), @r"
    [0, 0] EngineHello { status: Hello, local: false, headless: true }
    [0, 0] ready
    [0, 0] ready
    [0, 0] EngineHello { status: Ready, local: false, headless: true }
    ");

    let clients = [core.joined().await, core.joined().await];
    for (index, (input, output)) in foreign.pairs.iter_mut().enumerate() {
        let mut request = ZmqMessage::try_from(frames("ADD x")).unwrap();
        request.push_front(Bytes::from_static(&[0, 0]));
        input.send(request).await.unwrap();
        let CoreEvent::Message { client, frames } = core.next().await else { panic!() };
        assert!(clients.contains(&client));
        assert_eq!(text(&frames), "ADD x");
        core.send(client, &format!("for-{index}")).await.unwrap();
        assert_eq!(text(&receive(output).await), format!("for-{index}"));
    }

    // One of its processes goes, then the other: only then does the handshake start again.
    for left in [1, 0] {
        drop(foreign.pairs.pop());
        let gone = core.next().await;
        let reason = LeaveReason::Disconnected;
        assert!(
            clients
                .map(|client| CoreEvent::Left { client, reason: reason.clone() })
                .contains(&gone),
            "{gone:?}, {left} left"
        );
    }
    foreign.hello().await;
}

/// A frontend that has one of `pairs`, as a process that was just started.
async fn listed(pairs: &ListedPairs, index: usize) -> (FrontendEndpoint, FrontendSender) {
    let pair = pairs.iter().nth(index).unwrap().clone();
    let config = FrontendEndpointConfig::new(CoreAt::Listed(pair));
    let (mut frontend, sender) = FrontendEndpoint::start(config).await.unwrap();
    assert_eq!(next(&mut frontend).await, FrontendEvent::Waiting);
    (frontend, sender)
}

async fn check_listed_pairs(dir: &SocketDir, address: &Address) {
    let pairs = ListedPairs::choose(2, address, dir, None).unwrap();
    let desk = HandshakeDesk::bind(address, &pairs).await.unwrap();
    let mut core = dialing(desk.address()).await;
    let (mut first, _sender) = listed(&pairs, 0).await;
    let (mut second, sender) = listed(&pairs, 1).await;
    let early = tokio::time::timeout(Duration::from_millis(300), core.events.recv()).await;
    assert!(early.is_err(), "let in before its time: {early:?}");
    desk.let_in(true);
    assert_eq!(up(&mut first).await.0, 0);
    let (index, epoch) = up(&mut second).await;
    assert_eq!(index, 1);
    let clients = [core.joined().await, core.joined().await];
    desk.let_in(false);
    sender.try_send(frames("ADD x")).unwrap();
    let CoreEvent::Message { client, .. } = core.next().await else { panic!() };
    assert!(clients.contains(&client));

    // Another process takes the place of the second; the first notices nothing.
    drop(second);
    let reason = LeaveReason::Disconnected;
    assert_eq!(core.next().await, CoreEvent::Left { client, reason });
    let (mut second, sender) = listed(&pairs, 1).await;
    let (index, next_epoch) = up(&mut second).await;
    assert!(index == 1 && next_epoch != epoch);
    let client = core.joined().await;
    assert!(!clients.contains(&client));
    sender.try_send(frames("ADD y")).unwrap();
    assert_eq!(core.next().await, CoreEvent::Message { client, frames: frames("ADD y") });
    core.send(client, "z").await.unwrap();
    assert_eq!(message(&mut second).await, "z");

    // Another core takes the place of the first, once it is let in.
    drop(core.endpoint().await);
    for frontend in [&mut first, &mut second] {
        assert!(matches!(next(frontend).await, FrontendEvent::Down { .. }));
        assert_eq!(next(frontend).await, FrontendEvent::Waiting);
    }
    let mut core = dialing(desk.address()).await;
    desk.let_in(true);
    for frontend in [&mut first, &mut second] {
        up(frontend).await;
        core.joined().await;
    }
}

#[tokio::test]
async fn listed_pairs_belong_to_places_over_ipc() {
    let (dir, address) = ipc();
    check_listed_pairs(&dir, &address).await;
}

#[tokio::test]
async fn listed_pairs_belong_to_places_over_tcp() {
    let (dir, _) = ipc();
    check_listed_pairs(&dir, &tcp()).await;
}

#[tokio::test]
async fn an_advertised_host_is_told_to_cores_and_not_bound() {
    let (dir, _) = ipc();
    let pairs = ListedPairs::choose(1, &tcp(), &dir, Some("pawl.example")).unwrap();
    let (input, output) = pairs.as_told().next().unwrap();
    assert!(input.starts_with("tcp://pawl.example:") && output.starts_with("tcp://pawl.example:"));
    assert!(input != output && !input.ends_with(":0"), "{input} {output}");
    let bound = pairs.iter().next().unwrap().input.to_string();
    assert_eq!(bound, input.replace("pawl.example", "0.0.0.0"));
}

#[tokio::test]
async fn a_core_that_stops_tells_vllm_frontends_alone() {
    let (dir, address) = ipc();
    let native_at = dir.address("native").unwrap();
    let config = CoreEndpointConfig {
        handshake: vec![address.clone()],
        ..CoreEndpointConfig::new(vec![native_at.clone()])
    };
    let mut core = TestCore::start(config).await;
    core.tell(|core| core.set_ready(frames("ready"))).await;
    let (mut native, _sender) = join(&native_at).await;
    up(&mut native).await;
    core.joined().await;
    let mut foreign = Foreign::bind(&dir, &address, 1).await;
    foreign.hello().await;
    foreign.answer().await;
    let client = core.joined().await;
    let mut endpoint = core.endpoint().await;
    endpoint.send(client, frames("the last")).unwrap();
    endpoint.broadcast_end();
    endpoint.close(DEADLINE).await;
    let (_, output) = &mut foreign.pairs[0];
    assert_eq!(text(&receive(output).await), "the last");
    assert_eq!(text(&receive(output).await), "ENGINE_CORE_DEAD");
    let down = next(&mut native).await;
    assert!(matches!(down, FrontendEvent::Down { .. }), "{down:?}");
}

#[tokio::test]
async fn a_vllm_frontend_that_does_not_read_is_cut_off_after_five_seconds() {
    let (dir, address) = ipc();
    let mut core = dialing(&address).await;
    let mut foreign = Foreign::bind(&dir, &address, 1).await;
    foreign.hello().await;
    foreign.answer().await;
    let client = core.joined().await;
    // More than the crate's queue of 100,000 and the kernel's buffers hold.
    core.tell(move |core| {
        for _ in 0..200_000 {
            core.send(client, frames("unread")).unwrap();
        }
    })
    .await;
    let reason = LeaveReason::CutOff;
    assert_eq!(core.next().await, CoreEvent::Left { client, reason });
}
