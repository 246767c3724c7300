//! A gRPC client for tests: one HTTP/2 connection, blocking calls, and streams that can be left in
//! the middle.

use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use pawl_proto::control_client::ControlClient;
use pawl_proto::inference_client::InferenceClient;
use pawl_proto::{GenerateRequest, GenerateResponse};
use tokio::runtime::Runtime;
use tonic::codegen::Service;
use tonic::{Request, Status, Streaming};
use tonic_health::pb::health_client::HealthClient;

use crate::harness::{PATIENCE, port_in, wait_for};

/// The gRPC port in a port file, once it is there.
pub fn grpc_port(ports: &Path) -> u16 {
    wait_for("the gRPC port", || port_in(ports, "grpc_port"))
}

/// One HTTP/2 connection as generated clients want it.
#[derive(Clone)]
pub struct Connection(SendRequest<tonic::body::Body>);

impl Service<hyper::Request<tonic::body::Body>> for Connection {
    type Response = hyper::Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: hyper::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Blocking calls over one connection, which closes when this is dropped.
pub struct Grpc {
    runtime: Runtime,
    connection: Connection,
    origin: hyper::Uri,
}

impl Grpc {
    pub fn connect(port: u16) -> Self {
        Self::with_window(port, 1 << 20)
    }

    /// With room for `window` bytes of each answer.
    pub fn with_window(port: u16, window: u32) -> Self {
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = threads.unwrap();
        let sender = runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .initial_stream_window_size(window)
                .initial_connection_window_size(4 << 20)
                .handshake(TokioIo::new(stream))
                .await
                .unwrap();
            tokio::spawn(connection);
            sender
        });
        let origin = format!("http://127.0.0.1:{port}").parse().unwrap();
        Self { runtime, connection: Connection(sender), origin }
    }

    pub fn inference(&self) -> InferenceClient<Connection> {
        InferenceClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    pub fn control(&self) -> ControlClient<Connection> {
        ControlClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    pub fn health(&self) -> HealthClient<Connection> {
        HealthClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    /// A client without a service: for methods by their path, and for reflection.
    pub fn raw(&self) -> tonic::client::Grpc<Connection> {
        tonic::client::Grpc::with_origin(self.connection.clone(), self.origin.clone())
    }

    /// The outcome of `call`; fails when there is none in time.
    pub fn wait<T>(&self, call: impl Future<Output = T>) -> T {
        self.within(PATIENCE, call).expect("an answer in time")
    }

    /// The outcome of `call`, unless it takes longer than `time`: then it is cancelled.
    pub fn within<T>(&self, time: Duration, call: impl Future<Output = T>) -> Option<T> {
        self.runtime.block_on(async { tokio::time::timeout(time, call).await.ok() })
    }

    pub fn generate(&self, request: GenerateRequest) -> Result<GenerateResponse, Status> {
        self.wait(self.inference().generate(request)).map(tonic::Response::into_inner)
    }

    /// A stream, once its head is there.
    pub fn stream(
        &self,
        request: impl tonic::IntoRequest<GenerateRequest>,
    ) -> Result<Stream<'_>, Status> {
        let request: Request<GenerateRequest> = request.into_request();
        let answer = self.wait(async { self.inference().generate_stream(request).await })?;
        let id = answer.metadata().get("x-request-id").unwrap().to_str().unwrap().to_owned();
        Ok(Stream { grpc: self, id, inner: answer.into_inner() })
    }

    pub fn abort(&self, ids: &[&str]) -> u32 {
        let request_ids = ids.iter().map(|id| (*id).to_owned()).collect();
        let request = pawl_proto::AbortRequest { request_ids };
        self.wait(self.control().abort(request)).unwrap().into_inner().num_aborted
    }
}

/// An answer on its way. Dropping it cancels the call.
pub struct Stream<'a> {
    grpc: &'a Grpc,
    pub id: String,
    inner: Streaming<GenerateResponse>,
}

impl Stream<'_> {
    /// The next message; `None` at the end of a whole answer.
    pub fn next(&mut self) -> Result<Option<GenerateResponse>, Status> {
        self.grpc.wait(self.inner.message())
    }

    /// What is still to come, and how it ended.
    pub fn rest(&mut self) -> (Vec<GenerateResponse>, Result<(), Status>) {
        let mut messages = Vec::new();
        loop {
            match self.next() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => return (messages, Ok(())),
                Err(status) => return (messages, Err(status)),
            }
        }
    }
}
