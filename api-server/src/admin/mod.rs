//! The admin listener: a port of each frontend's own, for its operators and for Prometheus.
//!
//! `GET /metrics`, `/health`, `/ready`, `/load`, `/version` answer for this one process, whatever
//! its siblings on the shared port do. `GET /recording` tells whether metrics are recorded, and
//! `POST /recording` with `{"enabled": true}` or `false` switches that in the running server:
//! tokens flow the same either way. What may be asked of the engine itself is in [`calls`]. No key
//! is asked for: the port is for those who run the server. Its own requests are counted nowhere.

mod calls;

use std::sync::Arc;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::http::{
    JsonBytes, health, load, method_not_allowed, own_metrics, ready, route_not_found, version,
};
use crate::openai::body;
use crate::openai::error::ApiError;
use crate::openai::fields::missing;
use crate::serving::App;

/// The routes of the admin port.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/metrics", get(own_metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/load", get(load))
        .route("/version", get(version))
        .route("/recording", get(recording).post(set_recording))
        .route("/reset_prefix_cache", post(calls::reset_prefix_cache))
        .route("/reset_mm_cache", post(calls::reset_mm_cache))
        .route("/reset_encoder_cache", post(calls::reset_encoder_cache))
        .route("/pause", post(calls::pause))
        .route("/resume", post(calls::resume))
        .route("/is_paused", get(calls::is_paused))
        .route("/sleep", post(calls::sleep))
        .route("/wake_up", post(calls::wake_up))
        .route("/is_sleeping", get(calls::is_sleeping))
        .route("/start_profile", post(calls::start_profile))
        .route("/stop_profile", post(calls::stop_profile))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(route_not_found)
        .with_state(app)
}

async fn recording(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "enabled": app.metrics.recording() }))
}

async fn set_recording(
    State(app): State<Arc<App>>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Json<Value>, ApiError> {
    let mut fields = body::parse_fields(&bytes, &["enabled"])?;
    let enabled = fields.boolean("enabled")?;
    let enabled = enabled.ok_or_else(|| missing("enabled", "send true or false"))?;
    app.metrics.set_recording(enabled);
    tracing::info!("recording of metrics is now {}", if enabled { "on" } else { "off" });
    Ok(recording(State(app)).await)
}
