//! Where tensors live and operations run.
//!
//! Model code knows no kernels: it records a [`Program`] once, a list of [`Op`]s over tensor
//! handles, and a device executes that program each step over a [`Batch`]. The list of operations
//! is closed: a device implements all of them, and a model that needs another adds it here, for
//! every device. Numbers of rows are not part of a program; they are the batch's.
//!
//! All of std::arch, `half` and the layouts of weights stay below this folder.

pub mod cpu;
#[cfg(feature = "vulkan")]
pub mod vulkan;

use std::sync::atomic::AtomicU64;

use pawl_shared::model_card::GgmlType;

/// A matrix or vector of the model, in the device's own layout. Index into the weights loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightId(pub usize);

/// An activation: `[rows of the batch][width]` of f32. Index into [`Program`]'s tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorId(pub usize);

/// A weight as the model file holds it: `rows` rows of `cols` values, row-major, in blocks of
/// `dtype`. A vector is one row.
#[derive(Clone, Debug)]
pub struct WeightSource<'a> {
    /// The tensor's name, for errors.
    pub name: String,
    /// How the bytes encode the values.
    pub dtype: GgmlType,
    /// Output width of a matrix; 1 for a vector.
    pub rows: usize,
    /// Input width of a matrix; length of a vector.
    pub cols: usize,
    /// The bytes, in the file's order.
    pub data: &'a [u8],
}

/// One product of a [`Op::Matmul`]: `out[r] = weight · x[r]`, plus what `out[r]` held if `add`.
#[derive(Clone, Debug)]
pub struct MatmulPart {
    /// `[out width][x width]`
    pub weight: WeightId,
    /// Where the product goes.
    pub out: TensorId,
    /// Adds to `out` (a residual) instead of overwriting it.
    pub add: bool,
}

/// The non-linearity of a gated feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`
    Silu,
    /// The tanh approximation of GELU.
    Gelu,
}

/// The closed list of operations. "Row" is a row of the batch: one token.
#[derive(Clone, Debug)]
pub enum Op {
    /// `out[r] = table[token of r]`
    Embed { table: WeightId, out: TensorId },
    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) · weight`
    RmsNorm { x: TensorId, weight: WeightId, eps: f32, out: TensorId },
    /// Products that share the input `x`. A device may quantise `x` once for all of them.
    Matmul { x: TensorId, parts: Vec<MatmulPart> },
    /// `out[r][i] += bias[i]`
    AddBias { x: TensorId, bias: WeightId },
    /// Cosine and sine of each row's position at each of [`RopeSpec::frequencies`], interleaved.
    RopeAngles { out: TensorId },
    /// Rotates the neighbours (2i, 2i+1) of each head of `x` by the angles; what lies beyond the
    /// rotated part of a head stays.
    Rope { x: TensorId, angles: TensorId, head_dim: usize },
    /// Writes keys and values of the rows into the paged cache.
    KvWrite { layer: usize, k: TensorId, v: TensorId },
    /// Causal attention of each row over its sequence's cache, grouped heads.
    Attention { layer: usize, q: TensorId, out: TensorId },
    /// `gate[r] = activation(gate[r]) · up[r]`
    Gate { activation: Activation, gate: TensorId, up: TensorId },
    /// `out[i] = x[batch.taken[i]]`: only rows that sample go on.
    Take { x: TensorId, out: TensorId },
}

/// Which rows a program runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row per token of the batch.
    Tokens,
    /// One row per entry of [`Batch::taken`].
    Taken,
}

/// Operations in order, recorded once.
#[derive(Clone, Debug)]
pub struct Program {
    /// What its rows are.
    pub rows: Rows,
    /// Executed in this order; each sees what the ones before it wrote.
    pub ops: Vec<Op>,
}

/// The activations that programs of one device name.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    /// Values in a row of each tensor, and what its rows are.
    pub shapes: Vec<(usize, Rows)>,
}

impl TensorTable {
    /// A new tensor of `width` values a row.
    pub fn add(&mut self, width: usize, rows: Rows) -> TensorId {
        self.shapes.push((width, rows));
        TensorId(self.shapes.len() - 1)
    }
}

/// How attention is shaped, for the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Layers with a cache.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values in a head.
    pub head_dim: usize,
}

/// Rotary embedding: radians a position, one per rotated pair.
#[derive(Clone, Debug, Default)]
pub struct RopeSpec {
    /// `theta^(-2i/rotated)`, after any scaling.
    pub frequencies: Vec<f32>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Its first row in the batch.
    pub first_row: usize,
    /// At least 1.
    pub num_rows: usize,
    /// Position of its first row; everything before is in the cache.
    pub first_position: usize,
    /// Where its block table starts in [`Batch::block_tables`].
    pub blocks_start: usize,
}

/// What a program runs over.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// One per row.
    pub tokens: &'a [u32],
    /// Cover the rows, in order.
    pub sequences: &'a [Sequence],
    /// Block ids of all sequences, each table contiguous.
    pub block_tables: &'a [u32],
    /// Rows whose logits are wanted.
    pub taken: &'a [u32],
}

/// A device that holds a model's weights, its activations and its KV cache.
pub trait Device: Send {
    /// Rows of [`Batch::tokens`] that one run takes.
    fn tokens_max(&self) -> usize;

    /// Rows of [`Batch::taken`] that one run takes.
    fn taken_max(&self) -> usize;

    /// Runs the operations of `program` in order; bumps `progress` after each.
    ///
    /// # Errors
    /// What the device reports; the KV cache is then in an unknown state.
    fn run(
        &mut self,
        program: &Program,
        batch: &Batch<'_>,
        progress: &AtomicU64,
    ) -> Result<(), DeviceError>;

    /// Row `row` of `tensor`, as the last run left it.
    fn row(&self, tensor: TensorId, row: usize) -> &[f32];

    /// The same, to change in place: sampling masks logits where they lie.
    fn row_mut(&mut self, tensor: TensorId, row: usize) -> &mut [f32];
}

/// Why a model cannot be put on a device, or an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No kernel reads this encoding.
    #[error(
        "tensor {tensor} is {dtype}, which no kernel reads; they read F32, F16, BF16, \
         Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K: requantise the model to one of these"
    )]
    UnsupportedType {
        /// Which.
        tensor: String,
        /// Its encoding.
        dtype: GgmlType,
    },
    /// The bytes do not match the shape.
    #[error("tensor {tensor} needs {need} bytes for its shape, the file holds {found}")]
    WrongSize { tensor: String, need: usize, found: usize },
    /// A shape that the kernels do not take.
    #[error("{what} is {found}, but {need}")]
    Shape { what: String, found: usize, need: String },
    /// The system gave no memory.
    #[error("cannot allocate {bytes} bytes for {what}: {cause}")]
    Memory { what: &'static str, bytes: usize, cause: std::io::Error },
    /// No adapter, or one that failed: the text says what, in the driver's words where it has any.
    #[error("Vulkan: {0}")]
    Vulkan(String),
    /// `PAWL_CPU_ISA` or the configuration asks for what this machine lacks.
    #[error("CPU instruction set {asked:?} is not available here; choose one of {available}")]
    Isa { asked: String, available: String },
}
