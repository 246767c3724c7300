//! Operations that see one row at a time: norm, rotation, gate, bias. One body each, compiled for
//! each instruction set; see `isa_twins` for why all of them give the same bits.

use super::exp::exp;
use super::isa::isa_twins;
use crate::device::Activation;

/// Partial sums of a reduction: as many as the widest register has lanes.
const LANES: usize = 16;

/// Sums the lanes in one fixed tree.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

isa_twins! {
    /// `out[i] = x[i] / sqrt(mean(x²) + eps) · weight[i]`
    pub fn rms_norm = rms_norm_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32])
}

#[inline(always)]
fn rms_norm_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut lanes = [0.0_f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = value.mul_add(*value, *lane);
    }
    let mean = sum_lanes(lanes) / x.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    for ((out, value), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = value * factor * weight;
    }
}

/// Cosine and sine of `position` at each frequency: `out[2i]`, `out[2i + 1]`. The angle is an f32
/// product, as in the models' reference code; its functions are taken in double precision, so that
/// no library's rounding shows.
pub fn rope_angles(position: usize, frequencies: &[f32], out: &mut [f32]) {
    for (frequency, pair) in frequencies.iter().zip(out.chunks_exact_mut(2)) {
        let angle = f64::from(position as f32 * frequency);
        pair[0] = angle.cos() as f32;
        pair[1] = angle.sin() as f32;
    }
}

isa_twins! {
    /// Rotates each head's neighbours (2i, 2i + 1) by angle i.
    pub fn rope = rope_body(x: &mut [f32], angles: &[f32], head_dim: usize)
}

#[inline(always)]
fn rope_body(x: &mut [f32], angles: &[f32], head_dim: usize) {
    for head in x.chunks_exact_mut(head_dim) {
        for (pair, angle) in head.chunks_exact_mut(2).zip(angles.chunks_exact(2)) {
            let (a, b) = (pair[0], pair[1]);
            let (cos, sin) = (angle[0], angle[1]);
            pair[0] = a * cos - b * sin;
            pair[1] = a * sin + b * cos;
        }
    }
}

isa_twins! {
    /// `gate[i] = activation(gate[i]) · up[i]`
    pub fn gate = gate_body(activation: Activation, gate: &mut [f32], up: &[f32])
}

#[inline(always)]
fn gate_body(activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => {
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = *gate / (1.0 + exp(-*gate)) * up;
            }
        }
        Activation::Gelu => {
            // tanh(y) = 1 - 2 / (e^2y + 1), with y = sqrt(2/π) · (x + 0.044715 x³).
            const TWICE_ROOT: f32 = 1.595_769;
            for (gate, up) in gate.iter_mut().zip(up) {
                let twice = TWICE_ROOT * *gate * (0.044_715 * *gate).mul_add(*gate, 1.0);
                *gate = *gate * (1.0 - 1.0 / (exp(twice) + 1.0)) * up;
            }
        }
    }
}

isa_twins! {
    /// `x[i] += bias[i]`
    pub fn add_bias = add_bias_body(x: &mut [f32], bias: &[f32])
}

#[inline(always)]
fn add_bias_body(x: &mut [f32], bias: &[f32]) {
    for (x, bias) in x.iter_mut().zip(bias) {
        *x += bias;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::isa::Isa;
    use crate::device::cpu::testing::{Random, assert_same_bits, fast_isas};

    /// Each operation on 83 values: no whole number of registers.
    fn run(isa: Isa) -> Vec<Vec<f32>> {
        let mut random = Random(5);
        let (x, y) = (random.units(83), random.units(83));
        let mut normed = vec![0.0; 83];
        rms_norm(isa, &x, &y, 1e-5, &mut normed);
        let mut rotated = x[..80].to_vec();
        let mut angles = vec![0.0; 20];
        rope_angles(1234, &[1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.001], &mut angles);
        rope(isa, &mut rotated, &angles, 40);
        let (mut silu, mut gelu, mut biased) = (x.clone(), x.clone(), x);
        gate(isa, Activation::Silu, &mut silu, &y);
        gate(isa, Activation::Gelu, &mut gelu, &y);
        add_bias(isa, &mut biased, &y);
        vec![normed, rotated, silu, gelu, biased]
    }

    #[test]
    fn every_twin_gives_the_same_bits() {
        let expected = run(Isa::Scalar);
        for isa in fast_isas() {
            for (index, (found, expected)) in run(isa).iter().zip(&expected).enumerate() {
                assert_same_bits(found, expected, &format!("{isa:?} operation {index}"));
            }
        }
    }

    #[test]
    fn they_equal_their_formulas() {
        const TOLERANCE: f32 = 1e-6;
        let near =
            |found: f32, exact: f32| assert!((found - exact).abs() < TOLERANCE, "{found} {exact}");
        let mut out = [0.0; 2];
        rms_norm(Isa::Scalar, &[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        near(out[0], 3.0 / 12.5_f32.sqrt());
        near(out[1], 8.0 / 12.5_f32.sqrt());
        // A quarter turn of the first pair; what lies beyond the rotated part stays.
        let mut x = [1.0, 2.0, 3.0, 4.0];
        let mut angles = [0.0; 2];
        rope_angles(1, &[std::f32::consts::FRAC_PI_2], &mut angles);
        rope(Isa::Scalar, &mut x, &angles, 4);
        near(x[0], -2.0);
        near(x[1], 1.0);
        assert_eq!(x[2..], [3.0, 4.0]);
        let (mut silu, mut gelu) = ([1.0], [1.0]);
        gate(Isa::Scalar, Activation::Silu, &mut silu, &[2.0]);
        gate(Isa::Scalar, Activation::Gelu, &mut gelu, &[2.0]);
        near(silu[0], 2.0 / (1.0 + (-1.0_f32).exp()));
        near(gelu[0], 2.0 * 0.841_192);
    }
}
