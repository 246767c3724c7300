//! Being a client of a core: `call`, `send` and `top`.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    body, complete, json_lines, mock_core, output, printed, refused, status, tapping, text,
};
use crate::harness::{PATIENCE, Run, wait_for};

#[test]
fn any_method_can_be_called() {
    let run = Run::new();
    let _core = mock_core(&run, &[]);
    let core = run.core_address();
    let call = |args: &[&str]| {
        let printed = printed(&run, &[&["call", &core], args].concat());
        serde_json::from_str::<Value>(&printed).unwrap()
    };
    assert_eq!(call(&["is_scheduler_paused"]), false);
    assert_eq!(call(&["pause_generation", "[\"keep\", true]"]), Value::Null);
    assert_eq!(call(&["is_scheduler_paused"]), true);
    assert_eq!(status(&run)["paused"], true);
    assert_eq!(call(&["resume_generation"]), Value::Null);
    assert_eq!(call(&["pawl_status", "0"])["requests"], json!([]));
    assert!(call(&["get_model_card", "--json"]).as_str().unwrap().contains("\"vocab_size\""));
    refused(&run, &["call", &core, "no_such_method"], &["no_such_method", "no such method"]);
    refused(&run, &["call", &core, "pause_generation", "nap"], &["no JSON"]);
    refused(&run, &["call", &core, "pause_generation", "\"nap\""], &["abort, wait or keep"]);
    refused(&run, &["call", "ipc:///nowhere/core", "x"], &["there is no socket", "--listen"]);
    refused(&run, &["call", "tcp://127.0.0.1:1", "x"], &["nobody listens at tcp://127.0.0.1:1"]);
    // Something that listens and is no core.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = format!("tcp://{}", listener.local_addr().unwrap());
    refused(&run, &["call", &other, "x", "--wait", "0.5"], &["let us in", "no core"]);
}

#[test]
fn a_core_that_is_gone_is_told_from_one_that_never_was() {
    let run = Run::new();
    let mut core = mock_core(&run, &[]);
    let address = run.core_address();
    status(&run);
    core.signal(Signal::SIGKILL);
    core.wait();
    refused(&run, &["call", &address, "pawl_status"], &["nobody listens", "is gone"]);
}

#[test]
fn a_prompt_goes_in_and_tokens_come_out() {
    let run = Run::new();
    let _core = mock_core(&run, &["--mock-script", "300,301,302"]);
    let core = run.core_address();
    let send = |extra: &[&str]| printed(&run, &[&["send", &core], extra].concat());
    let ids = ["--token-ids", "5,6,7", "--max-tokens", "4"];
    assert_eq!(send(&[&ids[..], &["--ids"]].concat()), "300 301 302 300 \n");
    let shown = send(&ids);
    assert_eq!(shown.split_whitespace().count(), 4, "{shown}");
    assert_eq!(send(&["--prompt", "Hello there", "--max-tokens", "4"]), shown);
    let (lines, fine) = json_lines(&run, &[&["send", &core, "--json"], &ids[..]].concat());
    assert!(fine, "{lines:?}");
    let tokens: Vec<u64> = lines
        .iter()
        .flat_map(|line| line["token_ids"].as_array().cloned().unwrap_or_default())
        .map(|id| id.as_u64().unwrap())
        .collect();
    assert_eq!(tokens, [300, 301, 302, 300]);
    let end = lines.last().unwrap();
    assert_eq!((&end["finish_reason"], &end["output_tokens"]), (&json!("length"), &json!(4)));
    refused(&run, &["send", &core, "--token-ids", "999999"], &["validation_error", "999999"]);
    // As over HTTP: never cut in silence.
    let ids = ["send", &core, "--token-ids", "5,6,7", "--max-tokens"];
    refused(&run, &[&ids[..], &["100000"]].concat(), &["--max-tokens", "8192", "to 8189"]);
    refused(&run, &[&ids[..], &["8190"]].concat(), &["to 8189"]);
    let failed = output(&run, &["send", &core, "--token-ids", "999999"]);
    let said = text(&failed.stderr);
    assert!(said.contains(": refused after") && !said.contains("first token"), "{said}");
    let usage = output(&run, &["send", &core]);
    assert!(text(&usage.stderr).contains("--prompt"), "{}", text(&usage.stderr));
}

/// Ctrl-C: the core is told, and has forgotten the request when the command ends.
#[test]
fn an_interrupted_request_is_aborted() {
    let run = Run::new();
    let _core = mock_core(&run, &["--mock-step-ms", "20"]);
    let core = run.core_address();
    status(&run);
    let tap = tapping(&run, "tap", &["tap", &core, "--kind", "add,abort"]);
    let long = [
        "frames",
        "send",
        &core,
        "--token-ids",
        "5",
        "--max-tokens",
        "5000",
        "--ignore-eos",
        "--ids",
        "--id",
        "mine",
    ];
    let mut send = run.pawl("send", &long);
    wait_for("tokens", || (send.log().split_whitespace().count() > 5).then_some(()));
    send.signal(Signal::SIGINT);
    assert_eq!(send.wait().code(), Some(1), "{}", send.log());
    assert!(send.log().contains("abort after"), "{}", send.log());
    let status = status(&run);
    assert_eq!(status["requests_live"], 0, "{status}");
    assert_eq!(status["requests_finished"], json!({"abort": 1}), "{status}");
    wait_for("the abort in the tap", || tap.log().contains("ABORT mine-").then_some(()));
}

#[test]
fn top_tells_frontends_requests_cache_and_steps() {
    let run = Run::new();
    let _core = mock_core(&run, &["--mock-step-ms", "10", "--max-num-seqs", "2"]);
    let (one, other) = (run.frontend("one", &[]), run.frontend("other", &[]));
    let core = run.core_address();
    let mut streams: Vec<_> = (0..3)
        .map(|nth| {
            let body = body(&format!("r{nth}"), &json!({"max_tokens": 5000, "stream": true}));
            let mut stream = one.http.stream("/v1/completions", &body);
            if nth < 2 {
                stream.next().unwrap();
            }
            stream
        })
        .collect();
    let top = ["top", &core, "--once", "--json", "--interval", "0.3"];
    let snapshot = wait_for("all three requests in the core", || {
        let (mut lines, fine) = json_lines(&run, &top);
        assert!(fine && lines.len() == 1, "{lines:?}");
        lines.pop().filter(|snapshot| snapshot["requests_live"] == 3)
    });
    assert_eq!(
        (&snapshot["requests_running"], &snapshot["requests_waiting"]),
        (&json!(2), &json!(1))
    );
    let requests = snapshot["requests"].as_array().unwrap();
    let states: Vec<&Value> = requests.iter().map(|request| &request["state"]).collect();
    assert_eq!(states, ["decode", "decode", "waiting"], "{snapshot}");
    assert!(requests[0]["id"].as_str().unwrap().starts_with("cmpl-r0-"), "{snapshot}");
    assert!(requests[0]["output_tokens"].as_u64() >= Some(1), "{snapshot}");
    assert!(requests[2]["age_seconds"].as_f64() > Some(0.0), "{snapshot}");
    let frontends = snapshot["frontends"].as_array().unwrap();
    let of = |pid: i32| frontends.iter().find(|f| f["pid"] == pid).unwrap();
    assert_eq!(
        (&of(one.process.pid())["running"], &of(one.process.pid())["waiting"]),
        (&json!(2), &json!(1)),
        "{snapshot}"
    );
    assert_eq!(of(other.process.pid())["running"], 0);
    assert_eq!(frontends.len(), 3, "top itself is one: {snapshot}");
    let rates = &snapshot["rates"];
    assert!(rates["steps_per_second"].as_f64() > Some(0.0), "{snapshot}");
    assert!(rates["tokens_sampled_per_second"].as_f64() > Some(0.0), "{snapshot}");
    assert!(rates["step_ms"].as_f64() >= Some(10.0), "{snapshot}");
    assert!(snapshot["kv_blocks_used"].as_u64() >= Some(2), "{snapshot}");

    let shown = printed(&run, &["top", &core, "--once", "--interval", "0.1", "--requests", "2"]);
    for word in ["requests 2 running, 1 waiting", "CLIENT", "decode", "… and 1 younger", "/taps"]
    {
        assert!(shown.contains(word), "{word:?} is not in\n{shown}");
    }
    assert!(!shown.contains('\x1b'), "{shown:?}");
    streams.clear();
}

/// Somebody listens there who is no core: what waits to be let in can still be stopped.
#[test]
fn a_signal_ends_the_wait_for_a_core() {
    let run = Run::new();
    let core = std::os::unix::net::UnixListener::bind(run.path("core")).unwrap();
    let (knocked, knocks) = std::sync::mpsc::sync_channel(16);
    std::thread::spawn(move || {
        for knock in core.incoming() {
            // What comes again and again while nobody looks is dropped.
            let _ = knocked.try_send(knock);
        }
    });
    let address = run.core_address();
    let recording = run.path("one.frames").display().to_string();
    let one_request = || {
        let folder = Run::new();
        let _core = mock_core(&folder, &[]);
        let frontend = folder.frontend("api", &[]);
        let mut recorder = tapping(
            &folder,
            "record",
            &["record", &folder.core_address(), &recording, "--kind", "add", "--count", "1"],
        );
        complete(&frontend, &body("a", &json!({})));
        assert!(recorder.wait().success(), "{}", recorder.log());
    };
    one_request();
    for (name, args) in [
        ("top", &["top", &address][..]),
        ("send", &["send", &address, "--token-ids", "1"]),
        ("replay", &["replay", &recording, &address]),
    ] {
        let mut process = run.pawl(name, &[&["frames"], args, &["--wait", "3600"]].concat());
        // Then it listens for signals.
        let _knock = knocks.recv_timeout(PATIENCE).unwrap();
        process.signal(Signal::SIGINT);
        process.wait();
        assert!(process.log().contains("SIGINT: stopping"), "{name}: {}", process.log());
        while knocks.try_recv().is_ok() {}
    }
}

/// Without a terminal it goes on line by line, and lives through the end of its core.
#[test]
fn top_goes_on_without_a_terminal_and_without_a_core() {
    let run = Run::new();
    let mut core = mock_core(&run, &[]);
    let frontend = run.frontend("api", &[]);
    let address = run.core_address();
    let mut top = run.pawl("top", &["frames", "top", &address, "--interval", "0.1"]);
    complete(&frontend, &body("a", &json!({})));
    wait_for("looks", || {
        let log = top.log();
        (log.matches("CLIENT").count() > 2 && log.contains("1 length")).then_some(())
    });
    assert!(!top.log().contains('\x1b'));
    core.signal(Signal::SIGKILL);
    core.wait();
    let _core = mock_core(&run, &[]);
    let seen = top.log().len();
    wait_for("looks at the new core", || {
        let log = top.log();
        log.get(seen..)?.contains("finished 0 ").then_some(())
    });
    top.signal(Signal::SIGINT);
    assert!(top.wait().success(), "{}", top.log());
}
