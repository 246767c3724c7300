//! The formats of llama.cpp that cut a row into super-blocks of 256 values, with scales that are
//! small integers themselves, and the two of five bits beside them.
//!
//! Layouts as in ggml's `ggml-common.h` and `ggml-quants.c`. Here every 16 values get a scale and a
//! minimum of their own, `value = q · scale + minimum`. Both are rounded to half floats, where the
//! file's are a half float times an integer of six to eight bits: at most one part in 2,048, a
//! tenth of what rounding the activations to eight bits costs.

use half::f16;
use pawl_shared::model_card::GgmlType;

/// Values that share a scale.
pub const SHARING: usize = 16;

/// Sixteen values, decoded as far as products need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sixteen {
    /// f16
    pub scale: u16,
    /// f16
    pub minimum: u16,
    /// 0 to 63.
    pub q: [u8; SHARING],
}

/// Calls `each` for every sixteen values of a row, in order.
pub fn for_each_sixteen(dtype: GgmlType, row: &[u8], mut each: impl FnMut(usize, Sixteen)) {
    let (len, bytes) = (dtype.block_len() as usize, dtype.block_bytes() as usize);
    for (index, block) in row.chunks_exact(bytes).enumerate() {
        let first = index * len / SHARING;
        let mut each = |at: usize, scale: f32, minimum: f32, q: [u8; SHARING]| {
            let half = |value: f32| f16::from_f32(value).to_bits();
            each(first + at, Sixteen { scale: half(scale), minimum: half(minimum), q });
        };
        match dtype {
            GgmlType::Q5_0 | GgmlType::Q5_1 => q5(dtype, block, &mut each),
            GgmlType::Q4_K => q4_k(block, &mut each),
            GgmlType::Q5_K => q5_k(block, &mut each),
            GgmlType::Q6_K => q6_k(block, &mut each),
            other => unreachable!("{other} has no sixteens"),
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// What a decoder calls for each sixteen: its place, scale, minimum and values.
type Each<'a> = &'a mut dyn FnMut(usize, f32, f32, [u8; SHARING]);

/// d, for `Q5_1` also m, a fifth bit for each of 32 values, and 16 bytes: value i in the low and
/// value i + 16 in the high nibble of byte i.
fn q5(dtype: GgmlType, block: &[u8], each: Each<'_>) {
    let scale = half_at(block, 0);
    let (minimum, rest) = match dtype {
        GgmlType::Q5_1 => (half_at(block, 2), &block[4..]),
        _ => (-16.0 * scale, &block[2..]),
    };
    let fifths = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
    for part in 0..2 {
        let q = std::array::from_fn(|i| {
            let nibble = rest[4 + i] >> (4 * part) & 15;
            nibble | ((fifths >> (16 * part + i) & 1) as u8) << 4
        });
        each(part, scale, minimum, q);
    }
}

/// Scale and minimum of each of eight sub-blocks of 32, six bits each, packed into twelve bytes.
fn scales_and_minimums(packed: &[u8]) -> [(u8, u8); 8] {
    std::array::from_fn(|j| {
        if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            let low = packed[j + 4];
            let (scale_high, minimum_high) = (packed[j - 4] >> 6, packed[j] >> 6);
            (low & 15 | scale_high << 4, low >> 4 | minimum_high << 4)
        }
    })
}

/// d, dmin, the scales, then 128 bytes: 32 of them hold sub-block 2p in their low and 2p + 1 in
/// their high nibbles.
fn q4_k(block: &[u8], each: Each<'_>) {
    five_bits(block, None, &block[16..], each);
}

/// The same, with 32 bytes of fifth bits before: bit s of byte l is that of value l of sub-block s.
fn q5_k(block: &[u8], each: Each<'_>) {
    five_bits(block, Some(&block[16..48]), &block[48..], each);
}

fn five_bits(block: &[u8], fifths: Option<&[u8]>, nibbles: &[u8], each: Each<'_>) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    for (sub, (scale, minimum)) in scales_and_minimums(&block[4..16]).into_iter().enumerate() {
        let bytes = &nibbles[32 * (sub / 2)..][..32];
        for part in 0..2 {
            let q = std::array::from_fn(|i| {
                let l = 16 * part + i;
                let fifth = fifths.map_or(0, |fifths| fifths[l] >> sub & 1);
                bytes[l] >> (4 * (sub % 2)) & 15 | fifth << 4
            });
            each(2 * sub + part, d * f32::from(scale), -d_min * f32::from(minimum), q);
        }
    }
}

/// 128 bytes of low nibbles, 64 of upper bit pairs, a signed scale for each 16 values, d. Of each
/// half of 128 values, value `32 · t + l` has its nibble in byte `32 · (t % 2) + l`, low for t
/// below 2, and its upper bits in pair t of byte l; it is 32 too large.
fn q6_k(block: &[u8], each: Each<'_>) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (sixteen, &scale) in scales.iter().enumerate() {
        let (half, t, part) = (sixteen / 8, sixteen % 8 / 2, sixteen % 2);
        let q = std::array::from_fn(|i| {
            let l = 16 * part + i;
            let nibble = low[64 * half + 32 * (t % 2) + l] >> (4 * (t / 2)) & 15;
            nibble | (high[32 * half + l] >> (2 * t) & 3) << 4
        });
        // Rounded first, so that the minimum stays 32 times the scale.
        let scale = f16::from_f32(d * f32::from(scale as i8)).to_f32();
        each(sixteen, scale, -32.0 * scale, q);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of each format, and its values by ggml's own Python package (`gguf` 0.19, module
    /// `gguf.quants`, `dequantize`); the bytes are random, but for d and dmin.
    const GOLDENS: &str = include_str!("k_quants.json");

    #[test]
    fn values_are_those_of_ggml() {
        let goldens: serde_json::Value = serde_json::from_str(GOLDENS).unwrap();
        for dtype in
            [GgmlType::Q5_0, GgmlType::Q5_1, GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K]
        {
            let golden = &goldens[dtype.name()];
            let bytes: Vec<u8> = serde_json::from_value(golden["bytes"].clone()).unwrap();
            let expected: Vec<f32> = serde_json::from_value(golden["values"].clone()).unwrap();
            let mut found = Vec::new();
            for_each_sixteen(dtype, &bytes, |index, Sixteen { scale, minimum, q }| {
                assert_eq!(index * SHARING, found.len(), "in order");
                let half = |bits| f16::from_bits(bits).to_f32();
                // Each of the two rounded to one part in 2,048.
                let error = (63.0 * half(scale).abs() + half(minimum).abs()) / 2048.0;
                found.extend(q.map(|q| (f32::from(q) * half(scale) + half(minimum), error)));
            });
            assert_eq!(found.len(), expected.len(), "{dtype}");
            for (i, ((value, error), expected)) in found.iter().zip(&expected).enumerate() {
                assert!((value - expected).abs() <= *error, "{dtype} {i}: {value} {expected}");
            }
        }
    }
}
