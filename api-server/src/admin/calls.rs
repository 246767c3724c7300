//! What an operator may ask of the engine itself: vLLM's developer-mode routes, by the same names
//! and parameters. They hold for the whole engine, whichever frontend they are sent to.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use pawl_shared::protocol::Value;
use serde_json::json;

use crate::engine_client::UtilityError;
use crate::openai::error::{ApiError, ErrorCode};
use crate::serving::App;

type Answer = Result<Json<serde_json::Value>, ApiError>;
type Pairs = Query<Vec<(String, String)>>;

/// `POST /reset_prefix_cache`: whether it is empty now. Under running requests it is not emptied
/// unless they may be preempted for it.
pub async fn reset_prefix_cache(State(app): State<Arc<App>>, Query(query): Pairs) -> Answer {
    let mut asked = Asked(query);
    let running = asked.boolean("reset_running_requests", false)?;
    let external = asked.boolean("reset_external", false)?;
    asked.end()?;
    let args = vec![Value::Bool(running), Value::Bool(external)];
    let reset = told_boolean(call(&app, "reset_prefix_cache", args).await?)?;
    Ok(Json(json!({ "reset": reset })))
}

/// `POST /reset_mm_cache`
pub async fn reset_mm_cache(State(app): State<Arc<App>>) -> Answer {
    call(&app, "reset_mm_cache", Vec::new()).await?;
    Ok(Json(json!({ "reset": true })))
}

/// `POST /reset_encoder_cache`
pub async fn reset_encoder_cache(State(app): State<Arc<App>>) -> Answer {
    call(&app, "reset_encoder_cache", Vec::new()).await?;
    Ok(Json(json!({ "reset": true })))
}

/// `POST /pause`: answered once the pause is reached.
pub async fn pause(State(app): State<Arc<App>>, Query(query): Pairs) -> Answer {
    let mut asked = Asked(query);
    let mode = asked.mode()?;
    let clear_cache = asked.boolean("clear_cache", true)?;
    asked.end()?;
    call(&app, "pause_generation", vec![mode, Value::Bool(clear_cache)]).await?;
    Ok(Json(json!({ "status": "paused" })))
}

/// `POST /resume`
pub async fn resume(State(app): State<Arc<App>>) -> Answer {
    call(&app, "resume_scheduler", Vec::new()).await?;
    Ok(Json(json!({ "status": "resumed" })))
}

/// `GET /is_paused`
pub async fn is_paused(State(app): State<Arc<App>>) -> Answer {
    let paused = told_boolean(call(&app, "is_scheduler_paused", Vec::new()).await?)?;
    Ok(Json(json!({ "is_paused": paused })))
}

/// `POST /sleep`: a pause that `wake_up` ends.
pub async fn sleep(State(app): State<Arc<App>>, Query(query): Pairs) -> Answer {
    let mut asked = Asked(query);
    let level = match asked.take("level").as_deref() {
        None | Some("1") => 1,
        Some("0") => 0,
        Some(other) => {
            return Err(ApiError::invalid(
                "level",
                format!(
                    "must be 0 (pause) or 1 (and forget cached blocks), got {other:?}: the \
                     weights stay in memory at every level"
                ),
            ));
        }
    };
    let mode = asked.mode()?;
    asked.end()?;
    call(&app, "sleep", vec![Value::Integer(level), mode]).await?;
    Ok(Json(json!({ "status": "asleep" })))
}

/// Parts of an engine that can be woken.
const WAKE_TAGS: [&str; 3] = ["weights", "kv_cache", "scheduling"];

/// `POST /wake_up`: whether all of it is awake now.
pub async fn wake_up(State(app): State<Arc<App>>, Query(query): Pairs) -> Answer {
    let mut asked = Asked(query);
    let tags: Vec<_> = std::iter::from_fn(|| asked.take("tags")).collect();
    asked.end()?;
    if let Some(tag) = tags.iter().find(|tag| !WAKE_TAGS.contains(&&***tag)) {
        return Err(ApiError::invalid(
            "tags",
            format!("must be of {}, got {tag:?}", WAKE_TAGS.join(", ")),
        ));
    }
    let tags: Vec<_> = tags.into_iter().map(Value::Text).collect();
    let tags = if tags.is_empty() { Value::Nil } else { Value::Array(tags) };
    let awake = told_boolean(call(&app, "wake_up", vec![tags]).await?)?;
    Ok(Json(json!({ "awake": awake })))
}

/// `GET /is_sleeping`
pub async fn is_sleeping(State(app): State<Arc<App>>) -> Answer {
    let asleep = told_boolean(call(&app, "is_sleeping", Vec::new()).await?)?;
    Ok(Json(json!({ "is_sleeping": asleep })))
}

/// `POST /start_profile`, for engines that have a profiler.
pub async fn start_profile(State(app): State<Arc<App>>) -> Answer {
    call(&app, "profile", vec![Value::Bool(true)]).await?;
    Ok(Json(json!({ "status": "profiling" })))
}

/// `POST /stop_profile`
pub async fn stop_profile(State(app): State<Arc<App>>) -> Answer {
    call(&app, "profile", vec![Value::Bool(false)]).await?;
    Ok(Json(json!({ "status": "stopped" })))
}

async fn call(app: &App, method: &'static str, args: Vec<Value>) -> Result<Value, ApiError> {
    tracing::info!(method, ?args, "an operator calls the engine");
    app.engine.call(method, args).await.map_err(|error| {
        let code = match error {
            UtilityError::Unavailable { .. } => ErrorCode::EngineDown,
            UtilityError::Failed(_) => ErrorCode::CallFailed,
            UtilityError::Timeout { .. } => ErrorCode::CallTimeout,
        };
        ApiError::new(code, error.to_string())
    })
}

fn told_boolean(value: Value) -> Result<bool, ApiError> {
    match value {
        Value::Bool(told) => Ok(told),
        other => Err(ApiError::new(
            ErrorCode::CallFailed,
            format!("the engine answered {other:?}, not true or false"),
        )),
    }
}

/// The parameters of a request, taken out one by one; what is left is not known.
struct Asked(Vec<(String, String)>);

impl Asked {
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.remove(at).1)
    }

    fn boolean(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.take(name).as_deref() {
            None => Ok(default),
            Some("true" | "True" | "1") => Ok(true),
            Some("false" | "False" | "0") => Ok(false),
            Some(other) => {
                Err(ApiError::invalid(name, format!("must be true or false, got {other:?}")))
            }
        }
    }

    fn mode(&mut self) -> Result<Value, ApiError> {
        match self.take("mode") {
            None => Ok(Value::Text("abort".into())),
            Some(mode) if ["abort", "wait", "keep"].contains(&mode.as_str()) => {
                Ok(Value::Text(mode))
            }
            Some(other) => Err(ApiError::invalid(
                "mode",
                format!("must be abort, wait or keep, got {other:?}"),
            )),
        }
    }

    /// To be called once all known parameters were taken.
    fn end(self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::invalid(name, "is not known here; leave it out")),
        }
    }
}
