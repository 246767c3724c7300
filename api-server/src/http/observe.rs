//! Around every request: when it arrived, and what is counted of it once its answer has ended.
//!
//! Every answer is counted by method, route template and status. Probes (`/health`, `/metrics` and
//! their like) are left out, as vLLM does, unless they were refused with a 4xx. A client that
//! leaves before the answer's head is counted as 4xx (499); one that leaves later, with the status
//! sent.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use pawl_shared::clock::Stamp;

use super::App;
use super::body::content_length;
use crate::metrics::{HttpObservation, Metrics};
use crate::serving::Arrival;

/// The client left before it was answered.
const CLIENT_LEFT: u16 = 499;

/// What a request is counted under.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The template, never the path a client wrote.
    pub template: &'static str,
    /// Whether its good answers are counted, not only its refusals.
    pub counted: bool,
}

impl Route {
    /// Where no route matched.
    pub const NONE: Self = Self { template: "none", counted: true };
}

/// Stamps the request, and counts it when its answer has been sent or was given up.
pub async fn observe(
    State((app, route)): State<(Arc<App>, Route)>,
    mut request: Request,
    next: Next,
) -> Response {
    let arrival = app.clock.now();
    request.extensions_mut().insert(Arrival(arrival));
    app.metrics.http_started();
    app.open.enter();
    let mut watch = Watch {
        app: Arc::clone(&app),
        arrival,
        counted: route.counted,
        observation: HttpObservation {
            method: method_label(request.method()),
            handler: route.template,
            status: CLIENT_LEFT,
            seconds: 0.0,
            request_bytes: content_length(request.headers()).unwrap_or(0),
            response_bytes: 0,
        },
    };
    let mut response = next.run(request).await;
    watch.observation.status = response.status().as_u16();
    if app.draining() {
        // The client is to come back by a new connection, which may reach another server.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response.map(|inner| Body::new(WatchedBody { inner, watch }))
}

/// Counts a head that could not be read as a request at all.
pub fn bad_head(metrics: &Metrics, status: u16) {
    unrouted(metrics, "OTHER", status);
}

/// Counts a request whose client left before any route looked at it.
pub fn left_at_once(metrics: &Metrics, method: &Method) {
    unrouted(metrics, method_label(method), CLIENT_LEFT);
}

fn unrouted(metrics: &Metrics, method: &'static str, status: u16) {
    metrics.http_started();
    metrics.http_observed(&HttpObservation {
        method,
        handler: Route::NONE.template,
        status,
        seconds: 0.0,
        request_bytes: 0,
        response_bytes: 0,
    });
}

/// Methods are few; anything else a client makes up shares one label.
fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        _ => "OTHER",
    }
}

/// Reports when dropped, however the answer ended.
struct Watch {
    app: Arc<App>,
    arrival: Stamp,
    counted: bool,
    observation: HttpObservation,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.observation.seconds = self.app.clock.now().since(self.arrival).as_secs_f64();
        let refused = (400..500).contains(&self.observation.status);
        if self.counted || refused {
            self.app.metrics.http_observed(&self.observation);
        }
        self.app.open.leave();
    }
}

struct WatchedBody {
    inner: Body,
    watch: Watch,
}

impl hyper::body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.watch.observation.response_bytes += data.len() as u64;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
