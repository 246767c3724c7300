//! The debug client: what it shows, keeps, replays and asks, through the running processes.

mod clients;
mod files;
mod replays;
mod slow;
mod taps;

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::harness::{Frontend, PATIENCE, Process, Run, wait_for};

/// `pawl frames ARGS`, with its output apart from its log.
fn command(run: &Run, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pawl"));
    for (variable, _) in std::env::vars().filter(|(v, _)| v.starts_with("PAWL_")) {
        command.env_remove(variable);
    }
    command.arg("frames").args(args).env("TMPDIR", run.path("")).env_remove("XDG_RUNTIME_DIR");
    command.stdin(Stdio::null());
    command
}

/// Runs it to its end, which must come.
fn output(run: &Run, args: &[&str]) -> Output {
    let mut child =
        command(run, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    let (told, ended) = std::sync::mpsc::sync_channel::<()>(1);
    let guard = std::thread::spawn(move || {
        if ended.recv_timeout(PATIENCE).is_err() {
            // The wait below then shows what it said.
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = |from: &mut dyn std::io::Read| {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    };
    let (stdout, stderr) = std::thread::scope(|scope| {
        let stderr = scope.spawn(|| read(&mut err));
        (read(&mut out), stderr.join().unwrap())
    });
    let status = child.wait().unwrap();
    told.send(()).unwrap();
    guard.join().unwrap();
    Output { status, stdout, stderr }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What it prints; it must succeed.
fn printed(run: &Run, args: &[&str]) -> String {
    let output = output(run, args);
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The JSON lines it prints, and whether it succeeded.
fn json_lines(run: &Run, args: &[&str]) -> (Vec<Value>, bool) {
    let output = output(run, args);
    let printed = text(&output.stdout);
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    (printed.lines().map(parse).collect(), output.status.success())
}

/// A core that listens.
fn mock_core(run: &Run, extra: &[&str]) -> Process {
    let core = run.mock_core(extra);
    let listens = || std::os::unix::net::UnixStream::connect(run.path("core")).ok().map(drop);
    wait_for("the core's socket", listens);
    core
}

/// It must fail, and say all `words`.
fn refused(run: &Run, args: &[&str], words: &[&str]) {
    let output = output(run, args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}{said}", text(&output.stdout));
    for word in words {
        assert!(said.contains(word), "{word:?} is not in {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

pub fn status(run: &Run) -> Value {
    let printed = printed(run, &["call", &run.core_address(), "pawl_status", "--json"]);
    serde_json::from_str(&printed).unwrap()
}

/// Where the frontend with process `pid` serves its taps.
fn taps_of(run: &Run, frontend: &Frontend) -> String {
    let status = status(run);
    let frontends = status["frontends"].as_array().unwrap();
    let ours = frontends.iter().find(|f| f["pid"] == frontend.process.pid());
    ours.unwrap_or_else(|| panic!("{status}"))["taps"].as_str().unwrap().to_owned()
}

/// A tap or a recorder that has joined.
fn tapping(run: &Run, name: &str, args: &[&str]) -> Process {
    let process = run.pawl(name, &[&["frames"], args].concat());
    wait_for("the tap to join", || process.log().contains("tapping").then_some(()));
    process
}

fn complete(frontend: &Frontend, body: &Value) -> Value {
    let answer = frontend.http.post("/v1/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn body(id: &str, extra: &Value) -> Value {
    let mut body = json!({"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0,
                          "ignore_eos": true, "request_id": id});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}
