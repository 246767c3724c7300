//! The values that errors show: short readable text, as far as the bytes can be read.

use rmp::Marker;

use super::{Reader, Result};

/// Characters of a value that an error shows.
const PREVIEW_CHARS_MAX: usize = 96;

impl Reader<'_> {
    /// The value at the cursor as short readable text, as far as it can be read.
    pub(super) fn preview(mut self) -> String {
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
                self.take_nil();
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
