use super::*;
use crate::device::AttentionSpec;
use crate::device::cpu::testing::{Random, assert_same_bits, fast_isas};

/// Against attention in double precision over the values as stored in f32.
const TOLERANCE: f64 = 2e-6;

struct Case {
    cache: KvCache,
    blocks: Vec<u32>,
    /// `[positions][head_dim]`, of one key head.
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
    head_dim: usize,
}

const POSITIONS: usize = 300;

fn case(dtype: KvDtype, head_dim: usize, block_size: usize, blocks: Vec<u32>) -> Case {
    let mut random = Random(11);
    let keys = random.units(POSITIONS * head_dim);
    let values = random.units(POSITIONS * head_dim);
    case_of(dtype, head_dim, block_size, blocks, keys, values)
}

fn case_of(
    dtype: KvDtype,
    head_dim: usize,
    block_size: usize,
    blocks: Vec<u32>,
    keys: Vec<f32>,
    values: Vec<f32>,
) -> Case {
    let spec = AttentionSpec { layers: 1, heads: 1, kv_heads: 1, head_dim };
    let cache = KvCache::new(spec, dtype, block_size, 32).unwrap();
    // What was there before must not matter, least of all what is not a number.
    let nan = vec![f32::NAN; head_dim];
    for block in 0..32 {
        for offset in 0..block_size {
            // SAFETY: this is the only thread.
            unsafe { cache.write(0, block, offset, &nan, &nan) };
        }
    }
    for position in 0..POSITIONS {
        let row = position * head_dim..(position + 1) * head_dim;
        let block = blocks[position / block_size] as usize;
        // SAFETY: this is the only thread.
        unsafe {
            cache.write(0, block, position % block_size, &keys[row.clone()], &values[row]);
        }
    }
    let queries = Random(12).units(QUERIES * head_dim);
    Case { cache, blocks, keys, values, queries, head_dim }
}

/// The first queries of the case, with `positions` each, in one go.
fn run(isa: Isa, case: &Case, positions: &[usize]) -> Vec<f32> {
    let (count, dim) = (positions.len(), case.head_dim);
    let mut scratch = Scratch::new(count, dim);
    let mut fresh = vec![f32::NAN; partial_len(count, dim)];
    let mut merged = fresh.clone();
    start(&mut merged, count);
    let q = &case.queries[..count * dim];
    let queries = Queries { q, positions, layer: 0, kv_head: 0, blocks: &case.blocks };
    for group in 0..positions.iter().max().unwrap().div_ceil(GROUP) {
        // SAFETY: this is the only thread.
        unsafe { attend(isa, &case.cache, &queries, group, &mut scratch, &mut fresh) };
        merge(isa, positions, group, &fresh, &mut merged);
    }
    let mut out = vec![0.0; count * dim];
    for (query, out) in out.chunks_exact_mut(dim).enumerate() {
        finish(&merged, count, query, out);
    }
    out
}

fn check(test: impl Fn(&Case)) {
    for dtype in [KvDtype::F16, KvDtype::BF16, KvDtype::F32, KvDtype::Int8] {
        for (head_dim, block_size) in [(64, 16), (16, 32), (80, 16), (128, 64)] {
            test(&case(dtype, head_dim, block_size, (0..32).rev().collect()));
        }
    }
}

#[test]
fn the_specification_equals_double_precision_within_tolerance() {
    let case = case(KvDtype::F32, 64, 16, (1..32).collect());
    for positions in [1, 16, 17, 64, 128, 129, 300] {
        let found = run(Isa::Scalar, &case, &[positions]);
        let row = |of: &[f32], p: usize| -> Vec<f64> {
            of[p * 64..(p + 1) * 64].iter().map(|v| f64::from(*v)).collect()
        };
        let q = row(&case.queries, 0);
        let score = |p| -> f64 { row(&case.keys, p).iter().zip(&q).map(|(k, q)| k * q).sum() };
        let weights: Vec<f64> = (0..positions).map(|p| score(p).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (d, found) in found.iter().enumerate() {
            let sum = |(p, w): (usize, &f64)| w * f64::from(case.values[p * 64 + d]);
            let exact = weights.iter().enumerate().map(sum).sum::<f64>() / total;
            assert!((f64::from(*found) - exact).abs() < TOLERANCE, "{positions}: {found} {exact}");
        }
    }
}

/// Keys and values as integers: what is scored and summed is that of the rows rounded to 127 steps.
#[test]
fn integers_equal_double_precision_over_rounded_rows() {
    let mut case = case(KvDtype::Int8, 64, 16, (1..32).collect());
    let found = run(Isa::Scalar, &case, &[300, 129]);
    let rounded = |values: &mut Vec<f32>| {
        for row in values.chunks_exact_mut(64) {
            let scale = row.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0;
            row.iter_mut().for_each(|value| *value = (*value / scale).round() * scale);
        }
    };
    rounded(&mut case.keys);
    rounded(&mut case.values);
    let exact = case_of(KvDtype::F32, 64, 16, case.blocks.clone(), case.keys, case.values);
    for (found, exact) in found.iter().zip(run(Isa::Scalar, &exact, &[300, 129])) {
        // Ties are rounded otherwise, and a product's rounding may decide one.
        assert!((found - exact).abs() < 2e-5, "{found} {exact}");
    }
}

/// As a tile of a prompt's rows does: more and more positions, two heads a row.
fn of_a_prompt(first: usize, rows: usize) -> Vec<usize> {
    (first + 1..=first + rows).flat_map(|positions| [positions; 2]).collect()
}

#[test]
fn fast_equals_the_specification() {
    check(|case| {
        let few = [&[1][..], &[15, 16], &[127, 128, 129], &[300, 299, 3, 128, 256, 257]];
        let tiles = [of_a_prompt(100, 40), of_a_prompt(0, 37), of_a_prompt(250, 3)];
        for positions in few.into_iter().chain(tiles.iter().map(Vec::as_slice)) {
            let expected = run(Isa::Scalar, case, positions);
            for isa in fast_isas() {
                let found = run(isa, case, positions);
                let what = format!("{isa:?} {:?} {}", case.cache.dtype, case.head_dim);
                assert_same_bits(&found, &expected, &what);
            }
        }
    });
}

#[test]
fn queries_that_share_a_call_do_not_see_each_other() {
    check(|case| {
        for isa in [Isa::Scalar, Isa::best()] {
            let mut positions = vec![300, 1, 64, 129, 255, 96];
            positions.extend(of_a_prompt(110, 45));
            let together = run(isa, case, &positions);
            let alone = run(isa, case, &[300]);
            assert_same_bits(&together[..case.head_dim], &alone, &format!("{isa:?}"));
        }
    });
}

#[test]
fn block_ids_and_block_sizes_do_not_matter() {
    for isa in [Isa::Scalar, Isa::best()] {
        for dtype in [KvDtype::F16, KvDtype::Int8] {
            let straight = run(isa, &case(dtype, 64, 16, (1..32).collect()), &[300, 70]);
            for other in [
                case(dtype, 64, 16, (1..32).rev().collect()),
                case(dtype, 64, 32, (3..32).collect()),
            ] {
                let found = run(isa, &other, &[300, 70]);
                assert_same_bits(&found, &straight, &format!("{isa:?} {dtype:?}"));
            }
        }
    }
}
