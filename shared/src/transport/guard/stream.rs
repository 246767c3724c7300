//! What the bytes of a ZMTP 3 peer must look like, checked as they come.

use std::fmt;
use std::time::Duration;

/// What a stream may hold. Whatever is beyond ends the connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport) struct Limits {
    /// Of one frame.
    pub(in crate::transport) frame_bytes: u64,
    /// Of all frames of one message together.
    pub(in crate::transport) message_bytes: u64,
    /// In one message.
    pub(in crate::transport) frames: u32,
    /// From the connection to the peer's READY.
    pub(in crate::transport) handshake: Duration,
}

impl Limits {
    /// Joining, handshakes, ready responses: a few hundred bytes each.
    pub(in crate::transport) const CONTROL: Self = Self {
        frame_bytes: 256 << 10,
        message_bytes: 256 << 10,
        frames: 16,
        handshake: Duration::from_secs(5),
    };
    /// Requests and outputs, of which our own ends let no more than this wait.
    pub(in crate::transport) const DATA: Self =
        Self { frame_bytes: 64 << 20, message_bytes: 128 << 20, frames: 1024, ..Self::CONTROL };
}

/// Why a peer's connection was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// It does not begin as ZMTP 3 with the NULL mechanism does.
    Greeting,
    /// What follows the greeting is no READY command of at most 4 KiB.
    Ready,
    /// READY did not come within 5 s.
    HandshakeTime,
    /// A frame with flags that the protocol leaves at 0.
    Flags,
    /// A command after READY. Heartbeats are commands: peers must not send any.
    Command,
    /// A frame announced as longer than it may be.
    FrameBytes,
    /// The frames of one message are too long together.
    MessageBytes,
    /// One message has too many frames.
    Frames,
    /// Its identity is that of a peer that is there.
    Identity,
    /// All places for connections are taken.
    Connections,
}

impl Violation {
    /// Every kind.
    pub const ALL: [Self; 10] = [
        Self::Greeting,
        Self::Ready,
        Self::HandshakeTime,
        Self::Flags,
        Self::Command,
        Self::FrameBytes,
        Self::MessageBytes,
        Self::Frames,
        Self::Identity,
        Self::Connections,
    ];

    /// As a label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Greeting => "greeting",
            Self::Ready => "ready",
            Self::HandshakeTime => "handshake_time",
            Self::Flags => "flags",
            Self::Command => "command",
            Self::FrameBytes => "frame_bytes",
            Self::MessageBytes => "message_bytes",
            Self::Frames => "frames",
            Self::Identity => "identity",
            Self::Connections => "connections",
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Greeting => "it does not speak ZMTP 3 with the NULL mechanism",
            Self::Ready => "no READY command followed its greeting",
            Self::HandshakeTime => "it did not shake hands in time",
            Self::Flags => "it sent a frame with unknown flags",
            Self::Command => "it sent a command (heartbeats are not served: switch them off)",
            Self::FrameBytes => "it announced a frame that is too long",
            Self::MessageBytes => "it sent a message that is too long",
            Self::Frames => "it sent a message of too many frames",
            Self::Identity => "a peer with its identity is connected already",
            Self::Connections => "too many peers are connected already",
        })
    }
}

const GREETING_BYTES: usize = 64;
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const READY_BYTES_MAX: u64 = 4096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

#[derive(Debug)]
enum State {
    Greeting {
        at: usize,
    },
    Flags,
    Length {
        flags: u8,
        bytes_left: u8,
        value: u64,
    },
    /// The body of the READY command, kept to be read as a whole.
    Ready {
        bytes_left: usize,
        body: Vec<u8>,
    },
    Body {
        bytes_left: u64,
    },
}

/// Follows one peer's stream. It keeps nothing of it but the READY command.
#[derive(Debug)]
pub(super) struct StreamCheck {
    limits: Limits,
    state: State,
    ready: bool,
    // Of the message that is under way.
    frames: u32,
    message_bytes: u64,
}

impl StreamCheck {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, state: State::Greeting { at: 0 }, ready: false, frames: 0, message_bytes: 0 }
    }

    /// Whether the peer has said READY.
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// The bytes that come next. They may be passed on if this is `Ok`: a length that is too large
    /// is refused before its last byte is let through. Returns the identity of the peer when its
    /// READY is complete (empty if it has none).
    ///
    /// After an error nothing more may be handed in.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<Option<Vec<u8>>, Violation> {
        let mut identity = None;
        while let Some(&first) = bytes.first() {
            let mut taken = 1;
            match &mut self.state {
                State::Greeting { at } => {
                    check_greeting(*at, first)?;
                    *at += 1;
                    if *at == GREETING_BYTES {
                        self.state = State::Flags;
                    }
                }
                State::Flags => self.on_flags(first)?,
                State::Length { flags, bytes_left, value } => {
                    *value = *value << 8 | u64::from(first);
                    *bytes_left -= 1;
                    if *bytes_left == 0 {
                        let (flags, length) = (*flags, *value);
                        self.on_header(flags, length)?;
                    }
                }
                State::Ready { bytes_left, body } => {
                    taken = bytes.len().min(*bytes_left);
                    body.extend_from_slice(&bytes[..taken]);
                    *bytes_left -= taken;
                    if *bytes_left == 0 {
                        identity = Some(identity_in_ready(body)?);
                        self.ready = true;
                        self.state = State::Flags;
                    }
                }
                State::Body { bytes_left } => {
                    taken = usize::try_from(*bytes_left).unwrap_or(usize::MAX).min(bytes.len());
                    *bytes_left -= taken as u64;
                    if *bytes_left == 0 {
                        self.state = State::Flags;
                    }
                }
            }
            bytes = &bytes[taken..];
        }
        Ok(identity)
    }

    fn on_flags(&mut self, flags: u8) -> Result<(), Violation> {
        if !self.ready && flags & !LONG != COMMAND {
            return Err(Violation::Ready);
        }
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(Violation::Flags);
        }
        if self.ready && flags & COMMAND != 0 {
            return Err(Violation::Command);
        }
        let bytes_left = if flags & LONG != 0 { 8 } else { 1 };
        self.state = State::Length { flags, bytes_left, value: 0 };
        Ok(())
    }

    fn on_header(&mut self, flags: u8, length: u64) -> Result<(), Violation> {
        if !self.ready {
            return match usize::try_from(length) {
                Ok(bytes_left) if (1..=READY_BYTES_MAX).contains(&length) => {
                    self.state = State::Ready { bytes_left, body: Vec::new() };
                    Ok(())
                }
                _ => Err(Violation::Ready),
            };
        }
        if length > self.limits.frame_bytes {
            return Err(Violation::FrameBytes);
        }
        // Neither can overflow: both are held to their limits after each frame.
        self.frames += 1;
        self.message_bytes += length;
        if self.frames > self.limits.frames {
            return Err(Violation::Frames);
        }
        if self.message_bytes > self.limits.message_bytes {
            return Err(Violation::MessageBytes);
        }
        if flags & MORE == 0 {
            (self.frames, self.message_bytes) = (0, 0);
        }
        self.state = if length == 0 { State::Flags } else { State::Body { bytes_left: length } };
        Ok(())
    }
}

/// Signature, version, mechanism; what follows (the server's flag and filler) is anything.
fn check_greeting(at: usize, byte: u8) -> Result<(), Violation> {
    let right = match at {
        0 => byte == 0xff,
        9 => byte == 0x7f,
        10 => byte >= 3,
        12..=31 => byte == MECHANISM[at - 12],
        _ => true,
    };
    if right { Ok(()) } else { Err(Violation::Greeting) }
}

/// Reads `[5]READY` and its properties, `[n]name[4-byte n]value`, to the last byte.
fn identity_in_ready(body: &[u8]) -> Result<Vec<u8>, Violation> {
    let mut rest = body.strip_prefix(b"\x05READY").ok_or(Violation::Ready)?;
    let mut identity = Vec::new();
    while let Some((&name_bytes, after)) = rest.split_first() {
        let split = after.split_at_checked(name_bytes.into()).ok_or(Violation::Ready)?;
        let (name, after) = split;
        let (length, after) = after.split_first_chunk::<4>().ok_or(Violation::Ready)?;
        let length = u32::from_be_bytes(*length) as usize;
        let (value, after) = after.split_at_checked(length).ok_or(Violation::Ready)?;
        // The crate takes the last of several, and fails on a longer one.
        if name == b"Identity" {
            if value.len() > 255 {
                return Err(Violation::Ready);
            }
            identity = value.to_vec();
        }
        rest = after;
    }
    Ok(identity)
}

#[cfg(test)]
mod tests;
