//! 256-bit registers; byte dot products from 16-bit multiply-adds that cannot saturate.

use std::arch::x86_64::*;

use super::Lanes;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2;

// SAFETY: plain intrinsics; who calls the methods vouches for the instruction set. Memory is moved
// as arrays, whose registers have the same size.
impl Lanes for Avx2 {
    const PARTS: usize = 2;
    const QUERIES: usize = 2;
    type F = __m256;
    type I = __m256i;

    #[inline(always)]
    unsafe fn load(from: &[f32; 16], part: usize) -> __m256 {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<[f32; 8], __m256>(from.as_chunks().0[part]) }
    }

    #[inline(always)]
    unsafe fn store(to: &mut [f32; 16], part: usize, v: __m256) {
        // SAFETY: as above.
        to.as_chunks_mut().0[part] = unsafe { std::mem::transmute::<__m256, [f32; 8]>(v) };
    }

    #[inline(always)]
    unsafe fn load_f16(from: &[u16; 16], part: usize) -> __m256 {
        // SAFETY: as above.
        unsafe {
            _mm256_cvtph_ps(std::mem::transmute::<[u16; 8], __m128i>(from.as_chunks().0[part]))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: &[u16; 16], part: usize) -> __m256 {
        // SAFETY: as above.
        // A bf16 is the upper half of an f32.
        unsafe {
            let half = std::mem::transmute::<[u16; 8], __m128i>(from.as_chunks().0[part]);
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: &[i8; 16], part: usize) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let bytes = std::mem::transmute::<[i8; 8], i64>(from.as_chunks().0[part]);
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)))
        }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_set1_ps(v) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn to_f(v: __m256i) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_cvtepi32_ps(v) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn negative_fma(a: __m256, c: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_fnmadd_ps(a, c, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn to_exponent(v: __m256, offset: i32) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let moved = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(offset));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(moved))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(v: __m256, x: __m256, limit: f32) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let keep = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(limit));
            _mm256_and_ps(keep, v)
        }
    }

    #[inline(always)]
    unsafe fn load_i(from: &[u8; 64], part: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<[u8; 32], __m256i>(from.as_chunks().0[part]) }
    }

    #[inline(always)]
    unsafe fn splat_i(v: i32) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_set1_epi32(v) }
    }

    #[inline(always)]
    unsafe fn low_nibbles(v: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_and_si256(v, _mm256_set1_epi8(15)) }
    }

    #[inline(always)]
    unsafe fn high_nibbles(v: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15)) }
    }

    #[inline(always)]
    unsafe fn dot_small(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: as above. A pair sums to at most 2 · 63 · 127, below 2^15.
        unsafe {
            let pairs = _mm256_maddubs_epi16(w, x);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn dot_bytes(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: as above. Unsigned weights up to 255 would saturate a pair, so the sign moves to
        // x: a pair then sums to at most 2 · 128 · 127 = 32512, below 2^15.
        unsafe {
            let signed = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn dot_bytes_start(_sum_x: i32) -> __m256i {
        // SAFETY: as above. The products above are of signed weights already.
        unsafe { _mm256_setzero_si256() }
    }
}
