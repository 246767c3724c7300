//! A request on its way: what is submitted, and what is read back.

use std::sync::Arc;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{FinishReason, SamplingParams, StopReason};

use super::Inner;
use crate::metrics::AdmissionReason;
use crate::output_handler::Mailbox;

/// A request, checked by the caller, ready for the core.
#[derive(Clone, Debug)]
pub struct Submit {
    /// The id the client knows; need not be unique.
    pub external_id: String,
    /// Token ids; at least one and fewer than the model's length.
    pub prompt: Arc<[u32]>,
    /// As the client asked. `n` is fanned out here; the fields that only an engine reads (end
    /// token, stop tokens of the model, default `max_tokens`) are filled in here.
    pub params: SamplingParams,
    /// When the request arrived, on this process's monotonic clock: TTFT and e2e count from it.
    pub arrival: Stamp,
    /// Whether the caller streams the answer on to its client.
    pub streaming: bool,
    /// Lower runs earlier, under the priority policy.
    pub priority: i64,
    /// Separates prefix-cache entries of tenants.
    pub cache_salt: Option<String>,
}

impl Submit {
    /// A request with default priority and no cache salt.
    #[must_use]
    pub fn new(
        external_id: impl Into<String>,
        prompt: impl Into<Arc<[u32]>>,
        params: SamplingParams,
        arrival: Stamp,
    ) -> Self {
        Self {
            external_id: external_id.into(),
            prompt: prompt.into(),
            params,
            arrival,
            streaming: false,
            priority: 0,
            cache_salt: None,
        }
    }
}

/// A submitted request, to be read to its end. Dropping it aborts what has not ended.
pub struct Generation {
    mailbox: Arc<Mailbox>,
    key: u64,
    inner: Arc<Inner>,
}

impl Generation {
    pub(super) fn new(mailbox: Arc<Mailbox>, key: u64, inner: Arc<Inner>) -> Self {
        Self { mailbox, key, inner }
    }

    /// The next piece; `None` after every choice has ended. Cancel-safe.
    ///
    /// Every choice has exactly one [`Update`] with `finish` set, its last.
    pub async fn next(&mut self) -> Option<Update> {
        self.mailbox.take(&*self.inner.config.clock).await
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.inner.abandon(self.key);
    }
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").field("key", &self.key).finish_non_exhaustive()
    }
}

/// What is new for one choice.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Update {
    /// Which of the `n` choices, from 0.
    pub choice: u32,
    /// New text. A tail that may begin a stop string is held back; characters are never split.
    pub text: String,
    /// New tokens, stop token included, none after a stop string.
    pub token_ids: Vec<u32>,
    /// One per new token, when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// Once, with the first update, when asked for: one per prompt token after the first.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// Set on the last update of this choice.
    pub finish: Option<Finish>,
    /// Once, with the first tokens: prompt tokens found in a cache.
    pub cached_tokens: Option<u64>,
    /// Set with `finish` when the request failed: never take it for a normal end.
    pub error: Option<EngineFailure>,
    /// Set with `finish`: where the time went.
    pub timing: Option<RequestTiming>,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// As counted in `vllm:request_success_total`.
    pub reason: FinishReason,
    /// The stop token or string, where there was one.
    pub stop_reason: Option<StopReason>,
}

/// A failure that ended a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineFailure {
    /// What kind.
    pub kind: FailureKind,
    /// For programs: `engine_down`, `engine_aborted`, `engine_error`, `unreadable_frame`,
    /// `slow_reader`, `shutdown`, or the engine's own code (`validation_error`, `queue_full`,
    /// `engine_paused`, `engine_stopping`, …).
    pub code: String,
    /// For people.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

impl EngineFailure {
    /// If the engine does not serve the request now, although nothing is wrong with it: why. One
    /// that had no token by then was never let in, and may be sent again later.
    #[must_use]
    pub fn refusal(&self) -> Option<AdmissionReason> {
        match (self.kind, self.code.as_str()) {
            (FailureKind::Engine, "queue_full") => Some(AdmissionReason::QueueFull),
            (FailureKind::Engine, "engine_paused" | "engine_stopping") => {
                Some(AdmissionReason::EngineUnavailable)
            }
            _ => None,
        }
    }
}

/// What kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The core died, or its connection did.
    CoreDown,
    /// The engine refused or failed this one request (`validation_error` is the client's fault).
    Engine,
    /// The reader did not keep up.
    SlowReader,
    /// The server is stopping.
    Shutdown,
}

/// A sampled (or prompt) token with its logprob.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Its text alone; U+FFFD where its bytes are no whole character.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1-based rank in the vocabulary.
    pub rank: u32,
    /// The most likely tokens, best first, as many as asked for.
    pub top: Vec<TopLogprob>,
}

/// One of the most likely tokens at a position.
#[derive(Clone, Debug, PartialEq)]
pub struct TopLogprob {
    /// The token.
    pub token_id: u32,
    /// Its text alone.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Where the time of one choice went. The five parts add up to the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RequestTiming {
    /// Arrival to the request being handed to the core (this process's clock).
    pub intake: Duration,
    /// In the engine, until first scheduled (engine's clock).
    pub queue: Duration,
    /// First scheduled to first token (engine's clock).
    pub prefill: Duration,
    /// First to last token (engine's clock).
    pub decode: Duration,
    /// The rest: both ways between the processes, detokenising, delivering.
    pub deliver: Duration,
}

impl RequestTiming {
    /// Arrival to end.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.intake + self.queue + self.prefill + self.decode + self.deliver
    }
}
