//! Peers over tcp that break the rules, against the crate's own sockets behind the guard.

use std::io::ErrorKind;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use zeromq::{PullSocket, RouterSocket, Socket, SocketRecv, SocketSend};

use super::*;
use crate::transport::guard::{self, Limits, OpenGate};
use crate::transport::listen;

const QUICK: Limits = Limits { handshake: Duration::from_millis(300), ..Limits::CONTROL };

/// A socket of the crate's behind a gate.
async fn behind_gate(socket: &mut impl Socket, limits: Limits, connections: usize) -> Guarded {
    let bound = listen::bind(&tcp(), limits, connections).unwrap();
    socket.bind_listener(bound.listener).await.unwrap();
    let Address::Tcp { port, .. } = bound.address else { panic!("{}", bound.address) };
    Guarded { port, _gate: bound.gate.unwrap().open().unwrap() }
}

struct Guarded {
    port: u16,
    _gate: OpenGate,
}

impl Guarded {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    /// Connects and shakes hands.
    async fn shake(&self, kind: &str, identity: &[u8]) -> TcpStream {
        let mut peer = self.connect().await;
        peer.write_all(&hello(kind, identity)).await.unwrap();
        let mut greeting = [0; 64];
        peer.read_exact(&mut greeting).await.unwrap();
        peer
    }
}

fn hello(kind: &str, identity: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((kind.len() as u32).to_be_bytes());
    body.extend(kind.bytes());
    body.extend(b"\x08Identity");
    body.extend((identity.len() as u32).to_be_bytes());
    body.extend(identity);
    bytes.extend([4, body.len() as u8]);
    bytes.extend(body);
    bytes
}

fn announced(length: u64) -> Vec<u8> {
    [&[2][..], &length.to_be_bytes()].concat()
}

/// Waits until the other side has closed.
async fn closed(peer: &mut TcpStream) {
    let mut buffer = [0; 1024];
    let end = async { while matches!(peer.read(&mut buffer).await, Ok(1..)) {} };
    tokio::time::timeout(DEADLINE, end).await.expect("the connection is closed");
}

async fn read_until(peer: &mut TcpStream, end: &[u8]) {
    let read = async {
        let mut seen = Vec::new();
        while !seen.ends_with(end) {
            seen.push(peer.read_u8().await.unwrap());
        }
    };
    tokio::time::timeout(DEADLINE, read).await.expect("what we wait for");
}

fn counted(kind: Violation) -> u64 {
    violations().into_iter().find(|(known, _)| *known == kind).unwrap().1
}

async fn received(socket: &mut impl SocketRecv) -> Vec<Bytes> {
    let message = tokio::time::timeout(DEADLINE, socket.recv()).await.expect("a message");
    message.unwrap().into_vec()
}

#[tokio::test]
async fn no_length_ends_the_process_and_others_are_served() {
    let mut pull = PullSocket::new();
    let guarded = behind_gate(&mut pull, Limits::DATA, 8).await;
    let mut good = guarded.shake("PUSH", b"good").await;
    let before = counted(Violation::FrameBytes);
    for length in [(64 << 20) + 1, 1 << 40, 1 << 62, 1 << 63, u64::MAX] {
        // Before READY, where the command is too long, and after it.
        let mut peer = guarded.connect().await;
        let greeting = &hello("PUSH", b"")[..64];
        peer.write_all(&[greeting, &[6], &length.to_be_bytes()].concat()).await.unwrap();
        closed(&mut peer).await;
        let mut peer = guarded.shake("PUSH", b"bad").await;
        peer.write_all(&announced(length)).await.unwrap();
        closed(&mut peer).await;
        good.write_all(b"\x00\x02ok").await.unwrap();
        assert_eq!(received(&mut pull).await, [&b"ok"[..]]);
    }
    assert_eq!(counted(Violation::FrameBytes) - before, 5);
    // The longest frame that may be.
    good.write_all(&announced(64 << 20)).await.unwrap();
    let sending = tokio::spawn(async move {
        good.write_all(&vec![7; 64 << 20]).await.unwrap();
        good
    });
    assert_eq!(received(&mut pull).await[0].len(), 64 << 20);
    drop(sending.await.unwrap());
}

#[tokio::test]
async fn what_we_dial_is_checked_too() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = Address::Tcp { host: "127.0.0.1".into(), port };
    let hostile = tokio::spawn(async move {
        let (mut peer, _) = listener.accept().await.unwrap();
        peer.write_all(&hello("ROUTER", b"")).await.unwrap();
        peer.write_all(b"\x00\x02ok").await.unwrap();
        read_until(&mut peer, b"go").await;
        peer.write_all(&announced(1 << 40)).await.unwrap();
        closed(&mut peer).await;
    });
    let mut dealer = zeromq::DealerSocket::new();
    let mut monitor = dealer.monitor();
    guard::connect(&mut dealer, &address, Limits::DATA, DEADLINE).await.unwrap();
    assert_eq!(received(&mut dealer).await, [&b"ok"[..]]);
    dealer.send("go".into()).await.unwrap();
    let lost = async {
        tokio::select! {
            _ = dealer.recv() => {}
            () = crate::transport::link::lost(&mut monitor) => {}
        }
    };
    tokio::time::timeout(DEADLINE, lost).await.expect("the loss is noticed");
    hostile.await.unwrap();
}

#[tokio::test]
async fn nobody_listening_is_borne_for_as_long_as_was_said() {
    let address = {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Address::Tcp { host: "127.0.0.1".into(), port: free.local_addr().unwrap().port() }
    };
    let mut dealer = zeromq::DealerSocket::new();
    let patience = Duration::from_millis(200);
    let error = guard::connect(&mut dealer, &address, QUICK, patience).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[tokio::test]
async fn a_peer_keeps_its_identity() {
    let mut router = RouterSocket::new();
    let guarded = behind_gate(&mut router, QUICK, 8).await;
    let mut first = guarded.shake("DEALER", b"\0\0").await;
    first.write_all(b"\x00\x01a").await.unwrap();
    assert_eq!(received(&mut router).await, [&b"\0\0"[..], b"a"]);
    let before = counted(Violation::Identity);
    let mut second = guarded.connect().await;
    second.write_all(&hello("DEALER", b"\0\0")).await.unwrap();
    second.write_all(b"\x00\x01b").await.unwrap();
    closed(&mut second).await;
    assert_eq!(counted(Violation::Identity) - before, 1);
    let answer = zeromq::ZmqMessage::try_from(frames("\0\0 answer")).unwrap();
    router.send(answer).await.unwrap();
    read_until(&mut first, b"answer").await;
    // Free again with the connection.
    drop(first);
    let next = async {
        loop {
            let mut peer = guarded.shake("DEALER", b"\0\0").await;
            if peer.write_all(b"\x00\x01c").await.is_ok()
                && let Ok(message) =
                    tokio::time::timeout(Duration::from_millis(100), router.recv()).await
            {
                break message.unwrap().into_vec();
            }
        }
    };
    let next = tokio::time::timeout(DEADLINE, next).await.expect("a message");
    assert_eq!(next, [&b"\0\0"[..], b"c"]);
}

#[tokio::test]
async fn those_who_say_nothing_are_closed_and_have_few_places() {
    let mut pull = PullSocket::new();
    let guarded = behind_gate(&mut pull, QUICK, 1000).await;
    let (full, slow) = (counted(Violation::Connections), counted(Violation::HandshakeTime));
    let mut silent = Vec::new();
    for _ in 0..70 {
        let mut peer = guarded.connect().await;
        // One that drips is no better.
        peer.write_all(&[0xff]).await.unwrap();
        silent.push(peer);
    }
    for peer in &mut silent {
        closed(peer).await;
    }
    assert!(counted(Violation::Connections) - full >= 1);
    assert!(counted(Violation::HandshakeTime) - slow >= 1);
    let mut good = guarded.shake("PUSH", b"").await;
    good.write_all(b"\x00\x02ok").await.unwrap();
    assert_eq!(received(&mut pull).await, [&b"ok"[..]]);
}

#[tokio::test]
async fn connections_beyond_the_places_are_closed() {
    let mut pull = PullSocket::new();
    let guarded = behind_gate(&mut pull, QUICK, 2).await;
    let mut peers = Vec::new();
    for identity in [b"a", b"b"] {
        let mut peer = guarded.shake("PUSH", identity).await;
        peer.write_all(b"\x00\x02ok").await.unwrap();
        assert_eq!(received(&mut pull).await, [&b"ok"[..]]);
        peers.push(peer);
    }
    let mut third = guarded.connect().await;
    closed(&mut third).await;
    // The other two are untouched.
    for peer in &mut peers {
        peer.write_all(b"\x00\x02ok").await.unwrap();
        assert_eq!(received(&mut pull).await, [&b"ok"[..]]);
    }
}
