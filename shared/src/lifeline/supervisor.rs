//! The supervisor's end of a child's line.

use std::os::fd::OwnedFd;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::{Decoder, FromChild, ToChild};

/// Messages that wait to be written to one child. When they are too many it does not read, and more
/// are dropped: what it does not answer is not waited for long.
const WRITES_MAX: usize = 64;

/// What came of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It said something.
    Message(FromChild),
    /// Nothing more will come: the process has ended, or talked nonsense.
    End,
}

/// The supervisor's end of one child's line. Dropping it ends the line for the child.
#[derive(Debug)]
pub struct Line {
    writes: mpsc::Sender<Bytes>,
}

impl Line {
    /// A new line: the supervisor's end, and what the child gets as standard input. What the child
    /// says goes to `heard`, each with `key`; while that is full the line is not read.
    ///
    /// # Errors
    /// When the system has no more sockets.
    pub fn open<K>(key: K, heard: mpsc::Sender<(K, Heard)>) -> std::io::Result<(Self, OwnedFd)>
    where
        K: Copy + Send + Sync + 'static,
    {
        let (ours, childs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let (reading, writing) = UnixStream::from_std(ours)?.into_split();
        let (writes, written) = mpsc::channel(WRITES_MAX);
        tokio::spawn(write_all(writing, written));
        tokio::spawn(async move {
            read_all(reading, &key, &heard).await;
            // Whoever does not listen any more needs no end, either.
            let _ = heard.send((key, Heard::End)).await;
        });
        Ok((Self { writes }, childs.into()))
    }

    /// Tells the child something.
    pub fn send(&self, message: &ToChild) {
        // See WRITES_MAX.
        let _ = self.writes.try_send(message.encode());
    }
}

async fn read_all<K: Copy>(mut line: OwnedReadHalf, key: &K, heard: &mpsc::Sender<(K, Heard)>) {
    let mut decoder = Decoder::default();
    let mut buffer = BytesMut::with_capacity(64 * 1024);
    loop {
        buffer.clear();
        // An error on the line is as good as its end.
        if !matches!(line.read_buf(&mut buffer).await, Ok(length) if length > 0) {
            return;
        }
        decoder.push(&buffer);
        loop {
            match decoder.next_from_child() {
                Ok(Some(message)) => {
                    if heard.send((*key, Heard::Message(message))).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::error!("what a child says cannot be read: {error}");
                    return;
                }
            }
        }
    }
}

async fn write_all(mut line: OwnedWriteHalf, mut written: mpsc::Receiver<Bytes>) {
    while let Some(message) = written.recv().await {
        // The child is gone; the reader says so.
        if line.write_all(&message).await.is_err() {
            return;
        }
    }
}
