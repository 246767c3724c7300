//! Choosing a token from the row as it is after masks, bias and penalties.

use pawl_shared::protocol::SamplingParams;

use super::Scratch;
use super::ranked::rank;
use crate::device::cpu::logits;

/// Candidates that are ranked at first when only their joint probability is known.
const FIRST_TRY: usize = 64;

/// The first token whose logit is the largest; 0 if there is no number.
pub fn greedy(row: &[f32], largest: f32) -> u32 {
    row.iter().position(|&value| value == largest).unwrap_or(0) as u32
}

/// Draws with `uniform` in `[0, 1)` from what temperature, min-p, top-k and top-p leave.
pub fn draw(
    row: &[f32],
    largest: f32,
    params: &SamplingParams,
    uniform: f64,
    scratch: &mut Scratch,
) -> u32 {
    if !largest.is_finite() {
        return greedy(row, largest);
    }
    let factor = (1.0 / params.temperature) as f32;
    let weight = |value: f32| f64::from(logits::weight(value, largest, factor));
    let (top_k, top_p, min_p) = (params.top_k as usize, params.top_p, params.min_p);
    let all = top_k == 0 || top_k >= row.len();
    if all && top_p >= 1.0 && min_p <= 0.0 {
        return draw_from_all(row, largest, factor, uniform, scratch);
    }
    // The largest has weight 1, so that min-p is a bound for the weights themselves.
    let kept_by_min_p = |ranked: &[(f32, u32)]| ranked.partition_point(|c| weight(c.0) >= min_p);
    let mut kept;
    if !all {
        rank(row, top_k, scratch);
        kept = kept_by_min_p(&scratch.ranked);
    } else if min_p > 0.0 {
        kept = rank_until(row, scratch, |ranked| {
            let kept = kept_by_min_p(ranked);
            (kept < ranked.len()).then_some(kept)
        });
    } else {
        let total = exp_sums(row, largest, factor, scratch);
        kept = rank_until(row, scratch, |ranked| {
            let reached: f64 = ranked.iter().map(|c| weight(c.0)).sum();
            (reached >= top_p * total).then_some(ranked.len())
        });
        kept = top_p_len(&scratch.ranked[..kept], top_p * total, weight);
    }
    if top_p < 1.0 && (!all || min_p > 0.0) {
        let total: f64 = scratch.ranked[..kept].iter().map(|c| weight(c.0)).sum();
        kept = top_p_len(&scratch.ranked[..kept], top_p * total, weight);
    }
    let kept = &scratch.ranked[..kept.max(1)];
    let total: f64 = kept.iter().map(|c| weight(c.0)).sum();
    let mut left = uniform * total;
    for candidate in kept {
        left -= weight(candidate.0);
        if left < 0.0 {
            return candidate.1;
        }
    }
    // Rounding left a little over: it belongs to the last.
    kept[kept.len() - 1].1
}

/// How many of the ranked stay: a candidate goes when those before it reach `bound` already.
fn top_p_len(ranked: &[(f32, u32)], bound: f64, weight: impl Fn(f32) -> f64) -> usize {
    let mut before = 0.0;
    let stays = |candidate: &&(f32, u32)| {
        let stays = before < bound;
        before += weight(candidate.0);
        stays
    };
    ranked.iter().take_while(stays).count()
}

/// Ranks more and more until `enough` says how many are kept, or all are ranked.
fn rank_until(
    row: &[f32],
    scratch: &mut Scratch,
    enough: impl Fn(&[(f32, u32)]) -> Option<usize>,
) -> usize {
    let mut count = FIRST_TRY;
    loop {
        rank(row, count, scratch);
        if let Some(kept) = enough(&scratch.ranked) {
            return kept;
        }
        if count >= row.len() {
            return scratch.ranked.len();
        }
        count *= 8;
    }
}

/// Sums the weights of a row; the partial sums stay in `scratch.chunks`.
fn exp_sums(row: &[f32], largest: f32, factor: f32, scratch: &mut Scratch) -> f64 {
    scratch.chunks.clear();
    scratch.chunks.resize(row.len().div_ceil(logits::CHUNK), 0.0);
    logits::chunk_exp_sums(scratch.isa, row, largest, factor, &mut scratch.chunks);
    scratch.chunks.iter().map(|&sum| f64::from(sum)).sum()
}

fn draw_from_all(
    row: &[f32],
    largest: f32,
    factor: f32,
    uniform: f64,
    scratch: &mut Scratch,
) -> u32 {
    let mut left = uniform * exp_sums(row, largest, factor, scratch);
    let mut last = greedy(row, largest);
    for (index, &sum) in scratch.chunks.iter().enumerate() {
        if left >= f64::from(sum) {
            left -= f64::from(sum);
            continue;
        }
        let first = index * logits::CHUNK;
        for (token, &value) in row.iter().enumerate().skip(first).take(logits::CHUNK) {
            let weight = f64::from(logits::weight(value, largest, factor));
            if weight > 0.0 {
                last = token as u32;
            }
            left -= weight;
            if left < 0.0 {
                return last;
            }
        }
        // The chunk's sum was rounded up: the draw belongs to its last token of any weight.
        return last;
    }
    last
}
