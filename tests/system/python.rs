//! Peers in Python: the OpenAI SDK, and vLLM's side of the wire.

use std::path::PathBuf;
use std::process::Command;

use crate::harness::{Process, Run};

/// The interpreter with the peers' packages, as the test command set it up; `None` means skip,
/// loudly, and only where skipping is allowed.
pub fn python() -> Option<PathBuf> {
    let python = std::env::var_os("PAWL_TEST_PYTHON").map(PathBuf::from).filter(|p| p.exists());
    if python.is_none() {
        assert!(
            std::env::var_os("PAWL_TEST_NO_SKIP").is_none(),
            "no Python peers, and skipping is not allowed: run tests/run"
        );
        eprintln!("SKIPPED: no Python peers (tests/run installs them)");
    }
    python
}

/// Starts `tests/peers/SCRIPT ARGS`.
pub fn peer(run: &Run, python: &PathBuf, script: &str, args: &[&str]) -> Process {
    let mut command = Command::new(python);
    command.arg(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/peers").join(script));
    command.args(args);
    run.start(script, command)
}

#[test]
fn the_openai_sdk_runs_completions_chats_streams_and_errors() {
    let Some(python) = python() else { return };
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let url = format!("http://127.0.0.1:{}/v1", frontend.http.port());
    let mut sdk = peer(&run, &python, "openai_sdk.py", &["--base-url", &url]);
    let status = sdk.wait();
    assert!(status.success(), "{}", sdk.log());
}
