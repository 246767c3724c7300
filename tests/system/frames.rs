//! The debug client sees what passes, with stamps and stats, and what it recorded reads back.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::harness::{Run, wait_for};

fn decoded(recording: &Path, extra: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pawl"));
    command.args(["frames", "decode"]).arg(recording).args(extra);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn a_tap_shows_two_requests_with_stamps_and_stats() {
    let run = Run::new();
    let _core = run.mock_core(&["--async-scheduling"]);
    let frontend = run.frontend("api", &[]);
    let recording = run.path("tap.frames");
    let (address, file) = (run.core_address(), recording.display().to_string());
    let mut tap = run.pawl("tap", &["frames", "tap", &address, "--record", &file]);
    wait_for("the tap to join", || tap.log().contains("tapping").then_some(()));

    for token in [5, 6] {
        let body = json!({"prompt": [token], "max_tokens": 4, "ignore_eos": true});
        assert_eq!(frontend.http.post("/v1/completions", &body).status, 200);
    }
    // The shown lines are the log of the tap's process.
    wait_for("both ends in the tap", || {
        Some(tap.log()).filter(|log| log.matches("finish length").count() == 2)
    });
    wait_for("an idle step in the tap", || {
        let log = tap.log();
        let after = log.rsplit("finish length").next().unwrap_or_default();
        after.contains("running 0 waiting 0").then_some(())
    });
    assert!(tap.stop().success(), "{}", tap.log());

    let text = decoded(&recording, &[]);
    let steps: Vec<&str> = text.lines().filter(|line| line.contains(" STEP ")).collect();
    assert!(steps.len() >= 8, "{text}");
    assert!(!text.contains("NO STATS") && !text.contains("UNDECODABLE"), "{text}");
    assert!(steps.iter().all(|line| line.contains(" running ") && line.contains(" kv ")));
    assert!(text.lines().any(|line| line.contains("→core") && line.contains(" ADD ")), "{text}");
    for word in ["Queued@", "Scheduled@", "prompt 1 (0 cached)", "running 1 "] {
        assert!(text.contains(word), "{word:?} is not in\n{text}");
    }

    // Stamps are the engine's clock: positive, and never backwards.
    let stamps: Vec<f64> = decoded(&recording, &["--json"])
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|record| record["text"].as_str().unwrap().contains(" STEP "))
        .map(|record| record["frames"][0][3].as_f64().unwrap())
        .collect();
    assert_eq!(stamps.len(), steps.len());
    assert!(stamps[0] > 0.0 && stamps.is_sorted(), "{stamps:?}");
}

#[test]
fn a_tap_changes_nothing_for_the_clients() {
    let run = Run::new();
    let mut core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let body = json!({"prompt": [5], "max_tokens": 8, "ignore_eos": true, "seed": 1,
               "return_token_ids": true});
    let answer = || frontend.http.post("/v1/completions", &body).json()["choices"].clone();
    let before = answer();
    let address = run.core_address();
    let mut tap = run.pawl("tap", &["frames", "tap", &address]);
    wait_for("the tap to join", || tap.log().contains("tapping").then_some(()));
    assert_eq!(answer(), before);
    // Not even its death.
    tap.signal(nix::sys::signal::Signal::SIGKILL);
    tap.wait();
    assert_eq!(answer(), before);
    assert!(core.stop().success(), "{}", core.log());
}
