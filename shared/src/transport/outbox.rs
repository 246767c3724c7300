//! An [`Outbox`] between the one who sends and the thread that has the socket.

use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use tokio::sync::Notify;

use super::SendRefused;
use crate::rendezvous::Outbox;

/// Cheap to clone; all clones are the same outbox.
#[derive(Clone)]
pub(super) struct SharedOutbox(Arc<Shared>);

struct Shared {
    outbox: Mutex<State>,
    changed: Notify,
}

struct State {
    outbox: Outbox,
    closed: bool,
}

impl SharedOutbox {
    pub(super) fn new(outbox: Outbox) -> Self {
        let outbox = Mutex::new(State { outbox, closed: false });
        Self(Arc::new(Shared { outbox, changed: Notify::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.outbox.lock().expect("no code panics while it holds the outbox")
    }

    pub(super) fn push(&self, frames: Vec<Bytes>) -> Result<(), SendRefused> {
        let mut state = self.lock();
        if state.closed {
            return Err(SendRefused::Down);
        }
        state.outbox.push(frames).map_err(|_| SendRefused::Full)?;
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }

    pub(super) fn acknowledge(&self, total: u64) {
        self.lock().outbox.acknowledge(total);
        self.0.changed.notify_one();
    }

    /// What waits goes out without credit from now on, and then [`SharedOutbox::pop`] ends.
    pub(super) fn finish(&self) {
        let mut state = self.lock();
        state.outbox.finish();
        state.closed = true;
        drop(state);
        self.0.changed.notify_one();
    }

    /// Refuses everything from now on.
    pub(super) fn close(&self) {
        self.lock().closed = true;
    }

    /// The next message that may go out; `None` once finished. Only one task may wait here.
    pub(super) async fn pop(&self) -> Option<Vec<Bytes>> {
        loop {
            {
                let mut state = self.lock();
                if let Some(frames) = state.outbox.pop() {
                    return Some(frames);
                }
                if state.outbox.is_finished() {
                    return None;
                }
            }
            self.0.changed.notified().await;
        }
    }
}
