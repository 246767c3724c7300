//! How long a peer may be silent, and when this process may judge that at all.

use std::time::Duration;

use crate::clock::Stamp;

/// The figures of life and death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatConfig {
    /// How often a frontend pings.
    pub interval: Duration,
    /// A peer silent for this long hangs (a core) or is gone (a frontend).
    pub silence: Duration,
    /// A core silent for this long is dead.
    pub dead: Duration,
    /// If this process's own clock jumped by more than this, it was itself stopped.
    pub own_jump: Duration,
}

impl Default for HeartbeatConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            silence: Duration::from_secs(10),
            dead: Duration::from_secs(60),
            own_jump: Duration::from_secs(2),
        }
    }
}

/// Notices that this process was itself stopped (SIGSTOP, a suspended machine, a debugger): what
/// its peers said meanwhile lies unread in its sockets, so it must not judge their silence yet.
#[derive(Clone, Copy, Debug)]
pub struct OwnClock {
    last: Stamp,
    jumped_at: Option<Stamp>,
}

impl OwnClock {
    /// The clock of a process that runs at `now`: it may be stopped before it looks a first time.
    #[must_use]
    pub fn new(now: Stamp) -> Self {
        Self { last: now, jumped_at: None }
    }

    /// Takes note of the time, to be called each interval; whether it jumped since the last call.
    pub fn jumped(&mut self, now: Stamp, config: &HeartbeatConfig) -> bool {
        // Calls come each interval, so only what goes beyond that is a jump.
        let allowed = config.own_jump.max(config.interval);
        let jumped = now.since(self.last) > allowed;
        self.last = now;
        if jumped {
            self.jumped_at = Some(now);
        }
        jumped
    }

    /// Whether the sockets have surely been read since the last jump.
    #[must_use]
    pub fn has_read_since(&self, now: Stamp, config: &HeartbeatConfig) -> bool {
        self.jumped_at.is_none_or(|at| now.since(at) >= 2 * config.interval)
    }
}
