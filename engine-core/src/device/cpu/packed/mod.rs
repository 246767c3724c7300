//! The layout of weights: one linear stream per matrix and thread.
//!
//! A matrix is cut into tiles of 16 rows, and a tile into blocks of 32 columns. A block holds its
//! scales and then its values in the order the kernels read them: a group of four consecutive
//! columns of all 16 rows is 64 bytes, 32 bits for each row, so that one register of sixteen 32-bit
//! lanes accumulates 16 outputs and no lane ever meets another. Every output is therefore summed in
//! the order of its columns, however many rows of activations run at once.
//!
//! | kind | block of 16 × 32 |
//! |---|---|
//! | [`Kind::Q4`] | [`Q4Block`]: five cache lines |
//! | [`Kind::Q8`] | in pairs, [`Q8Pair`]: seventeen cache lines |
//! | [`Kind::Q6`] | [`Q6Block`]: ten cache lines |
//! | [`Kind::F16`], [`Kind::BF16`], [`Kind::F32`] | no blocks: each column is 16 values |
//!
//! Rows beyond the matrix's last are zero. The tiles of a matrix are split among the threads, and
//! all that a thread reads in a step lies in one stretch, in the order it is read.

mod k_quants;
mod repack;

use bytemuck::{Pod, Zeroable};

use crate::device::cpu::arena::{Buffer, Layout};
use crate::device::{DeviceError, WeightSource};
use pawl_shared::model_card::GgmlType;

#[cfg(any(test, feature = "vulkan"))]
pub use k_quants::{Sixteen, for_each_sixteen};
pub use repack::pack_tiles;
#[cfg(feature = "vulkan")]
pub use repack::row_bytes;

/// Rows of a tile.
pub const TILE: usize = 16;
/// Columns of a quantised block, of weights and of activations.
pub const BLOCK: usize = 32;

/// 16 rows × 32 columns of `q · scale + minimum`. The low nibbles of byte group j are columns
/// 4j to 4j + 3 of all rows, the high nibbles are columns 16 + 4j to 16 + 4j + 3.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Q4Block {
    /// f16
    pub scale: [u16; TILE],
    /// f16
    pub minimum: [u16; TILE],
    /// Four bytes for each row.
    pub nibbles: [[u8; 4 * TILE]; 4],
}

/// 16 rows × 64 columns of `q · scale`; byte group j of a half is columns 4j to 4j + 3. The second
/// half is zero where a row has an odd number of blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Q8Pair {
    /// f16, of both halves: kept beside the values, because a second stream would halve the speed.
    pub scale: [[u16; TILE]; 2],
    /// `q + 128`, because the dot product wants unsigned weights.
    pub values: [[[u8; 4 * TILE]; 8]; 2],
}

/// 16 rows × 32 columns of `q · scale + minimum`, both for each 16 columns; byte group j is columns
/// 4j to 4j + 3.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Q6Block {
    /// f16, of both halves.
    pub scale: [[u16; TILE]; 2],
    /// f16
    pub minimum: [[u16; TILE]; 2],
    /// q, at most 63.
    pub values: [[u8; 4 * TILE]; 8],
}

const _: () = assert!(size_of::<Q6Block>() == 10 * 64);
const _: () = assert!(size_of::<Q4Block>() == 5 * 64 && size_of::<Q8Pair>() == 17 * 64);

/// How a packed matrix encodes its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `q · scale + minimum`, q in 0..=15.
    Q4,
    /// `q · scale`, q in -128..=127.
    Q8,
    /// `q · scale + minimum` for each 16 columns, q in 0..=63: five and six bits.
    Q6,
    /// Half floats.
    F16,
    /// Upper halves of f32.
    BF16,
    /// As they are.
    F32,
}

impl Kind {
    /// The kind that holds `source`: without loss, but for what [`k_quants`] says.
    ///
    /// # Errors
    /// [`DeviceError::UnsupportedType`] where there is none.
    pub fn of(source: &WeightSource<'_>) -> Result<Self, DeviceError> {
        match source.dtype {
            GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q4_K => Ok(Self::Q4),
            GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5_K | GgmlType::Q6_K => Ok(Self::Q6),
            GgmlType::Q8_0 => Ok(Self::Q8),
            GgmlType::F16 => Ok(Self::F16),
            GgmlType::BF16 => Ok(Self::BF16),
            GgmlType::F32 => Ok(Self::F32),
            dtype => Err(DeviceError::UnsupportedType { tensor: source.name.clone(), dtype }),
        }
    }

    /// Whether its products run on quantised activations.
    pub fn quantised(self) -> bool {
        matches!(self, Self::Q4 | Self::Q8 | Self::Q6)
    }

    /// Bytes of a tile of 16 rows and `cols` columns.
    pub fn tile_bytes(self, cols: usize) -> usize {
        let blocks = cols / BLOCK;
        match self {
            Self::Q4 => blocks * size_of::<Q4Block>(),
            Self::Q8 => blocks.div_ceil(2) * size_of::<Q8Pair>(),
            Self::Q6 => blocks * size_of::<Q6Block>(),
            Self::F16 | Self::BF16 => cols * TILE * 2,
            Self::F32 => cols * TILE * 4,
        }
    }
}

/// Bytes of `source` as the file must hold them.
///
/// # Errors
/// [`DeviceError::UnsupportedType`], [`DeviceError::Shape`] where rows are not whole blocks, and
/// [`DeviceError::WrongSize`].
pub fn check_source(source: &WeightSource<'_>) -> Result<Kind, DeviceError> {
    let kind = Kind::of(source)?;
    let block = source.dtype.block_len() as usize;
    if !source.cols.is_multiple_of(block) {
        return Err(DeviceError::Shape {
            what: format!("row length of tensor {}", source.name),
            found: source.cols,
            need: format!("{:?} needs a multiple of {block}", source.dtype),
        });
    }
    let row_bytes = repack::row_bytes(source.dtype, source.cols);
    let need = row_bytes.saturating_mul(source.rows);
    if need != source.data.len() {
        let (tensor, found) = (source.name.clone(), source.data.len());
        return Err(DeviceError::WrongSize { tensor, need, found });
    }
    Ok(kind)
}

/// The tiles of a matrix that one thread multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its first tile; 16 rows each.
    pub first_tile: usize,
    /// How many.
    pub tiles: usize,
    /// Their bytes.
    pub bytes: Buffer<u8>,
}

/// A matrix in the packed layout.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    /// Encoding.
    pub kind: Kind,
    /// Output width.
    pub rows: usize,
    /// Input width.
    pub cols: usize,
    /// One for each thread, covering the tiles in order.
    pub parts: Vec<Part>,
}

impl PackedMatrix {
    /// The bytes of tile `tile`.
    ///
    /// # Safety
    /// The matrix is packed, and its arena lives.
    pub unsafe fn tile(&self, tile: usize) -> &[u8] {
        let of_tile = |p: &&Part| (p.first_tile..p.first_tile + p.tiles).contains(&tile);
        let part = self.parts.iter().find(of_tile).expect("the parts cover all tiles");
        let bytes = self.kind.tile_bytes(self.cols);
        // SAFETY: nothing writes weights once they are packed.
        unsafe { part.bytes.slice((tile - part.first_tile) * bytes, bytes) }
    }
}

/// Where each thread's part of each matrix lies: per thread, the matrices in order.
pub struct PartPlan {
    /// `[matrix][thread]`: first tile, tiles, offset in the arena.
    pub parts: Vec<Vec<(usize, usize, usize)>>,
    /// Bytes of the arena.
    pub bytes: usize,
}

/// Splits the tiles of `matrices` (kind, rows, cols) among `threads`.
pub fn plan_parts(matrices: &[(Kind, usize, usize)], threads: usize) -> PartPlan {
    let mut layout = Layout::default();
    let mut parts = vec![Vec::with_capacity(threads); matrices.len()];
    for thread in 0..threads {
        for (&(kind, rows, cols), parts) in matrices.iter().zip(&mut parts) {
            let (first, tiles) = share(rows.div_ceil(TILE), thread, threads);
            parts.push((first, tiles, layout.place(tiles * kind.tile_bytes(cols))));
        }
    }
    PartPlan { parts, bytes: layout.len() }
}

/// The `index`-th of `shares` nearly equal shares of `count` things: first, how many.
pub fn share(count: usize, index: usize, shares: usize) -> (usize, usize) {
    let first = count * index / shares;
    (first, count * (index + 1) / shares - first)
}
