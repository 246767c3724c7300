//! Gauges for clients that have heard nothing for a second: the engine speaks when a step ends, and
//! a step may be long, or there may be none.
//!
//! A core that hangs must not look fresh, so nothing is repeated once work has stood still for
//! [`STANDSTILL`]: the age of the stats then grows, as it should. An idle engine answers ticks, and
//! each answer counts as progress.

use std::collections::BTreeMap;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::SchedulerStats;
use pawl_shared::transport::ClientId;

use super::TICK;
use crate::engine::GAUGES_EVERY;

/// Work that has not moved for this long hangs.
const STANDSTILL: Duration = Duration::from_secs(10);

/// Whom to tell the gauges again, and which.
#[derive(Debug, Default)]
pub(super) struct Repeater {
    gauges: Option<SchedulerStats>,
    told_at: BTreeMap<ClientId, Stamp>,
    progress: Option<(u64, Stamp)>,
}

impl Repeater {
    pub fn join(&mut self, client: ClientId, now: Stamp) {
        self.told_at.insert(client, now);
    }

    pub fn leave(&mut self, client: ClientId) {
        self.told_at.remove(&client);
    }

    pub fn num_told(&self) -> usize {
        self.told_at.len()
    }

    /// The engine's gauges have changed. They carry no deltas.
    pub fn gauges(&mut self, gauges: SchedulerStats) {
        self.gauges = Some(gauges);
    }

    /// A frame with stats went to `client`.
    pub fn told(&mut self, client: ClientId, now: Stamp) {
        if let Some(at) = self.told_at.get_mut(&client) {
            *at = now;
        }
    }

    /// Called each [`TICK`]: who is to be told what. Whoever would be too late at the next tick is
    /// told at this one.
    pub fn due(&mut self, now: Stamp, progress: u64) -> Vec<(ClientId, SchedulerStats)> {
        let moved_at = match self.progress {
            Some((seen, at)) if seen == progress => at,
            _ => now,
        };
        self.progress = Some((progress, moved_at));
        let Some(gauges) = &self.gauges else { return Vec::new() };
        if now.since(moved_at) >= STANDSTILL {
            return Vec::new();
        }
        let mut due = Vec::new();
        for (&client, at) in &mut self.told_at {
            if now.since(*at) + TICK >= GAUGES_EVERY {
                *at = now;
                due.push((client, gauges.clone()));
            }
        }
        due
    }
}
