//! How many tokens fit into a step of a given time, by what steps took so far.
//!
//! A step of n tokens is taken to cost `fixed + each · n`: a least-squares line through the recent
//! steps, older ones fading. Only steps with a chunk of prompt in them count: what a lone decode
//! takes says little about prefill. Where the sizes seen hardly differ a line means nothing, and all
//! of the time is put down to the tokens, which errs towards short steps.

use std::time::Duration;

/// Every step may have this many prompt tokens, however slow the device, so that prompts get on;
/// only steps of at least so many are measured.
pub(super) const CHUNK_MIN: u32 = 16;
/// As long as nothing has been measured.
const CHUNK_FIRST: u32 = 64;
/// A step's weight falls to this with each later one.
const FADE: f64 = 0.8;
/// Sizes differ enough for a line if their variance is this share of their mean square.
const SPREAD_MIN: f64 = 0.01;

/// Sums over the measured steps, faded.
#[derive(Debug, Default)]
pub(super) struct StepSpeed {
    weight: f64,
    tokens: f64,
    tokens_squared: f64,
    seconds: f64,
    tokens_seconds: f64,
    /// Most tokens of any step: beyond twice that, the line is not believed.
    largest: u32,
}

impl StepSpeed {
    pub fn record(&mut self, tokens: u32, took: Duration) {
        if tokens < CHUNK_MIN {
            return;
        }
        let (n, seconds) = (f64::from(tokens), took.as_secs_f64());
        let fade = |sum: &mut f64, new: f64| *sum = *sum * FADE + new;
        fade(&mut self.weight, 1.0);
        fade(&mut self.tokens, n);
        fade(&mut self.tokens_squared, n * n);
        fade(&mut self.seconds, seconds);
        fade(&mut self.tokens_seconds, n * seconds);
        self.largest = self.largest.max(tokens);
    }

    /// Tokens of a step that takes `limit`.
    pub fn tokens_within(&self, limit: Duration) -> u32 {
        if self.weight == 0.0 {
            return CHUNK_FIRST;
        }
        let (fixed, each) = self.line();
        // Where a step of one token already takes most of the limit, tiny chunks would only pay
        // that price more often: then a chunk may cost as much again.
        let for_tokens = limit.as_secs_f64().max(2.0 * fixed) - fixed;
        // Casts from float to integer saturate, and no time for tokens means no limit on them.
        let believed = (for_tokens / each) as u32;
        believed.min(self.largest.saturating_mul(2).max(CHUNK_FIRST))
    }

    /// Seconds a step, and seconds a token; neither is negative.
    fn line(&self) -> (f64, f64) {
        let mean = self.seconds / self.tokens;
        let spread = self.weight * self.tokens_squared - self.tokens * self.tokens;
        if spread < SPREAD_MIN * self.weight * self.tokens_squared {
            return (0.0, mean);
        }
        let covariance = self.weight * self.tokens_seconds - self.tokens * self.seconds;
        let each = (covariance / spread).clamp(0.0, mean);
        ((self.seconds - each * self.tokens) / self.weight, each)
    }
}
