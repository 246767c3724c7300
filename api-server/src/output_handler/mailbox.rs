//! Between the output handler, which never waits, and the reader of one request, which may be slow.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use tokio::sync::Notify;

use crate::engine_client::Update;

/// How far a reader may fall behind before its request is aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveryLimits {
    /// Bytes that may lie unread for one request, all its choices together.
    pub unread_bytes: usize,
    /// How long something may lie unread without the reader taking anything.
    pub unread_time: Duration,
}

impl Default for DeliveryLimits {
    fn default() -> Self {
        Self { unread_bytes: 4 << 20, unread_time: Duration::from_secs(30) }
    }
}

/// The updates of one request that its reader has not taken yet.
///
/// Bounded by [`DeliveryLimits`]: when it is full, the request is aborted in the core and its
/// last update, an error, is put in nevertheless.
#[derive(Debug)]
pub(crate) struct Mailbox {
    inner: Mutex<Inner>,
    arrived: Notify,
}

#[derive(Debug)]
struct Inner {
    updates: VecDeque<Update>,
    bytes: usize,
    /// Choices that have not ended.
    open: u32,
    /// Since when something lies unread: the later of its arrival and the last taking.
    unread_since: Option<Stamp>,
}

const UNPOISONED: &str = "no panic happens under this lock";

impl Mailbox {
    /// For a request of `choices` choices.
    pub fn new(choices: u32) -> Self {
        let inner = Inner { updates: VecDeque::new(), bytes: 0, open: choices, unread_since: None };
        Self { inner: Mutex::new(inner), arrived: Notify::new() }
    }

    /// Puts `update` in, and wakes the reader. Returns the bytes that lie unread now.
    pub fn put(&self, update: Update, now: Stamp) -> usize {
        let mut inner = self.inner.lock().expect(UNPOISONED);
        inner.bytes += weight(&update);
        inner.open -= u32::from(update.finish.is_some());
        inner.unread_since = inner.unread_since.or(Some(now));
        inner.updates.push_back(update);
        let bytes = inner.bytes;
        drop(inner);
        self.arrived.notify_one();
        bytes
    }

    /// The next update; `None` after the last one of the last choice. Cancel-safe.
    pub async fn take(&self, clock: &dyn pawl_shared::clock::Clock) -> Option<Update> {
        loop {
            {
                let mut inner = self.inner.lock().expect(UNPOISONED);
                if let Some(update) = inner.updates.pop_front() {
                    inner.bytes -= weight(&update);
                    inner.unread_since = (!inner.updates.is_empty()).then(|| clock.now());
                    return Some(update);
                }
                if inner.open == 0 {
                    return None;
                }
            }
            self.arrived.notified().await;
        }
    }

    /// How long something has been lying unread.
    pub fn unread_for(&self, now: Stamp) -> Duration {
        let since = self.inner.lock().expect(UNPOISONED).unread_since;
        since.map_or(Duration::ZERO, |since| now.since(since))
    }
}

/// Roughly what an update takes in memory.
fn weight(update: &Update) -> usize {
    let logprobs = update.logprobs.iter().chain(update.prompt_logprobs.iter().flatten());
    let logprobs: usize = logprobs.map(|entry| 96 + 80 * entry.top.len()).sum();
    std::mem::size_of::<Update>() + update.text.len() + 4 * update.token_ids.len() + logprobs
}
