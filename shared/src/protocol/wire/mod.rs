//! msgpack itself: how single values are written and read, and the two shapes messages have.
//!
//! A type that travels implements [`Wire`]. Most do so through `array_struct!` or `map_struct!`,
//! which list vLLM's fields in vLLM's order: those lists are the wire, the structs are the meaning.
//!
//! Reading trusts nothing: announced lengths are checked against the bytes that are left before
//! anything is reserved, depth is bounded, and what a message may take in memory is budgeted.

mod items;
mod preview;
mod reader;
mod scalars;
mod writer;

pub(super) use items::ArrayItems;
pub(super) use reader::{Reader, Unknown};
pub(super) use scalars::or_nil;
pub(super) use writer::{EXT_PICKLES, EXT_RAW, Writer};

use super::DecodeError;

pub(super) type Result<T> = std::result::Result<T, DecodeError>;

/// Longest request id, method name and the like, in bytes.
pub(super) const NAME_BYTES_MAX: usize = 1024;

/// A value that travels.
pub(super) trait Wire: Sized {
    /// Writes it.
    fn write(&self, w: &mut Writer);

    /// Reads it.
    fn read(r: &mut Reader<'_>) -> Result<Self>;

    /// What a field is that the sender left away; `None` where it may not be left away.
    fn absent() -> Option<Self> {
        None
    }
}

/// A struct that vLLM sends as an array of all its fields, in this order.
///
/// Too short an array takes defaults for its tail, down to `required` elements; more elements than
/// we know are skipped (a newer vLLM), or refused where Python refuses them (`exact`: NamedTuples).
/// `field as module` writes and reads that field with the module's functions.
macro_rules! array_struct {
    ($type:ident, required $required:literal $(, $exact:ident)?;
     $($field:ident $(as $how:ident)?),+ $(,)?) => {
        impl $crate::protocol::wire::Wire for $type {
            fn write(&self, w: &mut $crate::protocol::wire::Writer) {
                w.array([$(stringify!($field)),+].len());
                $(array_struct!(@write w, &self.$field $(, $how)?);)+
            }

            fn read(
                r: &mut $crate::protocol::wire::Reader<'_>,
            ) -> $crate::protocol::wire::Result<Self> {
                let mut items = $crate::protocol::wire::ArrayItems::open(r, $required)?;
                let value = Self {
                    $($field: items.next(
                        r,
                        stringify!($field),
                        array_struct!(@read $($how)?),
                    )?,)+
                };
                array_struct!(@close items, r $(, $exact)?);
                Ok(value)
            }
        }
    };
    (@write $w:ident, $field:expr) => { $crate::protocol::wire::Wire::write($field, $w) };
    (@write $w:ident, $field:expr, $how:ident) => { $how::write($field, $w) };
    (@read) => { $crate::protocol::wire::Wire::read };
    (@read $how:ident) => { $how::read };
    (@close $items:ident, $r:ident) => { $items.skip_rest($r)? };
    (@close $items:ident, $r:ident, exact) => { $items.refuse_rest()? };
}

/// A struct that vLLM sends as a map of all its fields. Missing keys keep the value that `base`
/// has, unknown keys are skipped.
macro_rules! map_struct {
    ($type:ident, base $base:expr; $($field:ident),+ $(,)?) => {
        impl $crate::protocol::wire::Wire for $type {
            fn write(&self, w: &mut $crate::protocol::wire::Writer) {
                w.map([$(stringify!($field)),+].len());
                $(
                    w.text(stringify!($field));
                    $crate::protocol::wire::Wire::write(&self.$field, w);
                )+
            }

            fn read(
                r: &mut $crate::protocol::wire::Reader<'_>,
            ) -> $crate::protocol::wire::Result<Self> {
                let mut value: Self = $base;
                r.keys(|r, key| {
                    match key {
                        $(stringify!($field) => {
                            value.$field = $crate::protocol::wire::Wire::read(r)?;
                        })+
                        _ => r.skip_unknown()?,
                    }
                    Ok(())
                })?;
                Ok(value)
            }
        }
    };
}

pub(super) use {array_struct, map_struct};
