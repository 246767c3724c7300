//! Reading GGUF files: header, metadata and the places of tensors, each checked before it is used.
//!
//! The file is mapped, not read. Nothing is allocated by a number that the file states: strings and
//! arrays stay where they are in the file and are walked once to see that they end inside it, so a
//! lying header costs no memory. All arithmetic is in 64 bits and checked.
//!
//! Not here: what a tensor means to a model (the runner checks names and shapes it expects), and
//! the arithmetic of its elements.

mod metadata;
mod parse;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use super::map::MappedFile;
use super::{GgmlType, ModelError};
pub use metadata::{MetadataArray, MetadataValue};

/// A GGUF file whose every count, offset and shape has been checked.
pub struct GgufFile {
    bytes: Backing,
    version: u32,
    alignment: u64,
    metadata: HashMap<String, metadata::Place>,
    /// In the order of the file.
    tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

enum Backing {
    Mapped(MappedFile),
    Owned(Vec<u8>),
}

/// One tensor: what the file says of it, and where its data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Unique in the file.
    pub name: String,
    /// How the elements are stored.
    pub dtype: GgmlType,
    /// As in the file: **the innermost dimension first**, so a weight is `[columns, rows]`. One to
    /// four dimensions, none of them 0.
    pub shape: Vec<u64>,
    /// Bytes from the start of the file.
    range: Range<usize>,
}

impl GgufTensor {
    /// Elements of one row: the innermost dimension.
    pub fn columns(&self) -> u64 {
        self.shape[0]
    }

    /// All dimensions but the innermost, multiplied.
    pub fn rows(&self) -> u64 {
        self.elements() / self.columns()
    }

    /// All dimensions multiplied: checked when the file was read.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of its data.
    pub fn bytes_len(&self) -> u64 {
        self.range.len() as u64
    }
}

impl GgufFile {
    /// Maps the file and checks all that it says. Errors name the file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let parsed = Self::parse(Backing::Mapped(MappedFile::open(path)?));
        parsed.map_err(|error| ModelError::In { path: path.to_owned(), error: Box::new(error) })
    }

    /// The same over bytes in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, ModelError> {
        Self::parse(Backing::Owned(bytes))
    }

    fn parse(backing: Backing) -> Result<Self, ModelError> {
        let parsed = parse::parse(backing.as_slice())?;
        let by_name =
            parsed.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Self {
            bytes: backing,
            version: parsed.version,
            alignment: parsed.alignment,
            metadata: parsed.metadata,
            tensors: parsed.tensors,
            by_name,
        })
    }

    /// Where it was opened, if it is a file.
    pub fn path(&self) -> Option<&Path> {
        match &self.bytes {
            Backing::Mapped(file) => Some(file.path()),
            Backing::Owned(_) => None,
        }
    }

    /// 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Of tensor data, in bytes: a power of two.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Bytes of the whole file.
    pub fn len(&self) -> u64 {
        self.bytes.as_slice().len() as u64
    }

    /// Never: a file without a header is refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All tensors, in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// A tensor's bytes, `rows × columns` in its type's blocks. Fails where the file has changed
    /// its length since it was opened; a file that is cut while the slice is in use still ends the
    /// process with SIGBUS, which only a copy could prevent.
    pub fn data(&self, tensor: &GgufTensor) -> Result<&[u8], ModelError> {
        if let Backing::Mapped(file) = &self.bytes {
            file.check_unchanged()?;
        }
        let bytes = self.bytes.as_slice();
        bytes.get(tensor.range.clone()).ok_or_else(|| ModelError::CutOff {
            field: format!("tensor {:?}", tensor.name),
            needed: tensor.bytes_len(),
            left: (bytes.len() as u64).saturating_sub(tensor.range.start as u64),
        })
    }
}

impl Backing {
    fn as_slice(&self) -> &[u8] {
        match self {
            Backing::Mapped(file) => file.bytes(),
            Backing::Owned(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path())
            .field("version", &self.version)
            .field("metadata", &self.metadata.len())
            .field("tensors", &self.tensors.len())
            .finish()
    }
}
