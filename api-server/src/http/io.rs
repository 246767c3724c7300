//! A connection whose writes must make progress.
//!
//! A client that stops reading fills the kernel's buffers; the next write then waits for ever. Here
//! it waits so long and then fails, which ends the connection and aborts what it was answered with.
//! How much is queued before that is bounded elsewhere: by the HTTP library's write buffer, and by
//! each generation's own queue.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// A TCP stream with a bound on how long a write may make no progress.
pub struct TimedStream {
    stream: TcpStream,
    write_timeout: Duration,
    /// Runs while a write waits; kept for the next one, since most never wait.
    waiting: Pin<Box<Sleep>>,
    armed: bool,
}

impl TimedStream {
    /// Wraps `stream`.
    pub fn new(stream: TcpStream, write_timeout: Duration) -> Self {
        let waiting = Box::pin(tokio::time::sleep(write_timeout));
        Self { stream, write_timeout, waiting, armed: false }
    }

    fn bound<T>(
        &mut self,
        context: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.armed = false;
            return outcome;
        }
        if !self.armed {
            self.armed = true;
            self.waiting.as_mut().reset(Instant::now() + self.write_timeout);
        }
        match self.waiting.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client does not read",
            ))),
        }
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bound(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.bound(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(context);
        self.bound(context, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
