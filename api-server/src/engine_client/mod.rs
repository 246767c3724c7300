//! The one way from the HTTP layer to the engine-core.
//!
//! [`EngineClient::submit`] turns a request into wire requests (one per choice) and gives back a
//! [`Generation`] to read; dropping the generation aborts it in the core. How many cores there are,
//! how frames travel and what they mean stays behind this type.
//!
//! One task per core connection takes events and frames from the transport and folds them (see
//! [`crate::output_handler`]). Submitting and dropping touch the same state under a lock that is
//! held for one frame or one request at a time, never across a wait, and never by a scrape.

mod connection;
mod generation;
mod learning;
mod link;
mod lower;
mod served_model;
mod status;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
pub mod unconnected;

pub use generation::{
    EngineFailure, FailureKind, Finish, Generation, RequestTiming, Submit, TokenLogprob,
    TopLogprob, Update,
};
pub use served_model::ServedModel;
pub use status::{EngineStatus, SubmitError, UtilityError};

pub use crate::output_handler::DeliveryLimits;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{
    ClientMessage, EngineCoreRequest, FinishReason, ReadyResponse, RequestId, UtilityCall, Value,
};
use pawl_shared::transport::{FrontendEndpoint, FrontendEndpointConfig, TransportError};
use tokio::sync::{Notify, oneshot, watch};
use tokio_util::sync::CancellationToken;

use self::learning::Learning;
use self::link::{Link, LinkSender};
use crate::metrics::{AdmissionReason, Metrics};
use crate::output_handler::{Mailbox, NewRequest, OutputHandler};

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

/// Calls that wait for an answer at most; beyond, a call is refused.
const CALLS_MAX: usize = 1024;

/// How much of a client's id goes into wire ids, in bytes: it comes back with every output.
const EXTERNAL_ID_BYTES_MAX: usize = 64;

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
    /// Bounded by [`CALLS_MAX`].
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

    fn submit(self: &Arc<Self>, submits: &[Submit]) -> Result<Vec<Generation>, SubmitError> {
        let admitted = self.admit(submits)?;
        let wall = self.config.clock.wall();
        // Encoded outside the lock: a long prompt times n is real work.
        let messages: Vec<_> = submits
            .iter()
            .zip(&admitted.ids)
            .flat_map(|(submit, ids)| (0..).zip(ids).map(move |(choice, id)| (submit, choice, id)))
            .map(|(submit, choice, id)| {
                let prompt_tokens = u32::try_from(submit.prompt.len()).unwrap_or(u32::MAX);
                let model = &admitted.model;
                let params = lower::lower(
                    &submit.params,
                    choice,
                    &model.card,
                    model.max_model_len,
                    prompt_tokens,
                );
                let mut request =
                    EngineCoreRequest::new(id.clone(), submit.prompt.to_vec(), params);
                request.arrival_time = wall.0;
                request.client_index = admitted.client_index;
                request.priority = submit.priority;
                request.cache_salt = submit.cache_salt.clone();
                request.external_req_id = Some(submit.external_id.clone());
                (id, ClientMessage::Add(Box::new(request)).encode())
            })
            .collect();
        let mut state = self.state();
        if state.session.as_ref().is_none_or(|session| session.epoch != admitted.epoch) {
            return Err(self.unavailable());
        }
        let (news, mailboxes): (Vec<_>, Vec<_>) =
            submits.iter().zip(&admitted.ids).map(|both| self.opened(&admitted, both)).unzip();
        let keys = state.handler.add(news);
        let mut sent = Vec::with_capacity(messages.len());
        for (id, message) in messages {
            if let Err(refused) = self.sender.try_send(message) {
                state.handler.take_back(keys);
                self.tell_aborts(&mut state, sent);
                tracing::warn!(%refused, "a request could not be sent to the core");
                return Err(match refused {
                    pawl_shared::transport::SendRefused::Full => {
                        SubmitError::QueueFull { retry_after: RETRY_AFTER }
                    }
                    pawl_shared::transport::SendRefused::Down => self.unavailable(),
                });
            }
            sent.push(id.clone());
        }
        drop(state);
        let started = |(key, mailbox)| Generation::new(mailbox, key, self.clone());
        Ok(keys.zip(mailboxes).map(started).collect())
    }

    /// What the output handler keeps of a submission, and where its answer will lie.
    fn opened<'a>(
        &self,
        admitted: &Admitted,
        (submit, ids): (&'a Submit, &Vec<RequestId>),
    ) -> (NewRequest<'a>, Arc<Mailbox>) {
        let model = &admitted.model;
        let prompt_tokens = u32::try_from(submit.prompt.len()).unwrap_or(u32::MAX);
        let mailbox = Arc::new(Mailbox::new(submit.params.n.max(1)));
        let new = NewRequest {
            external_id: submit.external_id.as_str().into(),
            ids: ids.clone(),
            prompt_tokens: u64::from(prompt_tokens),
            params: &submit.params,
            max_tokens: lower::max_tokens(&submit.params, model.max_model_len, prompt_tokens),
            vocabulary: model.tokenizer.clone(),
            arrival: submit.arrival,
            sent: self.config.clock.now(),
            mailbox: mailbox.clone(),
        };
        (new, mailbox)
    }

    /// Whether the prompts can be taken now; if so, their wire ids, which are never given again.
    fn admit(&self, submits: &[Submit]) -> Result<Admitted, SubmitError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(SubmitError::Draining);
        }
        if *self.status.borrow() != EngineStatus::Up {
            return Err(self.unavailable());
        }
        let choices: usize = submits.iter().map(|submit| submit.params.n.max(1) as usize).sum();
        let mut state = self.state();
        if state.handler.open() + choices > self.config.open_max {
            return Err(SubmitError::QueueFull { retry_after: RETRY_AFTER });
        }
        let model = state.model.clone();
        let (Some(session), Some(model)) = (&mut state.session, model) else {
            return Err(self.unavailable());
        };
        let ids = submits.iter().map(|submit| session.fresh_ids(submit)).collect();
        let Session { client_index, epoch, .. } = *session;
        Ok(Admitted { model, ids, client_index, epoch })
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

    /// Sends a call and returns its id, which the reply bears too.
    fn send_call(
        &self,
        state: &mut State,
        method: &str,
        args: Vec<Value>,
    ) -> Result<u64, UtilityError> {
        let Some(session) = &state.session else {
            let SubmitError::Unavailable { reason } = self.unavailable() else {
                unreachable!("unavailable() gives no other")
            };
            return Err(UtilityError::Unavailable { reason });
        };
        let call_id = state.next_call;
        state.next_call += 1;
        let client_index = session.client_index;
        let call = UtilityCall { client_index, call_id, method: method.to_string(), args };
        match self.sender.try_send(ClientMessage::Utility(call).encode()) {
            Ok(()) => Ok(call_id),
            Err(refused) => Err(UtilityError::Unavailable { reason: refused.to_string() }),
        }
    }

    async fn call(&self, method: &str, args: Vec<Value>) -> Result<Value, UtilityError> {
        let (answer, answered) = oneshot::channel();
        let call_id = {
            let mut state = self.state();
            if state.calls.len() >= CALLS_MAX {
                let reason = format!("{CALLS_MAX} calls wait for an answer already");
                return Err(UtilityError::Unavailable { reason });
            }
            let call_id = self.send_call(&mut state, method, args)?;
            state.calls.insert(call_id, answer);
            call_id
        };
        // Whoever stops waiting, by time or by being dropped, takes the entry along.
        let _forget = ForgetCall { inner: self, call_id };
        let after = self.config.utility_timeout;
        match tokio::time::timeout(after, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(UtilityError::Unavailable { reason: "it has gone".to_string() }),
            Err(_) => Err(UtilityError::Timeout { method: method.to_string(), after }),
        }
    }
}

/// Submissions that can be sent.
struct Admitted {
    model: Arc<ServedModel>,
    /// Of each submission, one for each choice.
    ids: Vec<Vec<RequestId>>,
    client_index: u32,
    epoch: u64,
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

    fn fresh_ids(&mut self, submit: &Submit) -> Vec<RequestId> {
        let external = shortened(&submit.external_id);
        self.counter += 1;
        let (epoch, counter) = (self.epoch, self.counter);
        // The counter's width is fixed, so that no two pairs of epoch and counter look alike.
        let parent = format!("{external}-{epoch:x}{counter:0COUNTER_DIGITS$x}");
        match submit.params.n.max(1) {
            1 => vec![RequestId::from(parent)],
            n => (0..n).map(|choice| RequestId::from(format!("{choice}_{parent}"))).collect(),
        }
    }
}

/// Digits of a wire id's counter, which stands at its end.
const COUNTER_DIGITS: usize = 10;

/// The epoch in a wire id of ours.
pub(crate) fn epoch_of(id: &RequestId) -> Option<u64> {
    let (_, tail) = id.as_str().rsplit_once('-')?;
    let digits = tail.len().checked_sub(COUNTER_DIGITS)?;
    u64::from_str_radix(tail.get(..digits)?, 16).ok()
}

const RETRY_AFTER: Duration = Duration::from_secs(1);

struct ForgetCall<'a> {
    inner: &'a Inner,
    call_id: u64,
}

impl Drop for ForgetCall<'_> {
    fn drop(&mut self) {
        self.inner.state().calls.remove(&self.call_id);
    }
}

/// The beginning of a client's id, cut at a character.
fn shortened(id: &str) -> &str {
    let mut end = id.len().min(EXTERNAL_ID_BYTES_MAX);
    while !id.is_char_boundary(end) {
        end -= 1;
    }
    &id[..end]
}
