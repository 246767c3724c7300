//! Walking a program, on every thread at once.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::arena::Buffer;
use super::attention::{self, QUERIES_MAX, Query};
use super::isa::Isa;
use super::kv::KvCache;
use super::matmul::{self, Input, Output};
use super::packed::{BLOCK, PackedMatrix, TILE, share};
use super::pool::Barrier;
use super::quantise::{QuantisedBlock, quantise_row};
use super::{CpuDevice, TAKEN_MAX, TOKENS_MAX, Tensor, ThreadState, Weight, rows};
use crate::device::{Batch, MatmulPart, Op, Program, RopeSpec, Rows, Sequence, TensorId, WeightId};

/// What the threads of one run share.
struct Run<'a> {
    isa: Isa,
    weights: &'a [Weight],
    tensors: &'a [Tensor],
    quantised: &'a Buffer<QuantisedBlock>,
    kv: &'a KvCache,
    rope: &'a RopeSpec,
    attention_tiles: &'a [(usize, usize, usize)],
    claims: &'a [AtomicUsize],
    barrier: &'a Barrier,
    batch: &'a Batch<'a>,
    /// Rows of the program.
    rows: usize,
    thread: usize,
    threads: usize,
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
        plan_attention(&mut self.attention_tiles, &self.kv, batch);
        for claim in &mut self.claims {
            *claim.get_mut() = 0;
        }
        // A pool that runs cannot also be asked for its barrier.
        let (threads, meeting) = (self.pool.threads(), self.pool.meeting());
        let (isa, weights, tensors) = (self.isa, &self.weights[..], &self.tensors[..]);
        let (quantised, kv, rope) = (&self.quantised, &self.kv, &self.rope);
        let (attention_tiles, claims) = (&self.attention_tiles[..], &self.claims[..]);
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
                attention_tiles,
                claims,
                barrier: meeting.barrier(),
                batch,
                rows,
                thread,
                threads,
            };
            for op in &program.ops {
                // SAFETY: all threads run the same operation, each on its own rows, tiles or heads,
                // and meet before the next.
                unsafe { run.op(op, &mut state) };
                run.barrier.wait();
                if thread == 0 {
                    progress.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
}

/// Cuts the sequences' rows into tiles that fill a call of the attention kernel.
fn plan_attention(tiles: &mut Vec<(usize, usize, usize)>, kv: &KvCache, batch: &Batch<'_>) {
    tiles.clear();
    let group = kv.attention.heads / kv.attention.kv_heads;
    let rows_max = (QUERIES_MAX / group).max(1);
    for (index, sequence) in batch.sequences.iter().enumerate() {
        for first in (0..sequence.num_rows).step_by(rows_max) {
            tiles.push((index, first, rows_max.min(sequence.num_rows - first)));
        }
    }
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

    /// This thread's share of the rows.
    fn own_rows(&self) -> std::ops::Range<usize> {
        let (first, count) = share(self.rows, self.thread, self.threads);
        first..first + count
    }

    fn sequence_of(&self, row: usize) -> &Sequence {
        let after = self.batch.sequences.partition_point(|sequence| sequence.first_row <= row);
        &self.batch.sequences[after - 1]
    }

    fn position_of(&self, row: usize) -> usize {
        let sequence = self.sequence_of(row);
        sequence.first_position + row - sequence.first_row
    }

    /// This thread's part of an operation.
    ///
    /// # Safety
    /// Every thread of the pool does the same operation, and none begins the next before all are
    /// done: then no two touch the same values, and what an operation reads stands still.
    unsafe fn op(&self, op: &Op, state: &mut ThreadState) {
        // SAFETY: rows are split among the threads, and each writes its own only; the operations
        // split otherwise say so below.
        unsafe {
            match op {
                Op::Embed { table, out } => {
                    for row in self.own_rows() {
                        let token = self.batch.tokens[row] as usize;
                        self.matrix(*table).unpack_row(token, self.row_mut(*out, row));
                    }
                }
                Op::RmsNorm { x, weight, eps, out } => {
                    for row in self.own_rows() {
                        let out = self.row_mut(*out, row);
                        rows::rms_norm(
                            self.isa,
                            self.row(*x, row),
                            self.vector(*weight),
                            *eps,
                            out,
                        );
                    }
                }
                Op::Matmul { x, parts } => self.matmul(*x, parts, state),
                Op::AddBias { x, bias } => {
                    for row in self.own_rows() {
                        rows::add_bias(self.isa, self.row_mut(*x, row), self.vector(*bias));
                    }
                }
                Op::RopeAngles { out } => {
                    for row in self.own_rows() {
                        let out = self.row_mut(*out, row);
                        rows::rope_angles(self.position_of(row), &self.rope.frequencies, out);
                    }
                }
                Op::Rope { x, angles, head_dim } => {
                    for row in self.own_rows() {
                        let x = self.row_mut(*x, row);
                        rows::rope(self.isa, x, self.row(*angles, row), *head_dim);
                    }
                }
                Op::KvWrite { layer, k, v } => {
                    for row in self.own_rows() {
                        let sequence = self.sequence_of(row);
                        let position = self.position_of(row);
                        let index = sequence.blocks_start + position / self.kv.block_size;
                        let block = self.batch.block_tables[index] as usize;
                        let offset = position % self.kv.block_size;
                        self.kv.write(*layer, block, offset, self.row(*k, row), self.row(*v, row));
                    }
                }
                Op::Attention { layer, q, out } => self.attention(*layer, *q, *out, state),
                Op::Gate { activation, gate, up } => {
                    for row in self.own_rows() {
                        let (gate, up) = (self.row_mut(*gate, row), self.row(*up, row));
                        rows::gate(self.isa, *activation, gate, up);
                    }
                }
                Op::Take { x, out } => {
                    for row in self.own_rows() {
                        let from = self.batch.taken[row] as usize;
                        self.row_mut(*out, row).copy_from_slice(self.row(*x, from));
                    }
                }
            }
        }
    }

    /// Split by rows to quantise, then by tiles to multiply.
    ///
    /// # Safety
    /// As for [`Run::op`].
    unsafe fn matmul(&self, x: TensorId, parts: &[MatmulPart], state: &mut ThreadState) {
        let tensor = &self.tensors[x.0];
        let cols = tensor.width;
        let quantised = parts.iter().any(|part| self.matrix(part.weight).kind.quantised());
        let own = if self.rows == 1 { &state.quantised } else { self.quantised };
        let blocks = cols / BLOCK;
        if quantised {
            let rows = if self.rows == 1 { 0..1 } else { self.own_rows() };
            for row in rows {
                // SAFETY: each thread its own rows, or its own buffer.
                unsafe {
                    let to = own.slice_mut(row * blocks, blocks);
                    quantise_row(self.isa, self.row(x, row), to);
                }
            }
            if self.rows > 1 {
                self.barrier.wait();
            }
        }
        // SAFETY: nothing writes the input until the next operation.
        let input = unsafe {
            Input {
                cols,
                x: tensor.values.slice(0, self.rows * tensor.stride),
                x_stride: tensor.stride,
                blocks: own.slice(0, self.rows * blocks),
            }
        };
        for part in parts {
            let matrix = self.matrix(part.weight);
            let out = &self.tensors[part.out.0];
            assert_eq!((matrix.cols, matrix.rows), (cols, out.width), "shapes of a product");
            let mine = &matrix.parts[self.thread];
            if mine.tiles == 0 {
                continue;
            }
            // SAFETY: this thread writes the columns of its own tiles only. The last tile may reach
            // beyond the matrix's rows, into the padding of the tensor's rows.
            unsafe {
                let start = out.values.pointer(mine.first_tile * TILE, self.rows * out.stride);
                let out = Output { start, stride: out.stride, add: part.add };
                let tiles = mine.bytes.slice(0, mine.bytes.len());
                matmul::multiply(self.isa, matrix.kind, tiles, &input, self.rows, out);
            }
        }
    }

    /// Split by tiles of rows and by key heads, claimed one after another: their costs differ with
    /// the lengths of the contexts.
    ///
    /// # Safety
    /// As for [`Run::op`].
    unsafe fn attention(&self, layer: usize, q: TensorId, out: TensorId, state: &mut ThreadState) {
        let spec = self.kv.attention;
        let group = spec.heads / spec.kv_heads;
        let scale = 1.0 / (spec.head_dim as f32).sqrt();
        let pieces = self.attention_tiles.len() * spec.kv_heads;
        loop {
            let claimed = self.claims[layer].fetch_add(1, Ordering::Relaxed);
            if claimed >= pieces {
                return;
            }
            // From the back: the last rows of a prompt see most, and the longest piece should not
            // be begun last.
            let piece = pieces - 1 - claimed;
            let (tile, kv_head) = (piece / spec.kv_heads, piece % spec.kv_heads);
            let (index, first, count) = self.attention_tiles[tile];
            let sequence = &self.batch.sequences[index];
            let blocks = &self.batch.block_tables[sequence.blocks_start..];
            for first_head in (0..group).step_by(QUERIES_MAX) {
                let heads = QUERIES_MAX.min(group - first_head);
                // SAFETY: this piece's heads of its rows are this thread's; keys and values were
                // written by an earlier operation.
                unsafe {
                    let mut queries = [const { None }; QUERIES_MAX];
                    let mut scaled = state.queries.chunks_exact_mut(spec.head_dim);
                    for (i, query) in queries.iter_mut().enumerate().take(count * heads) {
                        let row = first + i / heads;
                        let head = kv_head * group + first_head + i % heads;
                        let at = head * spec.head_dim..(head + 1) * spec.head_dim;
                        let q = &self.row(q, sequence.first_row + row)[at.clone()];
                        let to = scaled.next().expect("a place for each query");
                        for (to, q) in to.iter_mut().zip(q) {
                            *to = q * scale;
                        }
                        let out = self.head_mut(out, sequence.first_row + row, at);
                        let positions = sequence.first_position + row + 1;
                        *query = Some(Query { q: to, positions, out });
                    }
                    let mut queries = queries.map(Option::unwrap_or_default);
                    attention::attend(
                        self.isa,
                        self.kv,
                        layer,
                        kv_head,
                        blocks,
                        &mut queries[..count * heads],
                        &mut state.attention,
                    );
                }
            }
        }
    }

    /// # Safety
    /// No other thread uses that part of the row meanwhile.
    #[allow(clippy::mut_from_ref)]
    unsafe fn head_mut(&self, id: TensorId, row: usize, at: std::ops::Range<usize>) -> &mut [f32] {
        let tensor = &self.tensors[id.0];
        // SAFETY: the caller's promise.
        unsafe { tensor.values.slice_mut(row * tensor.stride + at.start, at.len()) }
    }
}
