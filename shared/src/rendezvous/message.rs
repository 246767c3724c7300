//! What travels on the control socket: one map per message, each with its `type`.
//!
//! A JOIN's `version` is looked at before anything else in it, so that two versions that agree on
//! nothing but `type` and `version` can still name each other.

use bytes::Bytes;

use crate::protocol::{Value, decode_value, encode_value};

/// The version of native joining that this build speaks.
pub const JOIN_VERSION: u64 = 1;

/// What one that joins wants of the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// To have requests served.
    #[default]
    Frontend,
    /// To be sent copies of what passes between the core and its frontends.
    Tap,
}

/// A frontend's wish to be served, or a tap's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// Where its input ROUTER is bound.
    pub input: String,
    /// Where its output PULL is bound.
    pub output: String,
    /// Process id, for people.
    pub pid: u32,
    /// Unique per frontend process.
    pub instance: String,
    /// Of this pair of sockets; grows with each join of the same instance.
    pub epoch: u64,
    /// What it wants.
    pub role: Role,
    /// Where its own taps are served, if they are.
    pub taps: Option<String>,
}

/// One message of the control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMessage {
    /// Frontend → core: connect to me.
    Join(Join),
    /// A JOIN of a version that is not ours; nothing else of it is read.
    JoinOfVersion(u64),
    /// Core → frontend: the link stands.
    Welcome {
        /// The client index the core gave.
        client_index: u32,
        /// Of the JOIN.
        epoch: u64,
        /// Which engine this is.
        engine_index: u32,
    },
    /// Core → frontend: no, and why.
    Refused {
        /// The version the core speaks.
        version: u64,
        /// For people.
        reason: String,
    },
    /// Frontend → core: forget me.
    Leave {
        /// Of the JOIN.
        epoch: u64,
    },
    /// Core → frontend: you are forgotten.
    LeaveDone {
        /// Of the LEAVE.
        epoch: u64,
    },
    /// Frontend → core, each second.
    Ping {
        /// Of the JOIN.
        epoch: u64,
        /// Echoed.
        seq: u64,
    },
    /// Core → frontend.
    Pong {
        /// Of the PING.
        epoch: u64,
        /// Of the PING.
        seq: u64,
        /// Grows with each thing the core finished.
        progress: u64,
        /// Whether there is work, so that `progress` should grow.
        busy: bool,
    },
    /// Core → frontend: it stops. What is open may finish, new requests are refused.
    Stopping {
        /// Of the JOIN.
        epoch: u64,
    },
    /// Frontend → core: bytes taken since the link began.
    Ack {
        /// Of the JOIN.
        epoch: u64,
        /// Total, by `message_cost`.
        bytes: u64,
    },
    /// Core → frontend: the link is closed.
    Gone {
        /// Of the message that is answered, or of the link.
        epoch: u64,
        /// For people.
        reason: String,
    },
}

/// Why bytes are no control message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// Not one msgpack value.
    #[error("a control message is not readable: {0}")]
    Unreadable(String),
    /// A field is missing or of another type.
    #[error("a control message {kind:?} lacks a usable field `{field}`")]
    Field {
        /// The message's `type`, empty if that is what is missing.
        kind: String,
        /// The field.
        field: &'static str,
    },
    /// No such message.
    #[error("there is no control message of type {0:?}")]
    UnknownType(String),
}

impl ControlMessage {
    /// The bytes that travel.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let (kind, fields) = self.parts();
        encode_value(&Value::map([("type", Value::from(kind))].into_iter().chain(fields)))
    }

    fn parts(&self) -> (&'static str, Vec<(&'static str, Value)>) {
        match self {
            Self::Join(join) => (
                "JOIN",
                vec![
                    ("version", JOIN_VERSION.into()),
                    ("input", join.input.as_str().into()),
                    ("output", join.output.as_str().into()),
                    ("pid", join.pid.into()),
                    ("instance", join.instance.as_str().into()),
                    ("epoch", join.epoch.into()),
                    ("tap", (join.role == Role::Tap).into()),
                    ("taps", join.taps.clone().into()),
                ],
            ),
            Self::JoinOfVersion(version) => ("JOIN", vec![("version", (*version).into())]),
            Self::Welcome { client_index, epoch, engine_index } => (
                "WELCOME",
                vec![
                    ("client_index", (*client_index).into()),
                    ("epoch", (*epoch).into()),
                    ("engine_index", (*engine_index).into()),
                ],
            ),
            Self::Refused { version, reason } => (
                "REFUSED",
                vec![("version", (*version).into()), ("reason", reason.as_str().into())],
            ),
            Self::Leave { epoch } => ("LEAVE", vec![("epoch", (*epoch).into())]),
            Self::LeaveDone { epoch } => ("LEAVE_DONE", vec![("epoch", (*epoch).into())]),
            Self::Ping { epoch, seq } => {
                ("PING", vec![("epoch", (*epoch).into()), ("seq", (*seq).into())])
            }
            Self::Pong { epoch, seq, progress, busy } => (
                "PONG",
                vec![
                    ("epoch", (*epoch).into()),
                    ("seq", (*seq).into()),
                    ("progress", (*progress).into()),
                    ("busy", (*busy).into()),
                ],
            ),
            Self::Stopping { epoch } => ("STOPPING", vec![("epoch", (*epoch).into())]),
            Self::Ack { epoch, bytes } => {
                ("ACK", vec![("epoch", (*epoch).into()), ("bytes", (*bytes).into())])
            }
            Self::Gone { epoch, reason } => {
                ("GONE", vec![("epoch", (*epoch).into()), ("reason", reason.as_str().into())])
            }
        }
    }

    /// Reads one message. Unknown extra fields are ignored.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let map = decode_value(bytes).map_err(|e| ControlError::Unreadable(e.to_string()))?;
        let untyped = Fields { map: &map, kind: "" };
        let kind = untyped.text("type")?;
        let fields = Fields { map: &map, kind: &kind };
        let message = match kind.as_str() {
            "JOIN" => match fields.uint("version")? {
                JOIN_VERSION => Self::Join(Join {
                    input: fields.text("input")?,
                    output: fields.text("output")?,
                    pid: fields.small("pid")?,
                    instance: fields.text("instance")?,
                    epoch: fields.uint("epoch")?,
                    role: if fields.flag("tap") { Role::Tap } else { Role::Frontend },
                    taps: map.get("taps").and_then(Value::as_str).map(str::to_owned),
                }),
                other => Self::JoinOfVersion(other),
            },
            "WELCOME" => Self::Welcome {
                client_index: fields.small("client_index")?,
                epoch: fields.uint("epoch")?,
                engine_index: fields.small("engine_index")?,
            },
            "REFUSED" => {
                Self::Refused { version: fields.uint("version")?, reason: fields.text("reason")? }
            }
            "LEAVE" => Self::Leave { epoch: fields.uint("epoch")? },
            "LEAVE_DONE" => Self::LeaveDone { epoch: fields.uint("epoch")? },
            "PING" => Self::Ping { epoch: fields.uint("epoch")?, seq: fields.uint("seq")? },
            "PONG" => Self::Pong {
                epoch: fields.uint("epoch")?,
                seq: fields.uint("seq")?,
                progress: fields.uint("progress")?,
                busy: fields.flag("busy"),
            },
            "STOPPING" => Self::Stopping { epoch: fields.uint("epoch")? },
            "ACK" => Self::Ack { epoch: fields.uint("epoch")?, bytes: fields.uint("bytes")? },
            "GONE" => Self::Gone { epoch: fields.uint("epoch")?, reason: fields.text("reason")? },
            _ => return Err(ControlError::UnknownType(kind)),
        };
        Ok(message)
    }
}

struct Fields<'a> {
    map: &'a Value,
    kind: &'a str,
}

impl Fields<'_> {
    fn missing(&self, field: &'static str) -> ControlError {
        ControlError::Field { kind: self.kind.to_owned(), field }
    }

    fn text(&self, name: &'static str) -> Result<String, ControlError> {
        let text = self.map.get(name).and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| self.missing(name))
    }

    fn uint(&self, name: &'static str) -> Result<u64, ControlError> {
        self.map.get(name).and_then(Value::as_u64).ok_or_else(|| self.missing(name))
    }

    fn small(&self, name: &'static str) -> Result<u32, ControlError> {
        u32::try_from(self.uint(name)?).map_err(|_| self.missing(name))
    }

    fn flag(&self, name: &str) -> bool {
        self.map.get(name).and_then(Value::as_bool) == Some(true)
    }
}
