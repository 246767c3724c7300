//! HTTP/2 connections within bounds.
//!
//! A connection carries many calls, so bounds that HTTP/1 has per connection are here per call: a
//! reader that stops costs its own call, not its siblings. What is queued for a call is bounded by
//! the client's flow-control window and [`SEND_BYTES_MAX`], and before that by the generation's own
//! queue; how long it may lie there without the client taking anything, by the write timeout.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

use crate::config::HttpLimits;
use crate::http::io::TimedStream;
use crate::http::listener::{self, Stop};

/// Calls open at once on one connection; more wait at the client.
const CALLS_MAX: u32 = 1_000;
/// Bytes queued for one call beyond what the client has room for.
const SEND_BYTES_MAX: usize = 64 * 1024;
/// Bytes a client may send ahead of what has been read, for one call and for a connection.
const WINDOW_BYTES: (u32, u32) = (256 * 1024, 1024 * 1024);
/// A client that has been silent for so long is asked whether it is there, and has as long again to
/// answer.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));
/// A connection without a call for so long is closed.
const IDLE_MAX: Duration = Duration::from_secs(300);
/// A client that was told of the close has so long to go, calls aside.
const CLOSE_GRACE: Duration = Duration::from_secs(5);

/// Serves `router` on `listener` until told to stop and every connection is closed.
pub async fn serve(listener: TcpListener, router: Router, limits: &HttpLimits, stop: Stop) {
    let connect = |stream: TcpStream| {
        let (router, limits, stop) = (router.clone(), limits.clone(), stop.clone());
        async move { connection(stream, router, &limits, stop).await }
    };
    listener::accept(listener, limits.connections_max, &stop, connect).await;
}

async fn connection(stream: TcpStream, router: Router, limits: &HttpLimits, stop: Stop) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("TCP_NODELAY: {error}");
    }
    // Who connects and says nothing is let go, like over HTTP/1; who begins and goes on to say
    // nothing is idle.
    tokio::select! {
        begun = tokio::time::timeout(limits.header_timeout, stream.readable()) => {
            if !matches!(begun, Ok(Ok(()))) {
                return;
            }
        }
        () = stop.accepting.cancelled() => return,
    }
    let open = Arc::new(watch::Sender::new(0));
    let executor = Calls { open: Arc::clone(&open), write_timeout: limits.write_timeout };
    let head_bytes_max = u32::try_from(limits.head_bytes_max).unwrap_or(u32::MAX);
    let mut protocol = http2::Builder::new(executor);
    protocol
        .timer(TokioTimer::new())
        .max_concurrent_streams(CALLS_MAX)
        .max_send_buf_size(SEND_BYTES_MAX)
        .initial_stream_window_size(WINDOW_BYTES.0)
        .initial_connection_window_size(WINDOW_BYTES.1)
        .max_header_list_size(head_bytes_max)
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1);
    let io = TokioIo::new(TimedStream::new(stream, limits.write_timeout));
    let service = TowerToHyperService::new(router);
    let mut connection = std::pin::pin!(protocol.serve_connection(io, service));
    let mut closing = false;
    let ended = loop {
        let patience = if closing { CLOSE_GRACE } else { IDLE_MAX };
        tokio::select! {
            ended = connection.as_mut() => break ended,
            () = idle(open.subscribe(), patience), if !closing => {
                closing = true;
                connection.as_mut().graceful_shutdown();
            }
            () = idle(open.subscribe(), patience), if closing => return,
            () = stop.accepting.cancelled(), if !closing => {
                closing = true;
                connection.as_mut().graceful_shutdown();
            }
            () = stop.all.cancelled() => return,
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a gRPC connection ended: {error}");
    }
}

/// Resolves once no call has been open for `patience`.
async fn idle(mut open: watch::Receiver<u64>, patience: Duration) {
    loop {
        // The sender lives as long as the connection that waits here.
        let _ = open.wait_for(|&open| open == 0).await;
        let begun = open.wait_for(|&open| open > 0);
        if tokio::time::timeout(patience, begun).await.is_err() {
            return;
        }
    }
}

/// Runs the calls of one connection.
#[derive(Clone)]
struct Calls {
    open: Arc<watch::Sender<u64>>,
    write_timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Calls {
    fn execute(&self, call: F) {
        let guard = OpenCall::new(&self.open);
        let progress = Progress::default();
        let reading = Reading {
            call: Box::pin(call),
            progress: progress.clone(),
            write_timeout: self.write_timeout,
            seen: 0,
            left: Box::pin(tokio::time::sleep(self.write_timeout)),
        };
        tokio::spawn(THIS_CALL.scope(progress, async move {
            reading.await;
            drop(guard);
        }));
    }
}

struct OpenCall(Arc<watch::Sender<u64>>);

impl OpenCall {
    fn new(open: &Arc<watch::Sender<u64>>) -> Self {
        open.send_modify(|open| *open += 1);
        Self(Arc::clone(open))
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

tokio::task_local! {
    static THIS_CALL: Progress;
}

/// How the answer to a call gets on with its client. The count is of pieces given to the HTTP
/// library; it is odd while the last of them may not have left, since the library has not come back
/// for another.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// That of the call this runs for; one that nobody looks at where there is no connection.
    pub fn of_this_call() -> Self {
        THIS_CALL.try_with(Clone::clone).unwrap_or_default()
    }

    /// A piece was given to the library.
    pub fn gave(&self) {
        // From even to odd, and from odd, over the even between, to the next odd.
        let count = self.0.load(Ordering::Relaxed);
        self.0.store((count + 1) | 1, Ordering::Relaxed);
    }

    /// The library has come for another, which is not there yet.
    pub fn waits(&self) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store((count + 1) & !1, Ordering::Relaxed);
    }

    /// The number of the piece that waits for the client, if one does.
    fn unread(&self) -> Option<u64> {
        let count = self.0.load(Ordering::Relaxed);
        (count % 2 == 1).then_some(count)
    }
}

/// A call that is dropped, and thereby reset, once its client has taken nothing for too long.
struct Reading<F> {
    call: Pin<Box<F>>,
    progress: Progress,
    write_timeout: Duration,
    /// The piece that `left` runs for.
    seen: u64,
    left: Pin<Box<Sleep>>,
}

impl<F: Future<Output = ()>> Future for Reading<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.call.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        let Some(piece) = self.progress.unread() else { return Poll::Pending };
        if piece != self.seen {
            self.seen = piece;
            let deadline = Instant::now() + self.write_timeout;
            self.left.as_mut().reset(deadline);
        }
        if self.left.as_mut().poll(context).is_ready() {
            tracing::debug!("a call is cut off: its client does not read");
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    fn reading<F: Future<Output = ()>>(
        write_timeout: Duration,
        progress: &Progress,
        call: F,
    ) -> Reading<F> {
        Reading {
            call: Box::pin(call),
            progress: progress.clone(),
            write_timeout,
            seen: 0,
            left: Box::pin(tokio::time::sleep(write_timeout)),
        }
    }

    #[tokio::test]
    async fn a_call_whose_client_takes_nothing_is_cut_off() {
        let progress = Progress::default();
        let call = async {
            progress.gave();
            std::future::pending().await
        };
        tokio::time::timeout(LONG, reading(SHORT, &progress, call)).await.expect("cut off");
    }

    /// Waiting for the engine is no fault of the client's, nor is taking one piece after another.
    #[tokio::test]
    async fn a_call_whose_client_waits_or_reads_on_is_kept() {
        // So long that a busy machine does not make one out of a tenth of it.
        const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
        let progress = Progress::default();
        let mut ended = false;
        let call = async {
            progress.waits();
            tokio::time::sleep(WRITE_TIMEOUT * 3 / 2).await;
            for _ in 0..12 {
                progress.gave();
                tokio::time::sleep(WRITE_TIMEOUT / 10).await;
            }
            progress.waits();
            ended = true;
        };
        let reading = reading(WRITE_TIMEOUT, &progress, call);
        tokio::time::timeout(LONG, reading).await.expect("ends by itself");
        assert!(ended, "cut off");
    }

    #[tokio::test]
    async fn a_connection_without_calls_is_idle_and_one_with_a_call_is_not() {
        let open = Arc::new(watch::Sender::new(0));
        let call = OpenCall::new(&open);
        let mut waiting = std::pin::pin!(idle(open.subscribe(), SHORT));
        assert!(tokio::time::timeout(SHORT * 4, waiting.as_mut()).await.is_err(), "not idle");
        drop(call);
        tokio::time::timeout(LONG, waiting).await.expect("idle");
    }
}
