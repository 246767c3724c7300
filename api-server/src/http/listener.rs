//! Accepting connections and serving each, within bounds.
//!
//! The loop is ours because every bound on a connection is set here: how many there are, how long a
//! head may take, how large it may be, how long a write may wait; and because running out of
//! descriptors must neither end the loop nor make it spin.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Method, Request};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::io::TimedStream;
use super::observe::{bad_head, left_at_once};
use crate::config::HttpLimits;
use crate::metrics::Metrics;

/// Connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 1_024;
/// Pauses after a failed accept, doubled up to the second.
const ACCEPT_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// Header lines of a request; beyond: 431.
const HEADERS_MAX: usize = 100;

/// A socket that listens on `host:port`.
///
/// # Errors
/// When the name does not resolve or the address is taken: it is named.
pub async fn bind(host: &str, port: u16, reuse_port: bool) -> anyhow::Result<TcpListener> {
    // An IPv6 address may come in brackets, as in a URL.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let mut addresses = tokio::net::lookup_host((host, port))
        .await
        .with_context(|| format!("while looking up the host {host}"))?;
    let address = addresses.next().with_context(|| format!("the host {host} has no address"))?;
    listen(address, reuse_port).with_context(|| format!("while listening on {address}"))
}

fn listen(address: SocketAddr, reuse_port: bool) -> std::io::Result<TcpListener> {
    let socket = bound_socket(address, reuse_port)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

fn bound_socket(address: SocketAddr, reuse_port: bool) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restarted server must not wait for the old one's connections to be forgotten.
    socket.set_reuse_address(true)?;
    if reuse_port {
        socket.set_reuse_port(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Binds an address that servers with [`crate::config::FrontendConfig::reuse_port`] are to share,
/// without listening: no connection comes here, and while it is held nobody else gets the port.
///
/// # Errors
/// When the address is taken.
pub fn bind_shared(address: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    bound_socket(address, true).map(Into::into)
}

/// How serving ends.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Accept nothing more; a connection closes once its answer is sent.
    pub accepting: CancellationToken,
    /// Close every connection now.
    pub all: CancellationToken,
}

/// Serves `router` on `listener` until told to stop and every connection is closed. Heads that
/// could not be read are counted in `metrics`, where there are any.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: &HttpLimits,
    metrics: Option<Arc<Metrics>>,
    stop: Stop,
) {
    let protocol = Arc::new(protocol(limits));
    let connect = |stream: TcpStream| {
        let connection = Connection {
            protocol: Arc::clone(&protocol),
            router: router.clone(),
            write_timeout: limits.write_timeout,
            metrics: metrics.clone(),
            stop: stop.clone(),
        };
        connection.serve(stream)
    };
    accept(listener, limits.connections_max, &stop, connect).await;
}

/// Accepts connections, at most `connections_max` at once, and runs `connect` for each, until told
/// to stop and every one of them is closed.
pub async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    connections_max: usize,
    stop: &Stop,
    connect: impl Fn(TcpStream) -> F,
) {
    let places = Arc::new(Semaphore::new(connections_max));
    let connections = TaskTracker::new();
    let mut pause = ACCEPT_PAUSE.0;
    loop {
        // A place first: while all are taken, newcomers wait in the kernel's queue.
        let accepted = tokio::select! {
            () = stop.accepting.cancelled() => break,
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await;
                let place = place.expect("the semaphore is never closed");
                listener.accept().await.map(|(stream, _)| (stream, place))
            } => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                pause = ACCEPT_PAUSE.0;
                let connection = connect(stream);
                connections.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) if is_peer_gone(&error) => {}
            Err(error) => {
                // Mostly no descriptors are left. Connections close, so trying again is right, and
                // pausing between is what keeps the processor free until then.
                tracing::warn!(
                    "accepting failed, trying again in {} ms: {error}",
                    pause.as_millis()
                );
                tokio::select! {
                    () = stop.accepting.cancelled() => break,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(ACCEPT_PAUSE.1);
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// The newcomer left before it was accepted: no fault of this server's.
fn is_peer_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

fn protocol(limits: &HttpLimits) -> http1::Builder {
    // The library takes no smaller buffer.
    const BUFFER_BYTES_MIN: usize = 8_192;
    let mut protocol = http1::Builder::new();
    protocol
        // Without a timer the head's time limit would be silently off.
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_headers(HEADERS_MAX)
        .max_header_size(limits.head_bytes_max)
        .max_buf_size((limits.head_bytes_max * 2).max(BUFFER_BYTES_MIN))
        // A client that shuts its sending side is taken as gone: its request is aborted.
        .half_close(false);
    protocol
}

/// One connection's part of the listener.
struct Connection {
    protocol: Arc<http1::Builder>,
    router: Router,
    write_timeout: Duration,
    metrics: Option<Arc<Metrics>>,
    stop: Stop,
}

impl Connection {
    async fn serve(self, stream: TcpStream) {
        // Tokens are small writes, and each is wanted at once.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {error}");
        }
        let io = TokioIo::new(TimedStream::new(stream, self.write_timeout));
        let routes = TowerToHyperService::new(self.router);
        let metrics = self.metrics.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let unseen = Unseen::new(metrics.clone(), request.method());
            let answer = routes.call(request);
            async move {
                unseen.seen();
                answer.await
            }
        });
        let mut connection = std::pin::pin!(self.protocol.serve_connection(io, service));
        let mut closing = false;
        let ended = loop {
            tokio::select! {
                ended = connection.as_mut() => break ended,
                () = self.stop.accepting.cancelled(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = self.stop.all.cancelled() => return,
            }
        };
        if let Err(error) = ended {
            if let Some(metrics) = self.metrics.filter(|_| error.is_parse()) {
                let status = if error.is_parse_too_large() { 431 } else { 400 };
                bad_head(&metrics, status);
            }
            tracing::debug!("a connection ended: {error}");
        }
    }
}

/// A request that was read and that no route has looked at. A client that closes right after
/// sending is noticed while it is in this state; its request is counted all the same.
struct Unseen {
    metrics: Option<Arc<Metrics>>,
    method: Method,
}

impl Unseen {
    fn new(metrics: Option<Arc<Metrics>>, method: &Method) -> Self {
        Self { metrics, method: method.clone() }
    }

    /// From here on what stands around the routes counts it.
    fn seen(mut self) {
        self.metrics = None;
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        if let Some(metrics) = &self.metrics {
            left_at_once(metrics, &self.method);
        }
    }
}
