//! The gRPC side: the same requests, limits, errors and counts as over HTTP, since both stand on
//! [`crate::serving`].
//!
//! - `inference`, `control`: the methods, one file per service;
//! - `request`, `answer`: from a message to a completion's fields, and from pieces to messages;
//! - `status`: errors as statuses; its tables are in `docs/grpc.md`;
//! - `call`: around every call: keys, counts, deadlines;
//! - `connection`: HTTP/2 within bounds: streams, idleness, readers that stop;
//! - `health`: the standard health service follows the core.
//!
//! Services are found under `pawl.` and under `vllm.`, where vLLM's clients look for them.

mod answer;
mod call;
mod connection;
mod control;
mod health;
mod inference;
mod request;
mod status;

pub use connection::serve;
pub use health::Health;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::Uri;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use pawl_proto::control_server::ControlServer;
use pawl_proto::inference_server::InferenceServer;
use tonic_reflection::server::Builder as Reflection;
use tower::{Service, ServiceExt};

use crate::serving::App;

/// Bytes of one message from a client at most, whatever a body over HTTP may have: it is what
/// clients expect, and a message unfolds to some ten times its bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// The services of the gRPC port; `health` is told by its own task.
///
/// # Errors
/// When the compiled interface cannot be read, which a test would have noticed.
pub fn router(app: Arc<App>, health: &Health) -> anyhow::Result<Router> {
    app.metrics.grpc_served(&call::METHODS);
    let bytes_max = app.config.limits.body_bytes_max.min(MESSAGE_BYTES_MAX);
    let inference = InferenceServer::new(inference::InferenceCalls::new(Arc::clone(&app)))
        .max_decoding_message_size(bytes_max);
    let control = ControlServer::new(control::ControlCalls::new(Arc::clone(&app)))
        .max_decoding_message_size(bytes_max);
    let reflection = || {
        Reflection::configure()
            .register_encoded_file_descriptor_set(pawl_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let router = Router::new();
    let router = add(router, "/pawl.Inference", inference.clone());
    let router = add(router, "/pawl.Control", control.clone());
    let router = add(router, "/vllm.Inference", inference.map_request(as_ours));
    let router = add(router, "/vllm.Control", control.map_request(as_ours));
    let router = add(router, "/grpc.health.v1.Health", health.service());
    let router = add(router, "/grpc.reflection.v1.ServerReflection", reflection().build_v1()?);
    let old = reflection().build_v1alpha()?;
    let router = add(router, "/grpc.reflection.v1alpha.ServerReflection", old);
    Ok(router.fallback(call::unknown_method).layer(from_fn_with_state(app, call::observe)))
}

fn add<S>(router: Router, path: &str, service: S) -> Router
where
    S: Service<Request, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Response: IntoResponse,
    S::Future: Send + 'static,
{
    router.route_service(&format!("{path}/{{method}}"), service)
}

/// A call by vLLM's name, under ours. The messages are the same.
fn as_ours(mut request: Request) -> Request {
    if let Some(method) = request.uri().path().strip_prefix("/vllm.") {
        let path = format!("/pawl.{method}");
        *request.uri_mut() =
            Uri::try_from(path).expect("a part of a path, after a path's beginning");
    }
    request
}

/// A status as the whole answer.
fn refuse(status: tonic::Status) -> Response {
    status.into_http::<Body>()
}
