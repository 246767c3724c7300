//! The line between the supervisor and each of its children: a pair of connected sockets, of which
//! the child holds one as its standard input.
//!
//! Its end tells a child that the supervisor is gone, whatever it died of, and the child stops. On
//! it a child says each half second that it lives ([`Health`]), an api-server reports what its
//! metrics stand at, and asks for the sum over all api-servers when it is scraped on the port they
//! share. What is in a report is nothing to this module.
//!
//! - `frame`: how messages lie on the line;
//! - `child`: a child's end, on threads of its own, so that it works while a model loads;
//! - `supervisor`: the other end, on tokio.

mod child;
mod frame;
mod supervisor;

#[cfg(test)]
mod tests;

use std::time::Duration;

use bytes::Bytes;

pub use child::Lifeline;
pub use frame::{Decoder, LifelineError, MESSAGE_BYTES_MAX};
pub use supervisor::{Heard, Line};

/// How often a child says that it lives, and an api-server what its metrics stand at.
pub const REPORT_EVERY: Duration = Duration::from_millis(500);

/// A child's word on itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// It has been able to serve, at least once.
    pub ready: bool,
    /// Its pair of sockets is bound and no core has it: of an api-server whose pair the supervisor
    /// lists to cores.
    pub awaits_core: bool,
    /// Grows with each thing it finishes. One that stands still for long hangs.
    pub progress: u64,
}

/// What a child tells its supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromChild {
    /// Each [`REPORT_EVERY`].
    Health(Health),
    /// What its metrics stand at.
    Report {
        /// Of the [`ToChild::AskReport`] that it answers; 0: unasked.
        seq: u64,
        /// The snapshot, encoded.
        snapshot: Bytes,
    },
    /// It wants the sum over all api-servers, each asked anew.
    SumWanted {
        /// To be in the answer.
        seq: u64,
    },
}

/// What the supervisor tells a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToChild {
    /// What do the metrics stand at, now?
    AskReport {
        /// To be in the answer.
        seq: u64,
    },
    /// The sum that was wanted.
    Sum {
        /// Of the [`FromChild::SumWanted`].
        seq: u64,
        /// The summed snapshot, encoded.
        sum: Bytes,
    },
}
