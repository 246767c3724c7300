//! What orchestrators, load balancers and Prometheus ask.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::{App, shutting_down};
use crate::metrics::Format;
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

/// `GET /metrics`
pub async fn metrics_page(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = format_for(accept.unwrap_or_default());
    let metrics = Arc::clone(&app.metrics);
    let page = tokio::task::spawn_blocking(move || metrics.render(format)).await;
    let (kind, body) = page.map_err(|error| {
        ApiError::new(ErrorCode::Internal, format!("the page could not be written: {error}"))
    })?;
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
