//! Reading msgpack from bytes that a stranger may have written.

use std::cell::RefCell;

use bytes::Bytes;
use rmp::Marker;

use super::{Result, Wire};
use crate::protocol::{DecodeError, DecodeErrorKind as Kind, Value};

/// Arrays and maps inside one another. Deeper messages are refused, so that recursion is bounded.
const DEPTH_MAX: u32 = 128;

/// What one decoded message may take in memory, in bytes. Small values grow in memory (an empty
/// output is 3 bytes on the wire and some 600 decoded), so a frame's size is no bound by itself.
const DECODED_BYTES_MAX: usize = 256 << 20;

/// What messages hold beyond what this build knows of them: where, and what.
#[derive(Debug, Default)]
pub(in crate::protocol) struct Unknown {
    path: RefCell<Vec<String>>,
    found: RefCell<Vec<(String, Value)>>,
}

impl Unknown {
    pub(in crate::protocol) fn into_found(self) -> Vec<(String, Value)> {
        self.found.into_inner()
    }
}

/// A cursor over one payload, with the frames its tensors may lie in.
#[derive(Clone, Debug)]
pub(in crate::protocol) struct Reader<'a> {
    payload: &'a [u8],
    at: usize,
    /// The message's frames, counted so that the payload is 0.
    frames: &'a [Bytes],
    depth: u32,
    budget: usize,
    /// `dump` shows pickled objects' bytes, decoding refuses them.
    shows_pickle: bool,
    /// Where to note what is not known, for those who look at messages.
    unknown: Option<&'a Unknown>,
}

impl<'a> Reader<'a> {
    /// Reads a payload that refers to no other frame.
    pub(in crate::protocol) fn over(payload: &'a [u8]) -> Self {
        let budget = DECODED_BYTES_MAX;
        Self { payload, at: 0, frames: &[], depth: 0, budget, shows_pickle: false, unknown: None }
    }

    /// Reads the first of `frames`.
    pub(in crate::protocol) fn over_frames(frames: &'a [Bytes]) -> Self {
        let payload = frames.first().map_or(&[][..], |payload| &payload[..]);
        Self { frames, ..Self::over(payload) }
    }

    /// Lets pickled objects pass as the bytes they are.
    pub(in crate::protocol) fn showing_pickle(self) -> Self {
        Self { shows_pickle: true, ..self }
    }

    /// Notes in `unknown` what is passed over because it is not known.
    pub(in crate::protocol) fn noting(self, unknown: Option<&'a Unknown>) -> Self {
        Self { unknown, ..self }
    }

    /// Reads the one value of the payload, and refuses bytes after it.
    pub(in crate::protocol) fn whole<T>(
        mut self,
        type_name: &str,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        read(&mut self)
            .and_then(|value| {
                let left = self.left();
                if left == 0 {
                    return Ok(value);
                }
                let text = format!("expected the end, found {left} more bytes{}", self.place());
                Err(DecodeError::new(Kind::Trailing, text))
            })
            .map_err(|error| error.within(type_name))
    }

    pub(in crate::protocol) fn shows_pickle(&self) -> bool {
        self.shows_pickle
    }

    pub(in crate::protocol) fn frames(&self) -> &'a [Bytes] {
        self.frames
    }

    pub(in crate::protocol) fn left(&self) -> usize {
        self.payload.len() - self.at
    }

    fn place(&self) -> String {
        format!(" (byte {} of {})", self.at, self.payload.len())
    }

    /// Takes `bytes` from what the message may use in memory.
    pub(in crate::protocol) fn charge(&mut self, bytes: usize) -> Result<()> {
        self.budget = self.budget.checked_sub(bytes).ok_or_else(|| {
            let text = format!("the decoded message passes {DECODED_BYTES_MAX} bytes");
            DecodeError::new(Kind::TooLarge, text)
        })?;
        Ok(())
    }

    /// A list for `len` values: charged for all, and never reserving more than the bytes left.
    pub(in crate::protocol) fn reserve<T>(&mut self, len: usize) -> Result<Vec<T>> {
        let each = size_of::<T>().max(1);
        self.charge(len.saturating_mul(each))?;
        Ok(Vec::with_capacity(len.min(self.left() / each + 1)))
    }

    // ---- what is next ----

    pub(in crate::protocol) fn peek(&self) -> Result<Marker> {
        match self.payload.get(self.at) {
            Some(byte) => Ok(Marker::from_u8(*byte)),
            None => Err(self.truncated("a value")),
        }
    }

    pub(in crate::protocol) fn take_nil(&mut self) -> bool {
        let is_nil = self.payload.get(self.at) == Some(&Marker::Null.to_u8());
        self.at += usize::from(is_nil);
        is_nil
    }

    pub(in crate::protocol) fn is_text(&self) -> bool {
        use Marker::{FixStr, Str8, Str16, Str32};
        matches!(self.peek(), Ok(FixStr(_) | Str8 | Str16 | Str32))
    }

    pub(in crate::protocol) fn is_integer(&self) -> bool {
        use Marker::{FixNeg, FixPos, I8, I16, I32, I64, U8, U16, U32, U64};
        matches!(
            self.peek(),
            Ok(FixPos(_) | FixNeg(_) | U8 | U16 | U32 | U64 | I8 | I16 | I32 | I64)
        )
    }

    // ---- errors ----

    pub(in crate::protocol) fn truncated(&self, expected: &str) -> DecodeError {
        let text = format!("expected {expected}, found the end of the message{}", self.place());
        DecodeError::new(Kind::Truncated, text)
    }

    /// The value at the cursor is not `expected`.
    #[cold]
    pub(in crate::protocol) fn unexpected(&self, kind: Kind, expected: &str) -> DecodeError {
        if self.left() == 0 {
            return self.truncated(expected);
        }
        let found = self.clone().preview();
        DecodeError::new(kind, format!("expected {expected}, found {found}{}", self.place()))
    }

    // ---- values ----

    pub(in crate::protocol) fn bool(&mut self) -> Result<bool> {
        let value = match self.peek()? {
            Marker::True => true,
            Marker::False => false,
            _ => return Err(self.unexpected(Kind::Type, "true or false")),
        };
        self.at += 1;
        Ok(value)
    }

    /// An integer of any width that fits `T`. A float, 1.0 too, is refused as in vLLM.
    pub(in crate::protocol) fn integer<T: TryFrom<i128>>(&mut self, expected: &str) -> Result<T> {
        let start = self.at;
        let value = self.any_integer(expected)?;
        T::try_from(value).map_err(|_| {
            self.at = start;
            self.unexpected(Kind::Range, expected)
        })
    }

    pub(super) fn any_integer(&mut self, expected: &str) -> Result<i128> {
        Ok(match self.peek()? {
            Marker::FixPos(value) => {
                self.at += 1;
                value.into()
            }
            Marker::FixNeg(value) => {
                self.at += 1;
                value.into()
            }
            Marker::U8 => u8::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::U16 => u16::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::U32 => u32::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::U64 => u64::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::I8 => i8::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::I16 => i16::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::I32 => i32::from_be_bytes(self.after_marker(expected)?).into(),
            Marker::I64 => i64::from_be_bytes(self.after_marker(expected)?).into(),
            _ => return Err(self.unexpected(Kind::Type, expected)),
        })
    }

    /// A float32, a float64 or an integer.
    pub(in crate::protocol) fn float(&mut self) -> Result<f64> {
        const EXPECTED: &str = "a number";
        match self.peek()? {
            Marker::F64 => Ok(f64::from_be_bytes(self.after_marker(EXPECTED)?)),
            Marker::F32 => Ok(f32::from_be_bytes(self.after_marker(EXPECTED)?).into()),
            _ => Ok(self.any_integer(EXPECTED)? as f64),
        }
    }

    pub(in crate::protocol) fn text(&mut self) -> Result<&'a str> {
        let length = match self.peek()? {
            Marker::FixStr(len) => Length::Is(len),
            Marker::Str8 => Length::In8,
            Marker::Str16 => Length::In16,
            Marker::Str32 => Length::In32,
            _ => return Err(self.unexpected(Kind::Type, "text")),
        };
        let len = self.length(length)?;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|error| {
            let text = format!("expected text, found {len} bytes that are not UTF-8: {error}");
            DecodeError::new(Kind::Utf8, text)
        })
    }

    /// A text of at most `max` bytes.
    pub(in crate::protocol) fn short_text(&mut self, max: usize) -> Result<&'a str> {
        let text = self.text()?;
        if text.len() > max {
            let text = format!("expected at most {max} bytes of text, found {}", text.len());
            return Err(DecodeError::new(Kind::TooLarge, text));
        }
        Ok(text)
    }

    pub(in crate::protocol) fn bin(&mut self) -> Result<&'a [u8]> {
        let length = match self.peek()? {
            Marker::Bin8 => Length::In8,
            Marker::Bin16 => Length::In16,
            Marker::Bin32 => Length::In32,
            _ => return Err(self.unexpected(Kind::Type, "bytes")),
        };
        let len = self.length(length)?;
        self.take(len)
    }

    pub(in crate::protocol) fn ext(&mut self) -> Result<(i8, &'a [u8])> {
        let length = match self.peek()? {
            Marker::FixExt1 => Length::Is(1),
            Marker::FixExt2 => Length::Is(2),
            Marker::FixExt4 => Length::Is(4),
            Marker::FixExt8 => Length::Is(8),
            Marker::FixExt16 => Length::Is(16),
            Marker::Ext8 => Length::In8,
            Marker::Ext16 => Length::In16,
            Marker::Ext32 => Length::In32,
            _ => return Err(self.unexpected(Kind::Type, "an extension value")),
        };
        let len = self.length(length)?;
        let kind = self.take(1)?[0] as i8;
        Ok((kind, self.take(len)?))
    }

    /// The head of an array. Each element takes a byte at least, so the number of elements is
    /// bounded by the bytes that are left.
    pub(in crate::protocol) fn array(&mut self) -> Result<usize> {
        let length = match self.peek()? {
            Marker::FixArray(len) => Length::Is(len),
            Marker::Array16 => Length::In16,
            Marker::Array32 => Length::In32,
            _ => return Err(self.unexpected(Kind::Type, "an array")),
        };
        let len = self.length(length)?;
        self.has_bytes(len).map(|()| len)
    }

    /// The head of a map: the number of its pairs.
    pub(in crate::protocol) fn map(&mut self) -> Result<usize> {
        let length = match self.peek()? {
            Marker::FixMap(len) => Length::Is(len),
            Marker::Map16 => Length::In16,
            Marker::Map32 => Length::In32,
            _ => return Err(self.unexpected(Kind::Type, "a map")),
        };
        let len = self.length(length)?;
        self.has_bytes(len.saturating_mul(2)).map(|()| len)
    }

    /// Calls `field` at the value of each key of a map of names.
    pub(in crate::protocol) fn keys(
        &mut self,
        mut field: impl FnMut(&mut Self, &'a str) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..self.map()? {
            let key = self.text().map_err(|error| error.in_field("key"))?;
            self.within(key, |r| field(r, key)).map_err(|error| error.in_field(key))?;
        }
        Ok(())
    }

    /// Runs `read` for the field `name`, under which what is unknown in it is noted.
    pub(super) fn within<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let Some(unknown) = self.unknown else { return read(self) };
        unknown.path.borrow_mut().push(name.to_owned());
        let value = read(self);
        unknown.path.borrow_mut().pop();
        value
    }

    /// Passes over the value of a field that is not known, and notes it if anybody asks.
    pub(in crate::protocol) fn skip_unknown(&mut self) -> Result<()> {
        let Some(unknown) = self.unknown else { return self.skip() };
        let value = Value::read(self)?;
        let path = unknown.path.borrow().join(".");
        unknown.found.borrow_mut().push((path, value));
        Ok(())
    }

    /// Runs `read` one level deeper.
    pub(in crate::protocol) fn deeper<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if self.depth == DEPTH_MAX {
            let text = format!("arrays and maps lie more than {DEPTH_MAX} deep{}", self.place());
            return Err(DecodeError::new(Kind::TooDeep, text));
        }
        self.depth += 1;
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    /// Passes over one value.
    pub(in crate::protocol) fn skip(&mut self) -> Result<()> {
        use Marker::{
            Array16, Array32, Bin8, Bin16, Bin32, F32, F64, False, FixArray, FixMap, FixStr, Map16,
            Map32, Null, Reserved, Str8, Str16, Str32, True,
        };
        match self.peek()? {
            Null | True | False => self.at += 1,
            _ if self.is_integer() => drop(self.any_integer("an integer")?),
            F32 | F64 => drop(self.float()?),
            FixStr(_) | Str8 | Str16 | Str32 => drop(self.text()?),
            Bin8 | Bin16 | Bin32 => drop(self.bin()?),
            FixArray(_) | Array16 | Array32 => {
                let len = self.array()?;
                self.deeper(|r| (0..len).try_for_each(|_| r.skip()))?;
            }
            FixMap(_) | Map16 | Map32 => {
                let len = self.map()?;
                self.deeper(|r| (0..2 * len).try_for_each(|_| r.skip()))?;
            }
            Reserved => return Err(self.unexpected(Kind::Malformed, "a value")),
            _ => drop(self.ext()?),
        }
        Ok(())
    }

    // ---- bytes ----

    /// The `N` bytes after the marker at the cursor.
    fn after_marker<const N: usize>(&mut self, expected: &str) -> Result<[u8; N]> {
        let Some(bytes) = self.payload[self.at + 1..].first_chunk() else {
            return Err(self.truncated(expected));
        };
        self.at += 1 + N;
        Ok(*bytes)
    }

    fn length(&mut self, length: Length) -> Result<usize> {
        const EXPECTED: &str = "a length";
        Ok(match length {
            Length::Is(len) => {
                self.at += 1;
                len.into()
            }
            Length::In8 => u8::from_be_bytes(self.after_marker(EXPECTED)?).into(),
            Length::In16 => u16::from_be_bytes(self.after_marker(EXPECTED)?).into(),
            Length::In32 => u32::from_be_bytes(self.after_marker(EXPECTED)?) as usize,
        })
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        self.has_bytes(len)?;
        let bytes = &self.payload[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    fn has_bytes(&self, announced: usize) -> Result<()> {
        if announced <= self.left() {
            return Ok(());
        }
        let text = format!(
            "expected {announced} bytes or more, found {} to the end of the message{}",
            self.left(),
            self.place()
        );
        Err(DecodeError::new(Kind::Truncated, text))
    }
}

/// Where the length of a value is: in its marker, or in the bytes after it.
enum Length {
    Is(u8),
    In8,
    In16,
    In32,
}
