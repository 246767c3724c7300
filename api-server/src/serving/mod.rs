//! What every surface stands on: whether a request is let in, its tokens, its way to the core and
//! back. HTTP and gRPC read a request and write an answer in their own ways; all between is here.
//!
//! - [`App`]: the state all routes and methods share; admission, and the drain;
//! - [`engine`]: the way to the core, as a trait, so that tests can play one;
//! - [`model`]: the served model with all that is made of it once;
//! - [`completion`]: from a request's fields to a running request;
//! - [`prompts`]: tokenizing and templating, off the reactor's threads;
//! - [`generate`]: a running request: submit, merge, count, log;
//! - `open`: answers under way, for the drain.

pub mod completion;
pub mod engine;
pub mod generate;
pub mod model;
mod open;
pub mod prompts;

pub use open::OpenRequests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pawl_shared::clock::{Clock, Stamp};
use tokio::sync::Semaphore;

use crate::config::FrontendConfig;
use crate::engine_client::{EngineStatus, SubmitError};
use crate::metrics::{AdmissionReason, Metrics};
use crate::openai::error::{ApiError, ErrorCode};
use engine::Engine;
use model::{LoadedModel, ModelCache};

/// What a refused client is told to wait while a core is away or the server stops.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// When a request's head was read, on this process's clock.
#[derive(Clone, Copy, Debug)]
pub struct Arrival(pub Stamp);

/// What every route can reach.
pub struct App {
    /// As started.
    pub config: FrontendConfig,
    /// The way to the core.
    pub engine: Arc<dyn Engine>,
    /// The series.
    pub metrics: Arc<Metrics>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Answers being sent, for the drain.
    pub open: OpenRequests,
    /// `--chat-template`, read.
    template: Option<String>,
    models: ModelCache,
    draining: AtomicBool,
    /// Choices that were let in and have not ended.
    admitted: AtomicU64,
    /// Turns at tokenizing: one per processor, so that long prompts cannot take every thread. Those
    /// without a turn wait; there are no more of them than connections.
    tokenizing: Semaphore,
}

impl App {
    /// An app over `engine`. `template` takes the place of the model's own chat template.
    pub fn new(
        config: FrontendConfig,
        engine: Arc<dyn Engine>,
        metrics: Arc<Metrics>,
        clock: Arc<dyn Clock>,
        template: Option<String>,
    ) -> Self {
        let turns = std::thread::available_parallelism().map_or(2, usize::from).max(2);
        Self {
            config,
            engine,
            metrics,
            clock,
            open: OpenRequests::default(),
            template,
            models: ModelCache::default(),
            draining: AtomicBool::new(false),
            admitted: AtomicU64::new(0),
            tokenizing: Semaphore::new(turns),
        }
    }

    /// From now on new work is refused; what is under way goes on.
    pub fn begin_drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether a stop was asked for.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Choices being made.
    pub fn load(&self) -> u64 {
        self.admitted.load(Ordering::Relaxed)
    }

    /// The model, if the core serves now.
    ///
    /// # Errors
    /// 503 with the reason.
    pub fn serving_model(&self) -> Result<Arc<LoadedModel>, ApiError> {
        let unavailable = |code, message: String| {
            let error = ApiError::new(code, message);
            ApiError { retry_after: Some(RETRY_AFTER), ..error }
        };
        match self.engine.status() {
            EngineStatus::Up => {}
            EngineStatus::Connecting => {
                let what = match self.engine.ready() {
                    None => {
                        "no engine core has been met since this server started: it is starting or \
                         loading its model, or listens elsewhere; the server's log tells more"
                    }
                    Some(_) => "the engine is not there yet: it is starting",
                };
                return Err(unavailable(ErrorCode::EngineDown, what.into()));
            }
            EngineStatus::Hung { since } => {
                let seconds = self.clock.now().since(since).as_secs();
                return Err(unavailable(
                    ErrorCode::EngineHung,
                    format!("the engine has made no progress for {seconds} s"),
                ));
            }
            EngineStatus::Stopping => {
                return Err(unavailable(
                    ErrorCode::EngineDown,
                    "the engine core is stopping; send the request again once another one serves"
                        .into(),
                ));
            }
            EngineStatus::Down { reason } => {
                return Err(unavailable(
                    ErrorCode::EngineDown,
                    format!("the engine is gone: {reason}"),
                ));
            }
        }
        let served = self.engine.model().ok_or_else(|| {
            unavailable(ErrorCode::EngineDown, "the engine has not told its model yet".into())
        })?;
        Ok(self.models.get(served, &self.config, self.template.as_deref(), &self.clock))
    }

    /// Whether new work is taken now; a refusal is counted.
    ///
    /// # Errors
    /// 503 with the reason.
    pub fn accepting_model(&self) -> Result<Arc<LoadedModel>, ApiError> {
        if self.draining() {
            self.metrics.admission_rejected(AdmissionReason::Draining);
            return Err(shutting_down());
        }
        self.serving_model().inspect_err(|_| {
            self.metrics.admission_rejected(AdmissionReason::EngineUnavailable);
        })
    }

    /// Takes `choices` places among those that may be made at once.
    ///
    /// # Errors
    /// 503 if they are taken.
    fn admit(self: &Arc<Self>, choices: u64) -> Result<Admitted, ApiError> {
        let max = self.config.answers_max().map_or(u64::MAX, u64::from);
        let taken = self.admitted.fetch_add(choices, Ordering::Relaxed);
        let place = Admitted { app: Arc::clone(self), choices };
        // What could never fit was refused when the request was read.
        if taken.saturating_add(choices) > max {
            self.metrics.admission_rejected(AdmissionReason::QueueFull);
            return Err(ApiError::new(
                ErrorCode::QueueFull,
                format!(
                    "{taken} answers are being made here and at most {max} may be \
                     (--max-num-queued-reqs); try again soon"
                ),
            ));
        }
        Ok(place)
    }
}

/// Places taken by [`App::admit`]; given back when dropped.
pub struct Admitted {
    app: Arc<App>,
    choices: u64,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.app.admitted.fetch_sub(self.choices, Ordering::Relaxed);
    }
}

/// The server is stopping.
pub fn shutting_down() -> ApiError {
    let error = ApiError::new(ErrorCode::ShuttingDown, "the server is shutting down");
    ApiError { retry_after: Some(RETRY_AFTER), ..error }
}

/// What a refused submission tells the client.
fn submit_refused(error: SubmitError) -> ApiError {
    match error {
        SubmitError::Unavailable { reason } => {
            let message = format!("the engine is unavailable: {reason}");
            let error = ApiError::new(ErrorCode::EngineDown, message);
            ApiError { retry_after: Some(RETRY_AFTER), ..error }
        }
        SubmitError::QueueFull { retry_after } => {
            let message = "too many requests are open; try again soon";
            let error = ApiError::new(ErrorCode::QueueFull, message);
            ApiError { retry_after: Some(retry_after), ..error }
        }
        SubmitError::Draining => shutting_down(),
    }
}
