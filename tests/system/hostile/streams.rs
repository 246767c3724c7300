//! Bytes that are no ZeroMQ, on every socket that listens or dials over tcp.

use std::net::TcpListener;
use std::time::Duration;

use bytes::Bytes;
use pawl_shared::protocol::{Value as Plain, encode_value};

use super::zmtp::{self, MORE, Peer};
use super::{Dice, Memory, System, beside_live_traffic, counts, counts_of};
use crate::harness::{Client, Process, Run, Scrape, listeners, listening_ports, rounds, wait_for};
use crate::python::tiny_model;

/// A stream of a socket of `kind`, with one thing wrong with it.
fn stream(dice: &mut Dice, kind: &str) -> Vec<u8> {
    // The last one is the engine's own; who has it keeps it.
    let identity: &[u8] = [&b""[..], b"bad", b"\x01\x00", b"\x00\x00"][dice.below(4)];
    let hello = zmtp::hello(kind, identity);
    let payload = dice.bytes(30);
    let frames = [Bytes::from_static(b"\0"), Bytes::from(payload), Bytes::from_static(b"end")];
    let mut bytes = [hello.clone(), zmtp::message(&frames)].concat();
    // Anything from 2^20 to beyond what is a size at all.
    let length = (1_u64 << (20 + dice.below(44))).wrapping_add(dice.next() % 3).wrapping_sub(1);
    match dice.below(8) {
        0 => {
            let at = dice.below(64);
            bytes[at] = dice.next() as u8;
        }
        1 => {
            for _ in 0..=dice.below(8) {
                let at = dice.below(bytes.len());
                bytes[at] = dice.next() as u8;
            }
        }
        2 => bytes.truncate(dice.below(bytes.len())),
        // Before READY: as a command, and as a message.
        3 => bytes = [&hello[..64], &zmtp::header([4, 0, MORE][dice.below(3)], length)].concat(),
        4 | 5 => bytes = [hello, zmtp::header([0, MORE][dice.below(2)], length)].concat(),
        6 => {
            bytes = hello;
            bytes.extend([MORE, 0].repeat(1 + dice.below(3000)));
        }
        _ => {
            bytes = hello;
            let more = 1 + dice.below(2000);
            bytes.extend(dice.bytes(more));
        }
    }
    bytes
}

/// A JOIN whose sockets are at `port`.
fn join(port: u16, round: usize) -> Vec<u8> {
    let address = |name: &str| Plain::Text(format!("tcp://{name}:{port}"));
    let fields = [
        ("type", Plain::Text("JOIN".into())),
        ("version", Plain::Integer(1)),
        ("input", address("127.0.0.1")),
        ("output", address("localhost")),
        ("pid", Plain::Integer(1)),
        ("instance", Plain::Text(format!("bad-{round}"))),
        ("epoch", Plain::Integer(1)),
    ];
    zmtp::message(&[encode_value(&Plain::map(fields))])
}

/// Connects to each of `addresses` in turn, `count` times in all.
fn talk(dice: &mut Dice, addresses: &[(String, &str)], count: usize) {
    for round in 0..count {
        let (address, kind) = &addresses[round % addresses.len()];
        let mut peer = Peer::connect(address);
        // It may close before it has read everything.
        let _ = peer.write(&stream(dice, kind));
        peer.finish();
    }
}

/// Lets the core dial us, `count` times, and answers it.
fn be_dialled(system: &System, dice: &mut Dice, count: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    for round in 0..count {
        let mut control = Peer::shake(&system.address, "DEALER", b"");
        control.write(&join(port, round)).unwrap();
        let what = format!("the core to connect, round {round}");
        let (dialling, _) = wait_for(&what, || listener.accept().ok());
        dialling.set_nonblocking(false).unwrap();
        dialling.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut dialling = Peer(dialling);
        let _ = dialling.write(&stream(dice, "ROUTER"));
        dialling.finish();
        drop(control);
        // A stream that is sound so far has the core dial the other socket as well.
        while listener.accept().is_ok() {}
    }
}

/// An api-server that waits for a core to dial it.
struct Awaiting {
    process: Process,
    http: Client,
    admin: Client,
    handshake: String,
}

impl Awaiting {
    fn start(run: &Run) -> Self {
        let (model, ports) = (tiny_model(run), run.path("awaiting.ports"));
        let ports_text = ports.display().to_string();
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let handshake = format!("tcp://{free}");
        let args = ["api-server", &model, "--await-core", &handshake, "--port", "0"];
        let flags = ["--admin-port", "0", "--port-file", &ports_text];
        let process = run.pawl("awaiting", &[&args[..], &flags].concat());
        let (http, admin) = wait_for("its ports", || listeners(&ports));
        wait_for("its handshake socket", || {
            listening_ports(process.pid()).contains(&free.port()).then_some(())
        });
        Self { process, http, admin, handshake }
    }
}

/// The tcp sockets of a process, each with what it is.
fn sockets(pid: i32, but: &[u16]) -> Vec<(String, &'static str)> {
    let ports = listening_ports(pid).into_iter().filter(|port| !but.contains(port));
    ports.map(|port| (format!("tcp://127.0.0.1:{port}"), "DEALER")).collect()
}

#[test]
fn hostile_streams_over_tcp_end_alone() {
    let mut system = System::start(true);
    // One that waits for a core to dial it, and none does before the end.
    let mut awaiting = Awaiting::start(&system.run);
    let mut dice = Dice(13);
    let frontend = &system.frontend;
    let own = [frontend.http.port(), frontend.admin.port()];
    let mut addresses = vec![(system.address.clone(), "DEALER")];
    addresses.extend(sockets(frontend.process.pid(), &own));
    addresses.push((awaiting.handshake.clone(), "DEALER"));
    assert_eq!(addresses.len(), 4, "the core, two of the api-server, one that awaits");
    let pids = [system.pids(), [awaiting.process.pid(); 2]].concat();
    beside_live_traffic(frontend.http, || {
        // What is allocated once is not growth.
        talk(&mut dice, &addresses, 400);
        be_dialled(&system, &mut dice, 10);
        let before = Memory::of(&pids);
        talk(&mut dice, &addresses, rounds(600, 20_000));
        be_dialled(&system, &mut dice, rounds(30, 2_000));
        before.assert_grown_little();
    });
    system.assert_unharmed();
    let violations = |page: &Scrape| counts_of(page, "pawl:wire_violations_total");
    let seen = [counts(&system.status()["wire_violations"]), violations(&awaiting.admin.scrape())];
    for seen in &seen {
        for kind in ["greeting", "ready", "frame_bytes", "frames", "flags"] {
            assert!(seen.contains_key(kind), "no {kind} in {seen:?}");
        }
    }
    // The sockets that a core was told of are for that core.
    let seen = violations(&system.frontend.scrape());
    assert_eq!(seen.keys().collect::<Vec<_>>(), ["connections"]);
    // Told, and not 600 times.
    for log in [system.core.log(), awaiting.process.log()] {
        let lines = log.lines().filter(|line| line.contains("a peer's connection was closed"));
        assert!((1..100).contains(&lines.count()), "{log}");
    }
    // After all that it still has ears for a core.
    let args = ["engine-core", "--runner", "mock", "--handshake", &awaiting.handshake];
    let _core = system.run.pawl("core2", &args);
    wait_for("the core's handshake", || awaiting.http.is_ready().then_some(()));
    assert!(awaiting.process.ended().is_none());
}
