//! What can be wrong with a model's files.

use std::path::PathBuf;

/// Why a model file, card or tokenizer was refused. Names the field or tensor, and the way out.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// Of the file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The path names something that cannot be mapped.
    #[error("{path} is not a regular file; name a GGUF file")]
    NotAFile {
        /// As given.
        path: PathBuf,
    },
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it begins with {found:?} instead of \"GGUF\"")]
    NotGguf {
        /// The first bytes, at most four.
        found: String,
    },
    /// A version of the format that this reader does not know.
    #[error("GGUF version {found} is not supported, only 2 and 3; convert the file again")]
    Version {
        /// As in the file.
        found: u32,
    },
    /// The file ends inside a field.
    #[error("the file ends inside {field}: {needed} bytes needed, {left} left; fetch it again")]
    CutOff {
        /// Field or tensor.
        field: String,
        /// Bytes that the field says it has.
        needed: u64,
        /// Bytes from there to the end of the file.
        left: u64,
    },
    /// A number that the format does not define, or that is out of its range.
    #[error("{field} is {found}, expected {expected}")]
    Field {
        /// Which one.
        field: String,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The same name twice.
    #[error("{field} appears twice")]
    Duplicate {
        /// Key or tensor.
        field: String,
    },
    /// A metadata key that is needed and not there.
    #[error("metadata key {key:?} is missing; convert the model again with a newer converter")]
    Missing {
        /// Of the metadata.
        key: String,
    },
    /// Two tensors claim the same bytes.
    #[error("tensors {first:?} and {second:?} overlap in the file")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// The file is no longer as long as when it was opened.
    #[error(
        "{path} was {opened_bytes} bytes long when opened and is {now_bytes} now; load it again"
    )]
    Changed {
        /// Of the file.
        path: PathBuf,
        /// Length when it was mapped.
        opened_bytes: u64,
        /// Length now.
        now_bytes: u64,
    },
    /// Well formed, and not something that Pawl can run.
    #[error("{what} is not supported; {remedy}")]
    Unsupported {
        /// Named as in the file.
        what: String,
        /// What the user can do.
        remedy: String,
    },
    /// A text file beside the model is not what it should be.
    #[error("{path}: {problem}")]
    Beside {
        /// Of that file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The tokenizer cannot be built or used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A card from the wire that cannot be read.
    #[error("model card: {0}")]
    Card(String),
    /// Any of these, in a named file.
    #[error("{path}: {error}")]
    In {
        /// Of the file.
        path: PathBuf,
        /// What is wrong in it. Part of this error's text, so it is not its source as well: whoever
        /// writes the chain of sources would say it twice.
        error: Box<ModelError>,
    },
}

impl ModelError {
    /// A number out of range, said in one line.
    pub(crate) fn field(
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl ToString,
    ) -> Self {
        Self::Field { field: field.into(), expected: expected.into(), found: found.to_string() }
    }
}
