//! How many tokens fit into a step of a given time, by what steps took so far.
//!
//! A step of n tokens is taken to cost `fixed + each · n`. What is fixed is learned from the steps
//! without a chunk of prompt, what each token adds from those with one.

use std::time::Duration;

/// Every step may have this many prompt tokens, however slow the device, so that prompts get on.
/// A step of fewer tokens tells the fixed cost.
pub(super) const CHUNK_MIN: u32 = 16;
/// As long as nothing has been measured.
const CHUNK_FIRST: u32 = 64;
/// The fixed cost falls at once and rises by at most this factor a step: one stall, or a large
/// batch of decodes, says little about it.
const FIXED_RISE: f64 = 1.1;

/// In seconds.
#[derive(Debug, Default)]
pub(super) struct StepSpeed {
    /// What a step takes whatever is in it; 0 until measured.
    fixed: f64,
    /// What each token adds: half of it by the last step, half by those before.
    each: Option<f64>,
    /// The last step's time over its tokens.
    last: f64,
}

impl StepSpeed {
    pub fn record(&mut self, tokens: u32, took: Duration) {
        let (n, seconds) = (f64::from(tokens), took.as_secs_f64());
        if tokens < CHUNK_MIN {
            let most = if self.fixed == 0.0 { seconds } else { self.fixed * FIXED_RISE };
            self.fixed = seconds.min(most);
        } else {
            let each = (seconds - self.fixed).max(0.0) / n;
            self.each = Some(self.each.map_or(each, |before| (before + each) / 2.0));
            self.last = seconds / n;
        }
    }

    /// Tokens of a step that takes `limit`, where `others` of them are wanted whatever they take.
    pub fn tokens_within(&self, limit: Duration, others: u32) -> u32 {
        let Some(each) = self.each else { return CHUNK_FIRST };
        // Where what must run already takes most of the limit, tiny chunks would only pay that
        // price more often: then a chunk may cost as much again.
        let unavoidable = self.fixed + each * f64::from(others);
        let time = limit.as_secs_f64().max(2.0 * unavoidable);
        // Believed up to twice of what the last step alone promises. Casts to an integer saturate:
        // where tokens take no time there is no limit on them.
        ((time - self.fixed) / each).min(2.0 * time / self.last) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of the chunks of a long prompt within 500 ms on a device where a step takes `fixed`
    /// plus `each` for every token, in milliseconds; `|` is a lone decode.
    fn check(fixed: f64, each: f64) -> String {
        let mut speed = StepSpeed::default();
        let took = |tokens| Duration::from_secs_f64((fixed + each * f64::from(tokens)) / 1e3);
        let step = |index| {
            if index == 6 {
                speed.record(1, took(1));
                return "|".to_owned();
            }
            let tokens = speed.tokens_within(Duration::from_millis(500), 0).clamp(CHUNK_MIN, 2048);
            speed.record(tokens, took(tokens));
            tokens.to_string()
        };
        (0..13).map(step).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn chunks_find_the_size_that_takes_the_time() {
        let found = [
            ("as measured on a slow machine", check(16.0, 6.5)),
            ("fast", check(5.0, 0.01)),
            ("the time does not depend on the tokens", check(600.0, 0.0)),
            ("each token takes more than the time", check(0.0, 600.0)),
            ("each step takes more than the time", check(800.0, 20.0)),
            ("takes no time", check(0.0, 0.0)),
        ];
        insta::assert_debug_snapshot!(found);
    }

    #[test]
    fn a_stall_in_a_decode_changes_little() {
        let mut speed = StepSpeed::default();
        speed.record(1, Duration::from_millis(20));
        speed.record(200, Duration::from_millis(420));
        let before = speed.tokens_within(Duration::from_millis(500), 1);
        speed.record(1, Duration::from_secs(10));
        let after = speed.tokens_within(Duration::from_millis(500), 1);
        assert_eq!((before, after), (240, 238));
    }
}
