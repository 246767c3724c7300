//! A folder of this run's unix sockets that nobody else can enter.

use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::address::IPC_PATH_BYTES_MAX;
use super::{Address, TransportError};

/// Room that is kept for the names of sockets inside the folder.
const NAME_BYTES: usize = 24;

/// A folder with mode 0700, removed with all that is in it when dropped.
#[derive(Debug)]
pub struct SocketDir {
    path: PathBuf,
}

impl SocketDir {
    /// A new folder under `base`.
    pub fn create(base: &Path) -> Result<Self, TransportError> {
        let name = uuid::Uuid::new_v4().simple().to_string();
        let path = base.join(format!("pawl-{}", &name[..8]));
        let bytes = path.as_os_str().len() + 1 + NAME_BYTES;
        if bytes > IPC_PATH_BYTES_MAX {
            return Err(TransportError::PathTooLong { path, bytes });
        }
        let failed = |source| TransportError::SocketDir { path: path.clone(), source };
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
        // The umask can only take bits away, but a default ACL on the parent could give some.
        let metadata = std::fs::metadata(&path).map_err(failed)?;
        if metadata.mode() & 0o077 != 0 {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))
                .map_err(failed)?;
        }
        Ok(Self { path })
    }

    /// A new folder under the first of `$XDG_RUNTIME_DIR`, `$TMPDIR` and `/tmp` that takes one: a
    /// long `$TMPDIR` does not stop a start.
    pub fn create_default() -> Result<Self, TransportError> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let bases = runtime.into_iter().chain([std::env::temp_dir(), PathBuf::from("/tmp")]);
        let mut first_error = None;
        for base in bases {
            match Self::create(&base) {
                Ok(dir) => return Ok(dir),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.expect("there is at least one base, and it failed"))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The address of the socket `name` in this folder.
    pub fn address(&self, name: &str) -> Result<Address, TransportError> {
        Address::ipc(self.path.join(name))
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "socket folder not removed");
        }
    }
}
