//! Log-probabilities of the raw row: before masks, bias, penalties and temperature.

use pawl_shared::protocol::SamplingParams;

use super::Scratch;
use super::ranked::rank;
use crate::device::cpu::logits;
use crate::step::TokenLogprobs;

/// The sampled token's, then those of the best `count` (-1: of all), or, where the request names
/// tokens, of those. `scratch.raw` holds the row, whose largest value is `largest`.
pub fn of(
    largest: f32,
    token: u32,
    count: i32,
    params: &SamplingParams,
    scratch: &mut Scratch,
) -> TokenLogprobs {
    let raw = std::mem::take(&mut scratch.raw);
    scratch.chunks.clear();
    scratch.chunks.resize(raw.len().div_ceil(logits::CHUNK), 0.0);
    logits::chunk_exp_sums(scratch.isa, &raw, largest, 1.0, &mut scratch.chunks);
    let sum: f64 = scratch.chunks.iter().map(|&sum| f64::from(sum)).sum();
    let log_total = f64::from(largest) + sum.ln();
    let logprob = |value: f32| (f64::from(value) - log_total) as f32;
    let value_of = |token: u32| raw.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);

    let sampled = value_of(token);
    let mut token_ids = vec![token];
    let mut logprobs = vec![logprob(sampled)];
    if let Some(named) = &params.logprob_token_ids {
        token_ids.extend(named);
        logprobs.extend(named.iter().map(|&token| logprob(value_of(token))));
    } else if count != 0 {
        let count = usize::try_from(count).unwrap_or(raw.len()).min(raw.len());
        rank(&raw, count, scratch);
        for &(value, token) in scratch.ranked.iter().take(count) {
            token_ids.push(token);
            logprobs.push(logprob(value));
        }
    }
    // As vLLM counts: all that are at least as probable, itself included.
    let sampled_rank = raw.iter().filter(|&&value| value >= sampled).count() as u32;
    scratch.raw = raw;
    TokenLogprobs { token_ids, logprobs, sampled_rank: sampled_rank.max(1) }
}
