//! Time, as the state machines see it: injected, never asked of the system.
//!
//! Two kinds that cannot be mixed up. [`Stamp`] is monotonic (`CLOCK_MONOTONIC`, the clock vLLM's
//! engine stamps with) and may be subtracted from another stamp *of the same process*. [`WallTime`]
//! is for humans and for `created` fields; no interval is ever computed from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

/// A point on the monotonic clock, in nanoseconds. Never zero: vLLM's decoder replaces a stamp of
/// 0.0 by its own clock, so a zero on the wire would be read as "now".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(std::num::NonZeroU64);

impl Stamp {
    /// The stamp `nanos` nanoseconds after the clock's origin; the origin itself reads as 1 ns.
    #[must_use]
    pub fn from_nanos(nanos: u64) -> Self {
        Self(std::num::NonZeroU64::new(nanos).unwrap_or(std::num::NonZeroU64::MIN))
    }

    /// Nanoseconds since the clock's origin.
    #[must_use]
    pub fn nanos(self) -> u64 {
        self.0.get()
    }

    /// Seconds since the clock's origin, as the wire carries them.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.0.get() as f64 * 1e-9
    }

    /// Time from `earlier` to `self`; zero if `earlier` is in fact later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanos().saturating_sub(earlier.nanos()))
    }
}

impl std::ops::Add<Duration> for Stamp {
    type Output = Self;

    fn add(self, rhs: Duration) -> Self {
        let nanos = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self::from_nanos(self.nanos().saturating_add(nanos))
    }
}

/// Seconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct WallTime(pub f64);

/// Where a state machine gets its time from.
pub trait Clock: Send + Sync {
    /// The monotonic time of this process.
    fn now(&self) -> Stamp;
    /// The wall-clock time, for fields that people read.
    fn wall(&self) -> WallTime;
}

/// The system's own clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Stamp {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
            .expect("CLOCK_MONOTONIC exists on every Linux");
        let nanos = now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64;
        Stamp::from_nanos(nanos)
    }

    fn wall(&self) -> WallTime {
        let since_epoch =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        WallTime(since_epoch.as_secs_f64())
    }
}

/// A clock that moves only when a test moves it. Clones share the same time.
#[derive(Clone, Debug)]
pub struct ManualClock {
    nanos: Arc<AtomicU64>,
    /// How far the wall clock has been put forward, in seconds.
    put_forward: Arc<AtomicI64>,
}

impl ManualClock {
    /// A clock standing at `nanos`.
    #[must_use]
    pub fn at(nanos: u64) -> Self {
        Self { nanos: Arc::new(AtomicU64::new(nanos)), put_forward: Arc::default() }
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let nanos = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::SeqCst);
    }

    /// Puts the wall clock forward by so many seconds, or back, as its owner may at any time.
    pub fn put_wall_forward(&self, seconds: i64) {
        self.put_forward.fetch_add(seconds, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Stamp {
        Stamp::from_nanos(self.nanos.load(Ordering::SeqCst))
    }

    fn wall(&self) -> WallTime {
        let put_forward = self.put_forward.load(Ordering::SeqCst);
        WallTime(1.0e9 + put_forward as f64 + self.now().seconds())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_is_never_zero_on_the_wire() {
        assert!(Stamp::from_nanos(0).seconds() > 0.0);
    }

    #[test]
    fn since_is_never_negative() {
        let early = Stamp::from_nanos(5);
        let late = early + Duration::from_nanos(7);
        assert_eq!(late.since(early), Duration::from_nanos(7));
        assert_eq!(early.since(late), Duration::ZERO);
    }
}
