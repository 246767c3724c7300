//! The most that one thread can multiply: on values that lie in the first-level cache, in so many
//! chains that no sum waits for the one before it.

use std::time::Instant;

use super::PASSES;
use crate::device::cpu::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::device::cpu::lanes::{Avx2, Avx512, Lanes, unrolled};

/// Multiply-adds a second of one thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// Of bytes, which quantised weights need.
    pub bytes_per_s: f64,
    /// Of f32 by fma, which all others need.
    pub floats_per_s: f64,
}

/// Turns of a loop in one pass: a few milliseconds.
const TURNS: u32 = 500_000;
/// Lanes of f32 in all registers of a column; a byte product has four times as many.
const LANES: usize = 16;

/// Measures the peak of `isa`; best of several passes. `None` where there is nothing but loops.
#[must_use]
pub fn peak(isa: Isa) -> Option<Peak> {
    let best = |pass: &dyn Fn()| {
        let time = |_| {
            let started = Instant::now();
            pass();
            started.elapsed().as_secs_f64()
        };
        (0..PASSES).map(time).fold(f64::INFINITY, f64::min)
    };
    match isa {
        Isa::Scalar => None,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` beyond Scalar is only made where the machine has its features.
        Isa::Avx2 => Some(of::<Avx2>(&best, &|| unsafe { bytes_avx2() }, &|| unsafe {
            floats_avx2();
        })),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => Some(of::<Avx512>(&best, &|| unsafe { bytes_avx512() }, &|| unsafe {
            floats_avx512();
        })),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
fn of<L: Lanes>(best: &dyn Fn(&dyn Fn()) -> f64, bytes: &dyn Fn(), floats: &dyn Fn()) -> Peak {
    let a_turn = (CHAINS * LANES / L::PARTS) as f64 * f64::from(TURNS);
    Peak { bytes_per_s: 4.0 * a_turn / best(bytes), floats_per_s: a_turn / best(floats) }
}

/// More than the latency of a product times the products that a core begins in a cycle.
#[cfg(target_arch = "x86_64")]
const CHAINS: usize = 12;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn bytes_avx2() {
    // SAFETY: the features are those of the function.
    unsafe { bytes::<Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn bytes_avx512() {
    // SAFETY: the features are those of the function.
    unsafe { bytes::<Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats_avx2() {
    // SAFETY: the features are those of the function.
    unsafe { floats::<Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn floats_avx512() {
    // SAFETY: the features are those of the function.
    unsafe { floats::<Avx512>() }
}

/// # Safety
/// The features of `L`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn bytes<L: Lanes>() {
    let (weights, x) = ([[3_u8; 64]; 3], [[5_u8; 64]; 4]);
    // SAFETY: the features are the caller's promise.
    unsafe {
        let mut acc = [L::splat_i(0); CHAINS];
        for _ in 0..TURNS {
            // The compiler must not know them, or it would multiply once for all turns.
            let (weights, x) = std::hint::black_box((&weights, &x));
            unrolled!(chain of [0 1 2 3 4 5 6 7 8 9 10 11] below CHAINS, {
                let (w, x) = (L::load_i(&weights[chain / 4], 0), L::load_i(&x[chain % 4], 0));
                acc[chain] = L::dot_small(acc[chain], w, x);
            });
        }
        keep::<L>(acc.map(|acc| L::to_f(acc)));
    }
}

/// # Safety
/// The features of `L`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn floats<L: Lanes>() {
    let (weights, x) = std::hint::black_box(([0.5_f32; 16], [0.25_f32; 16]));
    // SAFETY: the features are the caller's promise.
    unsafe {
        let (w, x) = (L::load(&weights, 0), L::load(&x, 0));
        let mut acc = [L::splat(0.0); CHAINS];
        for _ in 0..TURNS {
            unrolled!(chain of [0 1 2 3 4 5 6 7 8 9 10 11] below CHAINS, {
                acc[chain] = L::fma(w, x, acc[chain]);
            });
        }
        keep::<L>(acc);
    }
}

/// # Safety
/// The features of `L`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn keep<L: Lanes>(acc: [L::F; CHAINS]) {
    let mut out = [0.0; LANES];
    for acc in acc {
        // SAFETY: the features are the caller's promise.
        unsafe { L::store(&mut out, 0, acc) };
        std::hint::black_box(&mut out);
    }
}
