//! Keys, and pages of other origins.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use crate::openai::error::{ApiError, ErrorCode};

/// Lets a request to a matched route pass if it carries one of the keys.
pub async fn require_key(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let keys = &app.config.api_keys;
    if keys.is_empty() || has_key(request.headers(), keys) {
        return Ok(next.run(request).await);
    }
    Err(wrong_key())
}

/// The refusal of a request without a key.
pub fn wrong_key() -> ApiError {
    ApiError::new(
        ErrorCode::InvalidApiKey,
        "no key, or a wrong one; send it as Authorization: Bearer KEY",
    )
}

/// Whether `headers` carry one of `keys` as a bearer token.
pub fn has_key(headers: &HeaderMap, keys: &[String]) -> bool {
    let sent = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    let Some((scheme, sent)) = sent.split_at_checked("Bearer ".len()) else { return false };
    if !scheme.eq_ignore_ascii_case(b"Bearer ") {
        return false;
    }
    // Every key is compared to its end, so that the time taken tells nothing about any of them.
    keys.iter().fold(false, |known, key| known | equal(key.as_bytes(), sent))
}

fn equal(key: &[u8], sent: &[u8]) -> bool {
    let mut difference = key.len() ^ sent.len();
    for (at, byte) in key.iter().enumerate() {
        difference |= usize::from(byte ^ sent.get(at).copied().unwrap_or(0));
    }
    std::hint::black_box(difference) == 0
}

/// Tells browsers that pages of the configured origins may call, and answers their question before
/// the call. Without configured origins nothing is told, and browsers refuse for us.
pub async fn cross_origin(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origins = &app.config.allowed_origins;
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = origin.filter(|origin| {
        origins.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
    });
    let Some(origin) = allowed else { return next.run(request).await };
    let asks_first = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if asks_first {
        let mut answer = StatusCode::NO_CONTENT.into_response();
        let headers = answer.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("authorization, content-type, x-request-id"),
        );
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        answer
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    response
}
