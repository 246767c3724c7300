//! The CPU device: packed weights, a pool of threads, kernels for each instruction set.
//!
//! Every thread walks the program; an operation is split by rows, by tiles of weights or by heads,
//! and all threads meet after it. No result depends on how it was split: see `matmul` and
//! `attention` for the orders that are kept.

mod arena;
mod attention;
mod execute;
mod exp;
mod isa;
mod kv;
#[cfg(target_arch = "x86_64")]
mod lanes;
pub(crate) mod logits;
mod matmul;
pub mod measure;
pub(in crate::device) mod packed;
pub mod profile;
mod quantise;
mod rows;
#[cfg(test)]
pub(crate) mod testing;
mod threads;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use arena::{Arena, Buffer, Layout, trim_heap};
pub use isa::Isa;
use kv::KvCache;
pub use kv::{KvDtype, block_bytes};
use packed::{Kind, PackedMatrix, Part};
use profile::{Part as ProfilePart, Profile};
use quantise::{GROUP_ROWS, QuantisedBlock};
#[cfg(feature = "vulkan")]
pub(in crate::device) use rows::rope_angles;
use threads::{Pool, Team};
pub use threads::{allowed_cores, physical_cores};

use super::{
    AttentionSpec, Batch, Device, DeviceError, MatmulPart, Op, Program, RopeSpec, Rows, TensorId,
    TensorTable, WeightSource,
};

/// Rows of one run. More rows only stream the weights less often, and at this size the
/// multiplications take a hundred times as long as the streaming; the activations should stay in
/// the second-level caches instead.
const TOKENS_MAX: usize = 256;
const _: () = assert!(TOKENS_MAX.is_multiple_of(GROUP_ROWS));
/// Rows of logits of one run: as many as the multiplications need to keep their pace.
const TAKEN_MAX: usize = 32;

/// What a device is made for.
#[derive(Clone, Debug)]
pub struct CpuDeviceConfig {
    /// Threads, the caller counted.
    pub threads: usize,
    /// Which kernels.
    pub isa: Isa,
    /// Shape of attention and its cache.
    pub attention: AttentionSpec,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Activations that programs name.
    pub tensors: TensorTable,
    /// Encoding of the cache.
    pub kv_dtype: KvDtype,
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks, block 0 included.
    pub num_blocks: usize,
}

#[derive(Debug)]
enum Weight {
    Matrix(PackedMatrix),
    Vector(Vec<f32>),
}

/// An activation: `[rows][stride]`.
#[derive(Clone, Copy, Debug)]
struct Tensor {
    width: usize,
    stride: usize,
    values: Buffer<f32>,
}

/// What one thread needs for itself.
#[derive(Debug)]
struct ThreadState {
    /// A single row's quantised input: every thread makes its own, which costs less than to meet.
    quantised: Buffer<QuantisedBlock>,
    /// A row as it is quantised, before its blocks go to their places.
    row_blocks: Vec<QuantisedBlock>,
    attention: AttentionState,
    /// Only of thread 0, while somebody wants to know.
    profile: Option<Profile>,
}

/// What a thread needs for the queries of a tile.
#[derive(Debug)]
struct AttentionState {
    scratch: attention::Scratch,
    /// Scaled: `[queries][head_dim]`
    q: Vec<f32>,
    /// Positions that each query sees.
    positions: Vec<usize>,
    /// What comes of one group, and of all so far.
    fresh: Vec<f32>,
    merged: Vec<f32>,
}

impl AttentionState {
    fn new(spec: &AttentionSpec) -> Self {
        let (group, rows) = attention::plan::Plan::shape(spec);
        let queries = group * rows;
        let partial = vec![0.0; attention::partial_len(queries, spec.head_dim)];
        Self {
            scratch: attention::Scratch::new(queries, spec.head_dim),
            q: vec![0.0; queries * spec.head_dim],
            positions: Vec::with_capacity(queries),
            fresh: partial.clone(),
            merged: partial,
        }
    }
}

/// Whether there are kernels for all of `weights`.
///
/// # Errors
/// [`DeviceError`] for the first encoding or shape that no kernel takes.
pub fn check_weights(weights: &[WeightSource<'_>]) -> Result<(), DeviceError> {
    weights.iter().try_for_each(|weight| packed::check_source(weight).map(|_| ()))
}

/// See the module.
#[derive(Debug)]
pub struct CpuDevice {
    isa: Isa,
    pool: Pool,
    weights: Vec<Weight>,
    tensors: Vec<Tensor>,
    quantised: Buffer<QuantisedBlock>,
    threads: Vec<Mutex<ThreadState>>,
    kv: KvCache,
    rope: RopeSpec,
    attention: attention::plan::Plan,
    /// Results of groups of positions that wait to be merged.
    partials: Buffer<f32>,
    team: Team,
    /// What the buffers above point into; last, so that it goes last.
    _arenas: Vec<Arena>,
}

impl CpuDevice {
    /// Packs `weights` (whose order is that of their use) and allocates the rest. `loaded` is told
    /// the bytes of each weight when it is packed.
    ///
    /// # Errors
    /// [`DeviceError`] for an encoding or a shape that no kernel takes, and for lack of memory.
    pub fn load(
        config: CpuDeviceConfig,
        weights: &[WeightSource<'_>],
        loaded: &mut dyn FnMut(u64),
    ) -> Result<Self, DeviceError> {
        let kinds = weights.iter().map(packed::check_source).collect::<Result<Vec<_>, _>>()?;
        let threads = config.threads.max(1);
        let mut pool = Pool::new(threads).map_err(|cause| DeviceError::Memory {
            what: "a thread",
            bytes: 0,
            cause,
        })?;
        let (weights_arena, packed) = pack(weights, &kinds, &mut pool, loaded)?;
        let kv =
            KvCache::new(config.attention, config.kv_dtype, config.block_size, config.num_blocks)?;

        let mut layout = Layout::default();
        let places: Vec<_> = config
            .tensors
            .shapes
            .iter()
            .map(|&(width, rows)| {
                let stride = row_stride(width);
                let rows = match rows {
                    Rows::Tokens => TOKENS_MAX,
                    Rows::Taken => TAKEN_MAX,
                };
                (width, stride, rows, layout.place(rows * stride * size_of::<f32>()))
            })
            .collect();
        let cols_max = weights.iter().map(|weight| weight.cols).max().unwrap_or(0);
        let blocks = cols_max.div_ceil(packed::BLOCK);
        let mut place = |blocks: usize| layout.place(blocks * size_of::<QuantisedBlock>());
        let shared = place(TOKENS_MAX * blocks);
        let own: Vec<_> = (0..threads).map(|_| place(GROUP_ROWS * blocks)).collect();
        let partials = layout.place(attention::plan::PARTIALS_MAX * size_of::<f32>());
        let arena = Arena::new("activations", layout.len())?;
        let tensors = places.into_iter().map(|(width, stride, rows, at)| Tensor {
            width,
            stride,
            values: arena.buffer(at, rows * stride),
        });
        let thread_state = |at: usize| {
            Mutex::new(ThreadState {
                quantised: arena.buffer(at, GROUP_ROWS * blocks),
                row_blocks: vec![QuantisedBlock::default(); blocks],
                attention: AttentionState::new(&config.attention),
                profile: None,
            })
        };
        trim_heap();
        Ok(Self {
            isa: config.isa,
            pool,
            weights: packed,
            tensors: tensors.collect(),
            quantised: arena.buffer(shared, TOKENS_MAX * blocks),
            threads: own.into_iter().map(thread_state).collect(),
            kv,
            rope: config.rope,
            attention: attention::plan::Plan::new(TOKENS_MAX),
            partials: arena.buffer(partials, attention::plan::PARTIALS_MAX),
            team: Team::new(threads),
            _arenas: vec![weights_arena, arena],
        })
    }

    /// Which kernels run.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads, the caller counted.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.pool.threads()
    }

    /// From now on measures where the time of runs goes.
    pub fn start_profile(&mut self) {
        self.own_state().profile = Some(Profile::start());
    }

    /// Ends what [`CpuDevice::start_profile`] began.
    pub fn take_profile(&mut self) -> Option<Profile> {
        let mut profile = self.own_state().profile.take()?;
        profile.lap(ProfilePart::Between);
        Some(profile)
    }

    fn own_state(&mut self) -> &mut ThreadState {
        self.threads[0].get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of weights that one run of `program` multiplies with.
    #[must_use]
    pub fn matrix_bytes(&self, program: &Program) -> usize {
        let bytes = |part: &MatmulPart| match &self.weights[part.weight.0] {
            Weight::Matrix(matrix) => matrix.parts.iter().map(|part| part.bytes.len()).sum(),
            Weight::Vector(_) => 0,
        };
        let of_op = |op: &Op| match op {
            Op::Matmul { parts, .. } => parts.iter().map(bytes).sum(),
            _ => 0_usize,
        };
        program.ops.iter().map(of_op).sum()
    }

    /// Bytes that the cache keeps of one position.
    #[must_use]
    pub fn kv_bytes_per_position(&self) -> usize {
        block_bytes(&self.kv.attention, 1, self.kv.dtype)
    }

    /// Runs `work(thread, row, values)` for the first `rows` rows of `tensor`, shared among the
    /// threads.
    pub fn for_each_row(
        &mut self,
        tensor: TensorId,
        rows: usize,
        work: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
    ) {
        let tensor = self.tensors[tensor.0];
        let next = AtomicUsize::new(0);
        let claim = |thread: usize| {
            loop {
                let row = next.fetch_add(1, Ordering::Relaxed);
                if row >= rows {
                    return;
                }
                // SAFETY: each row is claimed once, and `&mut self` keeps all others away.
                let values = unsafe { tensor.values.slice_mut(row * tensor.stride, tensor.width) };
                work(thread, row, values);
            }
        };
        // For a single row, the others need not be woken.
        if rows <= 1 { claim(0) } else { self.pool.run(&claim) }
    }
}

impl Device for CpuDevice {
    fn tokens_max(&self) -> usize {
        TOKENS_MAX
    }

    fn taken_max(&self) -> usize {
        TAKEN_MAX
    }

    fn run(
        &mut self,
        program: &Program,
        batch: &Batch<'_>,
        progress: &AtomicU64,
    ) -> Result<(), DeviceError> {
        self.execute(program, batch, progress);
        Ok(())
    }

    fn row(&self, tensor: TensorId, row: usize) -> &[f32] {
        let tensor = &self.tensors[tensor.0];
        // SAFETY: `&self` and `run`'s `&mut self` exclude each other, so nothing writes.
        unsafe { tensor.values.slice(row * tensor.stride, tensor.width) }
    }

    fn row_mut(&mut self, tensor: TensorId, row: usize) -> &mut [f32] {
        let tensor = &self.tensors[tensor.0];
        // SAFETY: `&mut self` is exclusive.
        unsafe { tensor.values.slice_mut(row * tensor.stride, tensor.width) }
    }
}

/// Distance of rows: whole registers, and not a multiple of a page, which would map the same column
/// of all rows to one set of the first-level cache.
fn row_stride(width: usize) -> usize {
    let stride = width.next_multiple_of(packed::TILE);
    if (stride * size_of::<f32>()).is_multiple_of(4096) { stride + packed::TILE } else { stride }
}

/// Packs the matrices, each thread its own part, and reads the vectors.
fn pack(
    sources: &[WeightSource<'_>],
    kinds: &[Kind],
    pool: &mut Pool,
    loaded: &mut dyn FnMut(u64),
) -> Result<(Arena, Vec<Weight>), DeviceError> {
    let shapes: Vec<_> = sources
        .iter()
        .zip(kinds)
        // A vector is no matrix: it takes no tiles.
        .map(|(source, &kind)| (kind, if source.rows == 1 { 0 } else { source.rows }, source.cols))
        .collect();
    let plan = packed::plan_parts(&shapes, pool.threads());
    let arena = Arena::new("weights", plan.bytes)?;
    let mut weights = Vec::with_capacity(sources.len());
    for ((source, &kind), parts) in sources.iter().zip(kinds).zip(&plan.parts) {
        if source.rows == 1 {
            weights.push(Weight::Vector(read_vector(source, kind)?));
        } else {
            let bytes = kind.tile_bytes(source.cols);
            let part = |&(first_tile, tiles, at): &(usize, usize, usize)| Part {
                first_tile,
                tiles,
                bytes: arena.buffer(at, tiles * bytes),
            };
            let parts: Vec<Part> = parts.iter().map(part).collect();
            let next = AtomicUsize::new(0);
            pool.run(&|_| {
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // SAFETY: the parts do not overlap, and each is taken once.
                    let out = unsafe { part.bytes.slice_mut(0, part.bytes.len()) };
                    packed::pack_tiles(source, kind, part.first_tile, part.tiles, out);
                }
            });
            let (rows, cols) = (source.rows, source.cols);
            weights.push(Weight::Matrix(PackedMatrix { kind, rows, cols, parts }));
        }
        loaded(source.data.len() as u64);
    }
    Ok((arena, weights))
}

/// The values of a vector.
///
/// # Errors
/// [`DeviceError::UnsupportedType`] where they are quantised.
#[cfg(feature = "vulkan")]
pub(in crate::device) fn vector_values(source: &WeightSource<'_>) -> Result<Vec<f32>, DeviceError> {
    read_vector(source, packed::check_source(source)?)
}

fn read_vector(source: &WeightSource<'_>, kind: Kind) -> Result<Vec<f32>, DeviceError> {
    let unsupported =
        || DeviceError::UnsupportedType { tensor: source.name.clone(), dtype: source.dtype };
    let data = source.data;
    match kind {
        Kind::F32 => {
            Ok(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
        Kind::F16 => Ok(data
            .chunks_exact(2)
            .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect()),
        Kind::BF16 => Ok(data
            .chunks_exact(2)
            .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect()),
        Kind::Q4 | Kind::Q8 | Kind::Q6 => Err(unsupported()),
    }
}
