//! A vector register as kernels see it: `N` lanes of f32 or i32, or 4·`N` bytes.
//!
//! Kernels that need more than loops over f32 (byte dot products, half floats) are written once
//! over this trait; each implementation is one instruction set. No method reorders or fuses what
//! its name does not say, so all of them give the same bits.
//!
//! Memory comes in arrays of 16 lanes, and `part` says which register of it is meant: 0 alone where
//! a register holds all 16. Arrays and constant indices leave nothing to check while a kernel runs,
//! in a build with debug assertions too, where each use of a pointer would be checked.

mod avx2;
mod avx512;

pub use avx2::Avx2;
pub use avx512::Avx512;

/// # Safety
/// Every method needs the instruction set of the implementing type.
pub trait Lanes: Copy {
    /// Registers in 16 lanes.
    const PARTS: usize;
    /// Query heads that attention takes at once: so many accumulators fit into the registers.
    const QUERIES: usize;
    /// f32 lanes.
    type F: Copy;
    /// i32 lanes, or four bytes for each.
    type I: Copy;

    unsafe fn load(from: &[f32; 16], part: usize) -> Self::F;
    unsafe fn store(to: &mut [f32; 16], part: usize, v: Self::F);
    unsafe fn load_f16(from: &[u16; 16], part: usize) -> Self::F;
    unsafe fn load_bf16(from: &[u16; 16], part: usize) -> Self::F;
    unsafe fn load_i8(from: &[i8; 16], part: usize) -> Self::F;
    unsafe fn splat(v: f32) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn to_f(v: Self::I) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// `b - a · c`, rounded once.
    unsafe fn negative_fma(a: Self::F, c: Self::F, b: Self::F) -> Self::F;
    /// The larger; `b` where one is no number.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` where one is no number.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Bits as integers: `v + offset`, then to the left into the exponent.
    unsafe fn to_exponent(v: Self::F, offset: i32) -> Self::F;
    /// `v`, or 0 where `x < limit`.
    unsafe fn zero_below(v: Self::F, x: Self::F, limit: f32) -> Self::F;

    unsafe fn load_i(from: &[u8; 64], part: usize) -> Self::I;
    unsafe fn splat_i(v: i32) -> Self::I;
    /// The low four bits of each byte.
    unsafe fn low_nibbles(v: Self::I) -> Self::I;
    /// The high four bits of each byte.
    unsafe fn high_nibbles(v: Self::I) -> Self::I;
    /// Each lane: `acc + Σ w[i] · x[i]` over its four bytes; `w` unsigned and at most 63.
    unsafe fn dot_small(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Each lane: `acc + Σ (w[i] - 128) · x[i]` over its four bytes, `w` unsigned, if the first
    /// `acc` is [`Lanes::dot_bytes_start`].
    unsafe fn dot_bytes(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Where an accumulator of `dot_bytes` starts, given Σ x over the block.
    unsafe fn dot_bytes_start(sum_x: i32) -> Self::I;
}

/// Sixteen stored values that fill the lanes: a column of a tile of weights, or of a page of keys.
pub trait Column: bytemuck::Pod {
    /// # Safety
    /// The instruction set of `L`.
    unsafe fn load<L: Lanes>(&self, part: usize) -> L::F;
}

/// Half floats.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct F16([u16; 16]);

/// Upper halves of f32.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct BF16([u16; 16]);

/// As they are.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct F32([f32; 16]);

impl Column for F16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, part: usize) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(&self.0, part) }
    }
}

impl Column for BF16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, part: usize) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(&self.0, part) }
    }
}

impl Column for F32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, part: usize) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { L::load(&self.0, part) }
    }
}

/// Runs a block for each of the constants that is below a bound: a loop that is unrolled whatever
/// the compiler thinks of it, so that arrays of registers stay in registers.
macro_rules! unrolled {
    ($i:ident of [$($value:literal)*] below $bound:expr, $body:block) => {
        $(
            if $value < $bound {
                #[allow(non_upper_case_globals)]
                const $i: usize = $value;
                $body
            }
        )*
    };
}
pub(super) use unrolled;
