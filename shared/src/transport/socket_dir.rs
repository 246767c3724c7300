//! A folder of this run's unix sockets that nobody else can enter.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::address::IPC_PATH_BYTES_MAX;
use super::{Address, TransportError};

/// Room that is kept for the names of sockets inside the folder.
const NAME_BYTES: usize = 24;
const PREFIX: &str = "pawl-";
/// Locked for as long as the run lives, so that what a killed run left behind can be told apart.
const LOCK: &str = "lock";

/// A folder with mode 0700, removed with all that is in it when dropped. What a killed run could
/// not remove is removed by the next one under the same base.
#[derive(Debug)]
pub struct SocketDir {
    path: PathBuf,
    _lock: Flock<File>,
}

impl SocketDir {
    /// A new folder under `base`.
    pub fn create(base: &Path) -> Result<Self, TransportError> {
        let name = uuid::Uuid::new_v4().simple().to_string();
        let path = base.join(format!("{PREFIX}{}", &name[..8]));
        let bytes = path.as_os_str().len() + 1 + NAME_BYTES;
        if bytes > IPC_PATH_BYTES_MAX {
            return Err(TransportError::PathTooLong { path, bytes });
        }
        let failed = |cause| TransportError::SocketDir { path: path.clone(), cause };
        remove_left_behind(base);
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
        // The umask can only take bits away, but a default ACL on the parent could give some.
        let metadata = std::fs::metadata(&path).map_err(failed)?;
        if metadata.mode() & 0o077 != 0 {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))
                .map_err(failed)?;
        }
        let lock = File::create(path.join(LOCK)).map_err(failed)?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, errno)| failed(std::io::Error::from_raw_os_error(errno as i32)))?;
        Ok(Self { path, _lock: lock })
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

/// Removes the folders of runs that are gone: ours, and with a lock that nobody holds. One without
/// a lock is just being made.
fn remove_left_behind(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let named_so = name
            .strip_prefix(PREFIX)
            .is_some_and(|id| id.len() == 8 && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let ours = std::fs::symlink_metadata(&path)
            .is_ok_and(|meta| meta.is_dir() && meta.uid() == nix::unistd::getuid().as_raw());
        if !ours || !named_so {
            continue;
        }
        let Ok(lock) = File::open(path.join(LOCK)) else { continue };
        // A lock that is being taken this very moment has a file of this very moment.
        let fresh = lock
            .metadata()
            .and_then(|meta| meta.modified())
            .is_ok_and(|made| made.elapsed().is_ok_and(|age| age.as_secs() < 2));
        if !fresh && Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_ok() {
            tracing::info!(path = %path.display(), "removing the sockets of a run that is gone");
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}
