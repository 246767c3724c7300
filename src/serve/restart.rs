//! How often a child may die before the supervisor gives up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Deaths of one child forgiven within [`WINDOW`].
const FORGIVEN: usize = 3;
const WINDOW: Duration = Duration::from_secs(300);

/// Remembers recent deaths; at most [`FORGIVEN`] + 1 of them.
#[derive(Clone, Debug, Default)]
pub struct RestartPolicy {
    deaths: VecDeque<Instant>,
}

impl RestartPolicy {
    /// Notes a death.
    ///
    /// # Errors
    /// When it is one too many; the text says so.
    pub fn record_death(&mut self, now: Instant) -> Result<(), String> {
        self.deaths.retain(|&death| now.duration_since(death) < WINDOW);
        self.deaths.push_back(now);
        if self.deaths.len() <= FORGIVEN {
            return Ok(());
        }
        Err(format!("{} deaths in {} s: giving up", self.deaths.len(), WINDOW.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fourth_death_within_five_minutes_is_one_too_many() {
        let start = Instant::now();
        let mut policy = RestartPolicy::default();
        for minute in 0..3 {
            policy.record_death(start + Duration::from_secs(minute * 60)).unwrap();
        }
        policy.record_death(start + Duration::from_secs(299)).unwrap_err();
    }

    #[test]
    fn old_deaths_are_forgotten() {
        let start = Instant::now();
        let mut policy = RestartPolicy::default();
        for hour in 0..100 {
            policy.record_death(start + Duration::from_secs(hour * 3600)).unwrap();
        }
        assert_eq!(policy.deaths.len(), 1);
    }
}
