//! Values the protocol carries without looking inside, and the dump of any message as one.

use bytes::Bytes;

use super::wire::{EXT_PICKLES, Reader, Result, Wire, Writer};
use super::{DecodeError, DecodeErrorKind as Kind};

/// A msgpack value kept as it came. The type is ours so that no other crate names a msgpack one.
///
/// A tensor inside stays `[dtype, shape, data]`; where its data travelled in a frame of its own,
/// the index of that frame is all that is kept, so such a value cannot be passed on.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// nil
    Nil,
    /// true, false
    Bool(bool),
    /// Any integer of msgpack, from -2^63 to 2^64 - 1; one beyond is sent as the nearest of those.
    Integer(i128),
    /// float32 or float64
    Float(f64),
    /// UTF-8 text.
    Text(String),
    /// Raw bytes.
    Bytes(Vec<u8>),
    /// array
    Array(Vec<Value>),
    /// map, in order
    Map(Vec<(Value, Value)>),
    /// extension type
    Ext(i8, Vec<u8>),
}

/// Any payload as a value, to look at: pickled objects stay bytes, tensors in other frames stay the
/// index of their frame.
///
/// # Errors
/// Bytes that are not one msgpack value, or nest too deep.
pub fn dump(payload: &[u8]) -> std::result::Result<Value, DecodeError> {
    Reader::over(payload).showing_pickle().whole("message", Value::read)
}

/// One value as a payload.
#[must_use]
pub fn encode_value(value: &Value) -> Bytes {
    let mut w = Writer::with_capacity(64);
    value.write(&mut w);
    w.into_payload()
}

/// One value from a payload.
///
/// # Errors
/// As [`dump`], and pickled objects (ext 1 and 2) are refused.
pub fn decode_value(payload: &[u8]) -> std::result::Result<Value, DecodeError> {
    Reader::over(payload).whole("value", Value::read)
}

impl Value {
    /// A map with names as keys.
    pub fn map<K: Into<String>>(pairs: impl IntoIterator<Item = (K, Self)>) -> Self {
        Self::Map(pairs.into_iter().map(|(key, value)| (Self::Text(key.into()), value)).collect())
    }

    /// The value under a name, if this is a map that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        let pairs = self.as_map()?;
        pairs.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value)
    }

    /// Whether this is nil.
    #[must_use]
    pub fn is_nil(&self) -> bool {
        matches!(self, Self::Nil)
    }

    /// true or false
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    /// An integer that fits.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        if let Self::Integer(value) = self { u64::try_from(*value).ok() } else { None }
    }

    /// An integer that fits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        if let Self::Integer(value) = self { i64::try_from(*value).ok() } else { None }
    }

    /// A float, or an integer as one.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            Self::Integer(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// Text.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Text(value) = self { Some(value) } else { None }
    }

    /// Raw bytes.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if let Self::Bytes(value) = self { Some(value) } else { None }
    }

    /// The elements of an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&[Self]> {
        if let Self::Array(value) = self { Some(value) } else { None }
    }

    /// The pairs of a map.
    #[must_use]
    pub fn as_map(&self) -> Option<&[(Self, Self)]> {
        if let Self::Map(value) = self { Some(value) } else { None }
    }

    /// One line of JSON. Bytes and extension values become objects with their bytes in hex; keys
    /// that are not text, and floats that JSON lacks, become text.
    #[must_use]
    pub fn to_json(&self) -> String {
        self.to_json_value().to_string()
    }

    /// As [`Value::to_json`], for callers that add to it.
    #[must_use]
    pub fn to_json_value(&self) -> serde_json::Value {
        use serde_json::{Value as Json, json};
        match self {
            Self::Nil => Json::Null,
            Self::Bool(value) => Json::Bool(*value),
            Self::Integer(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => value.into(),
                (_, Ok(value)) => value.into(),
                _ => value.to_string().into(),
            },
            Self::Float(value) if value.is_finite() => (*value).into(),
            Self::Float(value) => value.to_string().into(),
            Self::Text(value) => value.as_str().into(),
            Self::Bytes(value) => json!({ "bytes": hex(value) }),
            Self::Array(values) => values.iter().map(Self::to_json_value).collect(),
            Self::Map(pairs) => Json::Object(
                pairs
                    .iter()
                    .map(|(key, value)| {
                        let key = key.as_str().map_or_else(|| key.to_json(), str::to_owned);
                        (key, value.to_json_value())
                    })
                    .collect(),
            ),
            Self::Ext(kind, value) => json!({ "ext": kind, "bytes": hex(value) }),
        }
    }

    /// A JSON value as a msgpack one.
    #[must_use]
    pub fn from_json(json: &serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match json {
            Json::Null => Self::Nil,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(value) => match (value.as_u64(), value.as_i64()) {
                (Some(value), _) => value.into(),
                (_, Some(value)) => value.into(),
                _ => Self::Float(value.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(value) => value.as_str().into(),
            Json::Array(values) => Self::Array(values.iter().map(Self::from_json).collect()),
            Json::Object(pairs) => {
                Self::map(pairs.iter().map(|(key, value)| (key.as_str(), Self::from_json(value))))
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

macro_rules! from {
    ($($type:ty => $variant:ident),+ $(,)?) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(value.into())
            }
        }
    )+};
}

from!(
    bool => Bool, u8 => Integer, u16 => Integer, u32 => Integer, u64 => Integer, i32 => Integer,
    i64 => Integer, f32 => Float, f64 => Float, &str => Text, String => Text, Vec<u8> => Bytes,
    Vec<Value> => Array,
);

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Integer(value as i128)
    }
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Nil, Into::into)
    }
}

impl<T: Into<Self> + Clone> From<&[T]> for Value {
    fn from(values: &[T]) -> Self {
        Self::Array(values.iter().cloned().map(Into::into).collect())
    }
}

impl FromIterator<Self> for Value {
    fn from_iter<I: IntoIterator<Item = Self>>(values: I) -> Self {
        Self::Array(values.into_iter().collect())
    }
}

impl Wire for Value {
    fn write(&self, w: &mut Writer) {
        match self {
            Self::Nil => w.nil(),
            Self::Bool(value) => w.bool(*value),
            Self::Integer(value) if *value < 0 => {
                w.signed(i64::try_from(*value).unwrap_or(i64::MIN));
            }
            Self::Integer(value) => w.unsigned(u64::try_from(*value).unwrap_or(u64::MAX)),
            Self::Float(value) => w.float(*value),
            Self::Text(value) => w.text(value),
            Self::Bytes(value) => w.bin(value),
            Self::Array(values) => values.write(w),
            Self::Map(pairs) => {
                w.map(pairs.len());
                for (key, value) in pairs {
                    key.write(w);
                    value.write(w);
                }
            }
            Self::Ext(kind, value) => w.ext(*kind, value),
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        use rmp::Marker::{
            Array16, Array32, Bin8, Bin16, Bin32, F32, F64, False, FixArray, FixMap, FixStr, Map16,
            Map32, Null, Reserved, Str8, Str16, Str32, True,
        };
        Ok(match r.peek()? {
            Null => {
                r.take_nil();
                Self::Nil
            }
            True | False => Self::Bool(r.bool()?),
            _ if r.is_integer() => Self::Integer(r.integer("an integer")?),
            F32 | F64 => Self::Float(r.float()?),
            FixStr(_) | Str8 | Str16 | Str32 => Self::Text(String::read(r)?),
            Bin8 | Bin16 | Bin32 => {
                let bytes = r.bin()?;
                r.charge(bytes.len())?;
                Self::Bytes(bytes.to_vec())
            }
            FixArray(_) | Array16 | Array32 => r.deeper(|r| Vec::read(r).map(Self::Array))?,
            FixMap(_) | Map16 | Map32 => r.deeper(|r| {
                let len = r.map()?;
                let mut pairs = r.reserve(len)?;
                for _ in 0..len {
                    let key = Self::read(r).map_err(|error| error.in_field("key"))?;
                    let value = Self::read(r).map_err(|error| match &key {
                        Self::Text(name) => error.in_field(name),
                        _ => error.in_field("value"),
                    })?;
                    pairs.push((key, value));
                }
                Ok(Self::Map(pairs))
            })?,
            Reserved => return Err(r.unexpected(Kind::Malformed, "a value")),
            _ => {
                let before = r.clone();
                let (kind, bytes) = r.ext()?;
                if EXT_PICKLES.contains(&kind) && !r.shows_pickle() {
                    return Err(before.unexpected(Kind::Refused, "no pickled object"));
                }
                r.charge(bytes.len())?;
                Self::Ext(kind, bytes.to_vec())
            }
        })
    }
}
