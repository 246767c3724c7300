//! A ZeroMQ peer written on plain sockets: it can say anything, at any time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use bytes::Bytes;

pub const MORE: u8 = 1;
pub const LONG: u8 = 2;

/// Greeting and READY of a socket.
pub fn hello(kind: &str, identity: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", kind.as_bytes()), ("Identity", identity)] {
        body.push(name.len() as u8);
        body.extend(name.bytes());
        body.extend((value.len() as u32).to_be_bytes());
        body.extend(value);
    }
    bytes.extend([4, body.len() as u8]);
    bytes.extend(body);
    bytes
}

/// The header of a frame, of whatever length.
pub fn header(flags: u8, length: u64) -> Vec<u8> {
    [&[flags | LONG][..], &length.to_be_bytes()].concat()
}

/// A whole message.
pub fn message(frames: &[Bytes]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (nth, frame) in frames.iter().enumerate() {
        let more = if nth + 1 < frames.len() { MORE } else { 0 };
        bytes.extend(header(more, frame.len() as u64));
        bytes.extend_from_slice(frame);
    }
    bytes
}

/// A connection.
pub struct Peer(pub TcpStream);

impl Peer {
    pub fn connect(address: &str) -> Self {
        const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));
        let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_read_timeout(PATIENCE).unwrap();
        stream.set_write_timeout(PATIENCE).unwrap();
        Self(stream)
    }

    /// Connects and shakes hands.
    pub fn shake(address: &str, kind: &str, identity: &[u8]) -> Self {
        let mut peer = Self::connect(address);
        peer.write(&hello(kind, identity)).unwrap();
        let mut theirs = [0; 64];
        peer.0.read_exact(&mut theirs).unwrap();
        peer
    }

    pub fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write_all(bytes)
    }

    /// Says that nothing more comes, and waits until the other side has closed.
    pub fn finish(mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        if let Err(error) = self.0.read_to_end(&mut Vec::new()) {
            let kind = error.kind();
            let slow = [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut];
            assert!(!slow.contains(&kind), "the other side keeps a connection that is closed");
        }
    }
}
