//! The headers that name a request, and tell where its time went.

use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;

use super::App;
use crate::openai::error::ApiError;
use crate::openai::sampling::Common;
use crate::serving::generate::checked_id;

/// The header by which a client names its request, and by which the name is told back.
pub const REQUEST_ID: &str = "x-request-id";
/// The header that tells where the time went (`--request-timing header`).
pub const TIMING: &str = "x-pawl-timing";

/// The id of a request: the header's, the body's, or one of ours.
pub fn request_id(headers: &HeaderMap, common: &Common) -> Result<String, ApiError> {
    match headers.get(REQUEST_ID) {
        Some(id) => checked_id("X-Request-Id", Some(id.to_str().unwrap_or("\u{fffd}"))),
        None => checked_id("request_id", common.request_id.as_deref()),
    }
}

/// Puts the request's id on an answer, where that is wanted.
pub fn tell_id(app: &App, response: &mut Response, id: &str) {
    if !app.config.enable_request_id_headers {
        return;
    }
    let id = HeaderValue::from_str(id).expect("ids are visible ASCII");
    response.headers_mut().insert(REQUEST_ID, id);
}

/// Puts where the time went on an answer.
pub fn tell_timing(response: &mut Response, timing: &str) {
    let timing = HeaderValue::from_str(timing).expect("names and digits only");
    response.headers_mut().insert(TIMING, timing);
}
