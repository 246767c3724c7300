//! What sampling asks of a whole row of logits, fast enough for a vocabulary of many thousands.

use super::exp::exp;
use super::isa::{Isa, isa_twins};

/// Values that one partial result covers.
pub const CHUNK: usize = 256;
/// Partial results kept side by side, for registers.
const LANES: usize = 16;

/// The largest value of a row, and how many are not numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scan {
    /// `-∞` if there is no number.
    pub largest: f32,
    /// NaNs.
    pub nans: u32,
}

/// One pass over a row; NaNs are no maximum.
#[must_use]
pub fn scan(isa: Isa, row: &[f32]) -> Scan {
    let mut out = Scan::default();
    scan_row(isa, row, &mut out);
    out
}

isa_twins! {
    fn scan_row = scan_body(row: &[f32], out: &mut Scan)
}

#[inline(always)]
fn scan_body(row: &[f32], out: &mut Scan) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut nans = [0_u32; LANES];
    let mut lanes = |chunk: &[f32]| {
        for ((largest, nans), value) in largest.iter_mut().zip(&mut nans).zip(chunk) {
            *largest = if *value > *largest { *value } else { *largest };
            *nans = nans.wrapping_add(u32::from(value.is_nan()));
        }
    };
    let mut chunks = row.chunks_exact(LANES);
    (&mut chunks).for_each(&mut lanes);
    lanes(chunks.remainder());
    let fold = |a: f32, b: f32| if b > a { b } else { a };
    out.largest = largest.into_iter().fold(f32::NEG_INFINITY, fold);
    out.nans = nans.iter().sum();
}

isa_twins! {
    /// `out[c] = Σ exp((row[i] - offset) · factor)` over the 256 values of chunk c.
    pub fn chunk_exp_sums = chunk_exp_sums_body(
        row: &[f32], offset: f32, factor: f32, out: &mut [f32],
    )
}

#[inline(always)]
fn chunk_exp_sums_body(row: &[f32], offset: f32, factor: f32, out: &mut [f32]) {
    for (chunk, out) in row.chunks(CHUNK).zip(out) {
        let mut sums = [0.0_f32; LANES];
        for lanes in chunk.chunks(LANES) {
            for (sum, value) in sums.iter_mut().zip(lanes) {
                *sum += exp((value - offset) * factor);
            }
        }
        *out = super::rows::sum_lanes(sums);
    }
}

isa_twins! {
    /// `out[c]` = the largest of the `chunk` values of chunk c.
    pub fn chunk_maxima = chunk_maxima_body(row: &[f32], chunk: usize, out: &mut [f32])
}

#[inline(always)]
fn chunk_maxima_body(row: &[f32], chunk: usize, out: &mut [f32]) {
    for (values, out) in row.chunks(chunk).zip(out) {
        let mut largest = [f32::NEG_INFINITY; LANES];
        for lanes in values.chunks(LANES) {
            for (largest, value) in largest.iter_mut().zip(lanes) {
                *largest = if *value > *largest { *value } else { *largest };
            }
        }
        *out = largest.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    }
}

/// One weight of [`chunk_exp_sums`].
#[must_use]
pub fn weight(value: f32, offset: f32, factor: f32) -> f32 {
    exp((value - offset) * factor)
}
