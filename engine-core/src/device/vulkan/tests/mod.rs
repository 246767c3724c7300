mod faults;
mod shaders;
mod twins;

use super::*;

/// The best adapter of this machine, if there is one.
///
/// # Panics
/// If there is none, and skipping is not allowed.
pub fn gpu() -> Option<Gpu> {
    match choose(&list(), Wanted::Best) {
        Ok(index) => Some(Gpu::open(index).unwrap()),
        Err(reason) => {
            let may_skip = std::env::var_os("PAWL_TEST_NO_SKIP").is_none();
            assert!(may_skip, "{reason}: tests/run installs a driver in software");
            eprintln!("SKIPPED: {reason} (tests/run installs a driver in software)");
            None
        }
    }
}
