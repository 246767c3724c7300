//! An api-server without ports: requests are handed to its routes inside this process. The routes,
//! what stands around them and what is counted are the same as on a port.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, header};
use http_body_util::BodyExt;
use tokio::sync::watch;
use tower::ServiceExt;

use crate::config::FrontendConfig;
use crate::engine_client::{EngineClient, EngineStatus};
use crate::http;
use crate::metrics::Format;
use crate::server::{self, LEAVE_GRACE};
use crate::serving::App;
use crate::serving::generate::REQUEST_ID;

/// A running frontend that only this process can reach.
pub struct Embedded {
    app: Arc<App>,
    client: EngineClient,
    router: Router,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// As over HTTP.
    pub status: u16,
    /// When it is worth trying again, if the answer said so.
    pub retry_after: Option<Duration>,
    /// As over HTTP.
    pub body: Bytes,
}

impl Embedded {
    /// Begins to look for the core; its addresses and ports in `config` are not used.
    ///
    /// # Errors
    /// When sockets cannot be set up, or a file not be read.
    pub async fn start(config: FrontendConfig) -> anyhow::Result<Self> {
        let (app, client) = server::connect(config).await?;
        let router = http::router(Arc::clone(&app));
        Ok(Self { app, client, router })
    }

    /// Follows the core's status.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<EngineStatus> {
        self.client.watch()
    }

    /// Posts the JSON `body` to `path` under the name `request_id` and waits for the whole answer.
    /// Dropping the future aborts the request.
    pub async fn post(&self, path: &str, request_id: Option<&str>, body: Vec<u8>) -> Answer {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_LENGTH, body.len());
        let request = match request_id {
            Some(id) => request.header(REQUEST_ID, id),
            None => request,
        };
        let request = request.body(Body::from(body)).expect("paths and ids are the caller's own");
        let Ok(response) = self.router.clone().oneshot(request).await;
        let (head, body) = response.into_parts();
        let retry_after = head.headers.get(header::RETRY_AFTER);
        let retry_after = retry_after.and_then(|seconds| seconds.to_str().ok()?.parse().ok());
        Answer {
            status: head.status.as_u16(),
            retry_after: retry_after.map(Duration::from_secs),
            // Bodies are made here from memory: reading one to its end cannot fail.
            body: body.collect().await.map(|all| all.to_bytes()).unwrap_or_default(),
        }
    }

    /// The page of `/metrics` in the text format.
    #[must_use]
    pub fn metrics_page(&self) -> String {
        String::from_utf8_lossy(&self.app.metrics.render(Format::Text004).1).into_owned()
    }

    /// Aborts what is under way, and takes leave of the core. Afterwards the metrics stand still.
    pub async fn close(&self) {
        self.app.begin_drain();
        self.client.shutdown(LEAVE_GRACE).await;
    }
}
