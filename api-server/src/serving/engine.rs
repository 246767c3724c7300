//! What the routes need of an engine, so that their tests can drive them without one.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use futures::future::BoxFuture;
use pawl_shared::protocol::{ReadyResponse, Value};
use tokio::sync::watch;

use crate::engine_client::{
    EngineClient, EngineStatus, Generation, ServedModel, Submit, SubmitError, Update, UtilityError,
};

/// What comes of one submitted request. Dropping it aborts what has not ended.
pub type Updates = Pin<Box<dyn Stream<Item = Update> + Send>>;

/// The answer to a call, once it is there.
pub type Called = BoxFuture<'static, Result<Value, UtilityError>>;

/// An engine behind the routes.
pub trait Engine: Send + Sync + 'static {
    /// How it is doing.
    fn status(&self) -> EngineStatus;
    /// Follows how it is doing.
    fn watch(&self) -> watch::Receiver<EngineStatus>;
    /// Follows whether a core may be told of our sockets; see [`EngineClient::awaits_core`].
    fn awaits_core(&self) -> watch::Receiver<bool> {
        watch::Sender::new(false).subscribe()
    }
    /// What it told of itself when it joined.
    fn ready(&self) -> Option<Arc<ReadyResponse>>;
    /// What it serves, once known.
    fn model(&self) -> Option<Arc<ServedModel>>;
    /// Starts the prompts of one client's request, all of them or none.
    ///
    /// # Errors
    /// When they cannot be taken now.
    fn submit(&self, prompts: Vec<Submit>) -> Result<Vec<Updates>, SubmitError>;
    /// Ends the requests known by one of `names`; how many there were.
    fn abort(&self, names: &HashSet<&str>) -> usize;
    /// Ends every open request with an abort.
    fn abort_all(&self, reason: &str);
    /// Calls a method of the core by name.
    fn call(&self, method: &'static str, args: Vec<Value>) -> Called;
}

impl Engine for EngineClient {
    fn status(&self) -> EngineStatus {
        Self::status(self)
    }

    fn watch(&self) -> watch::Receiver<EngineStatus> {
        Self::watch(self)
    }

    fn awaits_core(&self) -> watch::Receiver<bool> {
        Self::awaits_core(self)
    }

    fn ready(&self) -> Option<Arc<ReadyResponse>> {
        Self::ready(self)
    }

    fn model(&self) -> Option<Arc<ServedModel>> {
        Self::model(self)
    }

    fn submit(&self, prompts: Vec<Submit>) -> Result<Vec<Updates>, SubmitError> {
        let updates_of = |generation| -> Updates {
            Box::pin(futures::stream::unfold(generation, |mut generation: Generation| async move {
                let update = generation.next().await?;
                Some((update, generation))
            }))
        };
        Ok(self.submit_all(prompts)?.into_iter().map(updates_of).collect())
    }

    fn abort(&self, names: &HashSet<&str>) -> usize {
        Self::abort(self, names)
    }

    fn abort_all(&self, reason: &str) {
        Self::abort_all(self, reason);
    }

    fn call(&self, method: &'static str, args: Vec<Value>) -> Called {
        let client = self.clone();
        Box::pin(async move { client.utility(method, args).await })
    }
}
