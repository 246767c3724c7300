//! Something that threads wait for: spin, then yield, then sleep.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::sync::{AtomicU32, Condvar, Mutex, SPINS, YIELDS, fence, spin_loop, yield_now};

/// See the module.
#[derive(Debug, Default)]
pub struct Event {
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Event {
    /// Returns once `ready` says so. `ready` must load with Acquire what is stored with Release
    /// before [`Event::notify`].
    pub fn wait(&self, ready: impl Fn() -> bool) {
        if self.spin(SPINS, &ready) {
            return;
        }
        for _ in 0..YIELDS {
            if ready() {
                return;
            }
            yield_now();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Of this fence and the notifier's one is the first: either the notifier sees this sleeper,
        // or the sleeper sees what the notifier stored.
        fence(Ordering::SeqCst);
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether `ready` came true within so many turns.
    pub fn spin(&self, turns: u32, ready: &impl Fn() -> bool) -> bool {
        for _ in 0..turns {
            if ready() {
                return true;
            }
            spin_loop();
        }
        ready()
    }

    /// Wakes those who sleep.
    pub fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }

    /// Threads that sleep, or are about to.
    #[cfg(test)]
    pub fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }
}
