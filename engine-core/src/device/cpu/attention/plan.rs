//! How the attention of a batch is cut into units that threads take. No result depends on it.

use super::{GROUP, QUERIES, partial_len};
use crate::device::{AttentionSpec, Sequence};

/// Queries that are as much work as widening a group for them.
const WIDENING: usize = 4;
/// Units that each thread should find, so that all finish together.
const UNITS_PER_THREAD: usize = 8;
/// f32 values of all partial results that wait to be merged. Where a batch would need more, its
/// later tiles are not split: their groups are then merged by the thread that computes them.
pub const PARTIALS_MAX: usize = 1 << 20;

/// Consecutive rows of a sequence; with one key head, a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Index in the batch.
    pub sequence: usize,
    /// Its first row, in the sequence.
    pub first: usize,
    /// How many.
    pub rows: usize,
    /// Groups of positions that its last row sees.
    pub groups: usize,
    /// Units that the groups of one key head are split into.
    pub units: usize,
    /// Where the partial results of its groups are kept until they are merged, if it is split:
    /// `[kv_heads][groups]` of them.
    pub partials: Option<usize>,
    /// The number of its first unit.
    first_unit: usize,
}

/// A unit: some groups of a tile, for one key head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    pub tile: Tile,
    pub kv_head: usize,
    pub groups: std::ops::Range<usize>,
}

/// Kept for its capacity.
#[derive(Debug)]
pub struct Plan {
    tiles: Vec<Tile>,
    /// Units in all.
    pub units: usize,
    /// Those of the tiles that are split.
    pub split: Vec<Tile>,
}

impl Plan {
    /// For batches of up to `rows` rows.
    pub fn new(rows: usize) -> Self {
        // A tile has a row at least.
        Self { tiles: Vec::with_capacity(rows), units: 0, split: Vec::with_capacity(rows) }
    }

    /// Query heads of a key head, and rows of a tile at most.
    pub fn shape(attention: &AttentionSpec) -> (usize, usize) {
        let group = attention.heads / attention.kv_heads;
        (group, (QUERIES / group).max(1))
    }

    /// Cuts the batch.
    pub fn set(&mut self, sequences: &[Sequence], attention: &AttentionSpec, threads: usize) {
        let (group, rows_max) = Self::shape(attention);
        self.tiles.clear();
        self.split.clear();
        let rows: usize = sequences.iter().map(|sequence| sequence.num_rows).sum();
        // Many threads get smaller tiles, though not below two calls of a kernel.
        let wanted = rows * attention.kv_heads / (UNITS_PER_THREAD / 2 * threads);
        let tile_rows = wanted.clamp((12 / group).max(1).min(rows_max), rows_max);
        for (index, sequence) in sequences.iter().enumerate() {
            for first in (0..sequence.num_rows).step_by(tile_rows) {
                let rows = tile_rows.min(sequence.num_rows - first);
                let groups = (sequence.first_position + first + rows).div_ceil(GROUP);
                let (units, partials, first_unit) = (1, None, 0);
                self.tiles.push(Tile {
                    sequence: index,
                    first,
                    rows,
                    groups,
                    units,
                    partials,
                    first_unit,
                });
            }
        }
        let work = |tile: &Tile| (tile.rows * group + WIDENING) * tile.groups;
        let total: usize = self.tiles.iter().map(|tile| work(tile) * attention.kv_heads).sum();
        let share = (total / (UNITS_PER_THREAD * threads)).max(1);
        let mut kept = 0;
        self.units = 0;
        for tile in &mut self.tiles {
            let per_unit = tile.groups.div_ceil(work(tile).div_ceil(share));
            let units = tile.groups.div_ceil(per_unit);
            let need = tile.groups
                * attention.kv_heads
                * partial_len(tile.rows * group, attention.head_dim);
            tile.first_unit = self.units;
            if threads > 1 && units > 1 && kept + need <= PARTIALS_MAX {
                (tile.units, tile.partials) = (units, Some(kept));
                kept += need;
                self.split.push(*tile);
            }
            self.units += tile.units * attention.kv_heads;
        }
    }

    /// Unit number `unit`.
    pub fn unit(&self, unit: usize) -> Unit {
        let after = self.tiles.partition_point(|tile| tile.first_unit <= unit);
        let tile = self.tiles[after - 1];
        let (kv_head, part) =
            ((unit - tile.first_unit) / tile.units, (unit - tile.first_unit) % tile.units);
        // The longer ones first, so that they do not all fall to one of two threads.
        let (each, longer) = (tile.groups / tile.units, tile.groups % tile.units);
        let cut = |part: usize| part * each + part.min(longer);
        Unit { tile, kv_head, groups: cut(part)..cut(part + 1) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SPEC: AttentionSpec = AttentionSpec { layers: 1, heads: 9, kv_heads: 3, head_dim: 64 };

    fn sequences(shapes: &[(usize, usize)]) -> Vec<Sequence> {
        let mut first_row = 0;
        let mut sequence = |&(num_rows, first_position)| {
            first_row += num_rows;
            Sequence { first_row: first_row - num_rows, num_rows, first_position, blocks_start: 0 }
        };
        shapes.iter().map(&mut sequence).collect()
    }

    /// Every row, key head and group once, and kept results apart.
    fn check(shapes: &[(usize, usize)], spec: &AttentionSpec, threads: usize) -> Plan {
        let sequences = sequences(shapes);
        let mut plan = Plan::new(256);
        plan.set(&sequences, spec, threads);
        let mut seen = BTreeMap::new();
        let group = spec.heads / spec.kv_heads;
        let mut kept = Vec::new();
        for unit in (0..plan.units).map(|unit| plan.unit(unit)) {
            assert_eq!(unit.tile.partials.is_some(), unit.tile.units > 1);
            assert!(!unit.groups.is_empty() && unit.tile.rows * group <= QUERIES.max(group));
            for row in unit.tile.first..unit.tile.first + unit.tile.rows {
                for group in unit.groups.clone() {
                    *seen.entry((unit.tile.sequence, row, unit.kv_head, group)).or_insert(0) += 1;
                }
            }
        }
        for tile in &plan.split {
            let len = partial_len(tile.rows * group, spec.head_dim) * tile.groups * spec.kv_heads;
            kept.push((tile.partials.unwrap(), len));
        }
        assert!(seen.values().all(|&count| count == 1));
        for (index, sequence) in sequences.iter().enumerate() {
            for row in 0..sequence.num_rows {
                for group in 0..(sequence.first_position + row + 1).div_ceil(GROUP) {
                    let all =
                        (0..spec.kv_heads).all(|h| seen.contains_key(&(index, row, h, group)));
                    assert!(all, "sequence {index} row {row} group {group}");
                }
            }
        }
        kept.sort_unstable();
        assert!(kept.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert!(kept.last().is_none_or(|(at, len)| at + len <= PARTIALS_MAX));
        plan
    }

    #[test]
    fn units_cover_everything_once() {
        let mqa = AttentionSpec { layers: 1, heads: 101, kv_heads: 1, head_dim: 128 };
        for threads in [1, 2, 3, 16] {
            for spec in [&SPEC, &mqa] {
                check(&[(1, 0)], spec, threads);
                check(&[(256, 0)], spec, threads);
                check(&[(1, 100), (255, 7000)], spec, threads);
                check(&[(1, 300), (1, 8000), (33, 0), (1, 1), (220, 511)], spec, threads);
                check(&[(1, 127); 256], spec, threads);
            }
        }
    }

    #[test]
    fn a_lone_long_decode_is_shared_evenly() {
        let plan = check(&[(1, 4096)], &SPEC, 2);
        assert!(plan.units >= 16);
        let sizes: Vec<usize> = (0..plan.units).map(|unit| plan.unit(unit).groups.len()).collect();
        let share = |queue: usize| sizes.iter().skip(queue).step_by(2).sum::<usize>();
        assert!(share(0).abs_diff(share(1)) <= 3, "{sizes:?}");
        // One that is long among many short ones.
        let mut shapes = [(1, 100); 20];
        shapes[7] = (1, 8000);
        assert!(check(&shapes, &SPEC, 2).unit(21).tile.units > 3);
    }

    /// The bound on what waits to be merged: tiles beyond it are not split.
    #[test]
    fn what_does_not_fit_is_not_split() {
        let plan = check(&[(1, 7_000_000), (1, 7_000_000)], &SPEC, 2);
        assert!(plan.split.is_empty());
        let plan = check(&[(1, 200_000), (1, 200_000)], &SPEC, 2);
        assert_eq!(plan.split.len(), 1);
    }
}
