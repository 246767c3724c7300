//! One client in the core's table: how it came, what it is, and how far its link is.

use super::message::{ControlMessage, Role};
use super::{CoreAction, Peer, PeerId};
use crate::clock::Stamp;

#[derive(Debug)]
pub(super) enum Via {
    Native {
        control: PeerId,
        pid: u32,
        instance: String,
        epoch: u64,
        heard: Stamp,
        taps: Option<String>,
    },
    Handshake {
        dialer: u32,
        /// Whether the pair has been linked before, and is tried again.
        again: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for the core to be ready, or for the next try.
    Held,
    Linking,
    Joined,
}

#[derive(Debug)]
pub(super) struct Member {
    pub via: Via,
    pub input: String,
    pub output: String,
    pub role: Role,
    pub phase: Phase,
}

impl Member {
    pub fn is_native(&self) -> bool {
        matches!(self.via, Via::Native { .. })
    }

    pub fn is_of(&self, dialer: u32) -> bool {
        matches!(self.via, Via::Handshake { dialer: d, .. } if d == dialer)
    }

    /// How it hears that the core stops: a frontend, once it has joined natively. vLLM's have no
    /// message for it.
    pub fn told_of_stopping(&self) -> Option<CoreAction> {
        match &self.via {
            Via::Native { control, epoch, .. }
                if self.phase == Phase::Joined && self.role == Role::Frontend =>
            {
                let message = ControlMessage::Stopping { epoch: *epoch };
                Some(CoreAction::Reply { to: control.clone(), message })
            }
            _ => None,
        }
    }

    pub fn peer(&self) -> Peer {
        match &self.via {
            Via::Native { pid, instance, epoch, taps, .. } => {
                let who = match self.role {
                    Role::Frontend => "frontend",
                    Role::Tap => "tap",
                };
                Peer {
                    text: format!("{who} {instance} (pid {pid}, epoch {epoch:x})"),
                    pid: Some(*pid),
                    epoch: Some(*epoch),
                    taps: taps.clone(),
                }
            }
            Via::Handshake { .. } => {
                let text = format!("vLLM frontend at {}", self.input);
                Peer { text, pid: None, epoch: None, taps: None }
            }
        }
    }
}
