//! Attention of a batch: its units, and the merging of what was split.

use super::Run;
use crate::device::TensorId;
use crate::device::cpu::attention::plan::{Tile, Unit};
use crate::device::cpu::attention::{self, Queries, partial_len};
use crate::device::cpu::threads::Cursor;
use crate::device::cpu::{AttentionState, ThreadState};

impl Run<'_> {
    /// Split by tiles of rows, by key heads and, where that leaves too few units, by groups of
    /// positions, whose results are merged in a stage of their own.
    ///
    /// # Safety
    /// As in [`Run::op`].
    pub(super) unsafe fn attention(
        &self,
        layer: usize,
        q: TensorId,
        out: TensorId,
        state: &mut ThreadState,
        cursor: &mut Cursor,
    ) {
        let queues = self.team.queues();
        let state = &mut state.attention;
        let units = |queue| (self.attention.units + queues - 1 - queue) / queues;
        self.team.stage(self.thread, cursor, units, |queue, unit| {
            // From the back: the last rows of a prompt see most, and the longest piece should not
            // be begun last.
            let unit = self.attention.unit(self.attention.units - 1 - (unit * queues + queue));
            // SAFETY: the unit's heads of its rows, or its groups' results, are this unit's; keys
            // and values were written by an earlier stage.
            unsafe { self.attend(layer, q, out, &unit, state) };
        });
        if self.attention.split.is_empty() {
            return;
        }
        let kv_heads = self.kv.attention.kv_heads;
        let pieces = self.attention.split.len() * kv_heads;
        let units = |queue| (pieces + queues - 1 - queue) / queues;
        self.team.stage(self.thread, cursor, units, |queue, unit| {
            let piece = unit * queues + queue;
            let (tile, kv_head) = (&self.attention.split[piece / kv_heads], piece % kv_heads);
            self.positions(tile, &mut state.positions);
            let count = state.positions.len();
            attention::start(&mut state.merged[..self.partial_len(tile)], count);
            for group in 0..tile.groups {
                // SAFETY: the stage before this one wrote it.
                let fresh = unsafe { self.partial(tile, kv_head, group) };
                let merged = &mut state.merged[..fresh.len()];
                attention::merge(self.isa, &state.positions, group, fresh, merged);
            }
            // SAFETY: this piece's heads of its rows are this unit's.
            unsafe { self.finish(out, tile, kv_head, &state.merged) };
        });
    }

    /// Query heads of a key head.
    fn heads_of_a_key(&self) -> usize {
        self.kv.attention.heads / self.kv.attention.kv_heads
    }

    fn partial_len(&self, tile: &Tile) -> usize {
        partial_len(tile.rows * self.heads_of_a_key(), self.kv.attention.head_dim)
    }

    /// The result of a group of a tile that is split.
    ///
    /// # Safety
    /// No other thread uses it meanwhile, if it is written.
    #[allow(clippy::mut_from_ref)]
    unsafe fn partial(&self, tile: &Tile, kv_head: usize, group: usize) -> &mut [f32] {
        let at = tile.partials.expect("the tile is split");
        let len = self.partial_len(tile);
        // SAFETY: the caller's promise.
        unsafe { self.partials.slice_mut(at + (kv_head * tile.groups + group) * len, len) }
    }

    /// Positions that each query of a tile sees: row by row, and the heads of a row.
    fn positions(&self, tile: &Tile, positions: &mut Vec<usize>) {
        let first = self.batch.sequences[tile.sequence].first_position + tile.first;
        positions.clear();
        for row in 0..tile.rows {
            positions.extend(std::iter::repeat_n(first + row + 1, self.heads_of_a_key()));
        }
    }

    /// A unit's groups; a tile that is not split is then finished.
    ///
    /// # Safety
    /// As in [`Run::op`].
    unsafe fn attend(
        &self,
        layer: usize,
        q: TensorId,
        out: TensorId,
        unit: &Unit,
        state: &mut AttentionState,
    ) {
        let (tile, kv_head, dim) = (&unit.tile, unit.kv_head, self.kv.attention.head_dim);
        let sequence = &self.batch.sequences[tile.sequence];
        let scale = 1.0 / (dim as f32).sqrt();
        let width = self.heads_of_a_key() * dim;
        for (row, scaled) in state.q.chunks_exact_mut(width).enumerate().take(tile.rows) {
            // SAFETY: an earlier stage wrote it.
            let q = unsafe { self.row(q, sequence.first_row + tile.first + row) };
            for (to, q) in scaled.iter_mut().zip(&q[kv_head * width..][..width]) {
                *to = q * scale;
            }
        }
        self.positions(tile, &mut state.positions);
        let count = state.positions.len();
        let queries = Queries {
            q: &state.q[..count * dim],
            positions: &state.positions,
            layer,
            kv_head,
            blocks: &self.batch.block_tables[sequence.blocks_start..],
        };
        let len = self.partial_len(tile);
        let (scratch, merged) = (&mut state.scratch, &mut state.merged[..len]);
        attention::start(merged, count);
        for group in unit.groups.clone() {
            // SAFETY: the groups of a unit are its own; the rest is the caller's promise.
            unsafe {
                if tile.partials.is_some() {
                    let fresh = self.partial(tile, kv_head, group);
                    attention::attend(self.isa, self.kv, &queries, group, scratch, fresh);
                } else {
                    let fresh = &mut state.fresh[..len];
                    attention::attend(self.isa, self.kv, &queries, group, scratch, fresh);
                    attention::merge(self.isa, &state.positions, group, fresh, merged);
                }
            }
        }
        if tile.partials.is_none() {
            // SAFETY: the caller's promise.
            unsafe { self.finish(out, tile, kv_head, merged) };
        }
    }

    /// Writes the results of a piece.
    ///
    /// # Safety
    /// No other thread uses those heads of those rows meanwhile.
    unsafe fn finish(&self, out: TensorId, tile: &Tile, kv_head: usize, merged: &[f32]) {
        let (group, dim) = (self.heads_of_a_key(), self.kv.attention.head_dim);
        let first_row = self.batch.sequences[tile.sequence].first_row + tile.first;
        let tensor = &self.tensors[out.0];
        let count = tile.rows * group;
        for query in 0..count {
            let (row, head) = (first_row + query / group, kv_head * group + query % group);
            // SAFETY: the caller's promise.
            let out = unsafe { tensor.values.slice_mut(row * tensor.stride + head * dim, dim) };
            attention::finish(merged, count, query, out);
        }
    }
}
