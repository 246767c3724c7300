//! What the routes need of an engine, so that their tests can drive them without one.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;

use crate::engine_client::{EngineClient, EngineStatus, ServedModel, Submit, SubmitError, Update};

/// What comes of one submitted request. Dropping it aborts what has not ended.
pub type Updates = Pin<Box<dyn Stream<Item = Update> + Send>>;

/// An engine behind the routes.
pub trait Engine: Send + Sync + 'static {
    /// How it is doing.
    fn status(&self) -> EngineStatus;
    /// What it serves, once known.
    fn model(&self) -> Option<Arc<ServedModel>>;
    /// Starts a request.
    ///
    /// # Errors
    /// When it cannot be taken now.
    fn submit(&self, submit: Submit) -> Result<Updates, SubmitError>;
    /// Ends every open request with an abort.
    fn abort_all(&self, reason: &str);
}

impl Engine for EngineClient {
    fn status(&self) -> EngineStatus {
        Self::status(self)
    }

    fn model(&self) -> Option<Arc<ServedModel>> {
        Self::model(self)
    }

    fn submit(&self, submit: Submit) -> Result<Updates, SubmitError> {
        let generation = Self::submit(self, submit)?;
        Ok(Box::pin(futures::stream::unfold(generation, |mut generation| async move {
            let update = generation.next().await?;
            Some((update, generation))
        })))
    }

    fn abort_all(&self, reason: &str) {
        Self::abort_all(self, reason);
    }
}
