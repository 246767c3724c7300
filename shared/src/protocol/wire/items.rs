//! The elements of an array that stands for a struct.

use super::{Reader, Result, Wire};
use crate::protocol::{DecodeError, DecodeErrorKind as Kind};

/// Where in the array the reading is.
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
        r.within(name, read).map_err(|error| error.in_field(name))
    }

    /// Passes over an element that is known and means nothing here.
    pub(in crate::protocol) fn pass(&mut self, r: &mut Reader<'_>) -> Result<()> {
        if self.next < self.len {
            self.next += 1;
            r.skip()?;
        }
        Ok(())
    }

    /// Passes over elements that a newer sender added.
    pub(in crate::protocol) fn skip_rest(&self, r: &mut Reader<'_>) -> Result<()> {
        (self.next..self.len).try_for_each(|at| r.within(&format!("[{at}]"), Reader::skip_unknown))
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
