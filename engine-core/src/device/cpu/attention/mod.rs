//! Attention over the paged cache.
//!
//! A query head of a row sees the positions up to its own, in groups of 128 that begin at multiples
//! of 128. Each group is taken by itself: its largest score, the sum of its weights, its weighted
//! values. What came of the groups is then merged in their order. So the order of every operation
//! depends on positions alone, and a row's result is the same whether its prompt came in one chunk
//! or many, with whatever other rows, in whatever blocks, and whether one thread took all groups or
//! each a few. In detail, for a group:
//!
//! - score: over the dimensions in order, each by fma; the query carries the factor 1/√d;
//! - weights e^(score - largest), summed in 16 lanes over the pages and then as a tree;
//! - values are added position by position, each by fma;
//! - merging scales what is there by e^(old - new) and what comes by e^(its own - new), where new
//!   is the larger of both maxima.
//!
//! The speed comes from [`QUERIES`] rows and heads that share a group: its keys and then its values
//! are widened to f32 once, into the first-level cache, and multiplied from there by six queries at
//! a time, in as many accumulators as there are registers. A decode has no more than these six: it
//! multiplies what it loads as it widens it, which halves its time (three heads over 208 positions
//! of a cache of 161 MB, one thread of a shared Emerald Rapids: 10.7 µs before, 5.7 after).
//! Half-precision dot products would do
//! less: `vdpbf16ps` has half the rate of f32 fma where it was measured (Emerald Rapids), and
//! rounds the queries.

#[cfg(target_arch = "x86_64")]
mod fast;
pub mod plan;
mod scalar;
#[cfg(test)]
mod tests;

use super::exp::exp;
use super::isa::{Isa, isa_twins};
use super::kv::{KvCache, KvDtype, PAGE};

/// Pages of a group.
const GROUP_PAGES: usize = 8;
/// Positions of a group.
pub const GROUP: usize = GROUP_PAGES * PAGE;
/// Queries that share a group: enough that widening it costs little, few enough that their scores
/// stay in the second-level cache.
pub const QUERIES: usize = 96;

/// Query heads of rows of one sequence, all of one key head.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    /// `[queries][head_dim]`, scaled by 1/√d.
    pub q: &'a [f32],
    /// Positions that each sees, its own included.
    pub positions: &'a [usize],
    /// Which layer's cache.
    pub layer: usize,
    /// Which of its heads.
    pub kv_head: usize,
    /// The sequence's block table.
    pub blocks: &'a [u32],
}

/// What a thread needs for a group.
#[derive(Debug)]
pub struct Scratch {
    /// Keys or values of the group: `[GROUP][head_dim]` in all.
    wide: Vec<[f32; PAGE]>,
    scores: Vec<Scores>,
    /// Positions of the group that each query sees.
    seen: Vec<usize>,
}

impl Scratch {
    /// For `queries` queries of heads of `head_dim`.
    pub fn new(queries: usize, head_dim: usize) -> Self {
        Self {
            wide: vec![[0.0; PAGE]; GROUP_PAGES * head_dim],
            scores: vec![[[0.0; PAGE]; GROUP_PAGES]; queries],
            seen: Vec::with_capacity(queries),
        }
    }
}

/// Scores of one query for a group, page by page; then its weights.
type Scores = [[f32; PAGE]; GROUP_PAGES];

/// Values that hold what came of a group, or of several, for `queries` queries:
/// `[queries]` maxima, `[queries]` sums of weights, `[queries][head_dim]` weighted values.
pub fn partial_len(queries: usize, head_dim: usize) -> usize {
    queries * (2 + head_dim)
}

/// Before the first group is merged.
pub fn start(partial: &mut [f32], queries: usize) {
    let (largest, rest) = partial.split_at_mut(queries);
    largest.fill(f32::NEG_INFINITY);
    rest.fill(0.0);
}

/// What a kernel is given of a group.
struct Group<'a> {
    dtype: KvDtype,
    head_dim: usize,
    /// One for each page that any query sees.
    keys: &'a [&'a [u8]],
    values: &'a [&'a [u8]],
    /// Of the group after this one, which a kernel may ask the memory for.
    next_keys: &'a [&'a [u8]],
    /// `[queries][head_dim]`
    q: &'a [f32],
    /// Of the group's positions, how many each query sees; may be 0.
    seen: &'a [usize],
}

/// Takes group number `group` by itself, into `out`. What it leaves there for a query that sees
/// nothing of the group has no meaning.
///
/// # Safety
/// No thread writes the pages of the blocks up to the queries' last position meanwhile.
pub unsafe fn attend(
    isa: Isa,
    cache: &KvCache,
    queries: &Queries<'_>,
    group: usize,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let first = group * GROUP;
    let seen = |positions: &usize| positions.saturating_sub(first).min(GROUP);
    scratch.seen.clear();
    scratch.seen.extend(queries.positions.iter().map(seen));
    let last = scratch.seen.iter().max().copied().unwrap_or(0);
    let pages_of_block = cache.block_size / PAGE;
    let page = |values: bool, page: usize| {
        let page = first / PAGE + page;
        let block = queries.blocks[page / pages_of_block] as usize;
        // SAFETY: the caller's promise.
        unsafe { cache.page(queries.layer, values, block, queries.kv_head, page % pages_of_block) }
    };
    let mut keys = [&[][..]; GROUP_PAGES];
    let (mut values, mut next_keys) = (keys, keys);
    let pages = last.div_ceil(PAGE);
    for index in 0..pages {
        (keys[index], values[index]) = (page(false, index), page(true, index));
    }
    let total = queries.positions.iter().max().map_or(0, |most| most.div_ceil(PAGE));
    let next = total.saturating_sub(first / PAGE + GROUP_PAGES).min(GROUP_PAGES);
    for (index, keys) in next_keys[..next].iter_mut().enumerate() {
        *keys = page(false, GROUP_PAGES + index);
    }
    let group = Group {
        dtype: cache.dtype,
        head_dim: cache.attention.head_dim,
        keys: &keys[..pages],
        values: &values[..pages],
        next_keys: &next_keys[..next],
        q: queries.q,
        seen: &scratch.seen,
    };
    let count = group.seen.len();
    let scores = &mut scratch.scores[..count];
    let (sums, values) = out.split_at_mut(2 * count);
    let (largest, total) = sums.split_at_mut(count);
    match isa {
        Isa::Scalar => scalar::scores(&group, scores),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` beyond Scalar is only made where the machine has its features.
        Isa::Avx2 => unsafe { fast::scores_avx2(&group, &mut scratch.wide, scores) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { fast::scores_avx512(&group, &mut scratch.wide, scores) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::scores(&group, scores),
    }
    match isa {
        Isa::Scalar => scalar::soften(group.seen, scores, largest, total),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { fast::soften_avx2(group.seen, scores, largest, total) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { fast::soften_avx512(group.seen, scores, largest, total) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::soften(group.seen, scores, largest, total),
    }
    match isa {
        Isa::Scalar => scalar::values(&group, scores, values),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { fast::values_avx2(&group, &mut scratch.wide, scores, values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { fast::values_avx512(&group, &mut scratch.wide, scores, values) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::values(&group, scores, values),
    }
}

/// Adds what came of group number `group` to what came of those before it.
pub fn merge(isa: Isa, positions: &[usize], group: usize, from: &[f32], to: &mut [f32]) {
    merge_with(isa, positions, group * GROUP, from, to);
}

isa_twins! {
    /// Of the queries that see any position from `first` on.
    fn merge_with = merge_body(positions: &[usize], first: usize, from: &[f32], to: &mut [f32])
}

#[inline(always)]
fn merge_body(positions: &[usize], first: usize, from: &[f32], to: &mut [f32]) {
    let count = positions.len();
    let (from, from_values) = from.split_at(2 * count);
    let (to, to_values) = to.split_at_mut(2 * count);
    let head_dim = from_values.len() / count;
    let values = from_values.chunks_exact(head_dim).zip(to_values.chunks_exact_mut(head_dim));
    for (i, (from_values, to_values)) in values.enumerate() {
        if positions[i] <= first {
            continue;
        }
        let (old, coming) = (to[i], from[i]);
        let new = if coming > old { coming } else { old };
        let (keep, take) = (exp(old - new), exp(coming - new));
        to[i] = new;
        to[count + i] = from[count + i].mul_add(take, to[count + i] * keep);
        for (to, from) in to_values.iter_mut().zip(from_values) {
            *to = from.mul_add(take, *to * keep);
        }
    }
}

/// The result of query `query`, once all its groups are merged.
pub fn finish(partial: &[f32], queries: usize, query: usize, out: &mut [f32]) {
    let total = partial[queries + query];
    let values = &partial[2 * queries..][query * out.len()..][..out.len()];
    for (out, value) in out.iter_mut().zip(values) {
        *out = value / total;
    }
}
