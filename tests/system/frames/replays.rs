//! What was recorded, given to another core.

use serde_json::{Value, json};

use super::{body, complete, json_lines, mock_core, output, refused, tapping, text};
use crate::harness::{Run, wait_for};

/// Records a mixture of requests on a core of its own; the file.
fn record(run: &Run, extra: &[&str]) -> String {
    let mut core = mock_core(run, &["--mock-step-ms", "10"]);
    let frontend = run.frontend("api", &[]);
    let file = run.path("mixture.frames").display().to_string();
    let mut args = vec!["record", "", &file];
    args.extend(extra);
    let address = run.core_address();
    args[1] = &address;
    let mut recorder = tapping(run, "recorder", &args);
    complete(&frontend, &body("greedy", &json!({"max_tokens": 12})));
    complete(&frontend, &body("seeded", &json!({"temperature": 0.8, "seed": 7, "n": 2})));
    complete(&frontend, &body("chance", &json!({"temperature": 0.8})));
    // The frontend aborts it once the text has come: its tokens are compared as far as they go.
    let words = complete(&frontend, &body("words", &json!({"max_tokens": 30})));
    let stop = words["choices"][0]["text"].as_str().unwrap().split_whitespace().nth(3).unwrap();
    complete(&frontend, &body("stopped", &json!({"max_tokens": 30, "stop": [stop]})));
    let mut stream = frontend
        .http
        .stream("/v1/completions", &body("left", &json!({"max_tokens": 600, "stream": true})));
    stream.next().unwrap();
    stream.close();
    wait_for("the abort in the file", || {
        let shown = text(&output(run, &["decode", &file]).stdout);
        shown.contains("ABORT cmpl-left-").then_some(())
    });
    assert!(recorder.stop().success(), "{}", recorder.log());
    assert!(core.stop().success(), "{}", core.log());
    file
}

fn summary(lines: &[Value]) -> &Value {
    lines.last().expect("a summary")
}

#[test]
fn the_same_model_gives_the_same_tokens() {
    let run = Run::new();
    let file = record(&run, &[]);
    let again = Run::new();
    let _core = mock_core(&again, &["--async-scheduling", "--seed", "99"]);
    let core = again.core_address();
    for extra in [&["--speed", "full"][..], &["--aborts"], &["--speed", "full", "--aborts"]] {
        // With --concurrency 1 they cannot be batched together as they were.
        for concurrency in ["1", "256"] {
            let args = ["replay", &file, &core, "--json", "--concurrency", concurrency];
            let (lines, fine) = json_lines(&run, &[&args[..], extra].concat());
            let told = summary(&lines);
            assert!(fine, "{extra:?}: {lines:?}");
            let verdicts = ["equal", "equal_so_far", "different", "incomparable", "failed"];
            let counts: Vec<_> = verdicts.iter().map(|v| told[*v].as_u64().unwrap()).collect();
            assert_eq!(counts, [4, 2, 0, 1, 0], "{extra:?}: {lines:?}");
            let left =
                lines.iter().find(|l| l["request"].as_str().unwrap().starts_with("cmpl-left-"));
            let tokens = left.unwrap()["tokens"].as_u64().unwrap();
            let aborted = extra.contains(&"--aborts");
            assert_eq!(tokens < 600, aborted, "{left:?}");
        }
    }
}

#[test]
fn another_model_gives_other_tokens_and_says_where() {
    let run = Run::new();
    let file = record(&run, &["--no-stats-only"]);
    let other = Run::new();
    let _core = mock_core(&other, &["--mock-script", "300,301,302"]);
    let core = other.core_address();
    let output = output(&run, &["replay", &file, &core, "--speed", "full"]);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(&output.stdout);
    assert!(shown.contains("cmpl-greedy-"), "{shown}");
    assert!(shown.contains("different: token 0 is 300, recorded was "), "{shown}");
    assert!(shown.contains("0 equal, 0 equal as far as recorded, 6 different"), "{shown}");
    assert!(shown.contains("incomparable: it was sampled without a seed"), "{shown}");
    // A core that refuses what the first one took.
    let small = Run::new();
    let _core = mock_core(&small, &["--max-model-len", "4"]);
    let (lines, fine) =
        json_lines(&run, &["replay", &file, &small.core_address(), "--json", "--speed", "full"]);
    assert!(!fine && summary(&lines)["equal"] == 0, "{lines:?}");
}

/// At the recorded pace a replay takes as long as the recording; a factor makes it shorter.
#[test]
fn the_pace_is_that_of_the_recording() {
    let run = Run::new();
    let mut core = mock_core(&run, &[]);
    let frontend = run.frontend("api", &[]);
    let file = run.path("pace.frames").display().to_string();
    let address = run.core_address();
    let mut recorder = tapping(&run, "recorder", &["record", &address, &file]);
    complete(&frontend, &body("one", &json!({})));
    let began = std::time::Instant::now();
    while began.elapsed().as_millis() < 1500 {
        complete(&frontend, &body("more", &json!({"max_tokens": 2})));
    }
    assert!(recorder.stop().success());
    let seconds = |speed: &str| {
        let args = ["replay", &file, &address, "--json", "--speed", speed];
        let (lines, fine) = json_lines(&run, &args);
        assert!(fine, "{lines:?}");
        summary(&lines)["seconds"].as_f64().unwrap()
    };
    let (as_recorded, at_half, tenfold) = (seconds("recorded"), seconds("0.5"), seconds("10"));
    assert!(as_recorded >= 1.4 && at_half >= 2.8, "{as_recorded} s, {at_half} s");
    assert!((0.14..1.4).contains(&tenfold), "{tenfold} s");
    assert!(core.stop().success());
    refused(&run, &["replay", &file, &address], &["is the core running"]);
}

#[test]
fn a_replay_that_cannot_be_says_why() {
    let run = Run::new();
    let file = run.path("idle.frames").display().to_string();
    let mut core = mock_core(&run, &[]);
    let address = run.core_address();
    let mut recorder = tapping(&run, "recorder", &["record", &address, &file]);
    assert!(recorder.stop().success());
    refused(&run, &["replay", &file, &address], &["no request begins in this recording"]);
    refused(&run, &["replay", "/nowhere", &address], &["/nowhere"]);
    // The core dies on the way: every request that is left has failed.
    let other = Run::new();
    let busy = record(&other, &[]);
    assert!(core.stop().success());
    let _core = mock_core(&run, &["--mock-fail-at", "5"]);
    let (lines, fine) = json_lines(&run, &["replay", &busy, &address, "--json", "--speed", "full"]);
    assert!(!fine, "{lines:?}");
    assert!(summary(&lines)["failed"].as_u64().unwrap() > 0, "{lines:?}");
}
