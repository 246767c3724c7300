//! Walking a program, on every thread at once.

mod attention;

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arena::Buffer;
use super::attention::plan::Plan;
use super::isa::Isa;
use super::kv::KvCache;
use super::matmul::{self, Input, Output};
use super::packed::{BLOCK, PackedMatrix, TILE, share};
use super::profile::Part;
use super::quantise::{GROUP_ROWS, QuantisedBlock, place_row, quantise_row};
use super::threads::{Cursor, Team};
use super::{CpuDevice, TAKEN_MAX, TOKENS_MAX, Tensor, ThreadState, Weight, rows};
use crate::device::{Batch, MatmulPart, Op, Program, RopeSpec, Rows, Sequence, TensorId, WeightId};

/// Rows that a thread takes at once in operations on rows.
const ROWS_AT_ONCE: usize = 8;
/// Bytes of weights, times rows in fours, that a thread takes at once in a product: some
/// microseconds.
const PRODUCT_AT_ONCE: usize = 1 << 16;

/// What the threads of one run share.
struct Run<'a> {
    isa: Isa,
    weights: &'a [Weight],
    tensors: &'a [Tensor],
    quantised: &'a Buffer<QuantisedBlock>,
    kv: &'a KvCache,
    rope: &'a RopeSpec,
    attention: &'a Plan,
    /// Results of groups that wait to be merged.
    partials: &'a Buffer<f32>,
    team: &'a Team,
    batch: &'a Batch<'a>,
    /// Rows of the program.
    rows: usize,
    thread: usize,
}

impl CpuDevice {
    pub(super) fn execute(&mut self, program: &Program, batch: &Batch<'_>, progress: &AtomicU64) {
        let rows = match program.rows {
            Rows::Tokens => batch.tokens.len(),
            Rows::Taken => batch.taken.len(),
        };
        assert!(batch.tokens.len() <= TOKENS_MAX, "the batch has at most tokens_max rows");
        assert!(batch.taken.len() <= TAKEN_MAX, "the batch takes at most taken_max rows");
        let covered: usize = batch.sequences.iter().map(|sequence| sequence.num_rows).sum();
        assert_eq!(covered, batch.tokens.len(), "the sequences cover the rows");
        let threads = self.pool.threads();
        self.attention.set(batch.sequences, &self.kv.attention, threads);
        self.team.reset();
        let (isa, weights, tensors) = (self.isa, &self.weights[..], &self.tensors[..]);
        let (quantised, kv, rope) = (&self.quantised, &self.kv, &self.rope);
        let (attention, partials, team) = (&self.attention, &self.partials, &self.team);
        let states = &self.threads;
        self.pool.run(&|thread| {
            let mut state = states[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let run = Run {
                isa,
                weights,
                tensors,
                quantised,
                kv,
                rope,
                attention,
                partials,
                team,
                batch,
                rows,
                thread,
            };
            let mut cursor = Cursor::default();
            state.lap(Part::Between);
            let mut ops = &program.ops[..];
            while !ops.is_empty() {
                // SAFETY: all threads run the same stages in the same order.
                let done = unsafe { run.stages(ops, &mut state, &mut cursor) };
                ops = &ops[done..];
                if thread == 0 {
                    progress.fetch_add(done as u64, Ordering::Relaxed);
                }
            }
        });
    }
}

impl ThreadState {
    fn lap(&mut self, part: Part) {
        if let Some(profile) = &mut self.profile {
            profile.lap(part);
        }
    }
}

/// How many of the first `ops` see one row at a time, so that a thread can take a row through all
/// of them. [`Op::Take`] reads another row: it can only be the first.
fn rows_only(ops: &[Op]) -> usize {
    let of_a_row = |(index, op): &(usize, &Op)| match op {
        Op::Matmul { .. } | Op::Attention { .. } => false,
        Op::Take { .. } => *index == 0,
        _ => true,
    };
    ops.iter().enumerate().take_while(of_a_row).count()
}

impl Run<'_> {
    fn matrix(&self, id: WeightId) -> &PackedMatrix {
        match &self.weights[id.0] {
            Weight::Matrix(matrix) => matrix,
            Weight::Vector(_) => panic!("weight {} is a vector where a matrix is used", id.0),
        }
    }

    fn vector(&self, id: WeightId) -> &[f32] {
        match &self.weights[id.0] {
            Weight::Vector(vector) => vector,
            Weight::Matrix(_) => panic!("weight {} is a matrix where a vector is used", id.0),
        }
    }

    /// # Safety
    /// No thread writes that row meanwhile.
    unsafe fn row(&self, id: TensorId, row: usize) -> &[f32] {
        let tensor = &self.tensors[id.0];
        // SAFETY: the caller's promise.
        unsafe { tensor.values.slice(row * tensor.stride, tensor.width) }
    }

    /// # Safety
    /// No other thread uses that row meanwhile.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row_mut(&self, id: TensorId, row: usize) -> &mut [f32] {
        let tensor = &self.tensors[id.0];
        // SAFETY: the caller's promise.
        unsafe { tensor.values.slice_mut(row * tensor.stride, tensor.width) }
    }

    /// A stage over all rows, in order.
    ///
    /// # Safety
    /// `work` writes what belongs to its row alone, and reads nothing that other rows of this stage
    /// write.
    unsafe fn each_row(&self, cursor: &mut Cursor, mut work: impl FnMut(usize)) {
        let queues = self.team.queues();
        let units = |queue| share(self.rows, queue, queues).1.div_ceil(ROWS_AT_ONCE);
        self.team.stage(self.thread, cursor, units, |queue, unit| {
            let (first, count) = share(self.rows, queue, queues);
            let from = unit * ROWS_AT_ONCE;
            let to = count.min(from + ROWS_AT_ONCE);
            (first + from..first + to).for_each(&mut work);
        });
    }

    fn sequence_of(&self, row: usize) -> &Sequence {
        let after = self.batch.sequences.partition_point(|sequence| sequence.first_row <= row);
        &self.batch.sequences[after - 1]
    }

    fn position_of(&self, row: usize) -> usize {
        let sequence = self.sequence_of(row);
        sequence.first_position + row - sequence.first_row
    }

    /// The first of `ops`, with the other threads, and those that can follow it without meeting in
    /// between; returns how many.
    ///
    /// # Safety
    /// All threads call this with the same operations, after the same stages.
    unsafe fn stages(&self, ops: &[Op], state: &mut ThreadState, cursor: &mut Cursor) -> usize {
        let of_rows = rows_only(ops);
        let next = ops.get(of_rows);
        // SAFETY: every operation is a stage or more; each unit of a stage writes its own rows,
        // columns or heads, and reads what earlier stages wrote.
        unsafe {
            match next {
                // A single row is quantised by each thread for itself, later: that costs less than
                // to meet.
                Some(Op::Matmul { x, parts }) if self.rows > 1 && self.quantises(parts) => {
                    self.each_row(cursor, |row| {
                        ops[..of_rows].iter().for_each(|op| self.row_op(op, row));
                        self.quantise(*x, row, self.quantised, &mut state.row_blocks);
                    });
                }
                _ if of_rows > 0 => self.each_row(cursor, |row| {
                    ops[..of_rows].iter().for_each(|op| self.row_op(op, row));
                }),
                _ => {}
            }
            state.lap(Part::Rows);
            match next {
                Some(Op::Matmul { x, parts }) => {
                    self.matmul(*x, parts, state, cursor);
                    let rows = parts.iter().map(|part| self.matrix(part.weight).rows).sum();
                    state.lap(Part::Product { cols: self.tensors[x.0].width, rows });
                }
                Some(Op::Attention { layer, q, out }) => {
                    self.attention(*layer, *q, *out, state, cursor);
                    state.lap(Part::Attention);
                }
                _ => return of_rows,
            }
        }
        of_rows + 1
    }

    /// One of the operations that see one row at a time.
    ///
    /// # Safety
    /// No other thread uses that row meanwhile.
    unsafe fn row_op(&self, op: &Op, row: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match op {
                Op::Embed { table, out } => {
                    let token = self.batch.tokens[row] as usize;
                    self.matrix(*table).unpack_row(token, self.row_mut(*out, row));
                }
                Op::RmsNorm { x, weight, eps, out } => {
                    let out = self.row_mut(*out, row);
                    rows::rms_norm(self.isa, self.row(*x, row), self.vector(*weight), *eps, out);
                }
                Op::AddBias { x, bias } => {
                    rows::add_bias(self.isa, self.row_mut(*x, row), self.vector(*bias));
                }
                Op::RopeAngles { out } => {
                    let out = self.row_mut(*out, row);
                    rows::rope_angles(self.position_of(row), &self.rope.frequencies, out);
                }
                Op::Rope { x, angles, head_dim } => {
                    let x = self.row_mut(*x, row);
                    rows::rope(self.isa, x, self.row(*angles, row), *head_dim);
                }
                Op::KvWrite { layer, k, v } => {
                    let (sequence, position) = (self.sequence_of(row), self.position_of(row));
                    let index = sequence.blocks_start + position / self.kv.block_size;
                    let block = self.batch.block_tables[index] as usize;
                    let offset = position % self.kv.block_size;
                    self.kv.write(*layer, block, offset, self.row(*k, row), self.row(*v, row));
                }
                Op::Gate { activation, gate, up } => {
                    let (gate, up) = (self.row_mut(*gate, row), self.row(*up, row));
                    rows::gate(self.isa, *activation, gate, up);
                }
                Op::Take { x, out } => {
                    let from = self.batch.taken[row] as usize;
                    self.row_mut(*out, row).copy_from_slice(self.row(*x, from));
                }
                Op::Matmul { .. } | Op::Attention { .. } => {
                    unreachable!("rows_only counts operations on rows")
                }
            }
        }
    }

    /// Whether a product of `parts` reads its input quantised.
    fn quantises(&self, parts: &[MatmulPart]) -> bool {
        parts.iter().any(|part| self.matrix(part.weight).kind.quantised())
    }

    /// Quantises row `row` of `x` to its places in `to`.
    ///
    /// # Safety
    /// No other thread writes that row, or uses its places, meanwhile.
    unsafe fn quantise(
        &self,
        x: TensorId,
        row: usize,
        to: &Buffer<QuantisedBlock>,
        row_blocks: &mut [QuantisedBlock],
    ) {
        let row_blocks = &mut row_blocks[..self.tensors[x.0].width / BLOCK];
        // SAFETY: the caller's promise.
        unsafe {
            quantise_row(self.isa, self.row(x, row), row_blocks);
            place_row(row, row_blocks, |at, block| to.slice_mut(at, 1)[0] = block);
        }
    }

    /// Multiplies tile by tile. Rows of `x` are quantised already, if it is more than one.
    ///
    /// # Safety
    /// As in [`Run::op`].
    unsafe fn matmul(
        &self,
        x: TensorId,
        parts: &[MatmulPart],
        state: &mut ThreadState,
        cursor: &mut Cursor,
    ) {
        let tensor = &self.tensors[x.0];
        let cols = tensor.width;
        let blocks = cols / BLOCK;
        let quantised = self.quantises(parts);
        let alone = self.rows == 1;
        let buffer = if alone { &state.quantised } else { self.quantised };
        let groups = if quantised { self.rows.div_ceil(GROUP_ROWS) } else { 0 };
        let mut own_row_missing = quantised && alone;
        let units = |queue| parts.iter().map(|part| self.chunks(part, queue).0).sum();
        self.team.stage(self.thread, cursor, units, |queue, mut unit| {
            // Not before a unit is taken: until then the stage may be over, and `x` be written.
            if std::mem::take(&mut own_row_missing) {
                // SAFETY: a thread's own buffer is its own.
                unsafe { self.quantise(x, 0, buffer, &mut state.row_blocks) };
            }
            // SAFETY: nothing writes the input until this stage is done.
            let input = unsafe {
                Input {
                    cols,
                    x: tensor.values.slice(0, self.rows * tensor.stride),
                    x_stride: tensor.stride,
                    blocks: bytemuck::cast_slice(buffer.slice(0, groups * blocks * GROUP_ROWS)),
                }
            };
            for part in parts {
                let (chunks, tiles) = self.chunks(part, queue);
                if unit >= chunks {
                    unit -= chunks;
                    continue;
                }
                // SAFETY: this unit writes the columns of its own tiles only.
                unsafe { self.multiply(part, &input, queue, unit * tiles, tiles) };
                return;
            }
        });
    }

    /// Of the tiles of `part` in `queue`: how many units, and how many tiles in each.
    fn chunks(&self, part: &MatmulPart, queue: usize) -> (usize, usize) {
        let matrix = self.matrix(part.weight);
        let size = matrix.kind.tile_bytes(matrix.cols) * self.rows.div_ceil(4);
        let tiles = (PRODUCT_AT_ONCE / size.max(1)).max(1);
        (matrix.parts[queue].tiles.div_ceil(tiles), tiles)
    }

    /// Multiplies up to `count` tiles of a queue, from its `first` on.
    ///
    /// # Safety
    /// As in [`Run::op`].
    unsafe fn multiply(
        &self,
        part: &MatmulPart,
        input: &Input<'_>,
        queue: usize,
        first: usize,
        count: usize,
    ) {
        let matrix = self.matrix(part.weight);
        let out = &self.tensors[part.out.0];
        assert_eq!((matrix.cols, matrix.rows), (input.cols, out.width), "shapes of a product");
        let mine = &matrix.parts[queue];
        let count = count.min(mine.tiles - first);
        let bytes = matrix.kind.tile_bytes(matrix.cols);
        // SAFETY: the last tile may reach beyond the matrix's rows, into the padding of the
        // tensor's rows, which belongs to it as well.
        unsafe {
            let column = (mine.first_tile + first) * TILE;
            let start = out.values.pointer(column, self.rows * out.stride);
            let output = Output { start, stride: out.stride, add: part.add };
            let tiles = mine.bytes.slice(first * bytes, count * bytes);
            matmul::multiply(self.isa, matrix.kind, tiles, input, self.rows, output);
        }
    }
}
