//! How fast the products are on this machine, and what the machine itself gives at this moment.

mod peak;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::arena::{Arena, Buffer};
use super::isa::Isa;
use super::matmul::{Input, Output, multiply};
use super::packed::{Kind, TILE, share};
use super::quantise::quantise_rows;
use super::threads::{Cursor, Pool, Team};
use crate::device::DeviceError;

pub use peak::Peak;

/// What bounds a step from outside. Shared machines drift by half within minutes, so a figure of
/// speed means little without these, taken beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineFigures {
    /// Bytes that the threads together read in a second, in long streams.
    pub read_bytes_per_s: f64,
    /// Time in which the threads meet, as they do after each operation.
    pub meeting: Duration,
}

/// Threads and memory to measure [`MachineFigures`] with.
#[derive(Debug)]
pub struct Machine {
    pool: Pool,
    team: Team,
    words: Buffer<u64>,
    /// What `words` points into.
    _arena: Arena,
}

impl Machine {
    /// Meetings in one pass.
    const MEETINGS: u32 = 10_000;

    /// For `threads` threads that read the same `bytes` bytes over and over, as steps do with a
    /// model's: where a part of so many stays in the last cache, it does so for both.
    ///
    /// # Errors
    /// The system's, if it gives no thread or no memory.
    pub fn new(threads: usize, bytes: usize) -> Result<Self, DeviceError> {
        let threads = threads.max(1);
        let mut pool = Pool::new(threads).map_err(|cause| DeviceError::Memory {
            what: "a thread",
            bytes: 0,
            cause,
        })?;
        let arena = Arena::new("a measurement", bytes)?;
        let words: Buffer<u64> = arena.buffer(0, bytes / size_of::<u64>());
        // Untouched memory is one page of zeros. Each thread is the first to touch its own part, as
        // with weights.
        each_share(&mut pool, words.len(), |first, count| {
            // SAFETY: the shares do not overlap.
            unsafe { words.slice_mut(first, count) }.fill(1);
        });
        Ok(Self { pool, team: Team::new(threads), words, _arena: arena })
    }

    /// Measures: a tenth of a second or so. Best of several passes: what the machine can give.
    pub fn measure(&mut self) -> MachineFigures {
        let pass = |_| {
            let started = Instant::now();
            each_share(&mut self.pool, self.words.len(), |first, count| {
                // SAFETY: nothing writes any more.
                let words = unsafe { self.words.slice(first, count) };
                std::hint::black_box(sum(words));
            });
            started.elapsed()
        };
        let read = (0..PASSES).map(pass).min().unwrap_or_default();
        let meet = |_| {
            self.team.reset();
            let started = Instant::now();
            self.pool.run(&|thread| {
                let mut cursor = Cursor::default();
                for _ in 0..Self::MEETINGS {
                    self.team.stage(thread, &mut cursor, |_| 1, |_, _| ());
                }
            });
            started.elapsed() / Self::MEETINGS
        };
        let meeting = (0..PASSES).map(meet).min().unwrap_or_default();
        let bytes = (self.words.len() * size_of::<u64>()) as f64;
        MachineFigures { read_bytes_per_s: bytes / read.as_secs_f64(), meeting }
    }
}

/// Runs `work(first, count)` for as many shares of `len` values as there are threads.
fn each_share(pool: &mut Pool, len: usize, work: impl Fn(usize, usize) + Sync) {
    let shares = pool.threads();
    let next = AtomicUsize::new(0);
    pool.run(&|_| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= shares {
                return;
            }
            let (first, count) = share(len, index, shares);
            work(first, count);
        }
    });
}

/// In several chains, so that the additions do not wait for one another.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    for chunk in words.chunks_exact(sums.len()) {
        sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    }
    sums.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

/// What bounds the products of one thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductLimits {
    /// Multiply-adds.
    pub peak: Peak,
    /// Bytes that it reads in a second, in one long stream.
    pub read_bytes_per_s: f64,
}

/// Measures what bounds [`products`] of `isa`; `None` where there is nothing but loops.
///
/// # Errors
/// The system's, if it gives no memory.
pub fn product_limits(isa: Isa) -> Result<Option<ProductLimits>, DeviceError> {
    // As much as the weights of one row's products.
    let bytes = MATRICES * TILES * Kind::Q8.tile_bytes(COLS);
    let read_bytes_per_s = Machine::new(1, bytes)?.measure().read_bytes_per_s;
    Ok(peak::peak(isa).map(|peak| ProductLimits { peak, read_bytes_per_s }))
}

/// One figure of [`products`].
#[derive(Clone, Debug, PartialEq)]
pub struct ProductFigure {
    /// Encoding of the weights.
    pub kind: String,
    /// Whether the products are of bytes.
    pub quantised: bool,
    /// Rows of activations.
    pub rows: usize,
    /// Multiply-adds a second.
    pub macs_per_s: f64,
    /// Bytes of weights read a second.
    pub bytes_per_s: f64,
}

/// Input and output width of the matrix measured: those of a small model's feed-forward block.
const COLS: usize = 576;
const TILES: usize = 96;
/// Matrices that are multiplied in turn, so that the weights come from memory, not from a cache.
const MATRICES: usize = 64;
/// Passes, of which the median counts.
const PASSES: usize = 7;

/// Every encoding with 1, 8, 32 and 256 rows of activations.
#[must_use]
pub fn products(isa: Isa) -> Vec<ProductFigure> {
    let kinds = [Kind::Q4, Kind::Q8, Kind::Q6, Kind::F16, Kind::BF16, Kind::F32];
    let rows = [1, 8, 32, 256];
    kinds.iter().flat_map(|kind| rows.map(|rows| product(isa, *kind, rows))).collect()
}

fn product(isa: Isa, kind: Kind, rows: usize) -> ProductFigure {
    let bytes = TILES * kind.tile_bytes(COLS);
    // Many rows are slow enough to need no more than one matrix.
    let matrices = (MATRICES / rows).max(1);
    // Not zero: the system would map all of it to one page.
    let weights = vec![0x1111_1111_1111_1111_u64; matrices * bytes / 8];
    let weights: &[u8] = bytemuck::cast_slice(&weights);
    let x: Vec<f32> = (0..rows * COLS).map(|i| (i % 17) as f32 - 8.0).collect();
    let blocks = quantise_rows(isa, &x, COLS);
    let input = Input { cols: COLS, x: &x, x_stride: COLS, blocks: &blocks };
    let mut out = vec![0.0_f32; rows * TILES * TILE];
    let mut times: Vec<Duration> = (0..PASSES)
        .map(|_| {
            let started = Instant::now();
            for tiles in weights.chunks_exact(bytes) {
                let output = Output { start: out.as_mut_ptr(), stride: TILES * TILE, add: false };
                // SAFETY: `out` has all rows and tiles, and this is the only thread.
                unsafe { multiply(isa, kind, tiles, &input, rows, output) };
            }
            started.elapsed()
        })
        .collect();
    times.sort_unstable();
    let seconds = times[PASSES / 2].as_secs_f64() / matrices as f64;
    ProductFigure {
        kind: format!("{kind:?}"),
        quantised: kind.quantised(),
        rows,
        macs_per_s: (rows * COLS * TILES * TILE) as f64 / seconds,
        bytes_per_s: bytes as f64 / seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No product is faster than the peak; that of bytes is the higher one.
    #[test]
    fn the_limits_of_a_thread_are_those_of_a_machine() {
        for isa in crate::device::cpu::testing::fast_isas() {
            let limits = product_limits(isa).unwrap().unwrap();
            let Peak { bytes_per_s, floats_per_s } = limits.peak;
            // Far below and far above any machine: nothing was optimised away.
            assert!((1e8..2e12).contains(&floats_per_s), "{isa:?} {limits:?}");
            assert!((1e8..8e12).contains(&bytes_per_s), "{isa:?} {limits:?}");
            assert!(bytes_per_s > floats_per_s, "{isa:?} {limits:?}");
        }
    }

    #[test]
    fn a_machine_reads_memory_and_its_threads_meet() {
        let figures = Machine::new(2, 1 << 20).unwrap().measure();
        // Far below and far above any machine: the sizes are right, and the work was done.
        assert!((1e8..1e13).contains(&figures.read_bytes_per_s), "{figures:?}");
        assert!(figures.meeting > Duration::ZERO, "{figures:?}");
    }
}
