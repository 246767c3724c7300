//! An [`ApiError`] as an HTTP answer, and the answers where no route or method matched.

use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

use crate::openai::error::{ApiError, ErrorCode};

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code.status()).expect("codes carry valid statuses");
        let mut response = (status, self.json()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs().max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code == ErrorCode::InvalidApiKey {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// No route has this path.
pub async fn route_not_found(uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(128).collect();
    ApiError::new(ErrorCode::RouteNotFound, format!("there is no route {path}"))
}

/// The route does not have this method.
pub async fn method_not_allowed(method: axum::http::Method, uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(128).collect();
    let method: String = method.as_str().chars().take(32).collect();
    ApiError::new(ErrorCode::MethodNotAllowed, format!("{path} does not answer to {method}"))
}
