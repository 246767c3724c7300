//! The fast twins: a group is widened once, then several queries share each load of it.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::{GROUP_PAGES, Group, Scores};
use crate::device::cpu::exp::exp_lanes;
use crate::device::cpu::kv::{KvDtype, PAGE};
use crate::device::cpu::lanes::{Avx2, Avx512, BF16, Column, F16, F32, Lanes, unrolled};
use crate::device::cpu::rows::sum_lanes;

/// See [`super::scalar::scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn scores_avx512(group: &Group<'_>, wide: &mut [[f32; PAGE]], out: &mut [Scores]) {
    // SAFETY: the features are those of the function.
    unsafe { scores::<Avx512>(group, wide, out) }
}

/// See [`super::scalar::scores`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn scores_avx2(group: &Group<'_>, wide: &mut [[f32; PAGE]], out: &mut [Scores]) {
    // SAFETY: the features are those of the function.
    unsafe { scores::<Avx2>(group, wide, out) }
}

/// See [`super::scalar::values`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn values_avx512(
    group: &Group<'_>,
    wide: &mut [[f32; PAGE]],
    weights: &[Scores],
    out: &mut [f32],
) {
    // SAFETY: the features are those of the function.
    unsafe { values::<Avx512>(group, wide, weights, out) }
}

/// See [`super::scalar::values`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn values_avx2(
    group: &Group<'_>,
    wide: &mut [[f32; PAGE]],
    weights: &[Scores],
    out: &mut [f32],
) {
    // SAFETY: the features are those of the function.
    unsafe { values::<Avx2>(group, wide, weights, out) }
}

/// See [`super::scalar::soften`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn soften_avx512(
    seen: &[usize],
    scores: &mut [Scores],
    largest: &mut [f32],
    total: &mut [f32],
) {
    // SAFETY: the features are those of the function.
    unsafe { soften::<Avx512>(seen, scores, largest, total) }
}

/// See [`super::scalar::soften`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn soften_avx2(seen: &[usize], scores: &mut [Scores], largest: &mut [f32], total: &mut [f32]) {
    // SAFETY: the features are those of the function.
    unsafe { soften::<Avx2>(seen, scores, largest, total) }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn widen<L: Lanes>(group: &Group<'_>, pages: &[&[u8]], wide: &mut [[f32; PAGE]]) {
    for (page, wide) in pages.iter().zip(wide.chunks_exact_mut(group.head_dim)) {
        // SAFETY: the caller's promise.
        unsafe {
            match group.dtype {
                KvDtype::F16 => widen_page::<L, F16>(page, wide),
                KvDtype::BF16 => widen_page::<L, BF16>(page, wide),
                KvDtype::F32 => widen_page::<L, F32>(page, wide),
            }
        }
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn widen_page<L: Lanes, C: Column>(page: &[u8], wide: &mut [[f32; PAGE]]) {
    let page: &[C] = bytemuck::cast_slice(page);
    for (column, wide) in page.iter().zip(wide) {
        // SAFETY: the caller's promise.
        unsafe {
            unrolled!(part of [0 1] below L::PARTS, {
                L::store(wide, part, column.load::<L>(part));
            });
        }
    }
}

/// Asks for one of `parts` parts of the pages: while keys are multiplied the values come, and while
/// values are multiplied the next keys, from wherever they are into the second-level cache.
#[inline(always)]
fn fetch(pages: &[&[u8]], part: usize, parts: usize) {
    const LINE: usize = 64;
    let share = |part: usize| pages.len() * part / parts;
    // With fewer parts than pages whole pages are asked for at once; no matter.
    for page in &pages[share(part)..share(part + 1)] {
        for line in page.iter().step_by(LINE) {
            // SAFETY: a hint, of an address inside the page.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(line).cast()) };
        }
    }
}

/// Pages whose scores are computed at once.
const PAGES: usize = 4;
const _: () = assert!(GROUP_PAGES.is_multiple_of(PAGES));

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn scores<L: Lanes>(group: &Group<'_>, wide: &mut [[f32; PAGE]], out: &mut [Scores]) {
    let dim = group.head_dim;
    // SAFETY: the caller's promise.
    unsafe { widen::<L>(group, group.keys, wide) };
    let calls = group.seen.len().div_ceil(L::QUERIES);
    let queries = group.q.chunks(L::QUERIES * dim).zip(group.seen.chunks(L::QUERIES));
    for (call, ((q, seen), out)) in queries.zip(out.chunks_mut(L::QUERIES)).enumerate() {
        fetch(group.values, call, calls);
        let pages = seen.iter().max().map_or(0, |seen| seen.div_ceil(PAGE));
        for first in (0..pages).step_by(PAGES) {
            let keys = &wide[first * dim..][..PAGES * dim];
            // SAFETY: the caller's promise.
            unsafe {
                match seen.len() {
                    6 if L::QUERIES >= 6 => page_scores::<L, 6>(keys, q, first, out),
                    5 if L::QUERIES >= 5 => page_scores::<L, 5>(keys, q, first, out),
                    4 if L::QUERIES >= 4 => page_scores::<L, 4>(keys, q, first, out),
                    3 if L::QUERIES >= 3 => page_scores::<L, 3>(keys, q, first, out),
                    2 => page_scores::<L, 2>(keys, q, first, out),
                    _ => page_scores::<L, 1>(keys, q, first, out),
                }
            }
        }
    }
}

/// R queries and four pages, from page `first` on.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn page_scores<L: Lanes, const R: usize>(
    keys: &[[f32; PAGE]],
    q: &[f32],
    first: usize,
    out: &mut [Scores],
) {
    let dim = keys.len() / PAGES;
    let keys: [&[[f32; PAGE]]; PAGES] = std::array::from_fn(|page| &keys[page * dim..][..dim]);
    let q: [&[f32]; R] = std::array::from_fn(|r| &q[r * dim..][..dim]);
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [[L::splat(0.0); PAGES]; R];
            for d in 0..dim {
                let mut key = [L::splat(0.0); PAGES];
                unrolled!(page of [0 1 2 3] below PAGES, {
                    key[page] = L::load(&keys[page][d], part);
                });
                unrolled!(r of [0 1 2 3 4 5] below R, {
                    let q = L::splat(q[r][d]);
                    unrolled!(page of [0 1 2 3] below PAGES, {
                        acc[r][page] = L::fma(key[page], q, acc[r][page]);
                    });
                });
            }
            for (acc, out) in acc.iter().zip(&mut *out) {
                for (acc, out) in acc.iter().zip(&mut out[first..]) {
                    L::store(out, part, *acc);
                }
            }
        });
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn soften<L: Lanes>(
    seen: &[usize],
    scores: &mut [Scores],
    largest: &mut [f32],
    total: &mut [f32],
) {
    for (((&seen, scores), largest), total) in seen.iter().zip(scores).zip(largest).zip(total) {
        scores.as_flattened_mut()[seen..].fill(f32::NEG_INFINITY);
        let mut lanes = [0.0_f32; PAGE];
        // SAFETY: the features are the caller's promise.
        unsafe {
            unrolled!(part of [0 1] below L::PARTS, {
                let mut most = L::splat(f32::NEG_INFINITY);
                for page in &*scores {
                    // What is no number loses.
                    most = L::max(L::load(page, part), most);
                }
                L::store(&mut lanes, part, most);
            });
        }
        let mut width = PAGE / 2;
        while width > 0 {
            for i in 0..width {
                let (a, b) = (lanes[i], lanes[i + width]);
                lanes[i] = if b > a { b } else { a };
            }
            width /= 2;
        }
        let most = if lanes[0] == f32::NEG_INFINITY { 0.0 } else { lanes[0] };
        // SAFETY: the features are the caller's promise.
        unsafe {
            unrolled!(part of [0 1] below L::PARTS, {
                let mut sum = L::splat(0.0);
                for page in &mut *scores {
                    let weight = exp_lanes::<L>(L::sub(L::load(page, part), L::splat(most)));
                    L::store(page, part, weight);
                    sum = L::add(sum, weight);
                }
                L::store(&mut lanes, part, sum);
            });
        }
        (*largest, *total) = (most, sum_lanes(lanes));
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn values<L: Lanes>(
    group: &Group<'_>,
    wide: &mut [[f32; PAGE]],
    weights: &[Scores],
    out: &mut [f32],
) {
    let columns = group.head_dim / PAGE;
    // SAFETY: the caller's promise.
    unsafe { widen::<L>(group, group.values, wide) };
    let queries = group.seen.chunks(L::QUERIES).zip(weights.chunks(L::QUERIES));
    let calls = group.seen.len().div_ceil(L::QUERIES);
    let out = out.as_chunks_mut::<PAGE>().0;
    let of_calls = queries.zip(out.chunks_mut(L::QUERIES * columns)).enumerate();
    for (call, ((seen, weights), out)) in of_calls {
        fetch(group.next_keys, call, calls);
        let count = seen.iter().max().copied().unwrap_or(0);
        let rows = &wide[..count * columns];
        let mut first = 0;
        while first < columns {
            // SAFETY: the features are the caller's promise.
            first += unsafe {
                if columns - first >= 4 {
                    slice::<L, 4>(rows, columns, weights, out, first)
                } else {
                    slice::<L, 1>(rows, columns, weights, out, first)
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
unsafe fn slice<L: Lanes, const W: usize>(
    rows: &[[f32; PAGE]],
    columns: usize,
    weights: &[Scores],
    out: &mut [[f32; PAGE]],
    first: usize,
) -> usize {
    // SAFETY: the features are the caller's promise.
    unsafe {
        match weights.len() {
            6 if L::QUERIES >= 6 => sum::<L, W, 6>(rows, columns, weights, out, first),
            5 if L::QUERIES >= 5 => sum::<L, W, 5>(rows, columns, weights, out, first),
            4 if L::QUERIES >= 4 => sum::<L, W, 4>(rows, columns, weights, out, first),
            3 if L::QUERIES >= 3 => sum::<L, W, 3>(rows, columns, weights, out, first),
            2 => sum::<L, W, 2>(rows, columns, weights, out, first),
            _ => sum::<L, W, 1>(rows, columns, weights, out, first),
        }
    }
    W
}

/// The same for R queries.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn sum<L: Lanes, const W: usize, const R: usize>(
    rows: &[[f32; PAGE]],
    columns: usize,
    weights: &[Scores],
    out: &mut [[f32; PAGE]],
    first: usize,
) {
    let weights: [&[f32]; R] = std::array::from_fn(|r| weights[r].as_flattened());
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [[L::splat(0.0); W]; R];
            for (position, row) in rows.chunks_exact(columns).enumerate().take(PAGE * GROUP_PAGES) {
                let row: &[[f32; PAGE]; W] = row[first..].first_chunk().expect("W columns left");
                let mut value = [L::splat(0.0); W];
                unrolled!(w of [0 1 2 3] below W, {
                    value[w] = L::load(&row[w], part);
                });
                unrolled!(r of [0 1 2 3 4 5] below R, {
                    let weight = L::splat(weights[r][position]);
                    unrolled!(w of [0 1 2 3] below W, {
                        acc[r][w] = L::fma(value[w], weight, acc[r][w]);
                    });
                });
            }
            for (acc, out) in acc.iter().zip(out.chunks_exact_mut(columns)) {
                for (acc, out) in acc.iter().zip(&mut out[first..]) {
                    L::store(out, part, *acc);
                }
            }
        });
    }
}
