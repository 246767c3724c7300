//! The one way from the HTTP layer to the engine-core.
//!
//! [`EngineClient::submit`] turns a request into wire requests (one per choice) and gives back a
//! [`Generation`] to read; dropping the generation aborts it in the core. How many cores there are,
//! how frames travel and what they mean stays behind this type.

mod generation;
mod served_model;
mod status;

pub use generation::{
    EngineFailure, FailureKind, Finish, Generation, RequestTiming, Submit, TokenLogprob,
    TopLogprob, Update,
};
pub use served_model::ServedModel;
pub use status::{EngineStatus, SubmitError, UtilityError};

use std::sync::Arc;

use pawl_shared::protocol::Value;

/// A handle on the engine-core; clones share it.
#[derive(Clone)]
pub struct EngineClient {
    inner: Arc<Inner>,
}

struct Inner {
    status: tokio::sync::watch::Sender<EngineStatus>,
}

impl EngineClient {
    /// How the core is doing right now.
    #[must_use]
    pub fn status(&self) -> EngineStatus {
        self.inner.status.borrow().clone()
    }

    /// Follows the core's status.
    #[must_use]
    pub fn watch(&self) -> tokio::sync::watch::Receiver<EngineStatus> {
        self.inner.status.subscribe()
    }

    /// What the core serves; `None` until it has told.
    #[must_use]
    pub fn model(&self) -> Option<Arc<ServedModel>> {
        None
    }

    /// Starts a request. Never blocks; must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the core cannot take it now; nothing was sent then.
    pub fn submit(&self, submit: Submit) -> Result<Generation, SubmitError> {
        drop(submit);
        Err(SubmitError::Unavailable { reason: "the core has not joined yet".into() })
    }

    /// Calls a method of the core by name.
    ///
    /// # Errors
    /// When the core is away, does not answer in time, or answers with a failure.
    pub async fn utility(&self, method: &str, args: Vec<Value>) -> Result<Value, UtilityError> {
        let _ = (method, args);
        Err(UtilityError::Unavailable { reason: "the core has not joined yet".into() })
    }

    /// Requests (choices) that are open in the core.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        0
    }

    /// From now on every [`EngineClient::submit`] is refused as [`SubmitError::Draining`]; open
    /// generations go on.
    pub fn begin_drain(&self) {}

    /// Resolves once nothing is in flight.
    pub async fn idle(&self) {}

    /// Ends every open generation with an abort (the core is told).
    pub fn abort_all(&self, reason: &str) {
        let _ = reason;
    }
}
