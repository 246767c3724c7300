//! The specification: plain loops over pages.

use half::{bf16, f16};

use super::{Query, Scores};
use crate::device::cpu::kv::{KvCache, KvDtype, PAGE};

fn value_at(dtype: KvDtype, page: &[u8], index: usize) -> f32 {
    let at = index * dtype.bytes();
    match dtype {
        KvDtype::F16 => f16::from_le_bytes([page[at], page[at + 1]]).to_f32(),
        KvDtype::BF16 => bf16::from_le_bytes([page[at], page[at + 1]]).to_f32(),
        KvDtype::F32 => f32::from_le_bytes([at, at + 1, at + 2, at + 3].map(|i| page[i])),
    }
}

/// Scores of each query for the positions of `keys`.
pub fn scores(cache: &KvCache, keys: &[&[u8]], queries: &[Query<'_>], out: &mut Scores) {
    for (query, out) in queries.iter().zip(out) {
        for (page, out) in keys.iter().zip(out) {
            for (lane, out) in out.iter_mut().enumerate() {
                let mut chains = [0.0_f32; 4];
                for (d, q) in query.q.iter().enumerate() {
                    let key = value_at(cache.dtype, page, d * PAGE + lane);
                    chains[d % 4] = key.mul_add(*q, chains[d % 4]);
                }
                *out = (chains[0] + chains[1]) + (chains[2] + chains[3]);
            }
        }
    }
}

/// Adds the values of the first `count` positions, weighted.
pub fn add_values(
    cache: &KvCache,
    values: &[&[u8]],
    count: usize,
    weights: &Scores,
    queries: &mut [Query<'_>],
) {
    let dim = cache.attention.head_dim;
    for (query, weights) in queries.iter_mut().zip(weights) {
        for (position, weight) in weights.as_flattened().iter().enumerate().take(count) {
            let (page, row) = (values[position / PAGE], (position % PAGE) * dim);
            for (d, out) in query.out.iter_mut().enumerate() {
                *out = value_at(cache.dtype, page, row + d).mul_add(*weight, *out);
            }
        }
    }
}
