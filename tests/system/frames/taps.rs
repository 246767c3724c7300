//! Taps of a core and of one frontend.

use serde_json::{Value, json};

use super::{body, complete, json_lines, mock_core, output, refused, tapping, taps_of, text};
use crate::harness::{Process, Run, wait_for};

fn until_it_says(tap: &Process, words: &[&str]) -> String {
    wait_for(&format!("{words:?} in the tap"), || {
        Some(tap.log()).filter(|log| words.iter().all(|word| log.contains(word)))
    })
}

#[test]
fn a_tap_shows_requests_with_stamps_and_stats() {
    let run = Run::new();
    let _core = mock_core(&run, &["--async-scheduling"]);
    let frontend = run.frontend("api", &[]);
    let mut tap = tapping(&run, "tap", &["tap", &run.core_address()]);
    complete(&frontend, &body("first", &json!({})));
    complete(&frontend, &body("second", &json!({})));
    wait_for("both ends in the tap", || {
        Some(tap.log()).filter(|log| log.matches("finish length").count() == 2)
    });
    wait_for("an idle step in the tap", || {
        let log = tap.log();
        let after = log.rsplit("finish length").next().unwrap_or_default();
        after.contains("running 0 waiting 0").then_some(())
    });
    assert!(tap.stop().success(), "{}", tap.log());
    let log = tap.log();
    let steps: Vec<&str> = log.lines().filter(|line| line.contains(" STEP ")).collect();
    assert!(steps.len() >= 8, "{log}");
    assert!(!log.contains("NO STATS") && !log.contains("UNDECODABLE"), "{log}");
    assert!(!log.contains("UNKNOWN"), "{log}");
    assert!(steps.iter().all(|line| line.contains(" running ") && line.contains(" kv ")));
    for word in [
        "→core",
        " ADD cmpl-first-",
        "JOINED frontend",
        "Queued@",
        "Scheduled@",
        "prompt 3 (0 cached)",
        "running 1 ",
        "0 missed",
    ] {
        assert!(log.contains(word), "{word:?} is not in\n{log}");
    }
}

/// Each filter shows what it names and nothing else.
#[test]
fn filters_choose_by_client_request_and_kind() {
    let run = Run::new();
    let _core = mock_core(&run, &[]);
    let (one, other) = (run.frontend("one", &[]), run.frontend("other", &[]));
    let core = run.core_address();
    let everything = tapping(&run, "all", &["tap", &core, "--json"]);
    let lines = |process: &Process| -> Vec<Value> {
        let log = process.log();
        let json = log.lines().filter(|line| line.starts_with('{'));
        json.map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let joined = wait_for("both frontends told to the tap", || {
        let joined: Vec<Value> =
            lines(&everything).into_iter().filter(|line| line["kind"] == "joined").collect();
        (joined.len() == 2).then_some(joined)
    });
    let pid = |line: &Value| line["text"].as_str().unwrap().to_owned();
    let of_one = joined.iter().find(|l| pid(l).contains(&format!("pid {},", one.process.pid())));
    let client = of_one.unwrap()["client"].to_string();
    let by_client = tapping(&run, "client", &["tap", &core, "--json", "--client", &client]);
    let by_request = tapping(&run, "request", &["tap", &core, "--json", "--request", "wanted"]);
    let by_kind = tapping(&run, "kind", &["tap", &core, "--json", "--kind", "add,abort"]);
    let quiet = tapping(&run, "quiet", &["tap", &core, "--json", "--no-stats-only"]);
    for (frontend, id) in [(&one, "wanted"), (&other, "else"), (&one, "last")] {
        complete(frontend, &body(id, &json!({})));
    }
    for tap in [&everything, &by_client, &quiet] {
        until_it_says(tap, &["ADD cmpl-last-", "finish length"]);
    }
    until_it_says(&by_request, &["finish length"]);
    until_it_says(&by_kind, &["ADD cmpl-last-"]);

    let by_client = lines(&by_client);
    let index: u32 = client.parse().unwrap();
    assert!(by_client.iter().all(|line| line["client"] == index));
    let text = |line: &Value| line["text"].as_str().unwrap().to_owned();
    assert!(!by_client.iter().any(|line| text(line).contains("else-")), "{by_client:?}");
    let by_request = lines(&by_request);
    assert_eq!(by_request.len(), 5, "one ADD and four steps: {by_request:?}");
    assert!(by_request.iter().all(|line| text(line).contains("wanted-")), "{by_request:?}");
    assert!(lines(&by_kind).iter().all(|line| line["kind"] == "add"));
    assert_eq!(lines(&by_kind).len(), 3);
    assert!(lines(&quiet).iter().all(|line| line["kind"] != "stats"));
    assert!(lines(&everything).iter().any(|line| line["kind"] == "stats"));
}

/// A frontend's own taps show what it sent and received, and nothing of its neighbour.
#[test]
fn one_frontends_view() {
    let run = Run::new();
    let mut core = mock_core(&run, &[]);
    let (one, other) = (run.frontend("one", &[]), run.frontend("other", &[]));
    let address = taps_of(&run, &one);
    let mut tap = tapping(&run, "tap", &["tap", &address]);
    complete(&other, &body("theirs", &json!({})));
    complete(&one, &body("ours", &json!({})));
    let log = until_it_says(&tap, &["JOINED engine-core 0", "ADD cmpl-ours-", "finish length"]);
    assert!(!log.contains("theirs"), "{log}");
    // The order is that of the wire: nothing of a request before its ADD.
    let add = log.find("ADD cmpl-ours-").unwrap();
    assert!(!log[..add].contains("ours"), "{log}");
    let call = ["call", &address, "pawl_status"];
    refused(&run, &call, &["a frontend serves its taps here", "core's address"]);
    core.signal(nix::sys::signal::Signal::SIGKILL);
    core.wait();
    until_it_says(&tap, &["LEFT: "]);
    assert!(tap.stop().success(), "{}", tap.log());
    let mut one = one;
    assert!(one.process.stop().success(), "{}", one.process.log());
    assert!(!std::path::Path::new(address.trim_start_matches("ipc://")).exists());
}

#[test]
fn a_tap_changes_nothing_for_the_clients() {
    let run = Run::new();
    let mut core = mock_core(&run, &[]);
    let frontend = run.frontend("api", &[]);
    let body = json!({"prompt": [5], "max_tokens": 8, "ignore_eos": true, "seed": 1,
               "return_token_ids": true});
    let answer = || frontend.http.post("/v1/completions", &body).json()["choices"].clone();
    let before = answer();
    let mut taps = [
        tapping(&run, "tap", &["tap", &run.core_address()]),
        tapping(&run, "view", &["tap", &taps_of(&run, &frontend)]),
    ];
    assert_eq!(answer(), before);
    // Not even their death.
    for tap in &mut taps {
        tap.signal(nix::sys::signal::Signal::SIGKILL);
        tap.wait();
    }
    assert_eq!(answer(), before);
    assert!(core.stop().success(), "{}", core.log());
}

#[test]
fn rates_tell_kinds_and_sizes_each_second() {
    let run = Run::new();
    let _core = mock_core(&run, &[]);
    let frontend = run.frontend("api", &[]);
    let mut tap = tapping(&run, "tap", &["tap", &run.core_address(), "--rates", "--json"]);
    complete(&frontend, &body("a", &json!({})));
    let log = until_it_says(&tap, &["\"add\"", "\"step\""]);
    let line = log.lines().find(|line| line.contains("\"add\"")).unwrap();
    let rates: Value = serde_json::from_str(line).unwrap();
    assert_eq!(rates["kinds"]["add"]["messages"], 1, "{rates}");
    assert!(rates["kinds"]["add"]["largest"].as_u64().unwrap() > 20, "{rates}");
    assert!(tap.stop().success());
}

#[test]
fn the_ninth_tap_is_refused_with_the_reason() {
    let run = Run::new();
    let _core = mock_core(&run, &[]);
    let core = run.core_address();
    let taps: Vec<Process> =
        (0..8).map(|nth| tapping(&run, &format!("tap{nth}"), &["tap", &core])).collect();
    let ninth = run.pawl("ninth", &["frames", "tap", &core]);
    until_it_says(&ninth, &["8 taps are here already"]);
    let given_up = ["tap", &core, "--timeout", "0.5"];
    refused(&run, &given_up, &["ERROR", "not let in at", "--timeout", "8 taps are here already"]);
    drop(taps);
    until_it_says(&ninth, &["tapping"]);
}

/// `pawl frames tap | head -n 2` ends by itself and quietly.
#[test]
fn a_closed_pipe_is_no_error() {
    let run = Run::new();
    let _core = mock_core(&run, &[]);
    let _frontend = run.frontend("api", &[]);
    let mut tap = super::command(&run, &["tap", &run.core_address()])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The core tells its stats each second, so that there is always something to write.
    drop(tap.stdout.take());
    wait_for("the tap's end", || tap.try_wait().unwrap());
    let end = tap.wait_with_output().unwrap();
    let said = text(&end.stderr);
    assert!(end.status.success() && !said.contains("panicked"), "{said}");
    assert!(!said.contains("ERROR"), "{said}");
}

/// The one core that runs here need not be named; several must.
#[test]
fn a_core_is_found_where_none_is_named() {
    let run = Run::new();
    let none = output(&run, &["top", "--once"]);
    assert!(!none.status.success());
    assert!(text(&none.stderr).contains("no core runs here"), "{}", text(&none.stderr));
    let server = run.serve(&["--runner", "mock"]);
    let found = output(&run, &["top", "--once", "--json", "--interval", "0.1"]);
    assert!(found.status.success(), "{}", text(&found.stderr));
    let told: Value = serde_json::from_str(&text(&found.stdout)).unwrap();
    let cores = run.socket_folders().into_iter().map(|folder| folder.join("core"));
    let mut cores = cores.map(|core| format!("ipc://{}", core.display()));
    assert!(cores.any(|core| told["core"] == core), "{told}");
    drop(server);
    let (_, fine) = json_lines(&run, &["tap", "ipc:///nowhere/core", "--count", "0"]);
    assert!(fine);
}
