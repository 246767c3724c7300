//! Answers under way.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// How many answers are under way, and a way to wait until none is.
#[derive(Debug, Default)]
pub struct OpenRequests {
    count: AtomicU64,
    none_left: Notify,
}

impl OpenRequests {
    /// One more.
    pub fn enter(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// One has ended.
    pub fn leave(&self) {
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.none_left.notify_waiters();
        }
    }

    /// How many.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Resolves once there is none.
    pub async fn none(&self) {
        loop {
            // Registered before the count is read, so that the last one to leave is not missed.
            let notified = self.none_left.notified();
            if self.count() == 0 {
                return;
            }
            notified.await;
        }
    }
}
