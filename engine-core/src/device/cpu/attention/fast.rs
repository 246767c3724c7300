//! The fast twins. Where few queries share a group, as in a decode, they multiply it as it is
//! stored; where many do, it is widened once, and they share each load of that.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::{GROUP_PAGES, Group, Scores};
use crate::device::cpu::exp::exp_lanes;
use crate::device::cpu::kv::{KvDtype, PAGE, int8_page};
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

/// Columns of each page of a group.
type Columns<'a, C> = [&'a [C]; GROUP_PAGES];

/// As they are stored. Instead of pages that nobody sees there is the first, whose columns then do
/// no harm.
fn stored<'a, C: Column>(pages: &[&'a [u8]]) -> Columns<'a, C> {
    let first = pages.first().copied().unwrap_or_default();
    std::array::from_fn(|page| bytemuck::cast_slice(pages.get(page).copied().unwrap_or(first)))
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn widen<L: Lanes>(
    group: &Group<'_>,
    pages: &[&[u8]],
    scaled: Scaled,
    wide: &mut [[f32; PAGE]],
) {
    for (page, wide) in pages.iter().zip(wide.chunks_exact_mut(group.head_dim)) {
        // SAFETY: the caller's promise.
        unsafe {
            match group.dtype {
                KvDtype::F16 => widen_page::<L, F16>(page, wide),
                KvDtype::BF16 => widen_page::<L, BF16>(page, wide),
                KvDtype::F32 => widen_page::<L, F32>(page, wide),
                KvDtype::Int8 => widen_integers::<L>(page, scaled, wide),
            }
        }
    }
}

/// Which scales the sixteen values of a column have.
#[derive(Clone, Copy)]
enum Scaled {
    /// Keys: 16 positions side by side, each its own.
    Each,
    /// Values: so many columns are of one position.
    Rows(usize),
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn widen_integers<L: Lanes>(page: &[u8], scaled: Scaled, wide: &mut [[f32; PAGE]]) {
    let (columns, scales) = int8_page(page);
    let columns = columns.iter().zip(wide);
    // SAFETY: the caller's promise.
    unsafe {
        match scaled {
            Scaled::Each => {
                for (column, wide) in columns {
                    unrolled!(part of [0 1] below L::PARTS, {
                        let value = L::load_i8(column, part);
                        L::store(wide, part, L::mul(value, L::load(scales, part)));
                    });
                }
            }
            Scaled::Rows(each) => {
                for (index, (column, wide)) in columns.enumerate() {
                    let scale = L::splat(scales[index / each]);
                    unrolled!(part of [0 1] below L::PARTS, {
                        L::store(wide, part, L::mul(L::load_i8(column, part), scale));
                    });
                }
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
    // SAFETY: the caller's promise.
    unsafe {
        match group.dtype {
            // A column of integers is not all that its values are made of.
            dtype if group.seen.len() > L::QUERIES || dtype == KvDtype::Int8 => {
                widen::<L>(group, group.keys, Scaled::Each, wide);
                let dim = group.head_dim;
                let keys = |page| bytemuck::cast_slice(&wide[page * dim..][..dim]);
                scores_of::<L, F32>(group, &std::array::from_fn(keys), out);
            }
            KvDtype::Int8 => unreachable!("widened"),
            KvDtype::F16 => scores_of::<L, F16>(group, &stored(group.keys), out),
            KvDtype::BF16 => scores_of::<L, BF16>(group, &stored(group.keys), out),
            KvDtype::F32 => scores_of::<L, F32>(group, &stored(group.keys), out),
        }
    }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn scores_of<L: Lanes, C: Column>(
    group: &Group<'_>,
    keys: &Columns<'_, C>,
    out: &mut [Scores],
) {
    let dim = group.head_dim;
    let queries = group.q.chunks(L::QUERIES * dim).zip(group.seen.chunks(L::QUERIES));
    let calls = group.seen.len().div_ceil(L::QUERIES);
    for (call, ((q, seen), out)) in queries.zip(out.chunks_mut(L::QUERIES)).enumerate() {
        fetch(group.values, call, calls);
        let pages = seen.iter().max().map_or(0, |seen| seen.div_ceil(PAGE));
        for first in (0..pages).step_by(PAGES) {
            let keys = keys[first..].first_chunk().expect("whole PAGES");
            // SAFETY: the caller's promise.
            unsafe {
                match seen.len() {
                    6 if L::QUERIES >= 6 => page_scores::<L, C, 6>(keys, q, first, out),
                    5 if L::QUERIES >= 5 => page_scores::<L, C, 5>(keys, q, first, out),
                    4 if L::QUERIES >= 4 => page_scores::<L, C, 4>(keys, q, first, out),
                    3 if L::QUERIES >= 3 => page_scores::<L, C, 3>(keys, q, first, out),
                    2 => page_scores::<L, C, 2>(keys, q, first, out),
                    _ => page_scores::<L, C, 1>(keys, q, first, out),
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
unsafe fn page_scores<L: Lanes, C: Column, const R: usize>(
    keys: &[&[C]; PAGES],
    q: &[f32],
    first: usize,
    out: &mut [Scores],
) {
    let dim = q.len() / R;
    let keys: [&[C]; PAGES] = std::array::from_fn(|page| &keys[page][..dim]);
    let q: [&[f32]; R] = std::array::from_fn(|r| &q[r * dim..][..dim]);
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [[L::splat(0.0); PAGES]; R];
            for d in 0..dim {
                let mut key = [L::splat(0.0); PAGES];
                unrolled!(page of [0 1 2 3] below PAGES, {
                    key[page] = keys[page][d].load::<L>(part);
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
    // SAFETY: the caller's promise.
    unsafe {
        match group.dtype {
            dtype if group.seen.len() > L::QUERIES || dtype == KvDtype::Int8 => {
                widen::<L>(group, group.values, Scaled::Rows(group.head_dim / PAGE), wide);
                values_of::<L, F32>(group, &[bytemuck::cast_slice(wide)], weights, out);
            }
            KvDtype::Int8 => unreachable!("widened"),
            KvDtype::F16 => values_of::<L, F16>(group, &stored(group.values), weights, out),
            KvDtype::BF16 => values_of::<L, BF16>(group, &stored(group.values), weights, out),
            KvDtype::F32 => values_of::<L, F32>(group, &stored(group.values), weights, out),
        }
    }
}

/// `values` are stretches of positions that follow one another.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn values_of<L: Lanes, C: Column>(
    group: &Group<'_>,
    values: &[&[C]],
    weights: &[Scores],
    out: &mut [f32],
) {
    let columns = group.head_dim / PAGE;
    let queries = group.seen.chunks(L::QUERIES).zip(weights.chunks(L::QUERIES));
    let out = out.as_chunks_mut::<PAGE>().0;
    let calls = group.seen.len().div_ceil(L::QUERIES);
    let of_calls = queries.zip(out.chunks_mut(L::QUERIES * columns)).enumerate();
    for (call, ((seen, weights), out)) in of_calls {
        fetch(group.next_keys, call, calls);
        let count = seen.iter().max().copied().unwrap_or(0);
        let mut first = 0;
        while first < columns {
            let place = Place { columns, first, count };
            // SAFETY: the caller's promise.
            first += unsafe {
                if columns - first >= 4 {
                    slice::<L, C, 4>(values, place, weights, out)
                } else {
                    slice::<L, C, 1>(values, place, weights, out)
                }
            };
        }
    }
}

/// What [`sum`] takes of the values of a group.
#[derive(Clone, Copy)]
struct Place {
    /// Registers of 16 dimensions that a position has.
    columns: usize,
    /// Of these, the first that is meant.
    first: usize,
    /// Positions, from the first of the group on.
    count: usize,
}

/// W columns of 16 dimensions, from column `place.first` on.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn slice<L: Lanes, C: Column, const W: usize>(
    values: &[&[C]],
    place: Place,
    weights: &[Scores],
    out: &mut [[f32; PAGE]],
) -> usize {
    // SAFETY: the features are the caller's promise.
    unsafe {
        match weights.len() {
            6 if L::QUERIES >= 6 => sum::<L, C, W, 6>(values, place, weights, out),
            5 if L::QUERIES >= 5 => sum::<L, C, W, 5>(values, place, weights, out),
            4 if L::QUERIES >= 4 => sum::<L, C, W, 4>(values, place, weights, out),
            3 if L::QUERIES >= 3 => sum::<L, C, W, 3>(values, place, weights, out),
            2 => sum::<L, C, W, 2>(values, place, weights, out),
            _ => sum::<L, C, W, 1>(values, place, weights, out),
        }
    }
    W
}

/// The same for R queries.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
unsafe fn sum<L: Lanes, C: Column, const W: usize, const R: usize>(
    values: &[&[C]],
    place: Place,
    weights: &[Scores],
    out: &mut [[f32; PAGE]],
) {
    let Place { columns, first, count } = place;
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [[L::splat(0.0); W]; R];
            let mut left = count;
            for values in values {
                let positions = (values.len() / columns).min(left);
                let weights: [&[f32]; R] =
                    std::array::from_fn(|r| &weights[r].as_flattened()[count - left..]);
                left -= positions;
                for (at, row) in values.chunks_exact(columns).enumerate().take(positions) {
                    let row: &[C; W] = row[first..].first_chunk().expect("W columns left");
                    let mut value = [L::splat(0.0); W];
                    unrolled!(w of [0 1 2 3] below W, {
                        value[w] = row[w].load::<L>(part);
                    });
                    unrolled!(r of [0 1 2 3 4 5] below R, {
                        let weight = L::splat(weights[r][at]);
                        unrolled!(w of [0 1 2 3] below W, {
                            acc[r][w] = L::fma(value[w], weight, acc[r][w]);
                        });
                    });
                }
            }
            for (acc, out) in acc.iter().zip(out.chunks_exact_mut(columns)) {
                for (acc, out) in acc.iter().zip(&mut out[first..]) {
                    L::store(out, part, *acc);
                }
            }
        });
    }
}
