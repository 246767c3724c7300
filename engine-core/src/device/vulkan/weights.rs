//! Weights in device memory: from the file's rows to tiles of 64 rows and blocks of 32 columns.
//!
//! `values`: `[tile][block][vector][row of the tile]` of vectors of four words, so that
//! neighbouring threads read neighbouring vectors. `scales`: `[tile][block][row of the tile]` of
//! words, two half floats each; only [`Kind::Q4`] and [`Kind::Q8`] have them. Row `4 · lane + i` of
//! a tile lies at place `16 · i + lane`: a thread's four rows are neighbours, its loads and those
//! of its neighbours too.

use half::f16;
use pawl_shared::model_card::GgmlType;

use crate::device::cpu::packed::{BLOCK, Kind, Sixteen, for_each_sixteen, row_bytes};
use crate::device::{DeviceError, WeightSource};

/// Rows of a tile.
pub const TILE: usize = 64;
/// Words of the longest block.
const WORDS_MAX: usize = BLOCK;

/// Vectors of four words that the values of a block of one row take.
pub fn vectors(kind: Kind) -> usize {
    match kind {
        Kind::Q4 => 1,
        Kind::Q8 | Kind::Q6 => 2,
        Kind::F16 | Kind::BF16 => 4,
        Kind::F32 => 8,
    }
}

/// Whether a block has a word of scales beside its values.
pub fn has_scales(kind: Kind) -> bool {
    matches!(kind, Kind::Q4 | Kind::Q8)
}

/// As the shader numbers them.
pub fn number(kind: Kind) -> u32 {
    match kind {
        Kind::Q4 => 0,
        Kind::Q8 => 1,
        Kind::Q6 => 2,
        Kind::F16 => 3,
        Kind::BF16 => 4,
        Kind::F32 => 5,
    }
}

/// Bytes of the values of a tile of `blocks` blocks.
pub fn value_bytes(kind: Kind, blocks: usize) -> usize {
    blocks * vectors(kind) * 16 * TILE
}

/// Bytes of its scales.
pub fn scale_bytes(kind: Kind, blocks: usize) -> usize {
    if has_scales(kind) { blocks * 4 * TILE } else { 0 }
}

/// The kind of a matrix, whose rows must be whole blocks here.
///
/// # Errors
/// [`DeviceError`] as for the CPU, and [`DeviceError::Shape`].
pub fn check(source: &WeightSource<'_>) -> Result<Kind, DeviceError> {
    let kind = crate::device::cpu::packed::check_source(source)?;
    if source.rows > 1 && !source.cols.is_multiple_of(BLOCK) {
        return Err(DeviceError::Shape {
            what: format!("row length of tensor {}", source.name),
            found: source.cols,
            need: format!("the Vulkan device needs a multiple of {BLOCK}; choose --device cpu"),
        });
    }
    Ok(kind)
}

/// Where rows of a matrix come from: several weights of one kind, one after another or row by row
/// in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// In the order of their rows.
    pub weights: Vec<usize>,
    /// Their rows alternate.
    pub interleaved: bool,
}

impl Rows {
    /// All of them.
    pub fn count(&self, sources: &[WeightSource<'_>]) -> usize {
        self.weights.iter().map(|&weight| sources[weight].rows).sum()
    }

    fn bytes<'a>(&self, sources: &[WeightSource<'a>], row: usize) -> (GgmlType, &'a [u8]) {
        let (mut weight, mut row) = (0, row);
        if self.interleaved {
            (weight, row) = (row % self.weights.len(), row / self.weights.len());
        } else {
            while row >= sources[self.weights[weight]].rows {
                row -= sources[self.weights[weight]].rows;
                weight += 1;
            }
        }
        let source = &sources[self.weights[weight]];
        let len = row_bytes(source.dtype, source.cols);
        (source.dtype, &source.data[row * len..][..len])
    }
}

/// Packs tile `tile` of `rows` into `values` and `scales`, which are zero.
pub fn pack_tile(
    rows: &Rows,
    sources: &[WeightSource<'_>],
    kind: Kind,
    tile: usize,
    values: &mut [u32],
    scales: &mut [u32],
) {
    let vectors = vectors(kind);
    let count = TILE.min(rows.count(sources) - tile * TILE);
    for row in 0..count {
        let (dtype, bytes) = rows.bytes(sources, tile * TILE + row);
        let place = 16 * (row % 4) + row / 4;
        each_block(kind, dtype, bytes, |block, words, scale| {
            for (v, words) in words.chunks_exact(4).enumerate() {
                let at = ((block * vectors + v) * TILE + place) * 4;
                values[at..at + 4].copy_from_slice(words);
            }
            if has_scales(kind) {
                scales[block * TILE + place] = scale;
            }
        });
    }
}

/// Calls `each` with the number, the words and the scales of each block of a row.
fn each_block(kind: Kind, dtype: GgmlType, row: &[u8], mut each: impl FnMut(usize, &[u32], u32)) {
    let mut words = [0_u32; WORDS_MAX];
    let words = &mut words[..4 * vectors(kind)];
    let half = |bytes: &[u8]| u32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    let bytes_to = |words: &mut [u32], bytes: &[u8]| {
        for (word, four) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        }
    };
    match (kind, dtype) {
        (Kind::Q4, GgmlType::Q4_0) => {
            for (index, block) in row.chunks_exact(18).enumerate() {
                // (q - 8) · d = q · d + (-8 · d), and eight times an f16 is an f16.
                let scale = f16::from_bits(half(block) as u16);
                let minimum = f16::from_f32(-8.0 * scale.to_f32());
                bytes_to(words, &block[2..]);
                each(index, words, half(block) | u32::from(minimum.to_bits()) << 16);
            }
        }
        (Kind::Q4, GgmlType::Q4_1) => {
            for (index, block) in row.chunks_exact(20).enumerate() {
                bytes_to(words, &block[4..]);
                each(index, words, half(block) | half(&block[2..]) << 16);
            }
        }
        (Kind::Q8, _) => {
            for (index, block) in row.chunks_exact(34).enumerate() {
                bytes_to(words, &block[2..]);
                each(index, words, half(block));
            }
        }
        (Kind::Q4, _) => {
            let mut low = [0; 16];
            for_each_sixteen(dtype, row, |index, sixteen| {
                if index % 2 == 0 {
                    low = sixteen.q;
                    return;
                }
                let nibbles: [u8; 16] = std::array::from_fn(|i| low[i] | sixteen.q[i] << 4);
                bytes_to(words, &nibbles);
                each(index / 2, words, pair(&sixteen));
            });
        }
        (Kind::Q6, _) => {
            let mut first = Sixteen { scale: 0, minimum: 0, q: [0; 16] };
            for_each_sixteen(dtype, row, |index, second| {
                if index % 2 == 0 {
                    first = second;
                    return;
                }
                six_bits(&first, &second, words);
                each(index / 2, words, 0);
            });
        }
        (Kind::F16 | Kind::BF16 | Kind::F32, _) => {
            for (index, block) in row.chunks_exact(4 * words.len()).enumerate() {
                bytes_to(words, block);
                each(index, words, 0);
            }
        }
    }
}

fn pair(sixteen: &Sixteen) -> u32 {
    u32::from(sixteen.scale) | u32::from(sixteen.minimum) << 16
}

/// Low nibbles as in [`Kind::Q4`]; then two words of upper bits, whose byte i has those of value
/// `16 · word + 4 · pair + i` as its bit pair; then the scales of both halves.
fn six_bits(first: &Sixteen, second: &Sixteen, words: &mut [u32]) {
    words.fill(0);
    for i in 0..16 {
        let nibbles = u32::from(first.q[i] & 15 | second.q[i] << 4);
        words[i / 4] |= nibbles << (8 * (i % 4));
        let shift = 8 * (i % 4) + 2 * (i / 4);
        words[4] |= u32::from(first.q[i] >> 4) << shift;
        words[5] |= u32::from(second.q[i] >> 4) << shift;
    }
    (words[6], words[7]) = (pair(first), pair(second));
}
