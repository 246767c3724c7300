//! Activations as 8-bit integers: one scale and one sum for each 32 values.

use bytemuck::{Pod, Zeroable};

use super::isa::{Isa, isa_twins};
use super::packed::BLOCK;

/// Adding and subtracting this rounds a float of less than 2^22 to the nearest integer, ties to
/// even, and leaves that integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;
/// Below this, a block is zero: its reciprocal would not be finite.
const SMALLEST: f32 = 1e-30;

/// The nearest integer, ties to even, of what is at most 127 in size; of anything else any.
#[inline(always)]
pub fn nearest(value: f32) -> i8 {
    (value + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i8
}

/// What turns values of up to `largest` into integers of up to 127, and the unit of these. A NaN or
/// infinity makes the unit so: it is not lost.
#[inline(always)]
pub fn factor_and_scale(largest: f32) -> (f32, f32) {
    let factor = if largest > SMALLEST { 127.0 / largest } else { 0.0 };
    let scale = if largest > SMALLEST || largest.is_nan() { largest / 127.0 } else { 0.0 };
    (factor, scale)
}

/// The largest size of a value.
#[inline(always)]
pub fn largest_size(x: &[f32]) -> f32 {
    // Compared as integers, a NaN is larger than any number.
    let size = |value: &f32| value.to_bits() & 0x7fff_ffff;
    f32::from_bits(x.iter().map(size).fold(0, u32::max))
}

/// Rows whose blocks lie side by side.
pub const GROUP_ROWS: usize = 8;

/// The same block of eight rows. A kernel that runs eight rows at once reads one stream through one
/// pointer: with eight pointers, they and their bounds did not fit into the registers.
pub type BlockRows = [QuantisedBlock; GROUP_ROWS];

/// Where the blocks of row `row` go in `[row groups][blocks][rows of a group]`.
pub fn place_row(row: usize, from: &[QuantisedBlock], mut to: impl FnMut(usize, QuantisedBlock)) {
    let first = row / GROUP_ROWS * from.len() * GROUP_ROWS + row % GROUP_ROWS;
    for (index, block) in from.iter().enumerate() {
        to(first + index * GROUP_ROWS, *block);
    }
}

/// 32 values of a row: `x[i] ≈ q[i] · scale`, `q` in -127..=127.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct QuantisedBlock {
    /// Four `q` each, the first in the lowest byte.
    pub words: [i32; BLOCK / 4],
    /// Units of q.
    pub scale: f32,
    /// `scale · Σ q`
    pub sum: f32,
    /// `Σ q`
    pub integer_sum: i32,
    /// `scale · Σ q` of the first 16.
    pub half_sum: f32,
}

isa_twins! {
    /// Quantises a row. A NaN or infinity makes its block's scale so, and with it every product of
    /// the row: it is not lost.
    pub fn quantise_row = quantise_row_body(x: &[f32], out: &mut [QuantisedBlock])
}

#[inline(always)]
fn quantise_row_body(x: &[f32], out: &mut [QuantisedBlock]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        let (factor, scale) = factor_and_scale(largest_size(x));
        let mut totals = [0_i32; 2];
        let mut q = [0_i8; BLOCK];
        let halves = x.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(q.as_chunks_mut().0);
        for ((x, q), total) in halves.zip(&mut totals) {
            let q: &mut [i8; BLOCK / 2] = q;
            for (value, q) in x.iter().zip(q) {
                *q = nearest(value * factor);
                *total = total.wrapping_add(i32::from(*q));
            }
        }
        let total = totals[0] + totals[1];
        out.words = bytemuck::cast(q);
        out.scale = scale;
        out.sum = out.scale * total as f32;
        out.integer_sum = total;
        out.half_sum = out.scale * totals[0] as f32;
    }
}

/// Rows of `cols` values in the layout that products read, for tests and measurements.
pub fn quantise_rows(isa: Isa, x: &[f32], cols: usize) -> Vec<BlockRows> {
    let (rows, blocks) = (x.len() / cols, cols / BLOCK);
    let mut out = vec![BlockRows::default(); rows.div_ceil(GROUP_ROWS) * blocks];
    let mut row_blocks = vec![QuantisedBlock::default(); blocks];
    for (row, x) in x.chunks_exact(cols).enumerate() {
        quantise_row(isa, x, &mut row_blocks);
        place_row(row, &row_blocks, |at, block| out.as_flattened_mut()[at] = block);
    }
    out
}
