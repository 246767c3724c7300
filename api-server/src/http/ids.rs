//! The headers that name a request, and tell where its time went.

use axum::http::HeaderValue;
use axum::response::Response;

use super::App;
use crate::serving::generate::REQUEST_ID;

/// The header that tells where the time went (`--request-timing header`).
pub const TIMING: &str = "x-pawl-timing";

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
