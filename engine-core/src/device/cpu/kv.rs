//! The paged cache of keys and values.
//!
//! A block is cut into pages of 16 positions. Keys of a page are stored by dimension, 16 positions
//! side by side, so that one register scores 16 positions; values are stored by position. As eight
//! bits, each position's row of a head has a scale, and a page ends in the scales of its 16. All
//! that the layers keep of a block lies together, so that memory, which comes in huge pages, is
//! taken for the blocks in use and no more: `[block][layer][key or value][kv head][page][...]`.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::arena::{Arena, Buffer};
use super::quantise::{factor_and_scale, largest_size, nearest};
use crate::device::{AttentionSpec, DeviceError};

/// Positions in a page: lanes of the widest register.
pub const PAGE: usize = 16;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvDtype {
    /// Half floats.
    #[default]
    F16,
    /// Upper halves of f32.
    BF16,
    /// As computed.
    F32,
    /// Integers of up to 127 in size, times an f32 for each row of a head.
    Int8,
}

/// The scale of a row of integers.
type Scale = f32;

impl KvDtype {
    /// Bytes of a value.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::Int8 => 1,
        }
    }

    /// Bytes of a row of `head_dim` values, with all that belongs to it.
    fn row_bytes(self, head_dim: usize) -> usize {
        let scale = if self == Self::Int8 { size_of::<Scale>() } else { 0 };
        head_dim * self.bytes() + scale
    }
}

/// The integers of a page of [`KvDtype::Int8`] and the scales of its 16 positions.
pub fn int8_page(page: &[u8]) -> (&[[i8; PAGE]], &[Scale; PAGE]) {
    let (values, scales) = page.split_at(page.len() - PAGE * size_of::<Scale>());
    let scales = bytemuck::cast_slice(scales).first_chunk().expect("a page has 16 scales");
    (bytemuck::cast_slice(values), scales)
}

/// Bytes that one block of `block_size` tokens takes in all layers.
#[must_use]
pub fn block_bytes(attention: &AttentionSpec, block_size: usize, dtype: KvDtype) -> usize {
    attention.layers * 2 * attention.kv_heads * block_size * dtype.row_bytes(attention.head_dim)
}

/// Memory for all blocks of all layers.
#[derive(Debug)]
pub struct KvCache {
    _arena: Arena,
    bytes: Buffer<u8>,
    /// Shape of the heads.
    pub attention: AttentionSpec,
    /// Encoding.
    pub dtype: KvDtype,
    /// Tokens a block; a multiple of [`PAGE`].
    pub block_size: usize,
    num_blocks: usize,
}

impl KvCache {
    /// A cache of `num_blocks` blocks. Its memory is taken from the system as it is first written.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] for a block size that is not whole pages, or a head that is not whole
    /// registers; [`DeviceError::Memory`].
    pub fn new(
        attention: AttentionSpec,
        dtype: KvDtype,
        block_size: usize,
        num_blocks: usize,
    ) -> Result<Self, DeviceError> {
        if block_size == 0 || !block_size.is_multiple_of(PAGE) {
            return Err(DeviceError::Shape {
                what: "--block-size".to_owned(),
                found: block_size,
                need: format!("the CPU device needs a multiple of {PAGE}"),
            });
        }
        if attention.head_dim == 0 || !attention.head_dim.is_multiple_of(PAGE) {
            return Err(DeviceError::Shape {
                what: "the model's head dimension".to_owned(),
                found: attention.head_dim,
                need: format!("the CPU device needs a multiple of {PAGE}"),
            });
        }
        let len = block_bytes(&attention, block_size, dtype).saturating_mul(num_blocks);
        let arena = Arena::new("the KV cache", len)?;
        let bytes = arena.buffer(0, len);
        Ok(Self { _arena: arena, bytes, attention, dtype, block_size, num_blocks })
    }

    /// Bytes that one head keeps of one page.
    fn page_bytes(&self) -> usize {
        PAGE * self.dtype.row_bytes(self.attention.head_dim)
    }

    /// Offset in bytes of a head's page: of its keys, or of its values.
    fn page_at(&self, layer: usize, values: bool, block: usize, head: usize, page: usize) -> usize {
        assert!(block < self.num_blocks, "block {block} of {}", self.num_blocks);
        let pages = self.block_size / PAGE;
        let of_layer = (block * self.attention.layers + layer) * 2 + usize::from(values);
        let of_head = of_layer * self.attention.kv_heads + head;
        (of_head * pages + page) * self.page_bytes()
    }

    /// The bytes of the page that holds `position`: keys `[head_dim][16]`, values `[16][head_dim]`.
    ///
    /// # Safety
    /// No thread writes the page while the slice lives.
    pub unsafe fn page(
        &self,
        layer: usize,
        values: bool,
        block: usize,
        head: usize,
        page: usize,
    ) -> &[u8] {
        let len = self.page_bytes();
        // SAFETY: the caller's promise.
        unsafe { self.bytes.slice(self.page_at(layer, values, block, head, page), len) }
    }

    /// Writes the key and value rows of the token at `offset` of `block`.
    ///
    /// # Safety
    /// No other thread touches that token's place meanwhile.
    pub unsafe fn write(&self, layer: usize, block: usize, offset: usize, k: &[f32], v: &[f32]) {
        let (dim, bytes) = (self.attention.head_dim, self.dtype.bytes());
        let (page, lane) = (offset / PAGE, offset % PAGE);
        for head in 0..self.attention.kv_heads {
            let keys = self.page_at(layer, false, block, head, page);
            let values = self.page_at(layer, true, block, head, page);
            let of_head = head * dim..(head + 1) * dim;
            let (k, v) = (&k[of_head.clone()], &v[of_head]);
            let (mut k_factor, mut v_factor) = (0.0, 0.0);
            if self.dtype == KvDtype::Int8 {
                for (row, page, to) in [(k, keys, &mut k_factor), (v, values, &mut v_factor)] {
                    let (factor, scale) = factor_and_scale(largest_size(row));
                    *to = factor;
                    let at = page + PAGE * dim + lane * size_of::<Scale>();
                    // SAFETY: these bytes are this token's alone, by the caller's promise.
                    let place = unsafe { self.bytes.slice_mut(at, size_of::<Scale>()) };
                    place.copy_from_slice(&scale.to_ne_bytes());
                }
            }
            let (keys, values) = (keys + lane * bytes, values + lane * dim * bytes);
            for (chunk, (k, v)) in k.as_chunks().0.iter().zip(v.as_chunks().0).enumerate() {
                let keys = keys + chunk * PAGE * PAGE * bytes;
                let values = values + chunk * PAGE * bytes;
                // SAFETY: these bytes are this token's alone, by the caller's promise.
                unsafe {
                    match self.dtype {
                        KvDtype::F16 => self.place(narrow::<f16>(k), narrow(v), keys, values),
                        KvDtype::BF16 => self.place(narrow::<bf16>(k), narrow(v), keys, values),
                        KvDtype::F32 => self.place(*k, *v, keys, values),
                        KvDtype::Int8 => {
                            let (k, v) = (integers(k, k_factor), integers(v, v_factor));
                            self.place(k, v, keys, values);
                        }
                    }
                }
            }
        }
    }

    /// Sixteen values of a key, one in each of as many columns, and of a value, side by side, from
    /// those bytes on.
    ///
    /// # Safety
    /// As for [`KvCache::write`].
    unsafe fn place<T: Copy>(&self, k: [T; PAGE], v: [T; PAGE], keys: usize, values: usize) {
        let bytes = size_of::<T>();
        // SAFETY: the places are inside (asserted), aligned as all pages are, and this token's.
        unsafe {
            let to = self.bytes.pointer(keys, keys + ((PAGE - 1) * PAGE + 1) * bytes).cast::<T>();
            for (i, k) in k.into_iter().enumerate() {
                to.add(i * PAGE).write(k);
            }
            self.bytes.pointer(values, values + PAGE * bytes).cast::<[T; PAGE]>().write(v);
        }
    }
}

/// Rounded after the factor, which makes the largest of its row 127.
fn integers(wide: &[f32; PAGE], factor: f32) -> [i8; PAGE] {
    wide.map(|value| nearest(value * factor))
}

/// Rounded to half as many bits, by the machine's own conversion where it has one.
fn narrow<T: Copy + Default>(wide: &[f32; PAGE]) -> [T; PAGE]
where
    [T]: HalfFloatSliceExt,
{
    let mut narrow = [T::default(); PAGE];
    narrow.convert_from_f32_slice(wide);
    narrow
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache for many tokens of which few are used takes the memory of few.
    #[test]
    fn memory_is_taken_for_the_blocks_in_use() {
        const USED: usize = 40;
        let spec = AttentionSpec { layers: 30, heads: 9, kv_heads: 3, head_dim: 64 };
        let cache = KvCache::new(spec, KvDtype::F16, 16, 4097).unwrap();
        let row = vec![1.0; 3 * 64];
        for (layer, block) in (0..30).flat_map(|layer| (1..=USED).map(move |block| (layer, block)))
        {
            // SAFETY: this is the only thread.
            unsafe { cache.write(layer, block, 0, &row, &row) };
        }
        let used = block_bytes(&spec, 16, KvDtype::F16) * (USED + 1);
        let resident = cache._arena.resident_bytes();
        assert!(resident >= used / 16, "{resident} bytes: the figure means nothing");
        assert!(resident <= used + 2 * (2 << 20), "{resident} bytes for {used} in use");
    }
}
