//! What orchestrators, load balancers and Prometheus ask.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::{App, shutting_down};
use crate::metrics::{Format, Snapshot};
use crate::openai::error::{ApiError, ErrorCode};

/// `GET /health`, `/ping`: 200 while the engine serves, also while the server drains.
pub async fn health(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    app.serving_model().map(|_| StatusCode::OK)
}

/// `GET /ready`: 200 while new work is taken.
pub async fn ready(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    if app.draining() {
        return Err(shutting_down());
    }
    app.serving_model().map(|_| StatusCode::OK)
}

/// `GET /version`
pub async fn version() -> impl IntoResponse {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /load`: answers being made by this frontend.
pub async fn load(State(app): State<Arc<App>>) -> impl IntoResponse {
    Json(json!({ "server_load": app.load() }))
}

/// How long the supervisor may take to gather the sum over all api-servers.
const SUM_PATIENCE: Duration = Duration::from_secs(2);

/// `GET /metrics` of this process alone.
pub async fn own_metrics(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let metrics = Arc::clone(&app.metrics);
    page(&headers, move || Ok::<_, Infallible>(metrics.snapshot())).await
}

/// `GET /metrics` on the port that clients use: the sum over all api-servers that share it.
pub async fn metrics(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Some(lifeline) = &app.config.lifeline else {
        return own_metrics(State(app), headers).await;
    };
    // This one's own numbers in place of the sum would look like a restart of everything.
    let Some(sum) = lifeline.sum(SUM_PATIENCE).await else {
        return Err(ApiError::new(
            ErrorCode::Internal,
            "the supervisor did not answer with the sum over all api-servers; each one's own \
             metrics are on its admin port",
        ));
    };
    page(&headers, move || Snapshot::decode(&sum)).await
}

async fn page<E: std::fmt::Display + Send + 'static>(
    headers: &HeaderMap,
    snapshot: impl FnOnce() -> Result<Snapshot, E> + Send + 'static,
) -> Result<Response, ApiError> {
    let unwritten = |error: String| {
        ApiError::new(ErrorCode::Internal, format!("the page could not be written: {error}"))
    };
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = format_for(accept.unwrap_or_default());
    let written = move || snapshot().map(|snapshot| snapshot.render(format));
    let page = tokio::task::spawn_blocking(written).await;
    let page = page.map_err(|error| unwritten(error.to_string()))?;
    let (kind, body) = page.map_err(|error| unwritten(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, kind)], body).into_response())
}

/// OpenMetrics only where it is asked for by name, and at least as much as plain text: parsers of
/// the older format lose its counters.
fn format_for(accept: &str) -> Format {
    let quality = |kind: &str| {
        accept
            .split(',')
            .filter_map(|range| {
                let mut parts = range.split(';').map(str::trim);
                let matches = parts.next()?.eq_ignore_ascii_case(kind);
                let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
                matches.then(|| quality.unwrap_or(1.0))
            })
            .fold(0.0, f32::max)
    };
    let open = quality("application/openmetrics-text");
    if open > 0.0 && open >= quality("text/plain") { Format::OpenMetrics } else { Format::Text004 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_only_when_asked_for() {
        let scraper = "application/openmetrics-text;version=1.0.0;q=0.5,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            ("", Format::Text004),
            ("*/*", Format::Text004),
            ("text/plain;version=0.0.4", Format::Text004),
            ("text/plain, application/openmetrics-text;q=0.1", Format::Text004),
            ("application/openmetrics-text;q=0", Format::Text004),
            ("application/openmetrics-text;version=1.0.0", Format::OpenMetrics),
            (scraper, Format::OpenMetrics),
        ] {
            assert_eq!(format_for(accept), format, "{accept}");
        }
    }
}
