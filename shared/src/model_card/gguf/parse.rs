//! The walk over a file's header.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::metadata::{ElementKind, Place};
use super::{GgmlType, GgufTensor, ModelError};

/// Arrays of arrays: no known file nests at all, and each level costs a stack frame.
const ARRAY_DEPTH_MAX: u32 = 4;
/// The format's own limit of dimensions.
const DIMENSIONS_MAX: u32 = 4;
/// Where the file does not say.
const ALIGNMENT_DEFAULT: u64 = 32;
/// More than a page of the largest kind in use is a mistake.
const ALIGNMENT_MAX: u64 = 1 << 21;

pub(super) struct Parsed {
    pub version: u32,
    pub alignment: u64,
    pub metadata: HashMap<String, Place>,
    pub tensors: Vec<GgufTensor>,
}

pub(super) fn parse(bytes: &[u8]) -> Result<Parsed, ModelError> {
    let magic = &bytes[..bytes.len().min(4)];
    if magic != b"GGUF" {
        return Err(ModelError::NotGguf { found: magic.escape_ascii().to_string() });
    }
    let mut cursor = Cursor { bytes, at: 4 };
    let version = cursor.u32(|| "the version".into())?;
    if version.swap_bytes() == 2 || version.swap_bytes() == 3 {
        return Err(ModelError::Unsupported {
            what: "a big-endian GGUF file".into(),
            remedy: "convert it to little-endian".into(),
        });
    }
    if version != 2 && version != 3 {
        return Err(ModelError::Version { found: version });
    }
    let tensor_count = cursor.u64(|| "the tensor count".into())?;
    let key_count = cursor.u64(|| "the metadata count".into())?;
    // Each key takes at least 13 bytes (length, type, one byte of value), each tensor at least 32.
    cursor.check_count("the metadata count", key_count, 13)?;
    cursor.check_count("the tensor count", tensor_count, 32)?;

    let metadata = read_metadata(&mut cursor, key_count)?;
    let alignment = alignment(bytes, &metadata)?;
    let tensors = read_tensors(&mut cursor, tensor_count, alignment)?;
    check_overlap(&tensors)?;
    Ok(Parsed { version, alignment, metadata, tensors })
}

fn read_metadata(
    cursor: &mut Cursor<'_>,
    count: u64,
) -> Result<HashMap<String, Place>, ModelError> {
    // Grows with what was read, never by `count`.
    let mut metadata = HashMap::new();
    for index in 0..count {
        let key = cursor.string(|| format!("metadata key {index}"))?.to_owned();
        let kind = cursor.u32(|| format!("the type of metadata key {key:?}"))?;
        let place = read_value(cursor, kind, &key, 0)?;
        if metadata.insert(key.clone(), place).is_some() {
            return Err(ModelError::Duplicate { field: format!("metadata key {key:?}") });
        }
    }
    Ok(metadata)
}

fn element_kind(kind: u32, key: &str) -> Result<ElementKind, ModelError> {
    ElementKind::from_id(kind).ok_or_else(|| {
        ModelError::field(format!("the type of metadata key {key:?}"), "a number up to 12", kind)
    })
}

/// Walks over one value and remembers where it is.
fn read_value(
    cursor: &mut Cursor<'_>,
    kind: u32,
    key: &str,
    depth: u32,
) -> Result<Place, ModelError> {
    let kind = element_kind(kind, key)?;
    let start = cursor.at;
    let field = || format!("metadata key {key:?}");
    match kind {
        ElementKind::Text => {
            let range = cursor.sized(field)?;
            Ok(Place { kind, count: 1, range, element: None })
        }
        ElementKind::Array => {
            if depth == ARRAY_DEPTH_MAX {
                let expected = format!("at most {ARRAY_DEPTH_MAX} arrays in each other");
                return Err(ModelError::field(field(), expected, "nested deeper"));
            }
            let element_id = cursor.u32(field)?;
            let element = element_kind(element_id, key)?;
            let count = cursor.u64(field)?;
            let first = cursor.at;
            match element.bytes() {
                Some(size) => {
                    let needed = cursor.multiply(field, count, size)?;
                    cursor.take(needed, field)?;
                }
                // A string is at least its length, an array at least type and count.
                None => {
                    cursor.check_count(&field(), count, 8)?;
                    for _ in 0..count {
                        read_value(cursor, element_id, key, depth + 1)?;
                    }
                }
            }
            Ok(Place { kind, count, range: first..cursor.at, element: Some(element) })
        }
        _ => {
            let size = kind.bytes().expect("neither text nor array");
            cursor.take(size, field)?;
            Ok(Place { kind, count: 1, range: start..cursor.at, element: None })
        }
    }
}

fn alignment(bytes: &[u8], metadata: &HashMap<String, Place>) -> Result<u64, ModelError> {
    let Some(place) = metadata.get("general.alignment") else { return Ok(ALIGNMENT_DEFAULT) };
    let value = place.value(bytes);
    match value.as_u64() {
        Some(number) if number.is_power_of_two() && number <= ALIGNMENT_MAX => Ok(number),
        _ => {
            let expected = format!("a power of two up to {ALIGNMENT_MAX}");
            Err(ModelError::field("metadata key \"general.alignment\"", expected, value))
        }
    }
}

/// A tensor before the start of the data section is known.
struct Declared {
    name: String,
    dtype: GgmlType,
    shape: Vec<u64>,
    bytes: u64,
    offset: u64,
}

fn read_tensors(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u64,
) -> Result<Vec<GgufTensor>, ModelError> {
    let mut declared = Vec::new();
    let mut names = HashSet::new();
    for index in 0..count {
        let tensor = read_tensor(cursor, index, alignment)?;
        if !names.insert(tensor.name.clone()) {
            return Err(ModelError::Duplicate { field: format!("tensor {:?}", tensor.name) });
        }
        declared.push(tensor);
    }
    let total = cursor.bytes.len() as u64;
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(declared.len());
    for tensor in declared {
        let cut_off = |left| ModelError::CutOff {
            field: format!("tensor {:?} (at byte {} of the data)", tensor.name, tensor.offset),
            needed: tensor.bytes,
            left,
        };
        let start = data_start.checked_add(tensor.offset).ok_or_else(|| cut_off(0))?;
        let left = total.saturating_sub(start);
        if tensor.bytes > left {
            return Err(cut_off(left));
        }
        // Both ends are within the length of a slice, so they fit in usize.
        let range = start as usize..(start + tensor.bytes) as usize;
        let Declared { name, dtype, shape, .. } = tensor;
        tensors.push(GgufTensor { name, dtype, shape, range });
    }
    Ok(tensors)
}

fn read_tensor(
    cursor: &mut Cursor<'_>,
    index: u64,
    alignment: u64,
) -> Result<Declared, ModelError> {
    let name = cursor.string(|| format!("the name of tensor {index}"))?.to_owned();
    let field = |what: &str| format!("the {what} of tensor {name:?}");
    let dimensions = cursor.u32(|| field("dimension count"))?;
    if dimensions == 0 || dimensions > DIMENSIONS_MAX {
        let expected = format!("1 to {DIMENSIONS_MAX}");
        return Err(ModelError::field(field("dimension count"), expected, dimensions));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(cursor.u64(|| field("shape"))?);
    }
    let type_id = cursor.u32(|| field("type"))?;
    let offset = cursor.u64(|| field("offset"))?;
    // Before anything else is done with the entry: without the type no size can be checked.
    let dtype = GgmlType::from_id(type_id).map_err(|found| ModelError::Unsupported {
        what: format!("tensor {name:?} of {found}"),
        remedy: "use a file quantised as Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, F16, BF16 or F32".into(),
    })?;
    let bytes = tensor_bytes(&name, dtype, &shape)?;
    if !offset.is_multiple_of(alignment) {
        let expected = format!("a multiple of the alignment {alignment}");
        return Err(ModelError::field(field("offset"), expected, offset));
    }
    Ok(Declared { name, dtype, shape, bytes, offset })
}

/// Bytes of a tensor, in 64 bits to the end.
fn tensor_bytes(name: &str, dtype: GgmlType, shape: &[u64]) -> Result<u64, ModelError> {
    let refuse = |expected: String| {
        ModelError::field(format!("the shape of tensor {name:?}"), expected, format!("{shape:?}"))
    };
    if shape.contains(&0) {
        return Err(refuse("no dimension of 0".into()));
    }
    if !shape[0].is_multiple_of(dtype.block_len()) {
        return Err(refuse(format!("rows of a multiple of {} for {dtype}", dtype.block_len())));
    }
    let product = |first: u64| shape[1..].iter().try_fold(first, |all, &n| all.checked_mul(n));
    match (product(shape[0]), dtype.bytes_for(shape[0]).and_then(product)) {
        (Some(_), Some(bytes)) => Ok(bytes),
        _ => Err(refuse("fewer than 2^64 elements and bytes".into())),
    }
}

fn check_overlap(tensors: &[GgufTensor]) -> Result<(), ModelError> {
    let mut by_start: Vec<&GgufTensor> = tensors.iter().collect();
    by_start.sort_by_key(|tensor| tensor.range.start);
    for pair in by_start.windows(2) {
        if pair[0].range.end > pair[1].range.start {
            return Err(ModelError::Overlap {
                first: pair[0].name.clone(),
                second: pair[1].name.clone(),
            });
        }
    }
    Ok(())
}

/// A place in the file that only moves forward, and never past its end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `count` bytes. The name of the field is only made when it is needed.
    fn take(&mut self, count: u64, field: impl Fn() -> String) -> Result<&'a [u8], ModelError> {
        if count > self.left() {
            return Err(ModelError::CutOff { field: field(), needed: count, left: self.left() });
        }
        // No more than what is left of a slice, so it fits in usize.
        let end = self.at + count as usize;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self, field: impl Fn() -> String) -> Result<u32, ModelError> {
        let bytes = self.take(4, field)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes were taken")))
    }

    fn u64(&mut self, field: impl Fn() -> String) -> Result<u64, ModelError> {
        let bytes = self.take(8, field)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes were taken")))
    }

    /// A length and that many bytes: where those bytes are.
    fn sized(&mut self, field: impl Fn() -> String) -> Result<Range<usize>, ModelError> {
        let len = self.u64(&field)?;
        let start = self.at;
        self.take(len, field)?;
        Ok(start..self.at)
    }

    fn string(&mut self, field: impl Fn() -> String) -> Result<&'a str, ModelError> {
        let range = self.sized(&field)?;
        std::str::from_utf8(&self.bytes[range]).map_err(|error| {
            ModelError::field(
                field(),
                "UTF-8",
                format!("invalid from byte {} on", error.valid_up_to()),
            )
        })
    }

    fn multiply(
        &self,
        field: impl Fn() -> String,
        count: u64,
        size: u64,
    ) -> Result<u64, ModelError> {
        count.checked_mul(size).ok_or_else(|| ModelError::CutOff {
            field: field(),
            needed: u64::MAX,
            left: self.left(),
        })
    }

    /// Refuses a count that cannot be true, as each element takes `least` bytes or more.
    fn check_count(&self, field: &str, count: u64, least: u64) -> Result<(), ModelError> {
        let needed = self.multiply(|| field.to_owned(), count, least)?;
        if needed <= self.left() {
            return Ok(());
        }
        let field = format!("{field} ({count})");
        Err(ModelError::CutOff { field, needed, left: self.left() })
    }
}
