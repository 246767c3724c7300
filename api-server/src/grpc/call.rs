//! Around every call: when it arrived, its key, its deadline, and what is counted at its end.
//!
//! Every call is counted by method and code, health checks and reflection included. A client that
//! leaves before the end is counted as Canceled. The drain waits for calls of Pawl's own services.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Uri};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use pawl_shared::clock::Stamp;
use tokio::time::{Instant, Sleep};
use tonic::{Code, Status};

use super::connection::Progress;
use super::refuse;
use super::status::{label, status};
use crate::http::{has_key, wrong_key};
use crate::metrics::{GrpcMethod, GrpcObservation};
use crate::openai::error::ApiError;
use crate::serving::{App, Arrival};

const STATUS: &str = "grpc-status";
const TIMEOUT: &str = "grpc-timeout";

const NONE: GrpcMethod = GrpcMethod { kind: "unary", service: "none", method: "none" };

const fn method(service: &'static str, method: &'static str, kind: &'static str) -> GrpcMethod {
    GrpcMethod { kind, service, method }
}

/// Every method there is.
pub const METHODS: [GrpcMethod; 9] = [
    method("pawl.Inference", "Generate", "unary"),
    method("pawl.Inference", "GenerateStream", "server_stream"),
    method("pawl.Control", "GetServerInfo", "unary"),
    method("pawl.Control", "GetModelInfo", "unary"),
    method("pawl.Control", "Abort", "unary"),
    method("grpc.health.v1.Health", "Check", "unary"),
    method("grpc.health.v1.Health", "Watch", "server_stream"),
    method("grpc.reflection.v1.ServerReflection", "ServerReflectionInfo", "bidi_stream"),
    method("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", "bidi_stream"),
];

/// The method of a path; vLLM's names count as ours.
fn method_of(uri: &Uri) -> Option<GrpcMethod> {
    let (service, name) = uri.path().strip_prefix('/')?.split_once('/')?;
    let ours = |known: &GrpcMethod| match service.strip_prefix("vllm.") {
        Some(service) => known.service.strip_prefix("pawl.") == Some(service),
        None => known.service == service,
    };
    METHODS.iter().find(|known| known.method == name && ours(known)).copied()
}

/// No method has this path.
pub async fn unknown_method(uri: Uri) -> Response {
    let path: String = uri.path().chars().take(128).collect();
    refuse(Status::unimplemented(format!("there is no method {path}")))
}

/// Stamps a call, lets it pass with its key and within its deadline, and counts it at its end.
pub async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let arrival = app.clock.now();
    request.extensions_mut().insert(Arrival(arrival));
    let method = method_of(request.uri());
    let ours = method.is_some_and(|method| method.service.starts_with("pawl."));
    let method = method.unwrap_or(NONE);
    app.metrics.grpc_started(method);
    if ours {
        app.open.enter();
    }
    let mut watch = Watch { app: Arc::clone(&app), arrival, method, ours, code: None };

    let deadline = match timeout_of(request.headers()) {
        Ok(timeout) => timeout.map(|timeout| Instant::now() + timeout),
        Err(error) => return watch.refused(status(&error)),
    };
    let keys = &app.config.api_keys;
    if ours && !keys.is_empty() && !has_key(request.headers(), keys) {
        return watch.refused(status(&wrong_key()));
    }
    let body_timeout = app.config.limits.body_timeout;
    let request = request.map(|body| Body::new(TimedBody::new(body, body_timeout)));
    let answered = match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline, next.run(request)).await,
        None => Ok(next.run(request).await),
    };
    let Ok(response) = answered else { return watch.refused(deadline_exceeded()) };
    watch.code = code_in(response.headers());
    let deadline = deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline)));
    let progress = Progress::of_this_call();
    response.map(|inner| Body::new(WatchedBody { inner, deadline, progress, ended: false, watch }))
}

fn deadline_exceeded() -> Status {
    Status::deadline_exceeded("the call's deadline has passed; what was under way is aborted")
}

/// The status that headers or trailers tell.
fn code_in(headers: &HeaderMap) -> Option<Code> {
    headers.get(STATUS).map(|code| Code::from_bytes(code.as_bytes()))
}

/// How long the client is willing to wait, from now.
fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(sent) = headers.get(TIMEOUT) else { return Ok(None) };
    let sent = sent.to_str().unwrap_or_default();
    timeout(sent).map(Some).ok_or_else(|| {
        let shown: String = sent.chars().take(32).collect();
        let problem = "must be 1 to 8 digits and one of H, M, S, m, u, n";
        ApiError::invalid(TIMEOUT, format!("{problem}, got {shown:?}"))
    })
}

fn timeout(sent: &str) -> Option<Duration> {
    let (digits, unit) = sent.split_at_checked(sent.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3_600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

/// Reports when dropped, however the call ended.
struct Watch {
    app: Arc<App>,
    arrival: Stamp,
    method: GrpcMethod,
    /// Whether the drain waits for it.
    ours: bool,
    /// `None` until the end is known.
    code: Option<Code>,
}

impl Watch {
    fn refused(mut self, status: Status) -> Response {
        self.code = Some(status.code());
        refuse(status)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.app.metrics.grpc_observed(&GrpcObservation {
            method: self.method,
            code: label(self.code.unwrap_or(Code::Cancelled)),
            seconds: self.app.clock.now().since(self.arrival).as_secs_f64(),
        });
        if self.ours {
            self.app.open.leave();
        }
    }
}

/// An answer that ends at its call's deadline, and tells whether its client reads.
struct WatchedBody {
    inner: Body,
    deadline: Option<Pin<Box<Sleep>>>,
    progress: Progress,
    ended: bool,
    watch: Watch,
}

impl hyper::body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let passed = |deadline: &mut Pin<Box<Sleep>>| deadline.as_mut().poll(context).is_ready();
        let frame = if self.deadline.as_mut().is_some_and(passed) {
            // Dropping what makes the answer aborts the request.
            self.inner = Body::empty();
            let mut trailers = HeaderMap::new();
            let status = deadline_exceeded();
            status.add_header(&mut trailers).expect("the message is plain text");
            Poll::Ready(Some(Ok(Frame::trailers(trailers))))
        } else {
            Pin::new(&mut self.inner).poll_frame(context)
        };
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                self.progress.gave();
                if let Some(trailers) = frame.trailers_ref() {
                    self.watch.code = code_in(trailers).or(self.watch.code);
                    self.ended = true;
                }
            }
            Poll::Ready(_) => self.ended = true,
            Poll::Pending => self.progress.waits(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A request that has to arrive whole within a time.
struct TimedBody {
    inner: Body,
    timeout: Duration,
    left: Pin<Box<Sleep>>,
}

impl TimedBody {
    fn new(inner: Body, timeout: Duration) -> Self {
        Self { inner, timeout, left: Box::pin(tokio::time::sleep(timeout)) }
    }
}

impl hyper::body::Body for TimedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(frame) => Poll::Ready(frame.map(|frame| {
                frame.map_err(|error| Status::cancelled(format!("the request broke off: {error}")))
            })),
            Poll::Pending if self.left.as_mut().poll(context).is_ready() => {
                let seconds = self.timeout.as_secs();
                let late = format!("the request did not arrive within {seconds} s");
                Poll::Ready(Some(Err(Status::deadline_exceeded(late))))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        for (text, read) in [
            ("1H", Some(Duration::from_secs(3_600))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3_600))),
            ("2M", Some(Duration::from_secs(120))),
            ("0S", Some(Duration::ZERO)),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("7n", Some(Duration::from_nanos(7))),
            ("", None),
            ("S", None),
            ("123456789m", None),
            ("-1S", None),
            ("1.5S", None),
            ("10", None),
            ("10é", None),
        ] {
            assert_eq!(timeout(text), read, "{text}");
        }
    }

    #[test]
    fn methods_are_known_by_both_names() {
        let of = |path: &'static str| {
            method_of(&Uri::from_static(path)).map(|known| (known.service, known.method))
        };
        assert_eq!(of("/pawl.Inference/Generate"), Some(("pawl.Inference", "Generate")));
        assert_eq!(of("/vllm.Inference/Generate"), Some(("pawl.Inference", "Generate")));
        assert_eq!(of("/vllm.Control/Abort"), Some(("pawl.Control", "Abort")));
        assert_eq!(of("/vllm.Control/Generate"), None);
        assert_eq!(of("/Inference/Generate"), None);
        assert_eq!(of("/"), None);
    }
}
