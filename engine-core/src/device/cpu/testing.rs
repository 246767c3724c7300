//! Random numbers and random weights for tests of kernels.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use half::f16;
use pawl_shared::model_card::GgmlType;

use super::CpuDevice;
use super::isa::Isa;
use crate::device::TensorId;

/// A small generator: the same numbers for the same seed, everywhere.
pub struct Random(pub u64);

impl Random {
    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In `[-1, 1)`.
    pub fn unit(&mut self) -> f32 {
        self.bits() as f32 / (1_u32 << 30) as f32 - 1.0
    }

    /// `len` of them.
    pub fn units(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.bits() as usize % bound
    }

    /// `rows × cols` random weights of about 1/√cols, encoded.
    pub fn weights(&mut self, dtype: GgmlType, rows: usize, cols: usize) -> Vec<u8> {
        let size = 1.0 / (cols as f32).sqrt();
        let mut out = Vec::new();
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        match dtype {
            GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q8_0 => {
                for _ in 0..rows * cols / 32 {
                    let (levels, bytes) =
                        if dtype == GgmlType::Q8_0 { (127.0, 32) } else { (8.0, 16) };
                    out.extend(half(size * (1.0 + 0.5 * self.unit()) / levels));
                    if dtype == GgmlType::Q4_1 {
                        out.extend(half(-size * (1.0 + 0.5 * self.unit())));
                    }
                    out.extend((0..bytes).map(|_| self.bits() as u8));
                }
            }
            GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K => {
                let bytes = dtype.block_bytes() as usize;
                for _ in 0..rows * cols / dtype.block_len() as usize {
                    let mut block: Vec<u8> = (0..bytes).map(|_| self.bits() as u8).collect();
                    // Random bits are no sensible half floats.
                    let (scales, at): (&[f32], usize) = match dtype {
                        GgmlType::Q5_0 => (&[1.0 / 16.0], 0),
                        GgmlType::Q5_1 => (&[1.0 / 16.0, -1.0], 0),
                        GgmlType::Q6_K => (&[1.0 / 2048.0], 208),
                        _ => (&[1.0 / 512.0, 1.0 / 32.0], 0),
                    };
                    for (scale, at) in scales.iter().zip((at..).step_by(2)) {
                        let scale = half(size * scale * (1.0 + 0.5 * self.unit()));
                        block[at..at + 2].copy_from_slice(&scale);
                    }
                    out.extend(block);
                }
            }
            GgmlType::F16 => (0..rows * cols).for_each(|_| out.extend(half(size * self.unit()))),
            GgmlType::BF16 => {
                let bf16 = |value: f32| half::bf16::from_f32(value).to_le_bytes();
                (0..rows * cols).for_each(|_| out.extend(bf16(size * self.unit())));
            }
            _ => (0..rows * cols).for_each(|_| out.extend((size * self.unit()).to_le_bytes())),
        }
        out
    }
}

/// All instruction sets of this machine but the specification.
pub fn fast_isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| *isa != Isa::Scalar && isa.available()).collect()
}

/// Equal to the last bit, but for which NaN.
pub fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(same, "{what}: value {i} is {a:e}, expected {b:e}");
    }
}

/// The allocator of the tests of this crate: the system's, and counts for threads that ask for it.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

static COUNTED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: all memory is the system allocator's; counting touches none of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNTED.fetch_add(u64::from(COUNTS.get()), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNTED.fetch_add(u64::from(COUNTS.get()), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Allocations so far of the threads that count.
pub fn allocations_counted() -> u64 {
    COUNTED.load(Ordering::SeqCst)
}

/// Counts this thread's allocations from now on, or no longer.
pub fn count_allocations(counts: bool) {
    COUNTS.set(counts);
}

impl CpuDevice {
    /// From now on the allocations of this thread and of all workers are counted.
    pub fn count_allocations_of_all_threads(&mut self, any: TensorId) {
        let threads = self.num_threads();
        let there = AtomicUsize::new(0);
        // As many rows as threads, and nobody takes a second before all have one.
        self.for_each_row(any, threads, &|_, _, _| {
            count_allocations(true);
            there.fetch_add(1, Ordering::SeqCst);
            while there.load(Ordering::SeqCst) < threads {
                std::thread::yield_now();
            }
        });
    }
}
