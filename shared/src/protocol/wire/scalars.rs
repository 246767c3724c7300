//! How plain values travel: numbers, texts, optional values and lists of values.

use std::collections::{BTreeMap, BTreeSet};

use super::{Reader, Result, Wire, Writer};

macro_rules! integer {
    ($($type:ident $write:ident $wide:ident),+) => {$(
        impl Wire for $type {
            fn write(&self, w: &mut Writer) {
                w.$write($wide::from(*self));
            }

            fn read(r: &mut Reader<'_>) -> Result<Self> {
                r.integer(concat!("an integer of type ", stringify!($type)))
            }

            fn absent() -> Option<Self> {
                Some(0)
            }
        }
    )+};
}

integer!(u32 unsigned u64, u64 unsigned u64, i32 signed i64, i64 signed i64);

impl Wire for f64 {
    fn write(&self, w: &mut Writer) {
        w.float(*self);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        r.float()
    }

    fn absent() -> Option<Self> {
        Some(0.0)
    }
}

impl Wire for bool {
    fn write(&self, w: &mut Writer) {
        w.bool(*self);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        r.bool()
    }

    fn absent() -> Option<Self> {
        Some(false)
    }
}

impl Wire for String {
    fn write(&self, w: &mut Writer) {
        w.text(self);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let text = r.text()?;
        r.charge(text.len())?;
        Ok(text.to_owned())
    }
}

impl<T: Wire> Wire for Option<T> {
    fn write(&self, w: &mut Writer) {
        match self {
            Some(value) => value.write(w),
            None => w.nil(),
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        if r.take_nil() { Ok(None) } else { T::read(r).map(Some) }
    }

    fn absent() -> Option<Self> {
        Some(None)
    }
}

/// A list. nil reads as the empty list: vLLM's optional lists mean the same either way.
impl<T: Wire> Wire for Vec<T> {
    fn write(&self, w: &mut Writer) {
        w.array(self.len());
        for value in self {
            value.write(w);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        if r.take_nil() {
            return Ok(Vec::new());
        }
        let len = r.array()?;
        let mut values = r.reserve(len)?;
        for index in 0..len {
            values.push(T::read(r).map_err(|error| error.at_index(index))?);
        }
        Ok(values)
    }

    fn absent() -> Option<Self> {
        Some(Vec::new())
    }
}

/// A set travels as an array, in any order.
impl<T: Wire + Ord> Wire for BTreeSet<T> {
    fn write(&self, w: &mut Writer) {
        w.array(self.len());
        for value in self {
            value.write(w);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        Vec::read(r).map(Self::from_iter)
    }

    fn absent() -> Option<Self> {
        Some(Self::new())
    }
}

/// A map from token ids, whose keys are integers on the wire.
impl Wire for BTreeMap<u32, f64> {
    fn write(&self, w: &mut Writer) {
        w.map(self.len());
        for (key, value) in self {
            key.write(w);
            value.write(w);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let len = r.map()?;
        let mut pairs: Vec<(u32, f64)> = r.reserve(len)?;
        for _ in 0..len {
            let key = u32::read(r).map_err(|error| error.in_field("key"))?;
            pairs.push((key, f64::read(r).map_err(|error| error.in_field(&key.to_string()))?));
        }
        Ok(pairs.into_iter().collect())
    }
}

/// A map with names as keys, in the sender's order.
macro_rules! named {
    ($($value:ty),+) => {$(
        impl Wire for Vec<(String, $value)> {
            fn write(&self, w: &mut Writer) {
                w.map(self.len());
                for (key, value) in self {
                    w.text(key);
                    value.write(w);
                }
            }

            fn read(r: &mut Reader<'_>) -> Result<Self> {
                if r.take_nil() {
                    return Ok(Vec::new());
                }
                let len = r.map()?;
                let mut pairs = r.reserve(len)?;
                for _ in 0..len {
                    let key = String::read(r).map_err(|error| error.in_field("key"))?;
                    let value = Wire::read(r).map_err(|error| error.in_field(&key))?;
                    pairs.push((key, value));
                }
                Ok(pairs)
            }

            fn absent() -> Option<Self> {
                Some(Vec::new())
            }
        }
    )+};
}

named!(String, u64, crate::protocol::Value);

/// A list that vLLM sends as nil when it is empty.
pub(in crate::protocol) mod or_nil {
    use super::{Reader, Result, Wire, Writer};

    pub(in crate::protocol) fn write<T: Wire>(list: &Vec<T>, w: &mut Writer) {
        if list.is_empty() { w.nil() } else { list.write(w) }
    }

    pub(in crate::protocol) fn read<T: Wire>(r: &mut Reader<'_>) -> Result<Vec<T>> {
        Vec::read(r)
    }
}
