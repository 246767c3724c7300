//! How the core is doing, and why a request or a call was refused.

use std::time::Duration;

use pawl_shared::clock::Stamp;

/// How the core is doing.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineStatus {
    /// No core has joined yet, or it has not told its model yet.
    Connecting,
    /// Serving.
    Up,
    /// It lives but makes no progress; open streams are kept, new requests refused.
    Hung {
        /// Since when, on this process's clock.
        since: Stamp,
    },
    /// It stops: open streams may finish, new requests are refused.
    Stopping,
    /// It is gone; the client joins again by itself.
    Down {
        /// For people.
        reason: String,
    },
}

/// Why a request was not started.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// No core, or a hung one: 503.
    #[error("the engine is unavailable: {reason}")]
    Unavailable {
        /// For people.
        reason: String,
    },
    /// Too much is open or queued already: 503 with Retry-After.
    #[error("too many requests are open; try again in {} s", retry_after.as_secs())]
    QueueFull {
        /// When to try again.
        retry_after: Duration,
    },
    /// The server is stopping: 503.
    #[error("the server is shutting down")]
    Draining,
}

/// Why a utility call gave no value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum UtilityError {
    /// No core.
    #[error("the engine is unavailable: {reason}")]
    Unavailable {
        /// For people.
        reason: String,
    },
    /// The core answered that it failed.
    #[error("the engine refused: {0}")]
    Failed(String),
    /// No answer in time.
    #[error("the engine did not answer `{method}` within {after:?}")]
    Timeout {
        /// The method called.
        method: String,
        /// How long was waited.
        after: Duration,
    },
}
