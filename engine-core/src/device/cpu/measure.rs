//! How fast the products are on this machine, one thread alone.

use std::time::{Duration, Instant};

use super::isa::Isa;
use super::matmul::{Input, Output, multiply};
use super::packed::{Kind, TILE};
use super::quantise::quantise_rows;

/// One figure of [`products`].
#[derive(Clone, Debug, PartialEq)]
pub struct ProductFigure {
    /// Encoding of the weights.
    pub kind: String,
    /// Rows of activations.
    pub rows: usize,
    /// Multiply-adds a second.
    pub macs_per_s: f64,
    /// Bytes of weights read a second.
    pub bytes_per_s: f64,
}

/// Input and output width of the matrix measured: those of a small model's feed-forward block.
const COLS: usize = 576;
const TILES: usize = 96;
/// Matrices that are multiplied in turn, so that the weights come from memory, not from a cache.
const MATRICES: usize = 64;
/// Passes, of which the median counts.
const PASSES: usize = 7;

/// Every encoding with 1, 8, 32 and 256 rows of activations.
#[must_use]
pub fn products(isa: Isa) -> Vec<ProductFigure> {
    let kinds = [Kind::Q4, Kind::Q8, Kind::F16, Kind::BF16, Kind::F32];
    let rows = [1, 8, 32, 256];
    kinds.iter().flat_map(|kind| rows.map(|rows| product(isa, *kind, rows))).collect()
}

fn product(isa: Isa, kind: Kind, rows: usize) -> ProductFigure {
    let bytes = TILES * kind.tile_bytes(COLS);
    // Many rows are slow enough to need no more than one matrix.
    let matrices = (MATRICES / rows).max(1);
    // Not zero: the system would map all of it to one page.
    let weights = vec![0x1111_1111_1111_1111_u64; matrices * bytes / 8];
    let weights: &[u8] = bytemuck::cast_slice(&weights);
    let x: Vec<f32> = (0..rows * COLS).map(|i| (i % 17) as f32 - 8.0).collect();
    let blocks = quantise_rows(isa, &x, COLS);
    let input = Input { cols: COLS, x: &x, x_stride: COLS, blocks: &blocks };
    let mut out = vec![0.0_f32; rows * TILES * TILE];
    let mut times: Vec<Duration> = (0..PASSES)
        .map(|_| {
            let started = Instant::now();
            for tiles in weights.chunks_exact(bytes) {
                let output = Output { start: out.as_mut_ptr(), stride: TILES * TILE, add: false };
                // SAFETY: `out` has all rows and tiles, and this is the only thread.
                unsafe { multiply(isa, kind, tiles, &input, rows, output) };
            }
            started.elapsed()
        })
        .collect();
    times.sort_unstable();
    let seconds = times[PASSES / 2].as_secs_f64() / matrices as f64;
    ProductFigure {
        kind: format!("{kind:?}"),
        rows,
        macs_per_s: (rows * COLS * TILES * TILE) as f64 / seconds,
        bytes_per_s: bytes as f64 / seconds,
    }
}
