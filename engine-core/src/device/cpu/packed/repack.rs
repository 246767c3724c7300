//! From the file's rows to tiles, and from a tile back to a row.

use half::{bf16, f16};

use super::k_quants::{SHARING, Sixteen, for_each_sixteen};
use super::{BLOCK, Kind, PackedMatrix, Q4Block, Q6Block, Q8Pair, TILE};
use crate::device::WeightSource;
use pawl_shared::model_card::GgmlType;

/// Bytes of a row of `cols` values in the file.
pub fn row_bytes(dtype: GgmlType, cols: usize) -> usize {
    (cols / dtype.block_len() as usize).saturating_mul(dtype.block_bytes() as usize)
}

/// Packs `tiles` tiles of `source`, from `first_tile` on, into `out`, which is zero.
pub fn pack_tiles(
    source: &WeightSource<'_>,
    kind: Kind,
    first_tile: usize,
    tiles: usize,
    out: &mut [u8],
) {
    let tile_bytes = kind.tile_bytes(source.cols);
    let row_bytes = row_bytes(source.dtype, source.cols);
    assert_eq!(out.len(), tiles * tile_bytes, "{} packs into its own part", source.name);
    for (tile, out) in (first_tile..first_tile + tiles).zip(out.chunks_exact_mut(tile_bytes)) {
        for lane in 0..TILE.min(source.rows - tile * TILE) {
            let row = &source.data[(tile * TILE + lane) * row_bytes..][..row_bytes];
            match source.dtype {
                GgmlType::Q4_0 => pack_q4_0(row, lane, out),
                GgmlType::Q4_1 => pack_q4_1(row, lane, out),
                GgmlType::Q8_0 => pack_q8_0(row, lane, out),
                GgmlType::Q4_K => pack_q4_k(row, lane, out),
                GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5_K | GgmlType::Q6_K => {
                    pack_q6(source.dtype, row, lane, out);
                }
                GgmlType::F16 | GgmlType::BF16 => pack_plain::<2>(row, lane, out),
                _ => pack_plain::<4>(row, lane, out),
            }
        }
    }
}

fn pack_q4_0(row: &[u8], lane: usize, tile: &mut [u8]) {
    let blocks: &mut [Q4Block] = bytemuck::cast_slice_mut(tile);
    for (block, out) in row.chunks_exact(18).zip(blocks) {
        let scale = f16::from_le_bytes([block[0], block[1]]);
        // (q - 8) · d = q · d + (-8 · d), and eight times an f16 is an f16 (or beyond the largest).
        let minimum = f16::from_f32(-8.0 * scale.to_f32());
        out.set_row(lane, scale.to_bits(), minimum.to_bits(), &block[2..]);
    }
}

fn pack_q4_1(row: &[u8], lane: usize, tile: &mut [u8]) {
    let blocks: &mut [Q4Block] = bytemuck::cast_slice_mut(tile);
    for (block, out) in row.chunks_exact(20).zip(blocks) {
        let scale = u16::from_le_bytes([block[0], block[1]]);
        let minimum = u16::from_le_bytes([block[2], block[3]]);
        out.set_row(lane, scale, minimum, &block[4..]);
    }
}

impl Q4Block {
    /// The file's byte i holds value i in its low and value i + 16 in its high nibble; so do ours,
    /// only in groups of four for 16 rows.
    fn set_row(&mut self, lane: usize, scale: u16, minimum: u16, values: &[u8]) {
        self.scale[lane] = scale;
        self.minimum[lane] = minimum;
        for (group, four) in self.nibbles.iter_mut().zip(values.chunks_exact(4)) {
            group[4 * lane..][..4].copy_from_slice(four);
        }
    }
}

fn pack_q8_0(row: &[u8], lane: usize, tile: &mut [u8]) {
    let pairs: &mut [Q8Pair] = bytemuck::cast_slice_mut(tile);
    for (b, block) in row.chunks_exact(34).enumerate() {
        let (pair, half) = (&mut pairs[b / 2], b % 2);
        pair.scale[half][lane] = u16::from_le_bytes([block[0], block[1]]);
        for (group, four) in pair.values[half].iter_mut().zip(block[2..].chunks_exact(4)) {
            for (out, value) in group[4 * lane..].iter_mut().zip(four) {
                *out = value ^ 0x80;
            }
        }
    }
}

/// Both halves of a block have the same scale and minimum.
fn pack_q4_k(row: &[u8], lane: usize, tile: &mut [u8]) {
    let blocks: &mut [Q4Block] = bytemuck::cast_slice_mut(tile);
    let mut low = [0; SHARING];
    for_each_sixteen(GgmlType::Q4_K, row, |index, Sixteen { scale, minimum, q }| {
        if index % 2 == 0 {
            low = q;
        } else {
            let nibbles: [u8; SHARING] = std::array::from_fn(|i| low[i] | q[i] << 4);
            blocks[index / 2].set_row(lane, scale, minimum, &nibbles);
        }
    });
}

fn pack_q6(dtype: GgmlType, row: &[u8], lane: usize, tile: &mut [u8]) {
    let blocks: &mut [Q6Block] = bytemuck::cast_slice_mut(tile);
    for_each_sixteen(dtype, row, |index, Sixteen { scale, minimum, q }| {
        let (block, half) = (&mut blocks[index / 2], index % 2);
        block.scale[half][lane] = scale;
        block.minimum[half][lane] = minimum;
        for (group, four) in block.values[4 * half..].iter_mut().zip(q.chunks_exact(4)) {
            group[4 * lane..][..4].copy_from_slice(four);
        }
    });
}

fn pack_plain<const BYTES: usize>(row: &[u8], lane: usize, tile: &mut [u8]) {
    for (value, out) in row.chunks_exact(BYTES).zip(tile.chunks_exact_mut(BYTES * TILE)) {
        out[BYTES * lane..][..BYTES].copy_from_slice(value);
    }
}

impl PackedMatrix {
    /// Row `row` as f32, for the embedding of a token.
    ///
    /// # Safety
    /// As for [`PackedMatrix::tile`].
    pub unsafe fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row of the table is a row of the activations");
        // SAFETY: the caller's promise.
        let tile = unsafe { self.tile(row / TILE) };
        let lane = row % TILE;
        let half = |bits: u16| f16::from_bits(bits).to_f32();
        match self.kind {
            Kind::Q4 => {
                let blocks: &[Q4Block] = bytemuck::cast_slice(tile);
                for (block, out) in blocks.iter().zip(out.chunks_exact_mut(BLOCK)) {
                    let (scale, minimum) = (half(block.scale[lane]), half(block.minimum[lane]));
                    for (i, out) in out.iter_mut().enumerate() {
                        let byte = block.nibbles[(i % 16) / 4][4 * lane + i % 4];
                        *out = f32::from((byte >> (4 * (i / 16))) & 15) * scale + minimum;
                    }
                }
            }
            Kind::Q8 => {
                let pairs: &[Q8Pair] = bytemuck::cast_slice(tile);
                for (b, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                    let (values, scale) = (&pairs[b / 2].values[b % 2], &pairs[b / 2].scale[b % 2]);
                    for (i, out) in out.iter_mut().enumerate() {
                        let value = f32::from(values[i / 4][4 * lane + i % 4]) - 128.0;
                        *out = value * half(scale[lane]);
                    }
                }
            }
            Kind::Q6 => {
                let blocks: &[Q6Block] = bytemuck::cast_slice(tile);
                for (block, out) in blocks.iter().zip(out.chunks_exact_mut(BLOCK)) {
                    for (i, out) in out.iter_mut().enumerate() {
                        let half_block = i / SHARING;
                        let scale = half(block.scale[half_block][lane]);
                        let minimum = half(block.minimum[half_block][lane]);
                        *out = f32::from(block.values[i / 4][4 * lane + i % 4]) * scale + minimum;
                    }
                }
            }
            Kind::F16 => {
                let columns: &[[u16; TILE]] = bytemuck::cast_slice(tile);
                for (column, out) in columns.iter().zip(out) {
                    *out = half(column[lane]);
                }
            }
            Kind::BF16 => {
                let columns: &[[u16; TILE]] = bytemuck::cast_slice(tile);
                for (column, out) in columns.iter().zip(out) {
                    *out = bf16::from_bits(column[lane]).to_f32();
                }
            }
            Kind::F32 => {
                let columns: &[[f32; TILE]] = bytemuck::cast_slice(tile);
                for (column, out) in columns.iter().zip(out) {
                    *out = column[lane];
                }
            }
        }
    }
}
