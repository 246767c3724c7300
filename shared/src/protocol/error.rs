//! Why a message could not be decoded.

/// A message that is not what it should be. The text names the type and the field, what was
/// expected, what was found, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DecodeError {
    /// What sort of mistake, for a counter.
    pub kind: DecodeErrorKind,
    /// For people.
    pub message: String,
}

/// The sorts of mistakes; [`DecodeErrorKind::as_str`] is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DecodeErrorKind {
    /// The bytes end inside a value, or announce more than there is.
    Truncated,
    /// Bytes after the value.
    Trailing,
    /// A byte that msgpack does not use.
    Malformed,
    /// A value of another type, a float where an integer is due included.
    Type,
    /// An integer outside its field's range, or a number that names nothing.
    Range,
    /// A required element or key is not there.
    Missing,
    /// Text that is not UTF-8.
    Utf8,
    /// Arrays and maps inside one another beyond the bound.
    TooDeep,
    /// More than a decoded message may take in memory, or a text beyond its bound.
    TooLarge,
    /// Understood and refused: pickled objects, out-of-band tensors.
    Refused,
    /// A tensor whose shape, type and data contradict one another.
    Tensor,
    /// The number of frames, the type byte, or an index into the frames.
    Frames,
}

impl DecodeErrorKind {
    /// Every kind, so that a counter can be primed.
    pub const ALL: [Self; 12] = [
        Self::Truncated,
        Self::Trailing,
        Self::Malformed,
        Self::Type,
        Self::Range,
        Self::Missing,
        Self::Utf8,
        Self::TooDeep,
        Self::TooLarge,
        Self::Refused,
        Self::Tensor,
        Self::Frames,
    ];

    /// The label's value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Trailing => "trailing",
            Self::Malformed => "malformed",
            Self::Type => "type",
            Self::Range => "range",
            Self::Missing => "missing",
            Self::Utf8 => "utf8",
            Self::TooDeep => "too_deep",
            Self::TooLarge => "too_large",
            Self::Refused => "refused",
            Self::Tensor => "tensor",
            Self::Frames => "frames",
        }
    }
}

impl DecodeError {
    /// A mistake at a place that is not known yet: each caller on the way out puts its own step of
    /// the path before it, so that decoding a good message builds no path.
    pub(super) fn new(kind: DecodeErrorKind, what: impl std::fmt::Display) -> Self {
        Self { kind, message: format!(": {what}") }
    }

    /// Puts a field's name (or the message's type) before the path.
    pub(super) fn within(mut self, step: &str) -> Self {
        self.message.insert_str(0, step);
        self
    }

    /// Puts `.name` before the path.
    pub(super) fn in_field(mut self, name: &str) -> Self {
        self.message = format!(".{name}{}", self.message);
        self
    }

    /// Puts `[index]` before the path.
    pub(super) fn at_index(mut self, index: usize) -> Self {
        self.message = format!("[{index}]{}", self.message);
        self
    }
}
