//! Starting, stopping and dying: what the processes leave behind, which is nothing.

mod draining;
mod signals;
mod starting;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pawl_shared::model_card::{GgmlType, testing::GgufWriter};
use serde_json::{Value, json};

use crate::harness::{
    Client, Frontend, PATIENCE, Process, Run, SseStream, alive, assert_within, command_line,
    listeners, rounds, signal, wait_for, within,
};

/// `pawl serve` with its api-servers, all ready.
pub struct Served {
    pub process: Process,
    pub http: Client,
    pub admins: Vec<Client>,
    /// Of the core and the api-servers.
    pub children: Vec<i32>,
}

impl Served {
    pub fn start(run: &Run, api_servers: usize, extra: &[&str]) -> Self {
        let count = api_servers.to_string();
        let args = ["--runner", "mock", "--api-server-count", &count];
        Self::once_ready(run, api_servers, run.serve(&[&args[..], extra].concat()))
    }

    /// The same over a core that is none of its children.
    pub fn with_core_elsewhere(run: &Run, api_servers: usize, process: Process) -> Self {
        let frontend = Frontend::once_ready(process, &run.path("serve.ports"));
        Self::once_all_ready(run, api_servers, frontend, api_servers)
    }

    /// `frontend` is its first api-server.
    fn once_ready(run: &Run, api_servers: usize, frontend: Frontend) -> Self {
        Self::once_all_ready(run, api_servers, frontend, api_servers + 1)
    }

    fn once_all_ready(run: &Run, api_servers: usize, frontend: Frontend, all: usize) -> Self {
        let admins: Vec<Client> = (0..api_servers)
            .map(|index| match index {
                0 => frontend.admin,
                _ => wait_for("the port file", || admin_of(run, index)),
            })
            .collect();
        for admin in &admins {
            wait_for("every api-server", || admin.is_ready().then_some(()));
        }
        let children = frontend.process.descendants();
        assert_eq!(children.len(), all, "{children:?}");
        let Frontend { process, http, .. } = frontend;
        Self { process, http, admins, children }
    }

    /// Its child whose command line has `part`.
    pub fn child(&self, part: &str) -> i32 {
        let children = self.process.descendants();
        let found = children.iter().find(|pid| command_line(**pid).contains(part));
        *found.unwrap_or_else(|| panic!("no child {part}: {children:?}"))
    }

    /// Streams of so many tokens that have begun, at least one at each api-server.
    pub fn streams_at_all(&self, max_tokens: u64) -> Vec<SseStream> {
        let idle = |admin: &Client| admin.scrape().get("pawl:requests_in_flight") == 0.0;
        let mut streams = Vec::new();
        // The kernel shares connections out.
        while streams.len() < 4 || self.admins.iter().any(idle) {
            assert!(streams.len() < 60, "one api-server gets no connection");
            let mut stream = self.http.stream("/v1/completions", &long_request(max_tokens));
            assert!(stream.next().is_some());
            streams.push(stream);
        }
        streams
    }

    /// None of its processes runs, no port is bound, no folder of sockets is there.
    pub fn assert_gone(&self, run: &Run, time: Duration) {
        let mut left = String::new();
        let gone = within(time, || {
            let running = self.children.iter().filter(|pid| alive(**pid));
            let running: Vec<String> = running.map(|pid| command_line(*pid)).collect();
            let folders = run.socket_folders();
            let ports = std::iter::once(&self.http).chain(&self.admins).map(|client| client.port());
            let taken = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_err();
            let taken: Vec<u16> = ports.filter(taken).collect();
            left = format!("processes {running:?}, folders {folders:?}, ports {taken:?}");
            (running.is_empty() && folders.is_empty() && taken.is_empty()).then_some(())
        });
        assert!(gone.is_some(), "left after {time:?}: {left}");
    }
}

/// The admin listener of a `serve`'s api-server, as it last told its port.
pub fn admin_of(run: &Run, index: usize) -> Option<Client> {
    let name = match index {
        0 => "serve.ports".to_owned(),
        _ => format!("serve.ports.{index}"),
    };
    Some(listeners(&run.path(&name))?.1)
}

pub fn long_request(max_tokens: u64) -> Value {
    json!({"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": true, "stream": true})
}

fn check_clean_stop(api_servers: usize, signal: Signal) {
    let run = Run::new();
    let mut served = Served::start(&run, api_servers, &[]);
    let answer = served.http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 3}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    served.process.signal(signal);
    let status = served.process.wait();
    assert_eq!(status.code(), Some(0), "{}", served.process.log());
    // What it waits for is gone when it is.
    served.assert_gone(&run, Duration::ZERO);
    assert!(!served.process.log().contains("ERROR"), "{}", served.process.log());
}

#[test]
fn sigterm_stops_everything() {
    check_clean_stop(1, Signal::SIGTERM);
}

#[test]
fn ctrl_c_stops_everything_with_two_api_servers() {
    check_clean_stop(2, Signal::SIGINT);
}

#[test]
fn nothing_outlives_a_killed_supervisor() {
    for _ in 0..rounds(1, 20) {
        check_killed_supervisor();
    }
}

fn check_killed_supervisor() {
    let run = Run::new();
    let mut served = Served::start(&run, 2, &["--mock-step-ms", "20"]);
    let mut stream = served.http.stream("/v1/completions", &long_request(5000));
    assert!(stream.next().is_some());
    let killed = Instant::now();
    served.process.signal(Signal::SIGKILL);
    served.process.wait();
    served.assert_gone(&run, Duration::from_secs(5));
    assert_within(
        Duration::from_secs(5),
        killed,
        "everything was gone after the supervisor's kill",
    );
    // And the next start, on the same port, works.
    let port = served.http.port().to_string();
    let args = ["serve", "--runner", "mock", "--port", &port, "--admin-port", "0"];
    let mut again = None;
    wait_for("the next start", || {
        // The system may have given the port to another test meanwhile; then it has ended.
        if again.as_mut().is_none_or(|process: &mut Process| process.ended().is_some()) {
            again = Some(run.pawl("again", &args));
        }
        served.http.is_ready().then_some(())
    });
}

#[test]
fn a_killed_core_ends_streams_and_is_started_again() {
    for _ in 0..rounds(1, 50) {
        check_killed_core();
    }
}

/// 2 × 50 streams end with an error event within 2 s; the next core serves the same api-servers,
/// whose counters go on.
fn check_killed_core() {
    let run = Run::new();
    let served = Served::start(&run, 2, &["--mock-step-ms", "10"]);
    let mut streams: Vec<_> =
        (0..100).map(|_| served.http.stream("/v1/completions", &long_request(5000))).collect();
    for stream in &mut streams {
        assert!(stream.next().is_some());
    }
    let core = served.child("engine-core");
    let killed = Instant::now();
    signal(core, Signal::SIGKILL);
    for stream in &mut streams {
        let events = stream.rest();
        let last = events.last().expect("an error event");
        assert_eq!(last["error"]["code"], "engine_unavailable", "{last}");
        let finishes = events.iter().filter(|e| e["choices"][0]["finish_reason"].is_string());
        assert_eq!(finishes.count(), 0, "a finish was faked");
    }
    assert_within(Duration::from_secs(2), killed, "100 streams ended after the core's kill");

    for admin in &served.admins {
        wait_for("every api-server's new core", || {
            let page = admin.scrape();
            (page.get("pawl:core_sessions_total") == 2.0 && page.get("pawl:core_up") == 1.0)
                .then_some(())
        });
    }
    assert_ne!(served.child("engine-core"), core);
    let body = json!({"prompt": [5], "max_tokens": 3, "ignore_eos": true});
    // Nobody asks for less than patience, but the figure is worth knowing.
    assert_within(PATIENCE, killed, "the next core served after the kill of the one before");
    for _ in 0..8 {
        let answer = served.http.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let page = served.http.scrape();
    assert_eq!((page.ended("error"), page.ended("length")), (100.0, 8.0));
}

/// A core that stays away: within a second nobody is told to be healthy, nor kept waiting.
#[test]
fn without_a_core_everyone_is_told_within_a_second() {
    for _ in 0..rounds(1, 20) {
        check_core_that_stays_away();
    }
}

fn check_core_that_stays_away() {
    let run = Run::new();
    let core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    core.signal(Signal::SIGKILL);
    let killed = Instant::now();
    wait_for("503", || (frontend.http.get("/health").status == 503).then_some(()));
    assert_within(Duration::from_secs(1), killed, "/health was 503 after the core's kill");
    let refused = frontend.http.post("/v1/completions", &long_request(5));
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    assert_within(Duration::from_secs(1), killed, "a request was refused after the core's kill");
}

/// Its requests leave the core, the other's clients notice nothing, and it is started again.
#[test]
fn a_killed_api_server_takes_nothing_with_it() {
    for _ in 0..rounds(1, 50) {
        check_killed_api_server();
    }
}

fn check_killed_api_server() {
    let run = Run::new();
    let served = Served::start(&run, 2, &["--mock-step-ms", "10"]);
    let open = |admin: Client| admin.scrape().get("pawl:requests_in_flight");
    let mut streams = served.streams_at_all(400);
    let kept = open(served.admins[0]);
    let victim = served.child("api-1.toml");
    let killed = Instant::now();
    signal(victim, Signal::SIGKILL);
    wait_for("its requests to leave the core", || {
        let page = served.admins[0].scrape();
        (page.running() + page.waiting() <= kept).then_some(())
    });
    // By themselves they would have gone on for four seconds.
    assert_within(Duration::from_secs(2), killed, "a killed api-server's requests left the core");
    let status = wait_for("the status", || core_status(&run));
    let live = status["requests"].as_array().unwrap();
    let blocks = live.iter().map(|request| request["blocks"].as_u64().unwrap()).sum::<u64>();
    assert!(live.len() as f64 <= kept, "{status}");
    assert_eq!(status["kv_blocks_used"], blocks, "blocks are held by nobody: {status}");
    let whole = streams.iter_mut().filter_map(|stream| {
        let events = stream.rest();
        stream.is_done().then(|| events.last().unwrap()["choices"][0]["finish_reason"].clone())
    });
    let whole: Vec<Value> = whole.collect();
    assert_eq!(whole, vec![json!("length"); kept as usize]);
    let back = wait_for("its next life", || {
        let admin = admin_of(&run, 1)?;
        (admin.is_ready() && admin.port() != served.admins[1].port()).then_some(admin)
    });
    assert_eq!(open(back), 0.0);
}

/// What the core of a `serve` says of itself.
fn core_status(run: &Run) -> Option<Value> {
    let socket =
        run.socket_folders().into_iter().map(|dir| dir.join("core")).find(|s| s.exists())?;
    let address = format!("ipc://{}", socket.display());
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_pawl"))
        .args(["frames", "call", &address, "pawl_status", "--json"])
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).ok()
}

/// `pawl ARGS` fails within 10 s, and says `cause` in one line.
fn check_failed_start(run: &Run, args: &[&str], cause: &[&str]) {
    let started = Instant::now();
    let mut process = run.pawl("failed", args);
    let status = process.wait();
    let (took, log) = (started.elapsed(), process.log());
    assert!(status.code().is_some_and(|code| code != 0), "{args:?} ended with {status}: {log}");
    assert!(took < Duration::from_secs(10), "{args:?} took {took:?}");
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("ERROR")).collect();
    let told = errors.iter().filter(|line| cause.iter().all(|word| line.contains(word))).count();
    assert_eq!(told, 1, "{args:?}: {cause:?} is to be told in one line: {log}");
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(process.descendants(), Vec::<i32>::new());
    assert_eq!(run.socket_folders(), Vec::<std::path::PathBuf>::new());
    std::fs::remove_file(run.path("failed.log")).unwrap();
}

#[test]
fn faults_at_the_start_are_told_in_one_line() {
    let run = Run::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    check_failed_start(&run, &["serve", "--runner", "mock", "--port", &port], &[&port, "--port"]);
    let core = run.core_address();
    check_failed_start(&run, &["api-server", "--core", &core, "--port", &port], &[&port]);
    let admin_taken = ["serve", "--runner", "mock", "--port", "0", "--admin-port", &port];
    check_failed_start(&run, &admin_taken, &[&port]);

    let missing = run.path("missing.gguf").display().to_string();
    check_failed_start(&run, &["serve", &missing, "--port", "0"], &["missing.gguf"]);
    check_failed_start(&run, &["engine-core", &missing, "--listen", &core], &["missing.gguf"]);

    let no_model = run.path("no.gguf").display().to_string();
    std::fs::write(&no_model, "This is no model.").unwrap();
    check_failed_start(&run, &["serve", &no_model, "--port", "0"], &["no.gguf"]);

    let whole = GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 128)
        .byte_vocabulary()
        .tensor("token_embd.weight", GgmlType::F32, &[16, 263], vec![0; 16 * 263 * 4])
        .bytes();
    let cut = run.path("cut.gguf").display().to_string();
    std::fs::write(&cut, &whole[..whole.len() - 1000]).unwrap();
    check_failed_start(&run, &["serve", &cut, "--port", "0"], &["cut.gguf"]);
    check_failed_start(&run, &["engine-core", &cut, "--listen", &core], &["cut.gguf"]);

    let deep = format!("ipc://{}/{}", run.path("x").display(), "y".repeat(120));
    let mock = ["engine-core", "--runner", "mock", "--listen", &deep];
    let mut refused = run.pawl("deep", &mock);
    assert!(!refused.wait().success());
    assert!(refused.log().contains("107"), "{}", refused.log());
}

#[test]
fn a_drain_completes_what_was_admitted_and_refuses_the_rest() {
    let run = Run::new();
    let mut served = Served::start(&run, 1, &["--mock-step-ms", "20", "--shutdown-timeout", "30"]);
    let mut stream = served.http.stream("/v1/completions", &long_request(100));
    assert!(stream.next().is_some());
    served.process.signal(Signal::SIGTERM);
    wait_for("the drain", || (served.http.get("/ready").status == 503).then_some(()));
    let late = served.http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 1}));
    assert_eq!(late.status, 503, "{}", late.text());
    assert_eq!(late.json()["error"]["code"], "shutting_down");
    assert!(late.header("retry-after").is_some(), "{late:?}");
    let page = served.admins[0].scrape();
    assert_eq!(page.rejected("draining"), 1.0);

    let events = stream.rest();
    assert_eq!(events.len(), 99);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(stream.is_done());
    assert_eq!(served.process.wait().code(), Some(0), "{}", served.process.log());
    served.assert_gone(&run, Duration::ZERO);
}

#[test]
fn without_time_to_drain_streams_end_with_an_error() {
    let run = Run::new();
    let mut served = Served::start(&run, 2, &["--mock-step-ms", "20"]);
    let mut streams: Vec<_> =
        (0..6).map(|_| served.http.stream("/v1/completions", &long_request(5000))).collect();
    for stream in &mut streams {
        assert!(stream.next().is_some());
    }
    let asked = Instant::now();
    served.process.signal(Signal::SIGTERM);
    for stream in &mut streams {
        let last = stream.rest().pop().expect("an error event");
        assert_eq!(last["error"]["code"], "shutting_down", "{last}");
        assert!(!stream.is_done());
    }
    assert_within(Duration::from_secs(2), asked, "streams ended after SIGTERM without drain time");
    assert_eq!(served.process.wait().code(), Some(0), "{}", served.process.log());
    served.assert_gone(&run, Duration::ZERO);
}

#[test]
fn a_frontend_waits_for_its_core_and_for_the_next_one() {
    let run = Run::new();
    let (address, file) = (run.core_address(), run.path("api.ports").display().to_string());
    let args = ["api-server", "--core", &address, "--port", "0", "--admin-port", "0"];
    let api = run.pawl("api", &[&args[..], &["--port-file", &file]].concat());
    let (http, admin) = wait_for("the port file", || listeners(&run.path("api.ports")));
    let body = json!({"prompt": [5], "max_tokens": 3, "ignore_eos": true});
    let early = http.post("/v1/completions", &body);
    assert_eq!(early.status, 503, "{}", early.text());
    assert!(early.text().contains("no engine core has been met"), "{}", early.text());
    // A slip of the pen in --core looks the same, so the address is told.
    wait_for("the warning", || {
        let log = api.log();
        log.lines()
            .any(|l| l.contains("WARN") && l.contains(&format!("at {address}")))
            .then_some(())
    });
    assert!(early.header("retry-after").is_some());
    assert_eq!(http.get("/health").status, 503);
    assert_eq!(http.get("/version").status, 200);

    for life in 1..=3_u8 {
        let mut core = run.mock_core(&[]);
        wait_for("readiness", || http.is_ready().then_some(()));
        assert_eq!(http.post("/v1/completions", &body).status, 200);
        let page = admin.scrape();
        assert_eq!(page.get("pawl:core_sessions_total"), f64::from(life));
        // Counters go on over the lives of the core.
        assert_eq!(page.get("vllm:generation_tokens_total"), 3.0 * f64::from(life));
        assert!(core.stop().success(), "{}", core.log());
        wait_for("its absence", || (http.get("/health").status == 503).then_some(()));
        assert_eq!(http.post("/v1/completions", &body).status, 503);
    }
    drop(api);
}
