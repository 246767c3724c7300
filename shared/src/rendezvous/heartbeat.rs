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

/// Notices that this process was stopped (SIGSTOP, a suspended machine, a debugger).
///
/// What a peer said meanwhile still lies unread in the sockets, so its silence means nothing yet:
/// judging waits two intervals, in which the sockets are read and one more ping is answered.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnClock {
    last: Option<Stamp>,
    judge_from: Option<Stamp>,
}

impl OwnClock {
    /// Takes note of the time; returns whether peers may be judged at it.
    pub fn may_judge(&mut self, now: Stamp, config: &HeartbeatConfig) -> bool {
        // Ticks come each interval, so only what goes beyond that is a jump.
        let allowed = config.own_jump.max(config.interval);
        if self.last.is_some_and(|last| now.since(last) > allowed) {
            self.judge_from = Some(now + 2 * config.interval);
        }
        self.last = Some(now);
        self.judge_from.is_none_or(|from| now >= from)
    }
}
