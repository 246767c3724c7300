//! The fast twins: several queries share each load of keys and values.

use super::{GroupScores, PAGE, Query, Scores};
use crate::device::cpu::kv::{KvCache, KvDtype};
use crate::device::cpu::lanes::{Avx2, Avx512, BF16, Column, F16, F32, Lanes, unrolled};

/// See [`super::scalar::scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn scores_avx512(cache: &KvCache, keys: &[&[u8]], queries: &[Query<'_>], out: &mut Scores) {
    // SAFETY: the features are those of the function.
    unsafe { scores::<Avx512>(cache, keys, queries, out) }
}

/// See [`super::scalar::scores`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn scores_avx2(cache: &KvCache, keys: &[&[u8]], queries: &[Query<'_>], out: &mut Scores) {
    // SAFETY: the features are those of the function.
    unsafe { scores::<Avx2>(cache, keys, queries, out) }
}

/// See [`super::scalar::add_values`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn add_values_avx512(
    cache: &KvCache,
    values: &[&[u8]],
    count: usize,
    weights: &Scores,
    queries: &mut [Query<'_>],
) {
    // SAFETY: the features are those of the function.
    unsafe { add_values::<Avx512>(cache, values, count, weights, queries) }
}

/// See [`super::scalar::add_values`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn add_values_avx2(
    cache: &KvCache,
    values: &[&[u8]],
    count: usize,
    weights: &Scores,
    queries: &mut [Query<'_>],
) {
    // SAFETY: the features are those of the function.
    unsafe { add_values::<Avx2>(cache, values, count, weights, queries) }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn scores<L: Lanes>(
    cache: &KvCache,
    keys: &[&[u8]],
    queries: &[Query<'_>],
    out: &mut Scores,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match cache.dtype {
            KvDtype::F16 => scores_of::<L, F16>(keys, queries, out),
            KvDtype::BF16 => scores_of::<L, BF16>(keys, queries, out),
            KvDtype::F32 => scores_of::<L, F32>(keys, queries, out),
        }
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn scores_of<L: Lanes, C: Column>(keys: &[&[u8]], queries: &[Query<'_>], out: &mut Scores) {
    for (queries, out) in queries.chunks(L::QUERIES).zip(out.chunks_mut(L::QUERIES)) {
        for (index, page) in keys.iter().enumerate() {
            let page: &[C] = bytemuck::cast_slice(page);
            // SAFETY: the features are the caller's promise.
            unsafe {
                match queries.len() {
                    6 if L::QUERIES >= 6 => page_scores::<L, C, 6>(page, queries, index, out),
                    5 if L::QUERIES >= 5 => page_scores::<L, C, 5>(page, queries, index, out),
                    4 if L::QUERIES >= 4 => page_scores::<L, C, 4>(page, queries, index, out),
                    3 if L::QUERIES >= 3 => page_scores::<L, C, 3>(page, queries, index, out),
                    2 => page_scores::<L, C, 2>(page, queries, index, out),
                    _ => page_scores::<L, C, 1>(page, queries, index, out),
                }
            }
        }
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn page_scores<L: Lanes, C: Column, const R: usize>(
    page: &[C],
    queries: &[Query<'_>],
    index: usize,
    out: &mut [GroupScores],
) {
    let page = page.as_chunks::<4>().0;
    let q: [&[[f32; 4]]; R] = std::array::from_fn(|r| &queries[r].q.as_chunks().0[..page.len()]);
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut chains = [[L::splat(0.0); 4]; R];
            for (d, keys) in page.iter().enumerate() {
                unrolled!(chain of [0 1 2 3] below 4, {
                    let key = keys[chain].load::<L>(part);
                    unrolled!(r of [0 1 2 3 4 5] below R, {
                        let q = L::splat(q[r][d][chain]);
                        chains[r][chain] = L::fma(key, q, chains[r][chain]);
                    });
                });
            }
            for (chains, out) in chains.into_iter().zip(&mut *out) {
                let [a, b, c, d] = chains;
                L::store(&mut out[index], part, L::add(L::add(a, b), L::add(c, d)));
            }
        });
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn add_values<L: Lanes>(
    cache: &KvCache,
    values: &[&[u8]],
    count: usize,
    weights: &Scores,
    queries: &mut [Query<'_>],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match cache.dtype {
            KvDtype::F16 => add_values_of::<L, F16>(values, count, weights, queries),
            KvDtype::BF16 => add_values_of::<L, BF16>(values, count, weights, queries),
            KvDtype::F32 => add_values_of::<L, F32>(values, count, weights, queries),
        }
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn add_values_of<L: Lanes, C: Column>(
    values: &[&[u8]],
    count: usize,
    weights: &Scores,
    queries: &mut [Query<'_>],
) {
    for (queries, weights) in queries.chunks_mut(L::QUERIES).zip(weights.chunks(L::QUERIES)) {
        let columns = queries[0].out.len() / PAGE;
        let mut first = 0;
        while first < columns {
            // SAFETY: the features are the caller's promise.
            first += unsafe {
                if columns - first >= 4 {
                    slice::<L, C, 4>(values, count, weights, queries, first)
                } else {
                    slice::<L, C, 1>(values, count, weights, queries, first)
                }
            };
        }
    }
}

/// W columns of 16 dimensions, from column `first` on.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn slice<L: Lanes, C: Column, const W: usize>(
    values: &[&[u8]],
    count: usize,
    weights: &[GroupScores],
    queries: &mut [Query<'_>],
    first: usize,
) -> usize {
    // SAFETY: the features are the caller's promise.
    unsafe {
        match queries.len() {
            6 if L::QUERIES >= 6 => of::<L, C, W, 6>(values, count, weights, queries, first),
            5 if L::QUERIES >= 5 => of::<L, C, W, 5>(values, count, weights, queries, first),
            4 if L::QUERIES >= 4 => of::<L, C, W, 4>(values, count, weights, queries, first),
            3 if L::QUERIES >= 3 => of::<L, C, W, 3>(values, count, weights, queries, first),
            2 => of::<L, C, W, 2>(values, count, weights, queries, first),
            _ => of::<L, C, W, 1>(values, count, weights, queries, first),
        }
    }
    W
}

/// The same for R queries.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn of<L: Lanes, C: Column, const W: usize, const R: usize>(
    values: &[&[u8]],
    count: usize,
    weights: &[GroupScores],
    queries: &mut [Query<'_>],
    first: usize,
) {
    let columns = queries[0].out.len() / PAGE;
    let weights: [&GroupScores; R] = std::array::from_fn(|r| &weights[r]);
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [[L::splat(0.0); W]; R];
            for (acc, query) in acc.iter_mut().zip(&*queries) {
                for (acc, out) in acc.iter_mut().zip(&query.out.as_chunks::<PAGE>().0[first..]) {
                    *acc = L::load(out, part);
                }
            }
            for (index, page) in values.iter().enumerate() {
                let page: &[C] = bytemuck::cast_slice(page);
                let weights = weights.map(|weights| &weights[index]);
                let rows = page.chunks_exact(columns).take(count - index * PAGE);
                for (position, row) in rows.enumerate().take(PAGE) {
                    let row: &[C; W] = row[first..].first_chunk().expect("W columns are left");
                    let mut value = [L::splat(0.0); W];
                    unrolled!(w of [0 1 2 3] below W, {
                        value[w] = row[w].load::<L>(part);
                    });
                    unrolled!(r of [0 1 2 3 4 5] below R, {
                        let weight = L::splat(weights[r][position]);
                        unrolled!(w of [0 1 2 3] below W, {
                            acc[r][w] = L::fma(value[w], weight, acc[r][w]);
                        });
                    });
                }
            }
            for (acc, query) in acc.iter().zip(&mut *queries) {
                let outs = &mut query.out.as_chunks_mut::<PAGE>().0[first..];
                for (acc, out) in acc.iter().zip(outs) {
                    L::store(out, part, *acc);
                }
            }
        });
    }
}
