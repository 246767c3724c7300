//! The specification: plain loops over the packed layout.

use half::{bf16, f16};

use super::{Input, Output};
use crate::device::cpu::packed::{Kind, Q4Block, Q6Block, Q8Pair, TILE};
use crate::device::cpu::quantise::{BlockRows, GROUP_ROWS};

/// See [`super::multiply`].
///
/// # Safety
/// As there.
pub unsafe fn multiply(kind: Kind, tiles: &[u8], input: &Input<'_>, rows: usize, out: Output) {
    let tile_bytes = kind.tile_bytes(input.cols);
    for (index, tile) in tiles.chunks_exact(tile_bytes).enumerate() {
        for row in 0..rows {
            // SAFETY: inside the rows and tiles that the caller vouches for.
            let to = unsafe { out.at(row, index) };
            for (lane, to) in to.iter_mut().enumerate() {
                let value = match kind {
                    Kind::Q4 => dot_q4(bytemuck::cast_slice(tile), lane, input.blocks_of(row), row),
                    Kind::Q8 => dot_q8(bytemuck::cast_slice(tile), lane, input.blocks_of(row), row),
                    Kind::Q6 => dot_q6(bytemuck::cast_slice(tile), lane, input.blocks_of(row), row),
                    Kind::F16 => dot_plain(tile, lane, input.x_of(row), |bits: u16| {
                        f16::from_bits(bits).to_f32()
                    }),
                    Kind::BF16 => dot_plain(tile, lane, input.x_of(row), |bits: u16| {
                        bf16::from_bits(bits).to_f32()
                    }),
                    Kind::F32 => dot_plain(tile, lane, input.x_of(row), |value: f32| value),
                };
                *to = if out.add { *to + value } else { value };
            }
        }
    }
}

fn dot_q4(tile: &[Q4Block], lane: usize, rows: &[BlockRows], row: usize) -> f32 {
    let mut acc = 0.0_f32;
    for (w, x) in tile.iter().zip(rows) {
        let x = &x[row % GROUP_ROWS];
        let q: &[i8] = bytemuck::cast_slice(&x.words);
        let mut dot = 0_i32;
        for (i, q) in q.iter().enumerate() {
            let byte = w.nibbles[(i % 16) / 4][4 * lane + i % 4];
            dot += i32::from((byte >> (4 * (i / 16))) & 15) * i32::from(*q);
        }
        acc = (dot as f32).mul_add(f16::from_bits(w.scale[lane]).to_f32() * x.scale, acc);
        acc = f16::from_bits(w.minimum[lane]).to_f32().mul_add(x.sum, acc);
    }
    acc
}

fn dot_q8(tile: &[Q8Pair], lane: usize, rows: &[BlockRows], row: usize) -> f32 {
    let mut acc = 0.0_f32;
    for (b, x) in rows.iter().enumerate() {
        let x = &x[row % GROUP_ROWS];
        let (values, scale) = (&tile[b / 2].values[b % 2], tile[b / 2].scale[b % 2][lane]);
        let q: &[i8] = bytemuck::cast_slice(&x.words);
        let mut dot = 0_i32;
        for (i, q) in q.iter().enumerate() {
            dot += (i32::from(values[i / 4][4 * lane + i % 4]) - 128) * i32::from(*q);
        }
        acc = (dot as f32).mul_add(f16::from_bits(scale).to_f32() * x.scale, acc);
    }
    acc
}

fn dot_q6(tile: &[Q6Block], lane: usize, rows: &[BlockRows], row: usize) -> f32 {
    let mut acc = 0.0_f32;
    for (w, x) in tile.iter().zip(rows) {
        let x = &x[row % GROUP_ROWS];
        let q: &[i8] = bytemuck::cast_slice(&x.words);
        for (half, sum) in [x.half_sum, x.sum - x.half_sum].into_iter().enumerate() {
            let mut dot = 0_i32;
            for (i, q) in q.iter().enumerate().skip(16 * half).take(16) {
                dot += i32::from(w.values[i / 4][4 * lane + i % 4]) * i32::from(*q);
            }
            let weight = |bits: u16| f16::from_bits(bits).to_f32();
            acc = (dot as f32).mul_add(weight(w.scale[half][lane]) * x.scale, acc);
            acc = weight(w.minimum[half][lane]).mul_add(sum, acc);
        }
    }
    acc
}

fn dot_plain<T: bytemuck::Pod>(
    tile: &[u8],
    lane: usize,
    row: &[f32],
    value: impl Fn(T) -> f32,
) -> f32 {
    let weights: &[T] = bytemuck::cast_slice(tile);
    let mut acc = 0.0_f32;
    for (w, x) in weights.chunks_exact(TILE).zip(row) {
        acc = value(w[lane]).mul_add(*x, acc);
    }
    acc
}
