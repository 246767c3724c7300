//! The one way from the HTTP layer to the engine-core.
//!
//! [`EngineClient::submit`] turns a request into wire requests (one per choice) and gives back a
//! [`Generation`] to read; dropping the generation aborts it in the core. How many cores there are,
//! how frames travel and what they mean stays behind this type.
//!
//! One task per core connection takes events and frames from the transport and folds them (see
//! [`crate::output_handler`]). Submitting and dropping touch the same state under a lock that is
//! held for one frame or one request at a time, never across a wait, and never by a scrape.

mod calls;
mod connection;
mod generation;
mod learning;
mod link;
mod lower;
mod served_model;
mod status;
mod submitting;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
pub mod unconnected;
mod wire_ids;

pub use generation::{
    EngineFailure, FailureKind, Finish, Generation, RequestTiming, Submit, TokenLogprob,
    TopLogprob, Update,
};
pub use served_model::ServedModel;
pub use status::{EngineStatus, SubmitError, UtilityError};

pub(crate) use wire_ids::epoch_of;

pub use crate::output_handler::DeliveryLimits;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{ClientMessage, FinishReason, ReadyResponse, RequestId, Value};
use pawl_shared::transport::{FrontendEndpoint, FrontendEndpointConfig, TransportError};
use tokio::sync::{Notify, oneshot, watch};
use tokio_util::sync::CancellationToken;

use self::learning::Learning;
use self::link::{Link, LinkSender};
use crate::metrics::{AdmissionReason, Metrics};
use crate::output_handler::OutputHandler;

/// How a client behaves.
#[derive(Clone)]
pub struct ClientConfig {
    /// Where everything is counted.
    pub metrics: Arc<Metrics>,
    /// The clock of this process; arrivals are stamped with it too.
    pub clock: Arc<dyn Clock>,
    /// How far a reader may fall behind.
    pub limits: DeliveryLimits,
    /// What to serve by when the core cannot tell its model (an engine of vLLM's).
    pub local_card: Option<ModelCard>,
    /// `--served-model-name`; empty: the card's names.
    pub served_model_names: Vec<String>,
    /// Choices open in the core at most; beyond, [`SubmitError::QueueFull`].
    pub open_max: usize,
    /// How long a utility call may take.
    pub utility_timeout: Duration,
    /// Whether each request's end is logged with where its time went (`--request-timing log`).
    pub log_request_timing: bool,
    /// Whether a core's outputs for a process that was here before ours may come to us: those
    /// requests are aborted.
    pub inherits_outputs: bool,
}

impl ClientConfig {
    /// The usual figures.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            clock: Arc::new(SystemClock),
            limits: DeliveryLimits::default(),
            local_card: None,
            served_model_names: Vec::new(),
            open_max: 16_384,
            utility_timeout: Duration::from_secs(30),
            log_request_timing: false,
            inherits_outputs: false,
        }
    }
}

/// A handle on the engine-core; clones share it.
#[derive(Clone)]
pub struct EngineClient {
    inner: Arc<Inner>,
}

struct Inner {
    config: ClientConfig,
    sender: LinkSender,
    status: watch::Sender<EngineStatus>,
    /// Whether a core may be told of our pair.
    awaits: watch::Sender<bool>,
    state: Mutex<State>,
    draining: AtomicBool,
    /// Told whenever nothing is open any more.
    idle: Notify,
    stop: CancellationToken,
    stopped: watch::Sender<bool>,
}

struct State {
    handler: OutputHandler,
    session: Option<Session>,
    model: Option<Arc<ServedModel>>,
    ready: Option<Arc<ReadyResponse>>,
    /// The last card as the core told it: the same again needs no new tokenizer.
    told_card: Option<Value>,
    /// Aborts that could not be sent. Bounded by the requests once open; sent with the next tick
    /// or join.
    unsent: Vec<RequestId>,
    /// Bounded by [`calls::CALLS_MAX`].
    calls: HashMap<u64, oneshot::Sender<Result<Value, UtilityError>>>,
    next_call: u64,
    /// While the session's model is not known.
    learning: Option<Learning>,
    leave_deadline: Duration,
}

/// One life of the connection.
struct Session {
    epoch: u64,
    client_index: u32,
    /// Wire ids so far.
    counter: u64,
    /// Whether the model is known: only then are requests taken.
    serving: bool,
    /// Whether the core has said that it stops.
    stopping: bool,
}

impl EngineClient {
    /// Begins to look for the core; returns at once. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When sockets of ours cannot be set up.
    pub async fn start(
        endpoint: FrontendEndpointConfig,
        config: ClientConfig,
    ) -> Result<Self, TransportError> {
        let (endpoint, sender) = FrontendEndpoint::start(endpoint).await?;
        if let Some(address) = endpoint.taps_address() {
            tracing::info!("its frames can be seen with `pawl frames tap {address}`");
        }
        Ok(Self::over(Link::Endpoint(endpoint), LinkSender::Endpoint(sender), config))
    }

    fn over(link: Link, sender: LinkSender, config: ClientConfig) -> Self {
        let client = Self::new(sender, config);
        tokio::spawn(connection::run(client.inner.clone(), link));
        client
    }

    /// A client that hears of its core only by what is handed to `inner`.
    fn new(sender: LinkSender, config: ClientConfig) -> Self {
        let handler = OutputHandler::new(
            config.metrics.clone(),
            config.limits,
            config.log_request_timing,
            config.clock.now(),
        );
        let state = State {
            handler,
            session: None,
            model: None,
            ready: None,
            told_card: None,
            unsent: Vec::new(),
            calls: HashMap::new(),
            next_call: 1,
            learning: None,
            leave_deadline: Duration::from_secs(1),
        };
        let inner = Arc::new(Inner {
            config,
            sender,
            status: watch::Sender::new(EngineStatus::Connecting),
            awaits: watch::Sender::new(false),
            state: Mutex::new(state),
            draining: AtomicBool::new(false),
            idle: Notify::new(),
            stop: CancellationToken::new(),
            stopped: watch::Sender::new(false),
        });
        Self { inner }
    }

    /// How the core is doing right now.
    #[must_use]
    pub fn status(&self) -> EngineStatus {
        self.inner.status.borrow().clone()
    }

    /// Follows the core's status.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<EngineStatus> {
        self.inner.status.subscribe()
    }

    /// Follows whether a core may be told of our pair: it is bound, and no core has it. Only where
    /// a supervisor lists it.
    #[must_use]
    pub fn awaits_core(&self) -> watch::Receiver<bool> {
        self.inner.awaits.subscribe()
    }

    /// What the core serves; `None` until it has told. Stays known while a core is away.
    #[must_use]
    pub fn model(&self) -> Option<Arc<ServedModel>> {
        self.inner.state().model.clone()
    }

    /// What the core told of itself when it joined; `None` until then. Stays known while a core is
    /// away.
    #[must_use]
    pub fn ready(&self) -> Option<Arc<ReadyResponse>> {
        self.inner.state().ready.clone()
    }

    /// Starts a request. Never blocks. A refusal is counted in `vllm:admission_rejections_total`.
    ///
    /// # Errors
    /// When the core cannot take it now.
    pub fn submit(&self, submit: Submit) -> Result<Generation, SubmitError> {
        let mut generations = self.submit_all(vec![submit])?;
        Ok(generations.pop().expect("one submission, one generation"))
    }

    /// Starts the prompts of one client's request: all of them or none. When the core itself does
    /// not take one of their choices, all that are open end with that
    /// ([`EngineFailure::refusal`]), and it is counted as one refusal.
    ///
    /// # Errors
    /// When the core cannot take them now.
    pub fn submit_all(&self, submits: Vec<Submit>) -> Result<Vec<Generation>, SubmitError> {
        self.inner.submit(&submits).inspect_err(|error| {
            self.inner.config.metrics.admission_rejected(match error {
                SubmitError::Unavailable { .. } => AdmissionReason::EngineUnavailable,
                SubmitError::QueueFull { .. } => AdmissionReason::QueueFull,
                SubmitError::Draining => AdmissionReason::Draining,
            });
        })
    }

    /// Calls a method of the core by name.
    ///
    /// # Errors
    /// When the core is away, does not answer in time, or answers with a failure.
    pub async fn utility(&self, method: &str, args: Vec<Value>) -> Result<Value, UtilityError> {
        self.inner.call(method, args).await
    }

    /// Choices of requests that are open in the core.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.inner.state().handler.open() as u64
    }

    /// From now on every [`EngineClient::submit`] is refused as [`SubmitError::Draining`]; open
    /// generations go on.
    pub fn begin_drain(&self) {
        self.inner.draining.store(true, Ordering::Relaxed);
    }

    /// Resolves once nothing is in flight.
    pub async fn idle(&self) {
        loop {
            let told = self.inner.idle.notified();
            if self.in_flight() == 0 {
                return;
            }
            told.await;
        }
    }

    /// Ends every open generation with an abort whose failure says `reason`; the core is told.
    pub fn abort_all(&self, reason: &str) {
        let failure = EngineFailure {
            kind: FailureKind::Shutdown,
            code: "shutdown".to_string(),
            message: reason.to_string(),
            retryable: true,
        };
        let now = self.inner.config.clock.now();
        let mut state = self.inner.state();
        let ended = state.handler.end_all(FinishReason::Abort, &failure, now);
        self.inner.tell_aborts(&mut state, ended);
        self.inner.told_idle(&state);
    }

    /// Ends the requests whose `external_id` is one of `names`, as an abort that is no failure; the
    /// core is told. Returns how many there were.
    pub fn abort(&self, names: &HashSet<&str>) -> usize {
        let now = self.inner.config.clock.now();
        let mut state = self.inner.state();
        let (count, ended) = state.handler.abort_named(names, now);
        self.inner.tell_aborts(&mut state, ended);
        self.inner.told_idle(&state);
        count
    }

    /// Aborts what is open, takes leave of the core (waiting for it at most until `deadline` is
    /// over) and ends the connection's task.
    pub async fn shutdown(&self, deadline: Duration) {
        self.begin_drain();
        self.abort_all("the server is shutting down");
        let mut stopped = self.inner.stopped.subscribe();
        // The task reads the deadline once it has been woken.
        self.inner.state().leave_deadline = deadline;
        self.inner.stop.cancel();
        // The sender lives in `inner`, so this cannot fail.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }
}

const UNPOISONED: &str = "no panic happens under this lock";

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(UNPOISONED)
    }

    fn unavailable(&self) -> SubmitError {
        SubmitError::Unavailable {
            reason: match &*self.status.borrow() {
                EngineStatus::Connecting => "it has not joined yet".to_string(),
                EngineStatus::Up => "it has just gone".to_string(),
                EngineStatus::Hung { .. } => "it makes no progress".to_string(),
                EngineStatus::Stopping => "it is stopping and takes no new requests".to_string(),
                EngineStatus::Down { reason } => reason.clone(),
            },
        }
    }

    /// The reader of a generation is gone.
    fn abandon(&self, key: u64) {
        let now = self.config.clock.now();
        let mut state = self.state();
        let ended = state.handler.abort(key, now);
        self.tell_aborts(&mut state, ended);
        self.told_idle(&state);
    }

    /// Sends aborts, or keeps them for later.
    fn tell_aborts(&self, state: &mut State, mut ids: Vec<RequestId>) {
        ids.append(&mut state.unsent);
        if ids.is_empty() {
            return;
        }
        let connected = state.session.is_some();
        let message = ClientMessage::Abort(ids.clone()).encode();
        if !connected || self.sender.try_send(message).is_err() {
            state.unsent = ids;
        }
    }

    fn told_idle(&self, state: &State) {
        if state.handler.open() == 0 {
            self.idle.notify_waiters();
        }
    }
}

impl Session {
    /// How a core is doing that moves.
    fn status(&self) -> EngineStatus {
        match (self.stopping, self.serving) {
            (true, _) => EngineStatus::Stopping,
            (false, true) => EngineStatus::Up,
            (false, false) => EngineStatus::Connecting,
        }
    }
}
