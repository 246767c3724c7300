//! What the machine offers, and what to do about it.

use std::process::Command;

/// The doctor's findings and whether it was content, with `limit` descriptors.
fn check(limit: u32) -> (serde_json::Value, bool) {
    let script = format!("ulimit -Sn {limit}; exec \"$0\" doctor --json");
    let output =
        Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_pawl")]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    let findings =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {error}"));
    (findings, output.status.success())
}

#[test]
fn a_low_limit_is_told_with_its_remedy() {
    let (findings, content) = check(300);
    assert!(!content);
    let descriptors = &findings["descriptors"];
    assert!(descriptors["value"].as_str().unwrap().starts_with("300 "), "{findings}");
    assert!(descriptors["advice"].as_str().unwrap().contains("ulimit"), "{findings}");
    assert!(findings["CPU kernels"]["value"].as_str().unwrap().ends_with("scalar"), "{findings}");
    assert!(findings["socket folder"]["advice"].is_null(), "{findings}");
}
