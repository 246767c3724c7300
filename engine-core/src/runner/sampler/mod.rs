//! From a row of logits to a token: a pure function of the row, the parameters, the request's
//! tokens and its seed.
//!
//! The order is vLLM's: logprobs are those of the raw row; then the row is masked (allowed tokens,
//! bad words, stop tokens before `min_tokens`), biased and penalised; then the greedy choice, or
//! temperature, min-p, top-k, top-p and a draw. The draw's random number is a function of the seed
//! and the position alone, so a request that is preempted, or runs in another batch, replays.

mod adjust;
mod choose;
mod logprobs;
mod random;
mod ranked;
#[cfg(test)]
mod tests;

use pawl_shared::protocol::SamplingParams;

use crate::device::cpu::{Isa, logits};
use crate::step::TokenLogprobs;
pub use random::uniform;

/// Temperatures below this are greedy: dividing by them would overflow.
const GREEDY_BELOW: f64 = 1e-5;

/// The request's tokens so far.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    /// As the client sent it.
    pub prompt: &'a [u32],
    /// Sampled since.
    pub output: &'a [u32],
}

/// What was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// If the parameters ask for them.
    pub logprobs: Option<TokenLogprobs>,
    /// NaNs in the row; the token then means nothing.
    pub num_nans: u32,
}

/// Memory that is reused from row to row; one for each thread.
#[derive(Debug)]
pub struct Scratch {
    isa: Isa,
    /// The row before it was changed.
    raw: Vec<f32>,
    /// Partial sums or maxima of a row.
    chunks: Vec<f32>,
    /// Candidates, best first.
    ranked: Vec<(f32, u32)>,
    /// Per token: how often it was sampled. Zero between calls.
    counts: Vec<u32>,
    /// Per token: whether it was seen. False between calls.
    seen: Vec<bool>,
}

impl Scratch {
    /// For rows of `vocab_size` values computed by the kernels of `isa`.
    #[must_use]
    pub fn new(isa: Isa, vocab_size: usize) -> Self {
        // Room for a whole row, so that no step has to make it. What is never written takes none.
        let (raw, ranked) = (Vec::with_capacity(vocab_size), Vec::with_capacity(vocab_size));
        let (counts, seen) = (vec![0; vocab_size], vec![false; vocab_size]);
        Self { isa, raw, chunks: Vec::with_capacity(vocab_size), ranked, counts, seen }
    }
}

/// Whether the token is that of the largest logit, and nothing else is wanted of the row: then
/// whoever computes it can choose, and the row need not be looked at.
#[must_use]
pub fn is_largest_logit(params: &SamplingParams) -> bool {
    let none = |list: &Option<Vec<Vec<u32>>>| list.as_ref().is_none_or(Vec::is_empty);
    params.temperature < GREEDY_BELOW
        && params.logprobs.is_none()
        && params.allowed_token_ids.is_none()
        && none(&params.bad_words_token_ids)
        && (params.min_tokens == 0 || params.all_stop_token_ids.is_empty())
        && params.logit_bias.as_ref().is_none_or(std::collections::BTreeMap::is_empty)
        && params.repetition_penalty == 1.0
        && params.frequency_penalty == 0.0
        && params.presence_penalty == 0.0
}

/// Samples a token from `row` (`[vocab_size]`), which is changed on the way.
pub fn sample(
    row: &mut [f32],
    params: &SamplingParams,
    history: History<'_>,
    seed: u64,
    scratch: &mut Scratch,
) -> Choice {
    let raw_scan = logits::scan(scratch.isa, row);
    if params.logprobs.is_some() {
        scratch.raw.clear();
        scratch.raw.extend_from_slice(row);
    }
    let changed = adjust::adjust(row, params, history, scratch);
    let scan = if changed { logits::scan(scratch.isa, row) } else { raw_scan };
    let token = if params.temperature < GREEDY_BELOW {
        choose::greedy(row, scan.largest)
    } else {
        let position = (history.prompt.len() + history.output.len()) as u64;
        choose::draw(row, scan.largest, params, uniform(seed, position), scratch)
    };
    let logprobs =
        params.logprobs.map(|count| logprobs::of(raw_scan.largest, token, count, params, scratch));
    Choice { token, logprobs, num_nans: raw_scan.nans }
}
