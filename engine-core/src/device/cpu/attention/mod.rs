//! Attention over the paged cache.
//!
//! A query head of a row sees the positions up to its own, in groups of 64 that begin at multiples
//! of 64, and keeps a running maximum, sum and weighted value (online softmax). The order of every
//! operation depends on positions alone, so a row's result is the same whether its prompt came in
//! one chunk or many, with whatever other rows, in whatever blocks. In detail, for a group:
//!
//! - score: four chains over the dimensions 0, 4, …; 1, 5, …; …, each by fma, added as
//!   (0 + 1) + (2 + 3); the query carries the factor 1/√d;
//! - the maximum moves, what was summed so far is scaled by e^(old - new);
//! - weights e^(score - maximum), summed in 16 lanes over the pages and then as a tree;
//! - values are added position by position, each by fma.

#[cfg(target_arch = "x86_64")]
mod fast;
mod scalar;
#[cfg(test)]
mod tests;

use super::exp::exp;
use super::isa::{Isa, isa_twins};
use super::kv::{KvCache, PAGE};
use super::rows::sum_lanes;

/// Pages of a group.
pub const GROUP_PAGES: usize = 4;
/// Positions of a group.
pub const GROUP: usize = GROUP_PAGES * PAGE;
/// Query heads that one call of a kernel takes: they share the loads of keys and values.
pub const QUERIES_MAX: usize = 6;

/// One query head of one row.
#[derive(Debug, Default)]
pub struct Query<'a> {
    /// Scaled by 1/√d: `[head_dim]`
    pub q: &'a [f32],
    /// Positions that it sees, its own included.
    pub positions: usize,
    /// `[head_dim]`
    pub out: &'a mut [f32],
}

/// What a thread needs for a group of queries: scores, and the state of each softmax.
#[derive(Debug)]
pub struct Scratch {
    scores: Scores,
    largest: [f32; QUERIES_MAX],
    total: [f32; QUERIES_MAX],
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            scores: [[[0.0; PAGE]; GROUP_PAGES]; QUERIES_MAX],
            largest: [0.0; QUERIES_MAX],
            total: [0.0; QUERIES_MAX],
        }
    }
}

/// Attention of `queries` (at most [`QUERIES_MAX`], of one sequence, all of `kv_head`) in `layer`.
///
/// # Safety
/// No thread writes the pages of the blocks up to the queries' last position meanwhile.
pub unsafe fn attend(
    isa: Isa,
    cache: &KvCache,
    layer: usize,
    kv_head: usize,
    blocks: &[u32],
    queries: &mut [Query<'_>],
    scratch: &mut Scratch,
) {
    assert!(queries.len() <= QUERIES_MAX, "a kernel takes {QUERIES_MAX} queries");
    let pages_of_block = cache.block_size / PAGE;
    scratch.largest = [f32::NEG_INFINITY; QUERIES_MAX];
    scratch.total = [0.0; QUERIES_MAX];
    for query in &mut *queries {
        query.out.fill(0.0);
    }
    let last = queries.iter().map(|query| query.positions).max().unwrap_or(0);
    for first in (0..last).step_by(GROUP) {
        let count = GROUP.min(last - first);
        let page = |values: bool, page: usize| {
            let page = first / PAGE + page;
            let block = blocks[page / pages_of_block] as usize;
            // SAFETY: the caller's promise.
            unsafe { cache.page(layer, values, block, kv_head, page % pages_of_block) }
        };
        let empty: &[u8] = &[];
        let (mut keys, mut values) = ([empty; GROUP_PAGES], [empty; GROUP_PAGES]);
        for index in 0..count.div_ceil(PAGE) {
            (keys[index], values[index]) = (page(false, index), page(true, index));
        }
        let pages = count.div_ceil(PAGE);
        scores(isa, cache, &keys[..pages], queries, &mut scratch.scores);
        for (i, query) in queries.iter_mut().enumerate() {
            let seen = query.positions.saturating_sub(first).min(GROUP);
            soften(
                isa,
                seen,
                &mut scratch.scores[i],
                &mut scratch.largest[i],
                &mut scratch.total[i],
                query.out,
            );
        }
        add_values(isa, cache, &values[..pages], count, &scratch.scores, queries);
    }
    for (query, total) in queries.iter_mut().zip(scratch.total) {
        for out in &mut *query.out {
            *out /= total;
        }
    }
}

/// Of one query for a group, page by page.
type GroupScores = [[f32; PAGE]; GROUP_PAGES];
type Scores = [GroupScores; QUERIES_MAX];

fn scores(isa: Isa, cache: &KvCache, keys: &[&[u8]], queries: &[Query<'_>], out: &mut Scores) {
    match isa {
        Isa::Scalar => scalar::scores(cache, keys, queries, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` beyond Scalar is only made where the machine has its features.
        Isa::Avx2 => unsafe { fast::scores_avx2(cache, keys, queries, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { fast::scores_avx512(cache, keys, queries, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::scores(cache, keys, queries, out),
    }
}

fn add_values(
    isa: Isa,
    cache: &KvCache,
    values: &[&[u8]],
    count: usize,
    weights: &Scores,
    queries: &mut [Query<'_>],
) {
    match isa {
        Isa::Scalar => scalar::add_values(cache, values, count, weights, queries),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` beyond Scalar is only made where the machine has its features.
        Isa::Avx2 => unsafe { fast::add_values_avx2(cache, values, count, weights, queries) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { fast::add_values_avx512(cache, values, count, weights, queries) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::add_values(cache, values, count, weights, queries),
    }
}

isa_twins! {
    /// From scores to weights: the first `seen` count, the others become 0.
    fn soften = soften_body(
        seen: usize,
        scores: &mut GroupScores,
        largest: &mut f32,
        total: &mut f32,
        out: &mut [f32],
    )
}

#[inline(always)]
fn soften_body(
    seen: usize,
    scores: &mut GroupScores,
    largest: &mut f32,
    total: &mut f32,
    out: &mut [f32],
) {
    if seen == 0 {
        scores.as_flattened_mut().fill(0.0);
        return;
    }
    for score in &mut scores.as_flattened_mut()[seen..] {
        *score = f32::NEG_INFINITY;
    }
    // By lanes, so that registers can do it; a maximum has no order.
    let mut lanes = [f32::NEG_INFINITY; PAGE];
    for page in &*scores {
        for (lane, score) in lanes.iter_mut().zip(page) {
            *lane = if *score > *lane { *score } else { *lane };
        }
    }
    let mut new = *largest;
    for lane in lanes {
        new = if lane > new { lane } else { new };
    }
    // A row of NaNs has no maximum; any finite one lets the NaNs through to the sum.
    new = if new == f32::NEG_INFINITY { 0.0 } else { new };
    let scale = exp(*largest - new);
    *largest = new;
    let mut sums = [0.0_f32; PAGE];
    for page in scores {
        for (sum, score) in sums.iter_mut().zip(page) {
            *score = exp(*score - new);
            *sum += *score;
        }
    }
    *total = total.mul_add(scale, sum_lanes(sums));
    for out in out {
        *out *= scale;
    }
}
