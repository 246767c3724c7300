//! `GET /v1/models`, and `/v1/models/NAME` for one of them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::App;
use crate::openai::error::ApiError;
use crate::serving::model::LoadedModel;

/// Every name the model answers to.
pub async fn models(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    let model = app.serving_model()?;
    let data: Vec<Value> =
        model.served.names.iter().map(|name| entry(&app, &model, name)).collect();
    Ok(Json(json!({ "object": "list", "data": data })))
}

/// One name the model answers to.
pub async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<impl IntoResponse, ApiError> {
    let model = app.serving_model()?;
    let name = model.check_name(Some(&name))?;
    Ok(Json(entry(&app, &model, &name)))
}

fn entry(app: &App, model: &LoadedModel, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.clock.wall().0 as u64,
        "owned_by": "pawl",
        "root": model.name(),
        "parent": null,
        "max_model_len": model.bounds.max_model_len,
    })
}
