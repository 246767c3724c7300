//! Tensors with their raw bytes, whichever way those travelled.

use bytes::Bytes;

use super::wire::{EXT_PICKLES, EXT_RAW, NAME_BYTES_MAX, Reader, Result, Wire, Writer};
use super::{DecodeError, DecodeErrorKind as Kind, LogprobsLists, LogprobsTensors};

/// `[dtype, shape, data]`, whichever way the data travelled (inline or in an aux frame).
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// numpy typestr (`<f4`) or torch name (`float32`).
    pub dtype: String,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub data: Bytes,
}

/// Dimensions of a tensor: numpy's own bound.
const DIMENSIONS_MAX: usize = 32;

impl Tensor {
    fn bad(&self, text: impl std::fmt::Display) -> DecodeError {
        let Self { dtype, shape, data } = self;
        let found = format!("{text}: dtype {dtype:?}, shape {shape:?}, {} bytes", data.len());
        DecodeError::new(Kind::Tensor, found)
    }

    /// The number of its elements, if that many bytes are there.
    fn elements(&self, bytes_each: usize) -> Result<usize> {
        let product = self.shape.iter().try_fold(1_usize, |all, extent| all.checked_mul(*extent));
        match product {
            Some(elements) if elements.checked_mul(bytes_each) == Some(self.data.len()) => {
                Ok(elements)
            }
            _ => Err(self.bad(format!("its shape and {bytes_each}-byte elements need other data"))),
        }
    }

    /// Token ids, ranks: any integer type that a peer sends, none of them negative.
    fn integers(&self, r: &mut Reader<'_>) -> Result<Vec<u32>> {
        let small = |value: i64| u32::try_from(value).map_err(|_| self.bad("a value is no u32"));
        match self.dtype.as_str() {
            "<i4" | "int32" => self.each(r, |bytes| small(i32::from_le_bytes(bytes).into())),
            "<i8" | "int64" => self.each(r, |bytes| small(i64::from_le_bytes(bytes))),
            "<u4" | "uint32" => self.each(r, |bytes| Ok(u32::from_le_bytes(bytes))),
            _ => Err(self.bad("expected 4- or 8-byte integers")),
        }
    }

    fn floats(&self, r: &mut Reader<'_>) -> Result<Vec<f32>> {
        match self.dtype.as_str() {
            "<f4" | "float32" => self.each(r, |bytes| Ok(f32::from_le_bytes(bytes))),
            "<f8" | "float64" => self.each(r, |bytes| Ok(f64::from_le_bytes(bytes) as f32)),
            _ => Err(self.bad("expected float32 or float64")),
        }
    }

    fn each<T, const N: usize>(
        &self,
        r: &mut Reader<'_>,
        convert: impl Fn([u8; N]) -> Result<T>,
    ) -> Result<Vec<T>> {
        let elements = self.elements(N)?;
        // Many tensors may name the same frame, so the copies are charged, not only the frame.
        r.charge(elements.saturating_mul(size_of::<T>()))?;
        let chunks = self.data.chunks_exact(N);
        chunks.map(|chunk| convert(chunk.try_into().expect("chunks of N bytes"))).collect()
    }
}

impl Wire for Tensor {
    fn write(&self, w: &mut Writer) {
        w.tensor(&self.dtype, &self.shape, self.data.clone());
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let before = r.clone();
        if r.array()? != 3 {
            return Err(before.unexpected(Kind::Tensor, "a tensor: [dtype, shape, data]"));
        }
        let dtype = r.short_text(NAME_BYTES_MAX).map_err(|error| error.in_field("dtype"))?;
        let dtype = dtype.to_owned();
        let shape = read_shape(r).map_err(|error| error.in_field("shape"))?;
        let data = read_data(r).map_err(|error| error.in_field("data"))?;
        let tensor = Self { dtype, shape, data };
        if let Some(bytes_each) = element_bytes(&tensor.dtype) {
            tensor.elements(bytes_each)?;
        }
        Ok(tensor)
    }
}

fn read_shape(r: &mut Reader<'_>) -> Result<Vec<usize>> {
    let before = r.clone();
    let len = r.array()?;
    if len > DIMENSIONS_MAX {
        return Err(before.unexpected(Kind::Tensor, "a shape of at most 32 dimensions"));
    }
    (0..len).map(|_| r.integer("an extent")).collect()
}

fn read_data(r: &mut Reader<'_>) -> Result<Bytes> {
    if r.is_integer() {
        let before = r.clone();
        let index: usize = r.integer("the index of a frame")?;
        return match r.frames().get(index) {
            Some(frame) if index > 0 => Ok(frame.clone()),
            _ => {
                let beside = r.frames().len().saturating_sub(1);
                let expected = format!("the index of one of {beside} frames beside the payload");
                Err(before.unexpected(Kind::Frames, &expected))
            }
        };
    }
    let before = r.clone();
    if r.map().is_ok() {
        return Err(before.unexpected(Kind::Refused, "no tensor of an out-of-band queue"));
    }
    match r.ext()? {
        (EXT_RAW, bytes) => {
            r.charge(bytes.len())?;
            Ok(Bytes::copy_from_slice(bytes))
        }
        (kind, _) if EXT_PICKLES.contains(&kind) => {
            Err(before.unexpected(Kind::Refused, "no pickled object"))
        }
        _ => Err(before.unexpected(Kind::Type, "raw bytes (ext 3)")),
    }
}

/// The size of an element of the types that are known; of others the data is kept as it came.
fn element_bytes(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "|b1" | "|i1" | "|u1" | "bool" | "int8" | "uint8" => 1,
        "<i2" | "<u2" | "<f2" | "int16" | "uint16" | "float16" | "bfloat16" => 2,
        "<i4" | "<u4" | "<f4" | "int32" | "uint32" | "float32" => 4,
        "<i8" | "<u8" | "<f8" | "int64" | "uint64" | "float64" => 8,
        _ => return None,
    })
}

/// How one of the two kinds of logprobs names its types.
struct Dtypes {
    ids: &'static str,
    wide_ids: &'static str,
    logprobs: &'static str,
    ranks: &'static str,
}

/// numpy's, where a real engine's ranks have 8 bytes.
const LISTS: Dtypes = Dtypes { ids: "<i4", wide_ids: "<i8", logprobs: "<f4", ranks: "<i8" };

/// torch's.
const TENSORS: Dtypes =
    Dtypes { ids: "int32", wide_ids: "int64", logprobs: "float32", ranks: "int64" };

/// Writes ids, logprobs and ranks. All rows have the width of the first: the runner makes them so.
fn write_logprobs(
    w: &mut Writer,
    dtypes: &Dtypes,
    token_ids: &[Vec<u32>],
    logprobs: &[Vec<f32>],
    ranks: &[u32],
) {
    let rows = ranks.len();
    let width = token_ids.first().map_or(0, Vec::len);
    let even = token_ids.len() == rows
        && logprobs.len() == rows
        && token_ids.iter().all(|row| row.len() == width)
        && logprobs.iter().all(|row| row.len() == width);
    assert!(even, "logprobs have rows of different widths or numbers");
    let ids = || token_ids.iter().flatten().copied();
    if ids().all(|id| i32::try_from(id).is_ok()) {
        let bytes: Vec<u8> = ids().flat_map(u32::to_le_bytes).collect();
        w.tensor(dtypes.ids, &[rows, width], bytes.into());
    } else {
        let bytes: Vec<u8> = ids().flat_map(|id| i64::from(id).to_le_bytes()).collect();
        w.tensor(dtypes.wide_ids, &[rows, width], bytes.into());
    }
    let bytes: Vec<u8> = logprobs.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    w.tensor(dtypes.logprobs, &[rows, width], bytes.into());
    let bytes: Vec<u8> = ranks.iter().flat_map(|rank| i64::from(*rank).to_le_bytes()).collect();
    w.tensor(dtypes.ranks, &[rows], bytes.into());
}

type Rows = (Vec<Vec<u32>>, Vec<Vec<f32>>, Vec<u32>);

/// Reads what [`write_logprobs`] writes, and passes over at most `unused` elements after it.
fn read_logprobs(r: &mut Reader<'_>, unused: usize) -> Result<Rows> {
    let before = r.clone();
    let len = r.array()?;
    if len < 3 || len > 3 + unused {
        let expected = format!("an array of {} elements", 3 + unused);
        return Err(before.unexpected(Kind::Type, &expected));
    }
    let ids = Tensor::read(r).map_err(|error| error.in_field("token_ids"))?;
    let logprobs = Tensor::read(r).map_err(|error| error.in_field("logprobs"))?;
    let ranks = Tensor::read(r).map_err(|error| error.in_field("ranks"))?;
    for _ in 3..len {
        r.skip()?;
    }
    // The ranks bound the number of rows by bytes that are there: rows of no columns cost none.
    let [rows] = ranks.shape[..] else { return Err(ranks.bad("expected one rank a row")) };
    let rank_values = ranks.integers(r).map_err(|error| error.in_field("ranks"))?;
    for tensor in [&ids, &logprobs] {
        if tensor.shape.len() != 2 || tensor.shape[0] != rows || tensor.shape != ids.shape {
            return Err(tensor.bad(format!("expected {rows} rows, in ids as in logprobs")));
        }
    }
    let width = ids.shape[1];
    let id_values = ids.integers(r).map_err(|error| error.in_field("token_ids"))?;
    let logprob_values = logprobs.floats(r).map_err(|error| error.in_field("logprobs"))?;
    r.charge(rows.saturating_mul(2 * size_of::<Vec<u32>>()))?;
    Ok((in_rows(&id_values, rows, width), in_rows(&logprob_values, rows, width), rank_values))
}

fn in_rows<T: Copy>(values: &[T], rows: usize, width: usize) -> Vec<Vec<T>> {
    (0..rows).map(|row| values[row * width..(row + 1) * width].to_vec()).collect()
}

/// `[ids, logprobs, ranks, nil]` with numpy's type names.
impl Wire for LogprobsLists {
    fn write(&self, w: &mut Writer) {
        w.array(4);
        write_logprobs(w, &LISTS, &self.token_ids, &self.logprobs, &self.ranks);
        w.nil();
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let (token_ids, logprobs, ranks) = read_logprobs(r, 1)?;
        Ok(Self { token_ids, logprobs, ranks })
    }
}

/// `[ids, logprobs, ranks, nil, nil]` with torch's type names.
impl Wire for LogprobsTensors {
    fn write(&self, w: &mut Writer) {
        w.array(5);
        write_logprobs(w, &TENSORS, &self.token_ids, &self.logprobs, &self.ranks);
        w.nil();
        w.nil();
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let (token_ids, logprobs, ranks) = read_logprobs(r, 2)?;
        Ok(Self { token_ids, logprobs, ranks })
    }
}
