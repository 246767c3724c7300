//! Activations as 8-bit integers: one scale and one sum for each 32 values.

use bytemuck::{Pod, Zeroable};

use super::isa::isa_twins;
use super::packed::BLOCK;

/// Adding and subtracting this rounds a float of less than 2^22 to the nearest integer, ties to
/// even, and leaves that integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;
/// Below this, a block is zero: its reciprocal would not be finite.
const SMALLEST: f32 = 1e-30;

/// 32 values of a row: `x[i] ≈ q[i] · scale`, `q` in -127..=127. One stream, so that a kernel that
/// runs eight rows at once needs eight pointers.
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
    /// To a size that vectors like.
    pub padding: i32,
}

isa_twins! {
    /// Quantises a row. A NaN or infinity makes its block's scale so, and with it every product of
    /// the row: it is not lost.
    pub fn quantise_row = quantise_row_body(x: &[f32], out: &mut [QuantisedBlock])
}

#[inline(always)]
fn quantise_row_body(x: &[f32], out: &mut [QuantisedBlock]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        // Compared as integers, a NaN is larger than any number.
        let mut largest = 0_u32;
        for value in x {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let largest = f32::from_bits(largest);
        let factor = if largest > SMALLEST { 127.0 / largest } else { 0.0 };
        let mut total = 0_i32;
        let mut q = [0_i8; BLOCK];
        for (value, q) in x.iter().zip(&mut q) {
            let rounded = (value * factor + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
            *q = rounded as i8;
            total = total.wrapping_add(i32::from(*q));
        }
        out.words = bytemuck::cast(q);
        out.scale = if largest > SMALLEST || largest.is_nan() { largest / 127.0 } else { 0.0 };
        out.sum = out.scale * total as f32;
        out.integer_sum = total;
    }
}
