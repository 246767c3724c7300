//! Peers in Python: the OpenAI SDK, and vLLM's side of the wire.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use pawl_shared::model_card::testing::GgufWriter;
use serde_json::{Value, json};

use crate::harness::{Frontend, Process, Run, skip, wait_for};

/// The interpreter with the peers' packages, as the test command set it up; `None` means skip.
pub fn python() -> Option<PathBuf> {
    let python = std::env::var_os("PAWL_TEST_PYTHON").map(PathBuf::from).filter(|p| p.exists());
    if python.is_none() {
        skip("interpreter with the Python peers");
    }
    python
}

/// `tests/peers/SCRIPT ARGS`
fn command(python: &PathBuf, script: &str, args: &[&str]) -> Command {
    let mut command = Command::new(python);
    command.arg(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/peers").join(script));
    command.args(args);
    command
}

/// Starts `tests/peers/SCRIPT ARGS`.
pub fn peer(run: &Run, python: &PathBuf, script: &str, args: &[&str]) -> Process {
    run.start(script, command(python, script, args))
}

/// The lines of JSON that a peer has printed so far.
pub fn said(peer: &Process) -> Vec<Value> {
    let log = peer.log();
    // The last line may be half written.
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Waits until `peer` has said `what`; that line.
pub fn once_said(peer: &mut Process, what: &str) -> Value {
    wait_for(what, || {
        let found = said(peer).into_iter().find(|line| line["event"] == what);
        let ended = found.is_none().then(|| peer.ended()).flatten();
        assert!(ended.is_none(), "it ended without saying {what}:\n{}", peer.log());
        found
    })
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

/// vLLM's frontend, which reads strictly, with our core.
fn with_vllm_frontend(args: &[&str]) -> Option<Vec<Value>> {
    let python = python()?;
    let run = Run::new();
    let args = [&["frontend", "--handshake", "tcp://127.0.0.1:*"][..], args].concat();
    let mut frontend = peer(&run, &python, "vllm_wire.py", &args);
    let bound = once_said(&mut frontend, "bound");
    let handshake = bound["handshake"].as_str().unwrap();
    let core = ["engine-core", "--runner", "mock", "--mock-step-ms", "1"];
    let mut core = run.pawl("core", &[&core[..], &["--handshake", handshake]].concat());
    let status = frontend.wait();
    assert!(status.success(), "{}", frontend.log());
    // It outlives its frontends, and stops when told to.
    assert_eq!(core.ended(), None, "{}", core.log());
    assert!(core.stop().success(), "{}", core.log());
    Some(said(&frontend))
}

#[test]
fn a_vllm_frontend_gets_tokens_from_our_core() {
    let args = ["--requests", "3", "--max-tokens", "6", "--sampling", r#"{"logprobs": 2}"#];
    let Some(said) = with_vllm_frontend(&args) else { return };
    let done = said.last().unwrap();
    for request in ["request-0", "request-1", "request-2"] {
        assert_eq!(done["tokens"][request].as_array().unwrap().len(), 6, "{done}");
        assert_eq!(done["finished"][request], "LENGTH", "{done}");
    }
    let steps = said.iter().filter(|line| line["event"] == "outputs");
    let stamps: Vec<f64> = steps.map(|line| line["timestamp"].as_f64().unwrap()).collect();
    assert!(stamps.is_sorted() && stamps[0] > 0.0, "{stamps:?}");
    let running = |line: &Value| line["stats"]["num_running_reqs"].as_u64();
    let most = said.iter().filter_map(running).max();
    assert_eq!(most, Some(3), "{said:#?}");
}

#[test]
fn a_vllm_frontend_aborts_in_our_core() {
    let args = ["--requests", "2", "--max-tokens", "60", "--abort-after", "3"];
    let Some(said) = with_vllm_frontend(&args) else { return };
    let done = said.last().unwrap();
    assert_eq!(done["finished"]["request-0"], "aborted by us", "{done}");
    assert_eq!(done["finished"]["request-1"], "LENGTH", "{done}");
    assert!(done["tokens"]["request-0"].as_array().unwrap().len() < 60, "{done}");
}

#[test]
fn a_vllm_frontend_calls_utilities_of_our_core() {
    let Some(python) = python() else { return };
    let run = Run::new();
    let commands = [
        json!({"utility": ["is_sleeping", []]}),
        json!({"utility": ["reset_prefix_cache", [false, false]]}),
        json!({"utility": ["no_such_method", [1]]}),
        json!({"add": {"id": "a", "prompt": [5, 6], "sampling": {"max_tokens": 2}}}),
    ];
    let script = run.path("commands");
    let lines: Vec<String> = commands.iter().map(Value::to_string).collect();
    std::fs::write(&script, lines.join("\n") + "\n").unwrap();
    let args = ["frontend", "--handshake", "tcp://127.0.0.1:*", "--stdin"];
    let command = command(&python, "vllm_wire.py", &args);
    let mut frontend = run.start_with_input("frontend", command, &script);
    let bound = once_said(&mut frontend, "bound");
    let handshake = bound["handshake"].as_str().unwrap();
    let _core = run.pawl("core", &["engine-core", "--runner", "mock", "--handshake", handshake]);
    assert!(frontend.wait().success(), "{}", frontend.log());
    let said = said(&frontend);
    let answers: Vec<(&str, &Value, bool)> = said
        .iter()
        .filter(|line| line["event"] == "utility")
        .map(|line| {
            let method = line["method"].as_str().unwrap();
            (method, &line["result"], line["failure"].is_null())
        })
        .collect();
    let expected = [
        ("reset_mm_cache", &json!(null), true),
        ("get_supported_tasks", &json!(["generate"]), true),
        ("is_sleeping", &json!(false), true),
        ("reset_prefix_cache", &json!(true), true),
        ("no_such_method", &json!(null), false),
    ];
    assert_eq!(answers, expected, "{}", frontend.log());
    assert_eq!(said.last().unwrap()["finished"]["a"], "LENGTH");
}

/// Its clients would wait for ever: it never asks whether the core is still there.
#[test]
fn a_vllm_frontend_is_told_when_our_core_stops() {
    let Some(python) = python() else { return };
    let run = Run::new();
    let args = ["frontend", "--handshake", "tcp://127.0.0.1:*", "--until-dead"];
    let mut frontend = peer(&run, &python, "vllm_wire.py", &args);
    let bound = once_said(&mut frontend, "bound");
    let handshake = bound["handshake"].as_str().unwrap();
    let core = ["engine-core", "--runner", "mock", "--handshake", handshake];
    let mut core = run.pawl("core", &core);
    once_said(&mut frontend, "done");
    assert!(core.stop().success(), "{}", core.log());
    assert!(frontend.wait().success(), "{}", frontend.log());
    once_said(&mut frontend, "dead");
}

/// A model's file that says how to tokenize and nothing else: bytes are tokens 3 to 258.
pub fn tiny_model(run: &Run) -> String {
    let path = run.path("tiny.gguf");
    let bytes = GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 2048)
        .byte_vocabulary()
        .bytes();
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

/// Our frontend, and an engine of vLLM's as `args` say that dials in.
fn with_vllm_engine(run: &Run, python: &PathBuf, args: &[&str]) -> (Frontend, Process) {
    let handshake = format!("ipc://{}", run.path("handshake").display());
    let ports = run.path("api.ports");
    let (model, ports_text) = (tiny_model(run), ports.display().to_string());
    let api = ["api-server", &model, "--await-core", &handshake, "--served-model-name", "tiny"];
    let flags = ["--port", "0", "--admin-port", "0", "--port-file", &ports_text];
    let api = run.pawl("api", &[&api[..], &flags[..]].concat());
    let args = [&["engine", "--handshake", &handshake][..], args].concat();
    let engine = peer(run, python, "vllm_wire.py", &args);
    (Frontend::once_ready(api, &ports), engine)
}

#[test]
fn a_vllm_engine_serves_our_frontend() {
    let Some(python) = python() else { return };
    let run = Run::new();
    // `H` and `i` are bytes 72 and 105; the tiny model's first three tokens are no bytes.
    let (frontend, mut engine) = with_vllm_engine(&run, &python, &["--tokens", "75,108"]);
    let body = json!({"model": "tiny", "prompt": "ab", "max_tokens": 4, "logprobs": 1});
    let answer = frontend.http.post("/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["text"], "HiHi", "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["H", "i", "H", "i"]));
    assert_eq!(answer["usage"]["prompt_tokens"], 2, "{answer}");

    let stopped = json!({"prompt": "ab", "max_tokens": 9, "stop": ["iH"], "stream": true});
    let events = frontend.http.stream("/v1/completions", &stopped).rest();
    let text: String =
        events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, "H", "{events:?}");

    // vLLM's engine keeps no running total for our client: what it tells is taken as it is.
    let after = frontend.scrape_until("an idle engine", |s| s.running() == 0.0);
    assert_eq!(after.get("vllm:prompt_tokens_total"), 4.0);
    assert_eq!(after.get("vllm:generation_tokens_total"), 4.0 + 3.0);
    assert_eq!(after.ended("stop"), 1.0);
    assert_eq!(after.get("pawl:decode_errors_total"), 0.0);
    // The stop string is seen by us alone: the engine must have been told.
    once_said(&mut engine, "abort");
    assert_eq!(engine.ended(), None, "{}", engine.log());
}

#[test]
fn a_vllm_engine_that_says_it_is_dead_ends_the_streams() {
    let Some(python) = python() else { return };
    let run = Run::new();
    let (frontend, _engine) =
        with_vllm_engine(&run, &python, &["--die-after", "20", "--step-ms", "10"]);
    let body = json!({"prompt": "ab", "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut stream = frontend.http.stream("/v1/completions", &body);
    let last = stream.rest().pop().unwrap();
    assert_eq!(last["error"]["code"], "engine_unavailable", "{last}");
    wait_for("503", || (frontend.http.get("/health").status == 503).then_some(()));
}

/// What `vllm_wire.py decode` makes of `lines`.
fn decoded(python: &PathBuf, lines: &[String]) -> Vec<Value> {
    let mut decode = command(python, "vllm_wire.py", &["decode"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let text = lines.join("\n") + "\n";
    let mut input = decode.stdin.take().unwrap();
    let feeding = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let output = decode.wait_with_output().unwrap();
    feeding.join().unwrap().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The snapshots of our messages are read by msgspec with vLLM's structs, strictly.
#[test]
fn msgspec_reads_every_message_of_ours() {
    let Some(python) = python() else { return };
    let folder =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("shared/src/protocol/tests/snapshots");
    let kinds = [
        ("add_plain", "client", "add"),
        ("add_full", "client", "add"),
        ("abort", "client", "abort"),
        ("start_dp_wave", "client", "start_dp_wave"),
        ("utility_call", "client", "utility"),
        ("hello", "hello", "hello"),
        ("init", "init", "init"),
        ("ready_response", "ready_response", "ready_response"),
        ("step_stats_only", "engine", "engine"),
        ("step_full", "engine", "engine"),
        ("utility_reply", "engine", "engine"),
        ("utility_reply_nil", "engine", "engine"),
        ("utility_failure", "engine", "engine"),
        ("dead", "engine", "dead"),
    ];
    let lines: Vec<String> = kinds
        .iter()
        .map(|(name, kind, _)| {
            let snapshot = std::fs::read_to_string(folder.join(format!("{name}.snap"))).unwrap();
            let frames = snapshot.lines().filter(|line| line.starts_with("frame "));
            let hex: Vec<&str> = frames.map(|line| line.split_once(": ").unwrap().1).collect();
            assert!(!hex.is_empty(), "{name}");
            format!("{kind} {}", hex.join(" "))
        })
        .collect();
    let decoded = decoded(&python, &lines);
    for ((name, _, event), message) in kinds.iter().zip(&decoded) {
        assert_eq!(message["event"], *event, "{name}: {message}");
    }
    assert_eq!(decoded.len(), kinds.len());
    assert_eq!(decoded[8]["message"]["timestamp"], 2.5, "{}", decoded[8]);
}

/// The bytes that our decoder's tests read are still those that msgspec writes.
#[test]
fn msgspec_writes_the_bytes_that_our_tests_read() {
    let Some(python) = python() else { return };
    let output = command(&python, "vllm_wire.py", &["samples"]).output().unwrap();
    assert!(output.status.success());
    let golden = include_str!("../../shared/src/protocol/tests/msgspec_frames.txt");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), golden);
}
