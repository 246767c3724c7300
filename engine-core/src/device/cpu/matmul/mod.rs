//! Products of packed matrices and activations.
//!
//! The order of every output element is fixed: over the blocks of 32 columns in order, an exact
//! integer dot product, then `acc = fma(dot, weight scale · activation scale, acc)`, then for 4-bit
//! weights `acc = fma(minimum, activation sum, acc)`. Weights of five and six bits do both for each
//! half of a block. Float weights accumulate column by column.
//! Every kernel keeps that order for any number of rows, so all of them give the same bits.

#[cfg(target_arch = "x86_64")]
mod fast;
mod scalar;
#[cfg(test)]
mod tests;

use super::isa::Isa;
use super::packed::{BLOCK, Kind, TILE};
use super::quantise::{BlockRows, GROUP_ROWS};

/// Rows of activations, quantised and not.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Values in a row.
    pub cols: usize,
    /// `[rows][stride]`, read by float weights.
    pub x: &'a [f32],
    /// Distance of rows in `x`.
    pub x_stride: usize,
    /// `[rows / 8][cols / 32]`, read by quantised weights.
    pub blocks: &'a [BlockRows],
}

impl<'a> Input<'a> {
    /// The group of row `row`, quantised.
    #[inline(always)]
    fn blocks_of(&self, row: usize) -> &'a [BlockRows] {
        let count = self.cols / BLOCK;
        &self.blocks[row / GROUP_ROWS * count..][..count]
    }

    /// Row `row`.
    #[inline(always)]
    fn x_of(&self, row: usize) -> &'a [f32] {
        &self.x[row * self.x_stride..][..self.cols]
    }
}

/// Where products go: `[rows][stride]`, 16 values for each tile.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The first row's value of the first tile.
    pub start: *mut f32,
    /// Distance of rows; at least 16 times the tiles.
    pub stride: usize,
    /// Adds to what is there.
    pub add: bool,
}

impl Output {
    /// The 16 values of a row and tile.
    ///
    /// # Safety
    /// Row and tile are inside, and no other thread uses them meanwhile.
    #[inline(always)]
    unsafe fn at<'a>(&self, row: usize, tile: usize) -> &'a mut [f32; TILE] {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.start.add(row * self.stride + tile * TILE).cast::<[f32; TILE]>() }
    }
}

/// Multiplies `tiles` consecutive packed tiles with `rows` rows of activations.
///
/// # Safety
/// `out` is valid for `rows` rows of 16 · `tiles` values, which no other thread uses meanwhile.
pub unsafe fn multiply(
    isa: Isa,
    kind: Kind,
    tiles: &[u8],
    input: &Input<'_>,
    rows: usize,
    out: Output,
) {
    let bytes = kind.tile_bytes(input.cols);
    assert!(bytes > 0 && tiles.len().is_multiple_of(bytes), "whole tiles");
    assert!(out.stride >= TILE * (tiles.len() / bytes), "rows of the output do not overlap");
    // SAFETY: `out` is the caller's promise, and an `Isa` beyond Scalar is only made where the
    // machine has its features.
    unsafe {
        match isa {
            Isa::Scalar => scalar::multiply(kind, tiles, input, rows, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => fast::multiply_avx2(kind, tiles, input, rows, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => fast::multiply_avx512(kind, tiles, input, rows, out),
            #[cfg(not(target_arch = "x86_64"))]
            _ => scalar::multiply(kind, tiles, input, rows, out),
        }
    }
}
