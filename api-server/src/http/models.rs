//! `GET /v1/models`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::App;
use crate::openai::error::ApiError;

/// Every name the model answers to.
pub async fn models(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    let model = app.serving_model()?;
    let created = app.clock.wall().0 as u64;
    let entry = |name: &String| {
        json!({
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pawl",
            "root": model.name(),
            "parent": null,
            "max_model_len": model.bounds.max_model_len,
        })
    };
    let data: Vec<Value> = model.served.names.iter().map(entry).collect();
    Ok(Json(json!({ "object": "list", "data": data })))
}
