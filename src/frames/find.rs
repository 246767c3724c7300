//! Which core is meant where none is named.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::bail;
use pawl_shared::transport::Address;

/// Folders that are looked into; a run's folder of sockets lies in one of these.
fn bases() -> BTreeSet<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    runtime.into_iter().chain([std::env::temp_dir()]).collect()
}

/// Cores of `pawl serve` (and of `--listen ipc://DIR/pawl…/core`) that run here and answer.
fn running() -> Vec<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in bases().iter().filter_map(|base| std::fs::read_dir(base).ok()).flatten() {
        let Ok(entry) = entry else { continue };
        if entry.file_name().to_string_lossy().starts_with("pawl") {
            let socket = entry.path().join("core");
            if UnixStream::connect(&socket).is_ok() {
                found.insert(socket);
            }
        }
    }
    found.into_iter().collect()
}

/// The core that is named, or the only one that runs here.
///
/// # Errors
/// None is named, and there is none, or more than one.
pub fn core(named: Option<&Address>) -> anyhow::Result<Address> {
    if let Some(address) = named {
        return Ok(address.clone());
    }
    match &running()[..] {
        [] => bail!(
            "no core runs here that could be found: name the address it listens at, such as \
             ipc:///tmp/pawl/core (its --listen)"
        ),
        [only] => Ok(Address::ipc(only)?),
        several => {
            let list: Vec<_> = several.iter().map(|p| format!("  ipc://{}", p.display())).collect();
            bail!("{} cores run here, name the one you mean:\n{}", several.len(), list.join("\n"))
        }
    }
}
