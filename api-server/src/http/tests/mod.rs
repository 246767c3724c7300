//! The routes over an engine that plays a script.

mod answers;
mod connections;
mod counting;
mod lifecycle;
mod validation;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::http::Request;
use futures::StreamExt;
use http_body_util::BodyExt;
use pawl_shared::clock::ManualClock;
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{FinishReason, StopReason, Value};
use pawl_shared::tokenizer::Tokenizer;
use tokio::sync::watch;
use tower::ServiceExt;

use super::App;
use crate::config::FrontendConfig;
use crate::engine_client::{
    EngineFailure, EngineStatus, FailureKind, Finish, ServedModel, Submit, SubmitError,
    TokenLogprob, TopLogprob, Update,
};
use crate::metrics::Metrics;
use crate::serving::engine::{Called, Engine, Updates};

/// What the fake engine makes of a request.
type Script = Box<dyn Fn(&Submit) -> Vec<Update> + Send + Sync>;

/// Plays a script for each request, and counts what was dropped before its end.
struct FakeEngine {
    status: Mutex<EngineStatus>,
    model: Option<Arc<ServedModel>>,
    script: Script,
    submitted: Mutex<Vec<Submit>>,
    aborted: Arc<AtomicU64>,
    /// Flips when every open request is to end.
    abort: watch::Sender<bool>,
}

impl Engine for FakeEngine {
    fn status(&self) -> EngineStatus {
        self.status.lock().unwrap().clone()
    }

    fn model(&self) -> Option<Arc<ServedModel>> {
        self.model.clone()
    }

    fn submit(&self, prompts: Vec<Submit>) -> Result<Vec<Updates>, SubmitError> {
        Ok(prompts.into_iter().map(|prompt| self.play(prompt)).collect())
    }

    fn watch(&self) -> watch::Receiver<EngineStatus> {
        watch::channel(self.status()).1
    }

    fn ready(&self) -> Option<Arc<pawl_shared::protocol::ReadyResponse>> {
        None
    }

    fn abort(&self, _: &std::collections::HashSet<&str>) -> usize {
        0
    }

    fn abort_all(&self, _: &str) {
        self.abort.send_replace(true);
    }

    /// Answers with what it was called with.
    fn call(&self, method: &'static str, args: Vec<Value>) -> Called {
        let mut called = vec![Value::Text(method.into())];
        called.extend(args);
        Box::pin(std::future::ready(Ok(Value::Array(called))))
    }
}

impl FakeEngine {
    fn play(&self, submit: Submit) -> Updates {
        let updates = (self.script)(&submit);
        self.submitted.lock().unwrap().push(submit);
        let whole = updates.iter().any(|update| update.finish.is_some());
        let played = futures::stream::iter(updates);
        if whole {
            return Box::pin(played);
        }
        // A script without an end goes on until it is aborted or dropped.
        let guard = DropCounter(Arc::clone(&self.aborted));
        let mut abort = self.abort.subscribe();
        let end = futures::stream::once(async move {
            let _guard = guard;
            abort.wait_for(|&abort| abort).await.unwrap();
            failure(FailureKind::Shutdown, "shutdown", "the server is shutting down")
        });
        Box::pin(played.chain(end))
    }
}

struct DropCounter(Arc<AtomicU64>);

impl Drop for DropCounter {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// One piece of text per token, with ids from 65.
fn words(words: &[&str]) -> Vec<Update> {
    let piece = |(at, word): (usize, &&str)| Update {
        text: (*word).to_owned(),
        token_ids: vec![65 + at as u32],
        cached_tokens: (at == 0).then_some(16),
        ..Update::default()
    };
    words.iter().enumerate().map(piece).collect()
}

fn ended(mut updates: Vec<Update>, reason: FinishReason, stop: Option<StopReason>) -> Vec<Update> {
    let last = updates.last_mut().expect("a script has at least one piece");
    last.finish = Some(Finish { reason, stop_reason: stop });
    updates
}

fn logprobs(mut updates: Vec<Update>) -> Vec<Update> {
    for update in &mut updates {
        let id = update.token_ids[0];
        update.logprobs = vec![TokenLogprob {
            token_id: id,
            text: update.text.clone(),
            bytes: update.text.clone().into_bytes(),
            logprob: -0.5,
            rank: 1,
            top: vec![
                TopLogprob {
                    token_id: id,
                    text: update.text.clone(),
                    bytes: update.text.clone().into_bytes(),
                    logprob: -0.5,
                },
                TopLogprob {
                    token_id: 7,
                    text: "\u{fffd}".into(),
                    bytes: vec![0xf0],
                    logprob: f32::NEG_INFINITY,
                },
            ],
        }];
    }
    updates
}

fn failure(kind: FailureKind, code: &str, message: &str) -> Update {
    Update {
        finish: Some(Finish { reason: FinishReason::Error, stop_reason: None }),
        error: Some(EngineFailure {
            kind,
            code: code.into(),
            message: message.into(),
            retryable: true,
        }),
        ..Update::default()
    }
}

fn served() -> Arc<ServedModel> {
    let mut card = ModelCard::mock();
    card.max_model_len = 64;
    let tokenizer = Arc::new(Tokenizer::from_card(&card).unwrap());
    let names = vec!["mock".into(), "alias".into()];
    Arc::new(ServedModel { names, max_model_len: 64, card, tokenizer })
}

/// An app over a script.
struct Stage {
    app: Arc<App>,
    engine: Arc<FakeEngine>,
}

impl Stage {
    fn new(script: impl Fn(&Submit) -> Vec<Update> + Send + Sync + 'static) -> Self {
        Self::with(FrontendConfig::default(), script)
    }

    fn with(
        config: FrontendConfig,
        script: impl Fn(&Submit) -> Vec<Update> + Send + Sync + 'static,
    ) -> Self {
        let engine = Arc::new(FakeEngine {
            status: Mutex::new(EngineStatus::Up),
            model: Some(served()),
            script: Box::new(script),
            submitted: Mutex::default(),
            aborted: Arc::default(),
            abort: watch::channel(false).0,
        });
        let clock = Arc::new(ManualClock::at(5_000_000_000));
        let dynamic: Arc<dyn Engine> = Arc::clone(&engine) as _;
        let app = App::new(config, dynamic, Arc::new(Metrics::default()), clock, None);
        Self { app: Arc::new(app), engine }
    }

    async fn send(&self, request: Request<Body>) -> String {
        let answer = async {
            let response = super::router(Arc::clone(&self.app)).oneshot(request).await.unwrap();
            let (status, headers) = (response.status(), response.headers().clone());
            (status, headers, response.into_body().collect().await.unwrap().to_bytes())
        };
        // An answer that never ends is to fail its test, not to hang it.
        let answer = tokio::time::timeout(std::time::Duration::from_secs(20), answer).await;
        let (status, headers, body) = answer.expect("the answer ends");
        let mut shown = format!("{status}\n");
        for name in ["retry-after", "www-authenticate", "x-pawl-timing", "allow", "connection"] {
            if let Some(value) = headers.get(name) {
                shown += &format!("{name}: {}\n", value.to_str().unwrap());
            }
        }
        let body = String::from_utf8(body.to_vec()).unwrap();
        // Whole answers are easier to read when indented.
        match serde_json::from_str::<serde_json::Value>(&body) {
            Ok(value) if status.is_success() => shown + &format!("{value:#}"),
            _ => shown + &body,
        }
    }

    async fn post(&self, path: &str, body: &str) -> String {
        let request = Request::post(path)
            .header("content-type", "application/json")
            .header("x-request-id", "t")
            .body(Body::from(body.to_owned()));
        self.send(request.unwrap()).await
    }

    async fn get(&self, path: &str) -> String {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    fn aborted(&self) -> u64 {
        self.engine.aborted.load(Ordering::SeqCst)
    }
}
