//! The metadata of a GGUF file, read where it lies.

use std::fmt;
use std::ops::Range;

use super::{GgufFile, ModelError};

/// Types of a metadata value, by their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElementKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ElementKind {
    pub(super) fn from_id(id: u32) -> Option<Self> {
        use ElementKind::*;
        let kinds = [U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64];
        kinds.get(id as usize).copied()
    }

    /// Bytes of one element, where that is fixed.
    pub(super) fn bytes(self) -> Option<u64> {
        use ElementKind::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            Text | Array => None,
        }
    }
}

/// Where a value is. For an array the range begins at its first element.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub kind: ElementKind,
    pub count: u64,
    pub range: Range<usize>,
    pub element: Option<ElementKind>,
}

impl Place {
    pub(super) fn value<'a>(&self, file: &'a [u8]) -> MetadataValue<'a> {
        let bytes = &file[self.range.clone()];
        match self.element {
            Some(kind) => MetadataValue::Array(MetadataArray { kind, count: self.count, bytes }),
            None => scalar(self.kind, bytes),
        }
    }
}

/// The walk over the file has shown that `bytes` has the length that `kind` needs.
fn scalar(kind: ElementKind, bytes: &[u8]) -> MetadataValue<'_> {
    fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.try_into().expect("checked when the file was read")
    }
    use MetadataValue::*;
    match kind {
        ElementKind::U8 => Unsigned(bytes[0].into()),
        ElementKind::I8 => Signed((bytes[0] as i8).into()),
        ElementKind::U16 => Unsigned(u16::from_le_bytes(fixed(bytes)).into()),
        ElementKind::I16 => Signed(i16::from_le_bytes(fixed(bytes)).into()),
        ElementKind::U32 => Unsigned(u32::from_le_bytes(fixed(bytes)).into()),
        ElementKind::I32 => Signed(i32::from_le_bytes(fixed(bytes)).into()),
        ElementKind::F32 => Float(f32::from_le_bytes(fixed(bytes)).into()),
        ElementKind::Bool => Bool(bytes[0] != 0),
        ElementKind::U64 => Unsigned(u64::from_le_bytes(fixed(bytes))),
        ElementKind::I64 => Signed(i64::from_le_bytes(fixed(bytes))),
        ElementKind::F64 => Float(f64::from_le_bytes(fixed(bytes))),
        ElementKind::Text => Text(bytes),
        ElementKind::Array => unreachable!("arrays have an element kind"),
    }
}

/// One metadata value.
#[derive(Clone, Copy, PartialEq)]
pub enum MetadataValue<'a> {
    /// uint8 to uint64
    Unsigned(u64),
    /// int8 to int64
    Signed(i64),
    /// float32 and float64
    Float(f64),
    /// Any byte but 0 is true.
    Bool(bool),
    /// As it is in the file, which need not be UTF-8.
    Text(&'a [u8]),
    /// Elements of one type.
    Array(MetadataArray<'a>),
}

impl<'a> MetadataValue<'a> {
    /// An integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(number) => Some(number),
            Self::Signed(number) => u64::try_from(number).ok(),
            _ => None,
        }
    }

    /// Any integer that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Self::Unsigned(number) => i64::try_from(number).ok(),
            Self::Signed(number) => Some(number),
            _ => None,
        }
    }

    /// Any number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Unsigned(number) => Some(number as f64),
            Self::Signed(number) => Some(number as f64),
            Self::Float(number) => Some(number),
            _ => None,
        }
    }

    /// A boolean, and nothing else.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = *self { Some(value) } else { None }
    }

    /// Text that is UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        if let Self::Text(bytes) = *self { std::str::from_utf8(bytes).ok() } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<MetadataArray<'a>> {
        if let Self::Array(array) = *self { Some(array) } else { None }
    }
}

/// For messages: arrays and long texts are cut.
impl fmt::Display for MetadataValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(number) => write!(f, "{number}"),
            Self::Signed(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "{number}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Text(bytes) => {
                let text: String = String::from_utf8_lossy(bytes).chars().take(80).collect();
                write!(f, "{text:?}")
            }
            Self::Array(array) => write!(f, "an array of {} elements", array.count),
        }
    }
}

impl fmt::Debug for MetadataValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An array of the metadata, decoded while it is walked.
#[derive(Clone, Copy, PartialEq)]
pub struct MetadataArray<'a> {
    kind: ElementKind,
    count: u64,
    /// From the first element to the end of the last.
    bytes: &'a [u8],
}

impl<'a> MetadataArray<'a> {
    /// Elements. The file has been seen to hold them all.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = MetadataValue<'a>> + use<'a> {
        let (kind, mut rest) = (self.kind, self.bytes);
        (0..self.count).map(move |_| next_element(kind, &mut rest))
    }
}

fn next_element<'a>(kind: ElementKind, rest: &mut &'a [u8]) -> MetadataValue<'a> {
    match kind {
        ElementKind::Text => {
            let len = take_u64(rest);
            MetadataValue::Text(take(rest, len))
        }
        ElementKind::Array => {
            let id = take(rest, 4).try_into().expect("four bytes were taken");
            let element = ElementKind::from_id(u32::from_le_bytes(id))
                .expect("checked when the file was read");
            let count = take_u64(rest);
            let all = *rest;
            match element.bytes() {
                Some(size) => _ = take(rest, count * size),
                None => (0..count).for_each(|_| _ = next_element(element, rest)),
            }
            let bytes = &all[..all.len() - rest.len()];
            MetadataValue::Array(MetadataArray { kind: element, count, bytes })
        }
        _ => {
            let size = kind.bytes().expect("neither text nor array");
            scalar(kind, take(rest, size))
        }
    }
}

/// What the walk over the file has shown to be there.
fn take<'a>(rest: &mut &'a [u8], count: u64) -> &'a [u8] {
    let (taken, after) = rest.split_at(count as usize);
    *rest = after;
    taken
}

fn take_u64(rest: &mut &[u8]) -> u64 {
    u64::from_le_bytes(take(rest, 8).try_into().expect("eight bytes were taken"))
}

/// Keys by type: `Ok(None)` where the key is absent, an error where it holds something else.
impl GgufFile {
    /// The value of a key.
    pub fn metadata(&self, key: &str) -> Option<MetadataValue<'_>> {
        self.metadata.get(key).map(|place| place.value(self.bytes.as_slice()))
    }

    /// All keys, sorted.
    pub fn metadata_keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.metadata.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(MetadataValue<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.metadata(key) else { return Ok(None) };
        match read(value) {
            Some(typed) => Ok(Some(typed)),
            None => Err(ModelError::field(format!("metadata key {key:?}"), expected, value)),
        }
    }

    /// An integer from 0 to 2^32 - 1.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let read = |value: MetadataValue<'_>| value.as_u64().and_then(|n| u32::try_from(n).ok());
        self.typed(key, "an integer from 0 to 2^32 - 1", read)
    }

    /// A finite number.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let read = |value: MetadataValue<'_>| value.as_f64().filter(|n| n.is_finite());
        Ok(self.typed(key, "a finite number", read)?.map(|number| number as f32))
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", |value| value.as_bool())
    }

    /// A text.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.typed(key, "a text in UTF-8", |value| value.as_str())
    }

    /// An array of any type.
    pub fn array(&self, key: &str) -> Result<Option<MetadataArray<'_>>, ModelError> {
        self.typed(key, "an array", |value| value.as_array())
    }

    /// An array of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        let mut texts = Vec::new();
        for (index, element) in array.iter().enumerate() {
            let Some(text) = element.as_str() else {
                let field = format!("element {index} of metadata key {key:?}");
                return Err(ModelError::field(field, "a text in UTF-8", element));
            };
            texts.push(text);
        }
        Ok(Some(texts))
    }

    /// The error for a key that a caller cannot do without.
    pub fn missing(key: &str) -> ModelError {
        ModelError::Missing { key: key.into() }
    }
}
