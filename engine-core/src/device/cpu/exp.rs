//! The exponential function, the same bits on every instruction set.

#[cfg(target_arch = "x86_64")]
use super::lanes::Lanes;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts: the first has few bits, so that its products with small integers are exact.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;
/// As in quantisation: rounds to an integer and leaves it in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Of e^r on |r| <= ln(2) / 2, from the highest power down.
const POWERS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
const HIGHEST: f32 = 1.0 / 5040.0;
/// From the bits of a sum with [`ROUNDER`] to a biased exponent.
const TO_EXPONENT: i32 = 127 - ROUNDER.to_bits() as i32;

/// `e^x` to about 2 units in the last place; exactly 1 at 0; 0 below -87 and for `-∞`; `x` above 88
/// counts as 88. NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = if x > 88.0 { 88.0 } else { x };
    let rounded = clamped * LOG2_E + ROUNDER;
    let n = rounded - ROUNDER;
    let r = (-n).mul_add(LN_2_LOW, (-n).mul_add(LN_2_HIGH, clamped));
    let mut p = HIGHEST;
    for power in POWERS {
        p = r.mul_add(p, power);
    }
    let exponent = rounded.to_bits().wrapping_add(TO_EXPONENT as u32) << 23;
    let value = p * f32::from_bits(exponent);
    if x < -87.0 { 0.0 } else { value }
}

/// The same in registers: what the compiler makes of loops over [`exp`] is as good, unless other
/// loops beside them lead it astray.
///
/// # Safety
/// The instruction set of `L`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn exp_lanes<L: Lanes>(x: L::F) -> L::F {
    // SAFETY: the caller's promise.
    unsafe {
        let clamped = L::min(L::splat(88.0), x);
        let rounded = L::add(L::mul(clamped, L::splat(LOG2_E)), L::splat(ROUNDER));
        let n = L::sub(rounded, L::splat(ROUNDER));
        let r = L::negative_fma(n, L::splat(LN_2_HIGH), clamped);
        let r = L::negative_fma(n, L::splat(LN_2_LOW), r);
        let mut p = L::splat(HIGHEST);
        for power in POWERS {
            p = L::fma(r, p, L::splat(power));
        }
        let value = L::mul(p, L::to_exponent(rounded, TO_EXPONENT));
        L::zero_below(value, x, -87.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the double-precision function.
    const TOLERANCE: f64 = 3e-7;

    #[test]
    fn equals_the_exact_function_within_tolerance() {
        let worst = (-87_000..=88_000).map(|i| i as f32 / 1000.0).map(|x| {
            let exact = f64::from(x).exp();
            (f64::from(exp(x)) - exact).abs() / exact
        });
        let worst = worst.fold(0.0, f64::max);
        assert!(worst < TOLERANCE, "{worst}");
    }

    #[test]
    fn its_edges_are_exact() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::INFINITY).is_finite());
    }
}
