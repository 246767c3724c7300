//! Many clients at once: what each takes, and what happens when there is no room for one more.

use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{Frontend, Run, cpu_time, resident_kib, rounds, wait_for};

fn stream_of(max_tokens: u64) -> Value {
    json!({"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": true, "stream": true})
}

/// As many as `wanted`, or as the machine's hard limit on descriptors allows one process.
fn allowed(wanted: usize) -> usize {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let room = usize::try_from(hard).unwrap_or(usize::MAX).saturating_sub(500);
    if room < wanted {
        eprintln!(
            "ONLY {room} streams instead of {wanted}: the hard limit on descriptors is {hard}"
        );
    }
    wanted.min(room)
}

/// Streams that have had tokens and wait for more. The core is stopped while they are weighed, so
/// nothing is on its way.
#[test]
fn idle_streams_take_little_memory() {
    const KIB_EACH_MAX: f64 = 48.0;
    let count = allowed(rounds(1_000, 10_000));
    let run = Run::new();
    let (seqs, blocks) = (count.to_string(), (4 * count + 100).to_string());
    let core = run.mock_core(
        &[
            &[
                "--mock-step-ms",
                "500",
                "--max-num-seqs",
                &seqs,
                "--num-gpu-blocks-override",
                &blocks,
            ],
            &["--max-num-batched-tokens", "65536", "--max-num-queued-reqs", "20000"][..],
            &["--max-shared-step-ms", "0", "--max-step-ms", "0"],
        ]
        .concat(),
    );
    let frontend = run.frontend("api", &["--max-num-queued-reqs", "20000"]);
    let pids = [core.pid(), frontend.process.pid()];
    let open = |count: usize| -> Vec<TcpStream> {
        let body = stream_of(5_000);
        let open = |_| frontend.http.open("POST", "/v1/completions", &body);
        let streams = (0..count).map(open).collect();
        let page = frontend.scrape_until("all to run", |s| s.running() == count as f64);
        let tokens = |s: &crate::harness::Scrape| s.get("vllm:generation_tokens_total");
        let all_told = tokens(&page) + 2.0 * count as f64;
        frontend.scrape_until("a token for each", |s| tokens(s) >= all_told);
        streams
    };
    // What is allocated once is no stream's.
    drop(open(50));
    frontend.idle();
    let before = pids.map(resident_kib);
    let streams = open(count);
    core.signal(Signal::SIGSTOP);
    let after = pids.map(resident_kib);
    core.signal(Signal::SIGCONT);
    let each = [0, 1].map(|i| (after[i] as f64 - before[i] as f64) / count as f64);
    eprintln!(
        "{count} streams: {:.1} KiB each in the core, {:.1} in the api-server",
        each[0], each[1]
    );
    assert!(each[0] + each[1] <= KIB_EACH_MAX, "{each:?} KiB each");
    drop(streams);
    frontend.idle();
}

/// An api-server that may open few descriptors.
fn frontend_with(run: &Run, descriptors: usize) -> Frontend {
    let ports = run.path("api.ports");
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_pawl")).args(["api-server", "--core", &run.core_address()]);
    command.args(["--port", "0", "--admin-port", "0", "--port-file"]).arg(&ports);
    Frontend::once_ready(run.start("api", command), &ports)
}

#[test]
fn running_out_of_descriptors_is_survived_at_rest() {
    const DESCRIPTORS: usize = 128;
    const TOKENS: usize = 2_000;
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "5"]);
    let frontend = frontend_with(&run, DESCRIPTORS);
    let pid = frontend.process.pid();
    for _ in 0..rounds(1, 10) {
        let mut stream = frontend.http.stream("/v1/completions", &stream_of(TOKENS as u64));
        let mut seen = usize::from(stream.next().is_some());
        let failures = || frontend.process.log().matches("accepting failed").count();
        let failed = failures();
        // The kernel shakes hands with them all; few are ever accepted.
        let connect = |_| TcpStream::connect(("127.0.0.1", frontend.http.port())).unwrap();
        let flood: Vec<TcpStream> = (0..400).map(connect).collect();
        wait_for("an accept that fails", || (failures() > failed).then_some(()));
        let (begin, spent, failed) = (Instant::now(), cpu_time(pid), failures());
        // The open stream goes on.
        while begin.elapsed() < Duration::from_secs(3) {
            assert!(stream.next().is_some(), "cut off after {seen} tokens");
            seen += 1;
        }
        let share = (cpu_time(pid) - spent).as_secs_f64() / begin.elapsed().as_secs_f64();
        eprintln!("{share:.2} of a core while there are no descriptors");
        assert!(share <= 0.5, "{share:.2} of a core");
        // A busy machine leaves little of a core even to one that spins: it must rest between.
        let tries = failures() - failed;
        assert!(tries <= 30, "{tries} tries in {:?}", begin.elapsed());
        drop(flood);
        let begin = Instant::now();
        wait_for("an answer", || frontend.http.try_get("/health"));
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        let events = stream.rest();
        assert!(stream.is_done());
        let last = events.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
        assert!(seen + events.len() <= TOKENS + 1);
    }
    // The link to the core never broke, and everything is counted.
    let page = frontend.scrape();
    assert_eq!(page.get("pawl:core_sessions_total"), 1.0);
    assert_eq!(page.ended("length"), rounds(1, 10) as f64);
    assert_eq!(page.get("vllm:generation_tokens_total"), (TOKENS * rounds(1, 10)) as f64);
}
