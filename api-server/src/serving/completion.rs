//! From the fields of a completion request, however they came, to a running request.

use std::sync::Arc;

use axum::http::HeaderMap;

use super::generate::{Running, request_id};
use super::prompts::{self, ReadyPrompt};
use super::{App, Arrival};
use crate::openai::completion::CompletionRequest;
use crate::openai::error::ApiError;
use crate::openai::sampling::Bounds;

/// A completion on its way.
pub struct Begun {
    /// As the client named it, or as it was named here.
    pub id: String,
    /// The name under which the model was asked for.
    pub model: String,
    /// What was asked for.
    pub request: CompletionRequest,
    /// Its prompts as tokens.
    pub prompts: Vec<ReadyPrompt>,
    /// What comes of it.
    pub running: Running,
}

/// Lets a request in, reads and checks it off the reactor, and submits its prompts to the core
/// under `prefix` and its id. `headers` may name the request.
///
/// # Errors
/// When the request is refused; that it was is counted.
pub async fn begin(
    app: &Arc<App>,
    Arrival(arrival): Arrival,
    headers: &HeaderMap,
    prefix: &str,
    read: impl FnOnce(&Bounds) -> Result<CompletionRequest, ApiError> + Send + 'static,
) -> Result<Begun, ApiError> {
    let model = app.accepting_model()?;
    let bytes_max = model.prompt_bytes_max(&app.config);
    let prepare = move || {
        let request = read(&model.bounds)?;
        let name = model.check_name(request.common.model.as_deref())?;
        let prompts = prompts::of_completion(&model, &request, bytes_max)?;
        Ok((request, name, prompts))
    };
    let (request, model, prompts) = app.off_reactor(prepare).await?;
    let common = &request.common;
    let id = request_id(headers, common)?;
    let running = Running::start(app, &format!("{prefix}{id}"), common, &prompts, arrival)?;
    Ok(Begun { id, model, request, prompts, running })
}
