//! Credit: how many bytes may be on their way to one client.
//!
//! The socket crate has no high-water mark worth the name (it queues 100,000 messages whatever
//! their size), so the core hands it at most one window per client and keeps the rest in an outbox
//! of its own. The frontend acknowledges what its output handler has taken.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Stamp;

/// Bytes that may be unacknowledged.
pub const WINDOW_BYTES: u64 = 4 << 20;
/// Bytes that may wait behind the window; beyond it the client is cut off.
pub const OUTBOX_BYTES_MAX: u64 = 64 << 20;
/// An acknowledgement is sent for each quarter window, and for less after this time.
pub const ACK_INTERVAL: Duration = Duration::from_millis(100);

/// Charged per message on top of its bytes, so that very many empty messages are bounded too.
const MESSAGE_OVERHEAD_BYTES: u64 = 128;

/// What a message costs, in bytes. Both sides count with this function.
#[must_use]
pub fn message_cost(frames: &[Bytes]) -> u64 {
    MESSAGE_OVERHEAD_BYTES + frames.iter().map(|frame| frame.len() as u64).sum::<u64>()
}

/// The outbox takes no more: its reader is too slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{waiting_bytes} bytes wait for a reader that does not keep up (limit {limit_bytes})")]
pub struct OutboxFull {
    /// Bytes that wait.
    pub waiting_bytes: u64,
    /// Bytes that may wait.
    pub limit_bytes: u64,
}

/// Messages for one peer, in order, with the credit that lets them out.
#[derive(Debug)]
pub struct Outbox {
    // Bounded by `limit` in bytes, each message charged its overhead; beyond it `push` refuses.
    queue: VecDeque<Vec<Bytes>>,
    waiting: u64,
    limit: u64,
    /// `None` for a peer that does not acknowledge.
    window: Option<u64>,
    sent: u64,
    acknowledged: u64,
    finishing: bool,
}

impl Outbox {
    /// An outbox of `limit` bytes; `window` is the peer's credit, if it acknowledges.
    #[must_use]
    pub fn new(limit: u64, window: Option<u64>) -> Self {
        Self {
            queue: VecDeque::new(),
            waiting: 0,
            limit,
            window,
            sent: 0,
            acknowledged: 0,
            finishing: false,
        }
    }

    /// Appends a message. A message larger than the whole outbox passes only when none waits.
    pub fn push(&mut self, frames: Vec<Bytes>) -> Result<(), OutboxFull> {
        let waiting = self.waiting + message_cost(&frames);
        if waiting > self.limit && !self.queue.is_empty() {
            return Err(OutboxFull { waiting_bytes: self.waiting, limit_bytes: self.limit });
        }
        self.waiting = waiting;
        self.queue.push_back(frames);
        Ok(())
    }

    /// The next message that may go out now.
    pub fn pop(&mut self) -> Option<Vec<Bytes>> {
        let cost = message_cost(self.queue.front()?);
        let unacknowledged = self.sent - self.acknowledged;
        // With nothing on its way any message may go, else one larger than the window never would.
        // The last messages before a close go without credit: nobody will acknowledge them.
        let open = self.finishing
            || unacknowledged == 0
            || self.window.is_none_or(|window| unacknowledged + cost <= window);
        if !open {
            return None;
        }
        self.sent += cost;
        self.waiting -= cost;
        self.queue.pop_front()
    }

    /// The peer has taken `total` bytes since the link began. Late or false totals are ignored.
    pub fn acknowledge(&mut self, total: u64) {
        if total > self.acknowledged && total <= self.sent {
            self.acknowledged = total;
        }
    }

    /// From now on what waits goes out without credit.
    pub fn finish(&mut self) {
        self.finishing = true;
    }

    /// Whether [`Outbox::finish`] was called and nothing waits.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finishing && self.queue.is_empty()
    }

    /// Bytes that wait.
    #[must_use]
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting
    }
}

/// When the reader acknowledges: each quarter window, or [`ACK_INTERVAL`] after the first byte.
#[derive(Debug, Default)]
pub struct AckPolicy {
    acknowledged: u64,
    due: Option<Stamp>,
}

impl AckPolicy {
    /// `taken` bytes have been taken since the link began; returns the total to acknowledge now.
    pub fn on_taken(&mut self, now: Stamp, taken: u64) -> Option<u64> {
        let owed = taken.saturating_sub(self.acknowledged);
        if owed == 0 {
            return None;
        }
        let due = *self.due.get_or_insert(now + ACK_INTERVAL);
        if owed < WINDOW_BYTES / 4 && now < due {
            return None;
        }
        self.acknowledged = taken;
        self.due = None;
        Some(taken)
    }

    /// When to ask again, if anything is owed.
    #[must_use]
    pub fn due(&self) -> Option<Stamp> {
        self.due
    }
}
