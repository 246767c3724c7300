//! What every generating route and method shares: submitting prompts, reading what comes of all of
//! them in one stream, counting tokens, and the one log line at the end.

use std::sync::Arc;

use axum::http::HeaderMap;
use futures::StreamExt;
use futures::stream::SelectAll;
use pawl_shared::clock::Stamp;
use pawl_shared::protocol::FinishReason;

use super::prompts::ReadyPrompt;
use super::{Admitted, App, submit_refused};
use crate::config::RequestTimingMode;
use crate::engine_client::{EngineFailure, FailureKind, RequestTiming, Submit, Update};
use crate::openai::answer::{PromptTokensDetails, Usage};
use crate::openai::error::{ApiError, ErrorCode};
use crate::openai::limits::ID_BYTES_MAX;
use crate::openai::sampling::Common;

/// The header, or the metadata, by which a client names its request and by which the name is told
/// back.
pub const REQUEST_ID: &str = "x-request-id";

/// The id of a request: the header's, the body's, or one of ours.
///
/// # Errors
/// When the client's is no id.
pub fn request_id(headers: &HeaderMap, common: &Common) -> Result<String, ApiError> {
    let sent = headers.get(REQUEST_ID).map(|id| id.to_str().unwrap_or("\u{fffd}"));
    let Some(id) = sent.or(common.request_id.as_deref()) else {
        return Ok(uuid::Uuid::new_v4().simple().to_string());
    };
    let fits = !id.is_empty() && id.len() <= ID_BYTES_MAX;
    if fits && id.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(id.to_owned());
    }
    let name = if sent.is_some() { "X-Request-Id" } else { "request_id" };
    let problem = format!("must be 1 to {ID_BYTES_MAX} visible ASCII characters without blanks");
    Err(ApiError::invalid(name, problem))
}

/// A request whose prompts are with the core. Dropping it aborts what has not ended, and logs.
pub struct Running {
    app: Arc<App>,
    updates: SelectAll<futures::stream::BoxStream<'static, (u32, Update)>>,
    choices_per_prompt: u32,
    tokens: Tokens,
    log: RequestLog,
    _place: Admitted,
}

/// What is new for one choice of one prompt.
pub struct Piece {
    /// Over all prompts: prompt × n + choice.
    pub index: u32,
    /// What is new.
    pub update: Update,
}

/// Tokens so far.
struct Tokens {
    prompt: u64,
    /// Of each choice, so that a chunk can tell its own.
    completion: Vec<u64>,
    /// Of each prompt; the first choice that tells counts.
    cached: Vec<Option<u64>>,
    prompt_each: Vec<u64>,
}

impl Running {
    /// Submits every prompt.
    ///
    /// # Errors
    /// When they are refused: all together.
    pub fn start(
        app: &Arc<App>,
        id: &str,
        common: &Common,
        prompts: &[ReadyPrompt],
        arrival: Stamp,
    ) -> Result<Self, ApiError> {
        let n = common.sampling.n;
        let choices = prompts.len() as u64 * u64::from(n);
        let place = app.admit(choices)?;
        let submits = prompts.iter().enumerate().map(|(at, prompt)| Submit {
            external_id: if prompts.len() == 1 { id.to_owned() } else { format!("{id}-{at}") },
            prompt: Arc::clone(&prompt.tokens),
            params: prompt.params.clone(),
            arrival,
            streaming: common.stream,
            priority: common.priority,
            cache_salt: common.cache_salt.clone(),
        });
        // A refusal is counted by the engine's client.
        let started = app.engine.submit(submits.collect()).map_err(submit_refused)?;
        let mut updates = SelectAll::new();
        for (at, one) in (0..).zip(started) {
            updates.push(one.map(move |update| (at, update)).boxed());
        }
        let prompt_each: Vec<u64> = prompts.iter().map(|p| p.tokens.len() as u64).collect();
        let tokens = Tokens {
            prompt: prompt_each.iter().sum(),
            completion: vec![
                0;
                usize::try_from(choices).expect("the number of choices is bounded")
            ],
            cached: vec![None; prompts.len()],
            prompt_each,
        };
        let log = RequestLog {
            id: id.to_owned(),
            arrival,
            open: choices,
            finish: None,
            failed: None,
            timing: None,
        };
        let app = Arc::clone(app);
        Ok(Self { app, updates, choices_per_prompt: n, tokens, log, _place: place })
    }

    /// The next piece, of whichever choice; `None` once every choice has ended. Cancel-safe.
    ///
    /// # Errors
    /// When a choice failed: the whole request is to end then.
    pub async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        let Some((prompt, update)) = self.updates.next().await else {
            // A stream that ends without its finish would be a fault; never let it look whole.
            return (self.log.open > 0 && self.log.failed.is_none()).then(|| {
                let error = ApiError::new(ErrorCode::Engine, "the engine's answer broke off");
                Err(self.fail(error))
            });
        };
        let index = prompt * self.choices_per_prompt + update.choice;
        let prompt = prompt as usize;
        self.tokens.completion[index as usize] += update.token_ids.len() as u64;
        if self.tokens.cached[prompt].is_none() {
            self.tokens.cached[prompt] = update.cached_tokens;
        }
        if update.timing.is_some() {
            self.log.timing = update.timing;
        }
        if let Some(failure) = &update.error {
            let error = failure_told(failure);
            return Some(Err(self.fail(error)));
        }
        if let Some(finish) = &update.finish {
            self.log.open = self.log.open.saturating_sub(1);
            self.log.finish = Some(finish.reason);
            if finish.reason == FinishReason::Error {
                let error = ApiError::new(ErrorCode::Engine, "the engine failed on this request");
                return Some(Err(self.fail(error)));
            }
        }
        Some(Ok(Piece { index, update }))
    }

    fn fail(&mut self, error: ApiError) -> ApiError {
        self.log.failed = Some(error.code.as_str());
        self.updates.clear();
        error
    }

    /// Tokens so far, of all prompts and choices.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let completion = self.tokens.completion.iter().sum();
        let cached = self.tokens.cached.iter().flatten().sum();
        self.usage_of(self.tokens.prompt, completion, cached)
    }

    /// Tokens so far of one choice and its prompt, as its chunks tell them.
    #[must_use]
    pub fn usage_at(&self, index: u32) -> Usage {
        let prompt = (index / self.choices_per_prompt) as usize;
        let completion = self.tokens.completion[index as usize];
        let cached = self.tokens.cached[prompt].unwrap_or(0);
        self.usage_of(self.tokens.prompt_each[prompt], completion, cached)
    }

    fn usage_of(&self, prompt: u64, completion: u64, cached: u64) -> Usage {
        let details = self.app.config.enable_prompt_tokens_details;
        Usage {
            prompt_tokens: prompt,
            total_tokens: prompt + completion,
            completion_tokens: completion,
            prompt_tokens_details: details.then_some(PromptTokensDetails { cached_tokens: cached }),
        }
    }

    /// Where the time went, if the client is to be told and it is known.
    #[must_use]
    pub fn timing_told(&self) -> Option<String> {
        let told = self.app.config.request_timing == RequestTimingMode::Header;
        self.log.timing.filter(|_| told).map(timing_text)
    }

    /// A stream in which nothing flows for so long gets a comment.
    #[must_use]
    pub fn keep_alive(&self) -> std::time::Duration {
        self.app.config.limits.keep_alive
    }
}

/// What a failed choice tells the client.
fn failure_told(failure: &EngineFailure) -> ApiError {
    let code = match failure.kind {
        FailureKind::CoreDown => ErrorCode::EngineDown,
        FailureKind::Engine if failure.code == "queue_full" => ErrorCode::QueueFull,
        FailureKind::Engine if failure.code == "engine_paused" => ErrorCode::EnginePaused,
        FailureKind::Engine if failure.code == "engine_stopping" => ErrorCode::EngineDown,
        FailureKind::Engine if failure.code == "validation_error" => ErrorCode::InvalidValue,
        FailureKind::Engine => ErrorCode::Engine,
        FailureKind::SlowReader => ErrorCode::SlowReader,
        FailureKind::Shutdown => ErrorCode::ShuttingDown,
    };
    ApiError::new(code, &failure.message)
}

/// `intake=0.000213, queue=…`: seconds.
fn timing_text(timing: RequestTiming) -> String {
    let parts = [
        ("intake", timing.intake),
        ("queue", timing.queue),
        ("prefill", timing.prefill),
        ("decode", timing.decode),
        ("deliver", timing.deliver),
        ("total", timing.total()),
    ];
    let text = parts.map(|(name, time)| format!("{name}={:.6}", time.as_secs_f64()));
    text.join(", ")
}

/// One line at the end of each request. Never a prompt or an answer.
struct RequestLog {
    id: String,
    arrival: Stamp,
    /// Choices that have not ended.
    open: u64,
    finish: Option<FinishReason>,
    failed: Option<&'static str>,
    timing: Option<RequestTiming>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let log = &self.log;
        let finish = match (log.failed, log.open, log.finish) {
            (Some(code), ..) => code,
            (None, 0, Some(reason)) => reason.as_str(),
            _ => FinishReason::Abort.as_str(),
        };
        let seconds = self.app.clock.now().since(log.arrival).as_secs_f64();
        let usage = self.usage();
        let timing =
            log.timing.filter(|_| self.app.config.request_timing != RequestTimingMode::Off);
        tracing::info!(
            target: "pawl::request",
            id = log.id,
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            choices = self.tokens.completion.len(),
            finish,
            seconds = format_args!("{seconds:.6}"),
            timing = timing.map(timing_text),
            "request ended"
        );
    }
}
