//! The specification: plain loops over pages.

use half::{bf16, f16};

use super::{Group, Scores};
use crate::device::cpu::exp::exp;
use crate::device::cpu::kv::{KvDtype, PAGE, int8_page};
use crate::device::cpu::rows::sum_lanes;

/// Value number `index` of a page, which is of the position `lane`.
fn value_at(dtype: KvDtype, page: &[u8], index: usize, lane: usize) -> f32 {
    let at = index * dtype.bytes();
    match dtype {
        KvDtype::F16 => f16::from_le_bytes([page[at], page[at + 1]]).to_f32(),
        KvDtype::BF16 => bf16::from_le_bytes([page[at], page[at + 1]]).to_f32(),
        KvDtype::F32 => f32::from_le_bytes([at, at + 1, at + 2, at + 3].map(|i| page[i])),
        KvDtype::Int8 => {
            let (values, scales) = int8_page(page);
            f32::from(values.as_flattened()[index]) * scales[lane]
        }
    }
}

/// Scores of each query for the positions that it sees; what it leaves beyond has no meaning.
pub fn scores(group: &Group<'_>, out: &mut [Scores]) {
    let queries = group.q.chunks_exact(group.head_dim);
    for ((q, &seen), out) in queries.zip(group.seen).zip(out) {
        for (position, out) in out.as_flattened_mut()[..seen].iter_mut().enumerate() {
            let (page, lane) = (group.keys[position / PAGE], position % PAGE);
            let mut score = 0.0_f32;
            for (d, q) in q.iter().enumerate() {
                score = value_at(group.dtype, page, d * PAGE + lane, lane).mul_add(*q, score);
            }
            *out = score;
        }
    }
}

/// From scores to weights, their largest score and their sum: the first `seen` of each query count,
/// the others become 0.
pub fn soften(seen: &[usize], scores: &mut [Scores], largest: &mut [f32], total: &mut [f32]) {
    for (((&seen, scores), largest), total) in seen.iter().zip(scores).zip(largest).zip(total) {
        scores.as_flattened_mut()[seen..].fill(f32::NEG_INFINITY);
        let larger = |most: f32, score: &f32| if *score > most { *score } else { most };
        let most = scores.as_flattened().iter().fold(f32::NEG_INFINITY, larger);
        // A row of NaNs has no maximum; any finite one lets the NaNs through to the sum.
        let most = if most == f32::NEG_INFINITY { 0.0 } else { most };
        let mut sums = [0.0_f32; PAGE];
        for page in scores {
            for (sum, score) in sums.iter_mut().zip(page) {
                *score = exp(*score - most);
                *sum += *score;
            }
        }
        (*largest, *total) = (most, sum_lanes(sums));
    }
}

/// Of each query, the values of the positions that it sees, weighted.
pub fn values(group: &Group<'_>, weights: &[Scores], out: &mut [f32]) {
    let queries = out.chunks_exact_mut(group.head_dim);
    for ((out, &seen), weights) in queries.zip(group.seen).zip(weights) {
        out.fill(0.0);
        for (position, weight) in weights.as_flattened()[..seen].iter().enumerate() {
            let (page, lane) = (group.values[position / PAGE], position % PAGE);
            let row = lane * group.head_dim;
            for (d, out) in out.iter_mut().enumerate() {
                *out = value_at(group.dtype, page, row + d, lane).mul_add(*weight, *out);
            }
        }
    }
}
