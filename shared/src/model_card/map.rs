//! A file mapped into memory, read only.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::ModelError;

/// The bytes of a file, and the file itself to ask whether it is still as long.
pub(super) struct MappedFile {
    map: Mmap,
    file: File,
    path: PathBuf,
}

impl MappedFile {
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let read = |cause| ModelError::Read { path: path.to_owned(), cause };
        // Asked before opening: to open a FIFO would wait for its other end.
        if !std::fs::metadata(path).map_err(read)?.is_file() {
            return Err(ModelError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(read)?;
        // SAFETY: the map is private to this value and read only. What no code can rule out is that
        // another process cuts the file short; `check_unchanged` asks before bytes are handed out.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        Ok(Self { map, file, path: path.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Fails where the file is no longer as long as it was when it was mapped.
    pub fn check_unchanged(&self) -> Result<(), ModelError> {
        let path = || self.path.clone();
        let found =
            self.file.metadata().map_err(|cause| ModelError::Read { path: path(), cause })?;
        let (opened_bytes, now_bytes) = (self.map.len() as u64, found.len());
        if now_bytes == opened_bytes {
            return Ok(());
        }
        Err(ModelError::Changed { path: path(), opened_bytes, now_bytes })
    }
}
