//! Values the protocol carries without looking inside, and tensors with their raw bytes.

use bytes::Bytes;

/// A msgpack value kept as it came. The type is ours so that no other crate names a msgpack one.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// nil
    Nil,
    /// true, false
    Bool(bool),
    /// Any integer.
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
