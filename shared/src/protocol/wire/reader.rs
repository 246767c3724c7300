//! Reading msgpack from bytes that a stranger may have written.

use bytes::Bytes;
use rmp::Marker;

use super::{Result, Wire};
use crate::protocol::{DecodeError, DecodeErrorKind as Kind};

/// Arrays and maps inside one another. Deeper messages are refused, so that recursion is bounded.
const DEPTH_MAX: u32 = 128;

/// What one decoded message may take in memory, in bytes. Small values grow in memory (an empty
/// output is 3 bytes on the wire and some 600 decoded), so the size of a frame is no bound by itself.
const DECODED_BYTES_MAX: usize = 256 << 20;

/// Characters of a value that an error shows.
const PREVIEW_CHARS_MAX: usize = 96;

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
}

impl<'a> Reader<'a> {
    /// Reads a payload that refers to no other frame.
    pub(in crate::protocol) fn over(payload: &'a [u8]) -> Self {
        let budget = DECODED_BYTES_MAX;
        Self { payload, at: 0, frames: &[], depth: 0, budget, shows_pickle: false }
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

    fn any_integer(&mut self, expected: &str) -> Result<i128> {
        let marker = self.peek()?;
        let start = self.at;
        self.at += 1;
        Ok(match marker {
            Marker::FixPos(value) => value.into(),
            Marker::FixNeg(value) => value.into(),
            Marker::U8 => u8::from_be_bytes(self.fixed(expected)?).into(),
            Marker::U16 => u16::from_be_bytes(self.fixed(expected)?).into(),
            Marker::U32 => u32::from_be_bytes(self.fixed(expected)?).into(),
            Marker::U64 => u64::from_be_bytes(self.fixed(expected)?).into(),
            Marker::I8 => i8::from_be_bytes(self.fixed(expected)?).into(),
            Marker::I16 => i16::from_be_bytes(self.fixed(expected)?).into(),
            Marker::I32 => i32::from_be_bytes(self.fixed(expected)?).into(),
            Marker::I64 => i64::from_be_bytes(self.fixed(expected)?).into(),
            _ => {
                self.at = start;
                return Err(self.unexpected(Kind::Type, expected));
            }
        })
    }

    /// A float32, a float64 or an integer.
    pub(in crate::protocol) fn float(&mut self) -> Result<f64> {
        const EXPECTED: &str = "a number";
        match self.peek()? {
            Marker::F64 => {
                self.at += 1;
                Ok(f64::from_be_bytes(self.fixed(EXPECTED)?))
            }
            Marker::F32 => {
                self.at += 1;
                Ok(f32::from_be_bytes(self.fixed(EXPECTED)?).into())
            }
            _ => Ok(self.any_integer(EXPECTED)? as f64),
        }
    }

    pub(in crate::protocol) fn text(&mut self) -> Result<&'a str> {
        const EXPECTED: &str = "text";
        let marker = self.peek()?;
        let start = self.at;
        self.at += 1;
        let len = match marker {
            Marker::FixStr(len) => len.into(),
            Marker::Str8 => self.length8(EXPECTED)?,
            Marker::Str16 => self.length16(EXPECTED)?,
            Marker::Str32 => self.length32(EXPECTED)?,
            _ => {
                self.at = start;
                return Err(self.unexpected(Kind::Type, EXPECTED));
            }
        };
        let bytes = self.take(len, EXPECTED)?;
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
        const EXPECTED: &str = "bytes";
        let marker = self.peek()?;
        let start = self.at;
        self.at += 1;
        let len = match marker {
            Marker::Bin8 => self.length8(EXPECTED)?,
            Marker::Bin16 => self.length16(EXPECTED)?,
            Marker::Bin32 => self.length32(EXPECTED)?,
            _ => {
                self.at = start;
                return Err(self.unexpected(Kind::Type, EXPECTED));
            }
        };
        self.take(len, EXPECTED)
    }

    pub(in crate::protocol) fn ext(&mut self) -> Result<(i8, &'a [u8])> {
        const EXPECTED: &str = "an extension value";
        let marker = self.peek()?;
        let start = self.at;
        self.at += 1;
        let len = match marker {
            Marker::FixExt1 => 1,
            Marker::FixExt2 => 2,
            Marker::FixExt4 => 4,
            Marker::FixExt8 => 8,
            Marker::FixExt16 => 16,
            Marker::Ext8 => self.length8(EXPECTED)?,
            Marker::Ext16 => self.length16(EXPECTED)?,
            Marker::Ext32 => self.length32(EXPECTED)?,
            _ => {
                self.at = start;
                return Err(self.unexpected(Kind::Type, EXPECTED));
            }
        };
        let [kind] = self.fixed(EXPECTED)?;
        Ok((kind as i8, self.take(len, EXPECTED)?))
    }

    /// The head of an array. Each element takes a byte at least, so the number of elements is
    /// bounded by the bytes that are left.
    pub(in crate::protocol) fn array(&mut self) -> Result<usize> {
        const EXPECTED: &str = "an array";
        let marker = self.peek()?;
        let start = self.at;
        self.at += 1;
        let len = match marker {
            Marker::FixArray(len) => len.into(),
            Marker::Array16 => self.length16(EXPECTED)?,
            Marker::Array32 => self.length32(EXPECTED)?,
            _ => {
                self.at = start;
                return Err(self.unexpected(Kind::Type, EXPECTED));
            }
        };
        self.fits(len, 1)
    }

    /// The head of a map: the number of its pairs.
    pub(in crate::protocol) fn map(&mut self) -> Result<usize> {
        const EXPECTED: &str = "a map";
        let marker = self.peek()?;
        let start = self.at;
        self.at += 1;
        let len = match marker {
            Marker::FixMap(len) => len.into(),
            Marker::Map16 => self.length16(EXPECTED)?,
            Marker::Map32 => self.length32(EXPECTED)?,
            _ => {
                self.at = start;
                return Err(self.unexpected(Kind::Type, EXPECTED));
            }
        };
        self.fits(len, 2)
    }

    /// Calls `field` at the value of each key of a map of names.
    pub(in crate::protocol) fn keys(
        &mut self,
        mut field: impl FnMut(&mut Self, &'a str) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..self.map()? {
            let key = self.text().map_err(|error| error.in_field("key"))?;
            field(self, key).map_err(|error| error.in_field(key))?;
        }
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

    fn take(&mut self, len: usize, expected: &str) -> Result<&'a [u8]> {
        if len > self.left() {
            let text = format!(
                "expected {expected} of {len} bytes, found {} bytes to the end of the message{}",
                self.left(),
                self.place()
            );
            return Err(DecodeError::new(Kind::Truncated, text));
        }
        let bytes = &self.payload[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    fn fixed<const N: usize>(&mut self, expected: &str) -> Result<[u8; N]> {
        let Some(bytes) = self.payload[self.at..].first_chunk() else {
            return Err(self.truncated(expected));
        };
        self.at += N;
        Ok(*bytes)
    }

    fn length8(&mut self, expected: &str) -> Result<usize> {
        Ok(u8::from_be_bytes(self.fixed(expected)?).into())
    }

    fn length16(&mut self, expected: &str) -> Result<usize> {
        Ok(u16::from_be_bytes(self.fixed(expected)?).into())
    }

    fn length32(&mut self, expected: &str) -> Result<usize> {
        Ok(u32::from_be_bytes(self.fixed(expected)?) as usize)
    }

    fn fits(&self, len: usize, bytes_each: usize) -> Result<usize> {
        if len.saturating_mul(bytes_each) > self.left() {
            let text = format!(
                "expected {len} elements, found {} bytes to the end of the message{}",
                self.left(),
                self.place()
            );
            return Err(DecodeError::new(Kind::Truncated, text));
        }
        Ok(len)
    }

    // ---- errors show what they found ----

    /// The value at the cursor as short readable text, as far as it can be read.
    fn preview(mut self) -> String {
        let mut text = String::new();
        if self.preview_into(&mut text).is_err() {
            text.push_str("… (cut off)");
        }
        match text.char_indices().nth(PREVIEW_CHARS_MAX) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        }
    }

    fn preview_into(&mut self, text: &mut String) -> Result<()> {
        use std::fmt::Write as _;

        use Marker::{
            Array16, Array32, Bin8, Bin16, Bin32, F32, F64, False, FixArray, FixMap, FixStr, Map16,
            Map32, Null, Reserved, Str8, Str16, Str32, True,
        };
        if text.len() > PREVIEW_CHARS_MAX {
            return Ok(());
        }
        // Writing to a String cannot fail.
        let _ = match self.peek()? {
            Null => {
                self.at += 1;
                write!(text, "nil")
            }
            True | False => write!(text, "{}", self.bool()?),
            _ if self.is_integer() => write!(text, "{}", self.any_integer("an integer")?),
            F32 | F64 => write!(text, "{:?}", self.float()?),
            FixStr(_) | Str8 | Str16 | Str32 => {
                let whole = self.text()?;
                let start: String = whole.chars().take(PREVIEW_CHARS_MAX).collect();
                write!(text, "{start:?}")
            }
            Bin8 | Bin16 | Bin32 => write!(text, "bytes({})", self.bin()?.len()),
            FixArray(_) | Array16 | Array32 => {
                let len = self.array()?;
                text.push('[');
                self.deeper(|r| r.preview_items(len, ", ", text))?;
                write!(text, "]")
            }
            FixMap(_) | Map16 | Map32 => {
                let len = self.map()?;
                text.push('{');
                self.deeper(|r| {
                    for index in 0..len {
                        if text.len() > PREVIEW_CHARS_MAX {
                            return Ok(());
                        }
                        text.push_str(if index == 0 { "" } else { ", " });
                        r.preview_items(2, ": ", text)?;
                    }
                    Ok(())
                })?;
                write!(text, "}}")
            }
            Reserved => write!(text, "the unused byte 0xc1"),
            _ => {
                let (kind, bytes) = self.ext()?;
                write!(text, "ext {kind} of {} bytes", bytes.len())
            }
        };
        Ok(())
    }

    fn preview_items(&mut self, len: usize, between: &str, text: &mut String) -> Result<()> {
        for index in 0..len {
            if text.len() > PREVIEW_CHARS_MAX {
                return Ok(());
            }
            text.push_str(if index == 0 { "" } else { between });
            self.preview_into(text)?;
        }
        Ok(())
    }
}

/// The elements of an array that stands for a struct.
pub(in crate::protocol) struct ArrayItems {
    len: usize,
    next: usize,
}

impl ArrayItems {
    /// Reads the head of an array of at least `required` elements.
    pub(in crate::protocol) fn open(r: &mut Reader<'_>, required: usize) -> Result<Self> {
        let before = r.clone();
        let len = r.array()?;
        if len < required {
            let expected = format!("an array of at least {required} elements");
            return Err(before.unexpected(Kind::Missing, &expected));
        }
        Ok(Self { len, next: 0 })
    }

    /// The next element, or its default where the sender left it away.
    pub(in crate::protocol) fn next<T: Wire>(
        &mut self,
        r: &mut Reader<'_>,
        name: &str,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T>,
    ) -> Result<T> {
        if self.next == self.len {
            return T::absent().ok_or_else(|| {
                let text = format!("missing: the array has {} elements", self.len);
                DecodeError::new(Kind::Missing, text).in_field(name)
            });
        }
        self.next += 1;
        read(r).map_err(|error| error.in_field(name))
    }

    /// Passes over elements that a newer sender added.
    pub(in crate::protocol) fn skip_rest(&self, r: &mut Reader<'_>) -> Result<()> {
        (self.next..self.len).try_for_each(|_| r.skip())
    }

    /// Refuses elements beyond those we know.
    pub(in crate::protocol) fn refuse_rest(&self) -> Result<()> {
        if self.len > self.next {
            let text = format!("expected {} elements, found {}", self.next, self.len);
            return Err(DecodeError::new(Kind::Type, text));
        }
        Ok(())
    }
}
