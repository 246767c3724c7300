//! A child's end of its line.

use std::collections::BTreeMap;
use std::io::{Read, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{Decoder, FromChild, Health, ToChild};
use crate::shutdown::{self, Shutdown};

/// Messages that wait to be written. When they are too many the supervisor does not read, and more
/// are dropped: the next report says all that they said.
const WRITES_MAX: usize = 64;

/// Sums that are waited for at once; one more is refused.
const SUMS_MAX: usize = 64;

enum Write {
    Message(Bytes),
    /// Everything before it is written.
    Flushed(SyncSender<()>),
}

const UNPOISONED: &str = "no panic happens under this lock";

/// A child's end. Clones are the same end.
#[derive(Clone)]
pub struct Lifeline(Arc<Shared>);

struct Shared {
    writes: SyncSender<Write>,
    reporter: OnceLock<Box<dyn Fn() -> Bytes + Send + Sync>>,
    sums: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    last_seq: u64,
    /// At most [`SUMS_MAX`].
    waiting: BTreeMap<u64, oneshot::Sender<Bytes>>,
}

impl std::fmt::Debug for Lifeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lifeline").finish_non_exhaustive()
    }
}

impl Lifeline {
    /// Takes standard input for the line. When it ends, `shutdown` is hurried, and soon after that
    /// the process ends whatever it is doing.
    ///
    /// # Errors
    /// When a thread cannot be started or the descriptor not be copied.
    pub fn on_stdin(shutdown: Shutdown) -> std::io::Result<Self> {
        Self::start(std::io::stdin().as_fd().try_clone_to_owned()?, move || {
            shutdown::end_with_supervisor(&shutdown);
        })
    }

    /// The same on any descriptor, with something else to do at its end.
    pub(super) fn start(
        line: OwnedFd,
        at_end: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<Self> {
        let reading = UnixStream::from(line);
        let writing = reading.try_clone()?;
        let (writes, written) = sync_channel(WRITES_MAX);
        let shared = Arc::new(Shared { writes, reporter: OnceLock::new(), sums: Mutex::default() });
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        thread("lifeline-write").spawn(move || write_all(writing, &written))?;
        let read = Arc::clone(&shared);
        thread("lifeline-read").spawn(move || {
            read.read_all(reading);
            // Nobody will answer these any more.
            read.sums.lock().expect(UNPOISONED).waiting.clear();
            at_end();
        })?;
        Ok(Self(shared))
    }

    /// Tells the supervisor how this process does. Call it from what must not hang.
    pub fn health(&self, health: Health) {
        self.0.write(&FromChild::Health(health));
    }

    /// How to take a snapshot when the supervisor asks for one; the first call counts.
    pub fn report_with(&self, snapshot: impl Fn() -> Bytes + Send + Sync + 'static) {
        // A second reporter has nothing to add: the metrics are one per process.
        let _ = self.0.reporter.set(Box::new(snapshot));
    }

    /// Reports unasked.
    pub fn report(&self) {
        self.0.report(0);
    }

    /// Waits until all that was said is written, at most for `patience`. For a process that ends.
    pub fn flush(&self, patience: Duration) {
        let (flushed, wait) = sync_channel(1);
        if self.0.writes.try_send(Write::Flushed(flushed)).is_ok() {
            // Late or not, the process ends.
            let _ = wait.recv_timeout(patience);
        }
    }

    /// The sum over all api-servers, each asked after this call; `None` when the supervisor does
    /// not answer within `patience`, or too many wait already.
    pub async fn sum(&self, patience: Duration) -> Option<Bytes> {
        let (seq, answer) = {
            let mut sums = self.0.sums.lock().expect(UNPOISONED);
            if sums.waiting.len() >= SUMS_MAX {
                return None;
            }
            sums.last_seq += 1;
            let seq = sums.last_seq;
            let (sender, answer) = oneshot::channel();
            sums.waiting.insert(seq, sender);
            (seq, answer)
        };
        let waiting = Waiting { shared: &self.0, seq };
        self.0.write(&FromChild::SumWanted { seq });
        let sum = tokio::time::timeout(patience, answer).await;
        drop(waiting);
        sum.ok()?.ok()
    }
}

/// Forgets a sum that is not waited for any more, also when its caller is dropped.
struct Waiting<'a> {
    shared: &'a Shared,
    seq: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.sums.lock().expect(UNPOISONED).waiting.remove(&self.seq);
    }
}

impl Shared {
    fn write(&self, message: &FromChild) {
        // See WRITES_MAX.
        let _ = self.writes.try_send(Write::Message(message.encode()));
    }

    fn report(&self, seq: u64) {
        if let Some(reporter) = self.reporter.get() {
            self.write(&FromChild::Report { seq, snapshot: reporter() });
        }
    }

    fn read_all(&self, mut line: UnixStream) {
        let mut decoder = Decoder::default();
        let mut buffer = [0; 16 * 1024];
        loop {
            match line.read(&mut buffer) {
                // An error on the line is as good as its end.
                Ok(0) | Err(_) => return,
                Ok(length) => decoder.push(&buffer[..length]),
            }
            loop {
                match decoder.next_to_child() {
                    Ok(Some(message)) => self.heard(message),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!("what the supervisor says cannot be read: {error}");
                        return;
                    }
                }
            }
        }
    }

    fn heard(&self, message: ToChild) {
        match message {
            ToChild::AskReport { seq } => self.report(seq),
            ToChild::Sum { seq, sum } => {
                let waiting = self.sums.lock().expect(UNPOISONED).waiting.remove(&seq);
                if let Some(waiting) = waiting {
                    // Its caller may just have given up.
                    let _ = waiting.send(sum);
                }
            }
        }
    }
}

fn write_all(mut line: UnixStream, written: &Receiver<Write>) {
    while let Ok(next) = written.recv() {
        match next {
            // The reader notices the line's end, too, and acts on it.
            Write::Message(message) if line.write_all(&message).is_err() => return,
            Write::Message(_) => {}
            // Whoever waits may have given up.
            Write::Flushed(flushed) => _ = flushed.try_send(()),
        }
    }
}
