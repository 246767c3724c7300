//! Recordings and typed frames: whole, cut, garbled, and with what this build does not know.

use std::process::Stdio;

use serde_json::{Value, json};

use super::{body, complete, json_lines, mock_core, output, printed, refused, tapping, text};
use crate::harness::{Run, wait_for};

/// A recording of two requests; its path.
fn recording(run: &Run) -> String {
    let _core = mock_core(run, &[]);
    let frontend = run.frontend("api", &[]);
    let file = run.path("two.frames").display().to_string();
    let address = run.core_address();
    let mut recorder = tapping(run, "recorder", &["record", &address, &file]);
    complete(&frontend, &body("first", &json!({})));
    complete(&frontend, &body("second", &json!({})));
    // A message is in the file as soon as it has come.
    wait_for("both ends in the file", || {
        let shown = text(&output(run, &["decode", &file]).stdout);
        (shown.matches("finish length").count() == 2).then_some(())
    });
    assert!(recorder.stop().success(), "{}", recorder.log());
    assert!(recorder.log().contains("0 missed"), "{}", recorder.log());
    file
}

#[test]
fn a_recording_reads_back_and_a_cut_one_to_the_cut() {
    let run = Run::new();
    let file = recording(&run);
    let whole = printed(&run, &["decode", &file]);
    assert!(whole.contains("ADD cmpl-first-") && whole.contains("ADD cmpl-second-"), "{whole}");
    assert!(!whole.contains("UNDECODABLE") && !whole.contains("UNKNOWN"), "{whole}");
    let (lines, fine) = json_lines(&run, &["decode", &file, "--json", "--kind", "step"]);
    assert!(fine && !lines.is_empty());
    // Stamps are the engine's clock: positive, and never backwards.
    let stamps: Vec<f64> = lines.iter().map(|l| l["frames"][0][3].as_f64().unwrap()).collect();
    assert!(stamps[0] > 0.0 && stamps.is_sorted(), "{stamps:?}");
    assert!(lines.iter().all(|line| line["epoch"].is_u64()), "{lines:?}");

    let bytes = std::fs::read(&file).unwrap();
    let cut = run.path("cut.frames");
    std::fs::write(&cut, &bytes[..bytes.len() - 7]).unwrap();
    let cut = cut.display().to_string();
    let shown = output(&run, &["decode", &cut]);
    let (shown, said) = (text(&shown.stdout), text(&shown.stderr));
    assert_eq!(shown.lines().count(), whole.lines().count() - 1, "all but the last: {said}");
    assert!(whole.starts_with(&shown), "{shown}");
    refused(&run, &["decode", &cut], &["cut off after"]);

    // From standard input, as a pipe gives it.
    let mut child = super::command(&run, &["decode", "-", "--request", "second"])
        .stdin(Stdio::from(std::fs::File::open(&file).unwrap()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("decode's end", || child.try_wait().unwrap());
    let shown = text(&child.wait_with_output().unwrap().stdout);
    assert_eq!(shown.lines().count(), 5, "{shown}");
    refused(&run, &["record", &run.core_address(), &file], &["exist", "two.frames"]);
}

#[test]
fn garbled_files_are_told_and_never_crash() {
    let run = Run::new();
    let bytes = std::fs::read(recording(&run)).unwrap();
    let garbled = run.path("garbled.frames");
    let name = garbled.display().to_string();
    // A few bytes wrong at a time, at places spread over the file.
    for place in (0..bytes.len()).step_by(bytes.len() / 24) {
        let mut bytes = bytes.clone();
        let end = bytes.len().min(place + 3);
        bytes[place..end].fill(0xc1);
        std::fs::write(&garbled, &bytes).unwrap();
        let output = output(&run, &["decode", &name]);
        let said = text(&output.stderr);
        assert!(output.status.code().is_some_and(|code| code < 2), "at {place}: {said}");
        assert!(!said.contains("panicked"), "at {place}: {said}");
    }
    std::fs::write(&garbled, "something else entirely").unwrap();
    refused(&run, &["decode", &name], &["not a recording", "--hex"]);
    std::fs::write(&garbled, "pawl frames 7\nrest").unwrap();
    refused(&run, &["decode", &name], &["version 7", "version 1"]);
    refused(&run, &["decode", "/nowhere/at/all"], &["/nowhere/at/all"]);
}

/// Typed frames: an ADD of 24 elements, and stats with a key of another engine's.
#[test]
fn unknown_fields_are_shown_by_name() {
    let run = Run::new();
    let file = run.path("typed.hex");
    let name = file.display().to_string();
    // ["a", [1], nil, {"temperature": 0, "sparkle": 7}, nil, 0, nil, nil, nil] and 15 more, of
    // which the last two are beyond what is known: true and "x".
    let add = "dc0018a161 9101 c0 82ab74656d706572617475726500a7737061726b6c6507 c0 00 c0 c0 c0 \
               c0 c0 00 00 00 c0 c2 c0 c0 c0 c2 c0 c0 c3a178";
    let abort = "91a161";
    let lines = format!("00 {}\n01 {abort}\n\n00 91\n", add.replace(' ', ""));
    std::fs::write(&file, lines).unwrap();
    let shown = output(&run, &["decode", "--hex", &name]);
    let shown = text(&shown.stdout);
    assert!(shown.contains("ADD a prompt [1]"), "{shown}");
    assert!(shown.contains("UNKNOWN sampling_params.sparkle = 7"), "{shown}");
    assert!(shown.contains("UNKNOWN [22] = true") && shown.contains("[23] = \"x\""), "{shown}");
    assert!(shown.contains("ABORT a"), "{shown}");
    assert!(shown.contains("UNDECODABLE"), "{shown}");
    let (lines, fine) = json_lines(&run, &["decode", "--hex", &name, "--json"]);
    assert!(!fine, "one of them does not decode");
    assert_eq!(
        lines[0]["unknown"],
        json!({"sampling_params.sparkle": 7, "[22]": true, "[23]": "x"})
    );
    assert_eq!(lines[0]["frames"][1][3]["sparkle"], 7);
    let kinds: Vec<&Value> = lines.iter().map(|line| &line["kind"]).collect();
    assert_eq!(kinds, ["add", "abort", "bad"]);
    std::fs::write(&file, "00 9z\n").unwrap();
    refused(&run, &["decode", "--hex", &name], &["hexadecimal"]);
}

/// A recording ends by itself where it was told to.
#[test]
fn a_recording_is_bounded() {
    let run = Run::new();
    let _core = mock_core(&run, &[]);
    let frontend = run.frontend("api", &[]);
    let address = run.core_address();
    let path = |name: &str| run.path(name).display().to_string();
    let (small, timed) = (path("small"), path("timed"));
    let mut full = tapping(&run, "full", &["record", &address, &small, "--max-bytes", "4096"]);
    complete(&frontend, &body("a", &json!({"max_tokens": 50})));
    assert!(full.wait().success());
    assert!(full.log().contains("full at --max-bytes"), "{}", full.log());
    assert!(std::fs::metadata(&small).unwrap().len() <= 4096);
    let mut by_time = run.pawl("time", &["frames", "record", &address, &timed, "--seconds", "0.3"]);
    assert!(by_time.wait().success(), "{}", by_time.log());
}
