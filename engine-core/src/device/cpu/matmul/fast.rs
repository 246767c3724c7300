//! The fast twins: the same sums in the same order, 16 outputs and up to 8 rows at a time.
//!
//! With 8 rows a Q4 block takes 112 operations of the two ports that do its 64 byte products: 57 %
//! of their peak, and it was measured at that. 16 rows would be 61 %, but do not fit into the
//! registers: they were measured at 47 %.

use super::{Input, Output};
use crate::device::cpu::lanes::{Avx2, Avx512, BF16, Column, F16, F32, Lanes, unrolled};
use crate::device::cpu::packed::{Kind, Q4Block, Q6Block, Q8Pair, TILE};
use crate::device::cpu::quantise::{BlockRows, GROUP_ROWS, QuantisedBlock};

/// See [`super::multiply`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub unsafe fn multiply_avx512(
    kind: Kind,
    tiles: &[u8],
    input: &Input<'_>,
    rows: usize,
    out: Output,
) {
    // SAFETY: the caller's promise; the features are those of the function.
    unsafe { multiply::<Avx512>(kind, tiles, input, rows, out) }
}

/// See [`super::multiply`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn multiply_avx2(kind: Kind, tiles: &[u8], input: &Input<'_>, rows: usize, out: Output) {
    // SAFETY: the caller's promise; the features are those of the function.
    unsafe { multiply::<Avx2>(kind, tiles, input, rows, out) }
}

/// # Safety
/// As for [`super::multiply`], and the features of `L`.
#[inline(always)]
unsafe fn multiply<L: Lanes>(
    kind: Kind,
    tiles: &[u8],
    input: &Input<'_>,
    rows: usize,
    out: Output,
) {
    for (index, tile) in tiles.chunks_exact(kind.tile_bytes(input.cols)).enumerate() {
        let mut row = 0;
        while row < rows {
            // SAFETY: rows and tiles are those of the caller.
            row += unsafe {
                match rows - row {
                    8.. => run::<L, 8>(kind, tile, input, row, index, out),
                    4.. => run::<L, 4>(kind, tile, input, row, index, out),
                    2.. => run::<L, 2>(kind, tile, input, row, index, out),
                    _ => run::<L, 1>(kind, tile, input, row, index, out),
                }
            };
        }
    }
}

/// One tile and M rows from `row` on.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn run<L: Lanes, const M: usize>(
    kind: Kind,
    tile: &[u8],
    input: &Input<'_>,
    row: usize,
    index: usize,
    out: Output,
) -> usize {
    // SAFETY: the caller's promise.
    let mut to: [&mut [f32; TILE]; M] = std::array::from_fn(|m| unsafe { out.at(row + m, index) });
    let add = out.add;
    // SAFETY: the features are the caller's promise.
    unsafe {
        if kind.quantised() {
            let (x, at) = (input.blocks_of(row), row % GROUP_ROWS);
            match kind {
                Kind::Q4 => q4::<L, M>(bytemuck::cast_slice(tile), x, at, add, &mut to),
                Kind::Q6 => q6::<L, M>(bytemuck::cast_slice(tile), x, at, add, &mut to),
                _ => q8::<L, M>(bytemuck::cast_slice(tile), x, at, add, &mut to),
            }
        } else {
            let x: [&[f32]; M] = std::array::from_fn(|m| input.x_of(row + m));
            match kind {
                Kind::F16 => plain::<L, F16, M>(bytemuck::cast_slice(tile), x, add, &mut to),
                Kind::BF16 => plain::<L, BF16, M>(bytemuck::cast_slice(tile), x, add, &mut to),
                _ => plain::<L, F32, M>(bytemuck::cast_slice(tile), x, add, &mut to),
            }
        }
    }
    M
}

#[inline(always)]
unsafe fn store<L: Lanes, const M: usize>(
    part: usize,
    add: bool,
    acc: [L::F; M],
    to: &mut [&mut [f32; TILE]; M],
) {
    for (acc, to) in acc.into_iter().zip(to) {
        // SAFETY: the features are the caller's promise.
        unsafe { L::store(to, part, if add { L::add(L::load(to, part), acc) } else { acc }) }
    }
}

/// M rows of a group, from its row `at` on.
#[inline(always)]
fn rows_of<const M: usize>(group: &BlockRows, at: usize) -> &[QuantisedBlock; M] {
    let at = if M == GROUP_ROWS { 0 } else { at };
    group[at..].first_chunk().expect("a call's rows are of one group")
}

#[inline(always)]
unsafe fn q4<L: Lanes, const M: usize>(
    tile: &[Q4Block],
    x: &[BlockRows],
    at: usize,
    add: bool,
    to: &mut [&mut [f32; TILE]; M],
) {
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [L::splat(0.0); M];
            for (w, x) in tile.iter().zip(x) {
                let rows = rows_of::<M>(x, at);
                let scale = L::load_f16(&w.scale, part);
                let minimum = L::load_f16(&w.minimum, part);
                let mut values = [L::splat_i(0); 8];
                unrolled!(group of [0 1 2 3] below 4, {
                    let both = L::load_i(&w.nibbles[group], part);
                    values[group] = L::low_nibbles(both);
                    values[group + 4] = L::high_nibbles(both);
                });
                unrolled!(m of [0 1 2 3 4 5 6 7] below M, {
                    let x = &rows[m];
                    let mut dot = L::splat_i(0);
                    unrolled!(four of [0 1 2 3 4 5 6 7] below 8, {
                        dot = L::dot_small(dot, values[four], L::splat_i(x.words[four]));
                    });
                    let scale = L::mul(scale, L::splat(x.scale));
                    acc[m] = L::fma(L::to_f(dot), scale, acc[m]);
                    acc[m] = L::fma(minimum, L::splat(x.sum), acc[m]);
                });
            }
            store::<L, M>(part, add, acc, to);
        });
    }
}

#[inline(always)]
unsafe fn q8<L: Lanes, const M: usize>(
    tile: &[Q8Pair],
    x: &[BlockRows],
    at: usize,
    add: bool,
    to: &mut [&mut [f32; TILE]; M],
) {
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [L::splat(0.0); M];
            for (w, pair) in tile.iter().zip(x.chunks(2)) {
                unrolled!(half of [0 1] below 2, {
                    if let Some(x) = pair.get(half) {
                        let rows = rows_of::<M>(x, at);
                        let scale = L::load_f16(&w.scale[half], part);
                        let mut values = [L::splat_i(0); 8];
                        for (values, bytes) in values.iter_mut().zip(&w.values[half]) {
                            *values = L::load_i(bytes, part);
                        }
                        unrolled!(m of [0 1 2 3 4 5 6 7] below M, {
                            let x = &rows[m];
                            let mut dot = L::dot_bytes_start(x.integer_sum);
                            unrolled!(four of [0 1 2 3 4 5 6 7] below 8, {
                                dot = L::dot_bytes(dot, values[four], L::splat_i(x.words[four]));
                            });
                            let scale = L::mul(scale, L::splat(x.scale));
                            acc[m] = L::fma(L::to_f(dot), scale, acc[m]);
                        });
                    }
                });
            }
            store::<L, M>(part, add, acc, to);
        });
    }
}

#[inline(always)]
unsafe fn q6<L: Lanes, const M: usize>(
    tile: &[Q6Block],
    x: &[BlockRows],
    at: usize,
    add: bool,
    to: &mut [&mut [f32; TILE]; M],
) {
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [L::splat(0.0); M];
            for (w, x) in tile.iter().zip(x) {
                let rows = rows_of::<M>(x, at);
                unrolled!(half of [0 1] below 2, {
                    let scale = L::load_f16(&w.scale[half], part);
                    let minimum = L::load_f16(&w.minimum[half], part);
                    let mut values = [L::splat_i(0); 4];
                    unrolled!(four of [0 1 2 3] below 4, {
                        values[four] = L::load_i(&w.values[4 * half + four], part);
                    });
                    unrolled!(m of [0 1 2 3 4 5 6 7] below M, {
                        let x = &rows[m];
                        let mut dot = L::splat_i(0);
                        unrolled!(four of [0 1 2 3] below 4, {
                            let words = L::splat_i(x.words[4 * half + four]);
                            dot = L::dot_small(dot, values[four], words);
                        });
                        let scale = L::mul(scale, L::splat(x.scale));
                        acc[m] = L::fma(L::to_f(dot), scale, acc[m]);
                        let sum = if half == 0 {
                            L::splat(x.half_sum)
                        } else {
                            L::sub(L::splat(x.sum), L::splat(x.half_sum))
                        };
                        acc[m] = L::fma(minimum, sum, acc[m]);
                    });
                });
            }
            store::<L, M>(part, add, acc, to);
        });
    }
}

#[inline(always)]
unsafe fn plain<L: Lanes, C: Column, const M: usize>(
    tile: &[C],
    x: [&[f32]; M],
    add: bool,
    to: &mut [&mut [f32; TILE]; M],
) {
    let x = x.map(|x| &x[..tile.len()]);
    // SAFETY: the features are the caller's promise.
    unsafe {
        unrolled!(part of [0 1] below L::PARTS, {
            let mut acc = [L::splat(0.0); M];
            for (k, column) in tile.iter().enumerate() {
                let w = column.load::<L>(part);
                unrolled!(m of [0 1 2 3 4 5 6 7] below M, {
                    acc[m] = L::fma(w, L::splat(x[m][k]), acc[m]);
                });
            }
            store::<L, M>(part, add, acc, to);
        });
    }
}
