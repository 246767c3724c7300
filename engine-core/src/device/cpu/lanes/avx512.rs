//! 512-bit registers with byte dot products.

use std::arch::x86_64::*;

use super::Lanes;

/// AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx512;

// SAFETY: plain intrinsics; who calls the methods vouches for the instruction set. Memory is moved
// as arrays, whose registers have the same size.
impl Lanes for Avx512 {
    const PARTS: usize = 1;
    const QUERIES: usize = 6;
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    unsafe fn load(from: &[f32; 16], _part: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<[f32; 16], __m512>(*from) }
    }

    #[inline(always)]
    unsafe fn store(to: &mut [f32; 16], _part: usize, v: __m512) {
        // SAFETY: as above.
        *to = unsafe { std::mem::transmute::<__m512, [f32; 16]>(v) };
    }

    #[inline(always)]
    unsafe fn load_f16(from: &[u16; 16], _part: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(std::mem::transmute::<[u16; 16], __m256i>(*from)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: &[u16; 16], _part: usize) -> __m512 {
        // SAFETY: as above.
        // A bf16 is the upper half of an f32.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(std::mem::transmute::<[u16; 16], __m256i>(*from));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: &[i8; 16], _part: usize) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let wide = _mm512_cvtepi8_epi32(std::mem::transmute::<[i8; 16], __m128i>(*from));
            _mm512_cvtepi32_ps(wide)
        }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(v) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn to_f(v: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(v) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn negative_fma(a: __m512, c: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fnmadd_ps(a, c, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn to_exponent(v: __m512, offset: i32) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let moved = _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(offset));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(moved))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(v: __m512, x: __m512, limit: f32) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
            _mm512_maskz_mov_ps(keep, v)
        }
    }

    #[inline(always)]
    unsafe fn load_i(from: &[u8; 64], _part: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<[u8; 64], __m512i>(*from) }
    }

    #[inline(always)]
    unsafe fn splat_i(v: i32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(v) }
    }

    #[inline(always)]
    unsafe fn low_nibbles(v: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_and_si512(v, _mm512_set1_epi8(15)) }
    }

    #[inline(always)]
    unsafe fn high_nibbles(v: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)) }
    }

    #[inline(always)]
    unsafe fn dot_small(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_dpbusd_epi32(acc, w, x) }
    }

    #[inline(always)]
    unsafe fn dot_bytes(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_dpbusd_epi32(acc, w, x) }
    }

    #[inline(always)]
    unsafe fn dot_bytes_start(sum_x: i32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(-128 * sum_x) }
    }
}
