//! Reading a body within its bounds: kind, bytes, time.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::App;
use crate::openai::error::{ApiError, ErrorCode};

/// The bytes of a JSON body, not yet read as JSON.
pub struct JsonBytes(pub Bytes);

impl FromRequest<Arc<App>> for JsonBytes {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        check_kind(request.headers())?;
        let limits = &app.config.limits;
        let bytes_max = limits.body_bytes_max;
        let too_large = || {
            ApiError::new(
                ErrorCode::BodyTooLarge,
                format!("the body is larger than {bytes_max} bytes; send less at once"),
            )
        };
        let announced = content_length(request.headers());
        if announced.is_some_and(|bytes| bytes > bytes_max as u64) {
            return Err(too_large());
        }
        let body = Limited::new(request.into_body(), bytes_max).collect();
        match tokio::time::timeout(limits.body_timeout, body).await {
            Ok(Ok(collected)) => Ok(Self(collected.to_bytes())),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
            Ok(Err(error)) => Err(ApiError::new(
                ErrorCode::InvalidJson,
                format!("the body could not be read to its end: {error}"),
            )),
            Err(_) => Err(ApiError::new(
                ErrorCode::BodyTimeout,
                format!("the body did not arrive within {} s", limits.body_timeout.as_secs()),
            )),
        }
    }
}

/// The body's length as announced.
pub fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Other kinds than JSON are refused, since a browser sends some of those to any host without
/// asking it first.
fn check_kind(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = kind.to_str().unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || essence.ends_with("+json") {
        return Ok(());
    }
    let essence: String = essence.chars().take(64).collect();
    Err(ApiError::new(
        ErrorCode::MediaType,
        format!("the body's Content-Type is {essence:?}; send JSON with application/json"),
    ))
}
