use pawl_shared::model_card::GgmlType;

use super::*;
use crate::device::WeightSource;
use crate::device::cpu::packed::{Sixteen, check_source, for_each_sixteen, pack_tiles};
use crate::device::cpu::quantise::quantise_rows;
use crate::device::cpu::testing::{Random, assert_same_bits, fast_isas};

/// Relative to the sum of the absolute products: the error that quantised activations may add to a
/// product in double precision.
const QUANTISATION_TOLERANCE: f64 = 0.01;
/// The same for activations that are not quantised.
const ROUNDING_TOLERANCE: f64 = 1e-6;

const DTYPES: [GgmlType; 11] = [
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::F32,
];

/// Rows of activations: two calls of the widest kernel, and one of each of the others.
const ROWS: usize = 39;

struct Case {
    kind: Kind,
    tiles: Vec<u8>,
    /// `[rows of weights][cols]`, in double precision.
    exact: Vec<f64>,
    rows: usize,
    cols: usize,
}

fn case(random: &mut Random, dtype: GgmlType, rows: usize, cols: usize) -> Case {
    let data = random.weights(dtype, rows, cols);
    let name = "case".to_owned();
    let source = WeightSource { name, dtype, rows, cols, data: &data };
    let kind = check_source(&source).unwrap();
    let count = rows.div_ceil(TILE);
    let mut tiles = vec![0_u64; count * kind.tile_bytes(cols) / 8];
    let bytes = bytemuck::cast_slice_mut(&mut tiles);
    pack_tiles(&source, kind, 0, count, bytes);
    let tiles = bytes.to_vec();
    Case { kind, tiles, exact: decode(dtype, &data), rows, cols }
}

/// The format's definition, written apart from the packing.
fn decode(dtype: GgmlType, data: &[u8]) -> Vec<f64> {
    let half = |b: &[u8]| f64::from(half::f16::from_le_bytes([b[0], b[1]]).to_f32());
    let nibbles = |b: &[u8]| -> Vec<f64> {
        let low = b.iter().map(|b| f64::from(b & 15));
        low.chain(b.iter().map(|b| f64::from(b >> 4))).collect()
    };
    let blocks = |size: usize, block: &dyn Fn(&[u8]) -> Vec<f64>| -> Vec<f64> {
        data.chunks_exact(size).flat_map(block).collect()
    };
    match dtype {
        GgmlType::Q4_0 => {
            blocks(18, &|b| nibbles(&b[2..]).iter().map(|q| (q - 8.0) * half(b)).collect())
        }
        GgmlType::Q4_1 => {
            blocks(20, &|b| nibbles(&b[4..]).iter().map(|q| q * half(b) + half(&b[2..])).collect())
        }
        GgmlType::Q8_0 => {
            blocks(34, &|b| b[2..].iter().map(|&q| f64::from(q as i8) * half(b)).collect())
        }
        // Their decoding has a test of its own.
        GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K => {
            let mut values = Vec::new();
            for_each_sixteen(dtype, data, |_, Sixteen { scale, minimum, q }| {
                let half = |bits| f64::from(half::f16::from_bits(bits).to_f32());
                values.extend(q.map(|q| f64::from(q) * half(scale) + half(minimum)));
            });
            values
        }
        GgmlType::F16 => blocks(2, &|b| vec![half(b)]),
        GgmlType::BF16 => {
            blocks(2, &|b| vec![f64::from(half::bf16::from_le_bytes([b[0], b[1]]).to_f32())])
        }
        _ => blocks(4, &|b| vec![f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))]),
    }
}

/// Products of `x` (`[rows][cols]`), one call for each of `splits`, added to `base` if given.
fn run(isa: Isa, case: &Case, x: &[f32], splits: &[usize], base: Option<f32>) -> Vec<f32> {
    let rows = x.len() / case.cols;
    let stride = case.rows.next_multiple_of(TILE);
    let mut out = vec![base.unwrap_or(f32::NAN); rows * stride];
    // Aligned, as an arena is.
    let mut tiles = vec![0_u64; case.tiles.len() / 8];
    bytemuck::cast_slice_mut(&mut tiles).copy_from_slice(&case.tiles);
    let mut row = 0;
    for &split in splits {
        let x = &x[row * case.cols..][..split * case.cols];
        let blocks = quantise_rows(isa, x, case.cols);
        let input = Input { cols: case.cols, x, x_stride: case.cols, blocks: &blocks };
        let start = out[row * stride..].as_mut_ptr();
        let output = Output { start, stride, add: base.is_some() };
        // SAFETY: `out` has the rows, and this is the only thread.
        unsafe { multiply(isa, case.kind, bytemuck::cast_slice(&tiles), &input, split, output) };
        row += split;
    }
    assert_eq!(row, rows, "the splits cover the rows");
    out
}

/// Every kind over odd shapes: rows of weights that fill no tile, an odd number of blocks, columns
/// that are no whole blocks where the kind allows it.
fn check(test: impl Fn(&mut Random, &Case, &[f32])) {
    let mut random = Random(7);
    for dtype in DTYPES {
        let block = dtype.block_len() as usize;
        let odd = if block == 1 { 77 } else { 5 * block };
        let unit = block.max(32);
        for (rows, cols) in [(16, unit), (33, 3 * unit), (5, 2 * unit), (48, odd)] {
            let case = case(&mut random, dtype, rows, cols);
            let x = random.units(ROWS * cols);
            test(&mut random, &case, &x);
        }
    }
}

#[test]
fn the_specification_equals_double_precision_within_tolerance() {
    check(|_, case, x| {
        let found = run(Isa::Scalar, case, x, &[ROWS], None);
        let stride = case.rows.next_multiple_of(TILE);
        let quantised = case.kind.quantised();
        let tolerance = if quantised { QUANTISATION_TOLERANCE } else { ROUNDING_TOLERANCE };
        for (row, x) in x.chunks_exact(case.cols).enumerate() {
            for (r, w) in case.exact.chunks_exact(case.cols).enumerate() {
                let products = || w.iter().zip(x).map(|(w, x)| w * f64::from(*x));
                let (exact, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
                let error = (f64::from(found[row * stride + r]) - exact).abs();
                assert!(error <= tolerance * size, "{:?} {error} of {size}", case.kind);
            }
        }
    });
}

#[test]
fn fast_equals_the_specification() {
    check(|_, case, x| {
        for base in [None, Some(0.3)] {
            let expected = run(Isa::Scalar, case, x, &[ROWS], base);
            for isa in fast_isas() {
                let found = run(isa, case, x, &[ROWS], base);
                assert_same_bits(&found, &expected, &format!("{isa:?} {:?}", case.kind));
            }
        }
    });
}

#[test]
fn every_batch_split_gives_the_same_bits() {
    check(|random, case, x| {
        for isa in [Isa::Scalar, Isa::best()] {
            let whole = run(isa, case, x, &[ROWS], None);
            let mut splits = vec![vec![1; ROWS], vec![8, 8, 23], vec![4, 35], vec![2, 17, 20]];
            let mut random_split = Vec::new();
            while random_split.iter().sum::<usize>() < ROWS {
                let left = ROWS - random_split.iter().sum::<usize>();
                random_split.push(1 + random.below(left));
            }
            splits.push(random_split);
            for split in splits {
                let found = run(isa, case, x, &split, None);
                assert_same_bits(&found, &whole, &format!("{isa:?} {:?} {split:?}", case.kind));
            }
        }
    });
}

#[test]
fn a_value_that_is_not_a_number_is_not_lost() {
    let mut random = Random(3);
    for dtype in DTYPES {
        let cols = 64.max(dtype.block_len() as usize);
        let case = case(&mut random, dtype, 16, cols);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random.units(2 * cols);
            x[cols + 40] = bad;
            for isa in [Isa::Scalar, Isa::best()] {
                let out = run(isa, &case, &x, &[2], None);
                assert!(out[..16].iter().all(|v| v.is_finite()), "{dtype} {isa:?}");
                assert!(out[16..].iter().all(|v| !v.is_finite()), "{dtype} {isa:?} {bad}");
            }
        }
    }
}
