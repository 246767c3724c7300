//! Signals that come twice, to everybody, or while nobody reads the log.

use super::*;
use crate::harness::SseStream;

/// The finish reason or the error's code that a stream ends with.
fn end_of(stream: &mut SseStream) -> String {
    let events = stream.rest();
    let last = events.last().unwrap_or(&Value::Null);
    let finish = last["choices"][0]["finish_reason"].as_str();
    finish.or(last["error"]["code"].as_str()).unwrap_or("nothing").to_owned()
}

/// Two api-servers, a drain time of a minute, and an open stream of `tokens` tokens, 20 ms each.
fn with_open_stream(run: &Run, tokens: u64) -> (Served, SseStream) {
    let served = Served::start(run, 2, &["--mock-step-ms", "20", "--shutdown-timeout", "60"]);
    let mut stream = served.http.stream("/v1/completions", &long_request(tokens));
    assert!(stream.next().is_some());
    (served, stream)
}

/// Waits until so many of its processes have taken note of a signal.
fn once_heard(served: &Served, signal: &str, processes: usize) {
    let word = format!("{signal}: stopping");
    let heard = || served.process.log().matches(&word).count();
    wait_for("the signal to be heard", || (heard() >= processes).then_some(()));
}

fn assert_stopped_well(mut served: Served, run: &Run) {
    assert_eq!(served.process.wait().code(), Some(0), "{}", served.process.log());
    served.assert_gone(run, Duration::ZERO);
    let log = served.process.log();
    assert!(!log.contains("starting it again") && !log.contains("killing"), "{log}");
}

/// `pawl serve 2>&1 | head -1`: whoever logs next must not die of it.
#[test]
fn nobody_has_to_read_the_log() {
    let run = Run::new();
    let args = ["--runner", "mock", "--api-server-count", "2", "--request-timing", "log"];
    let process = run.start_half_read("serve", run.serve_command(&args));
    let frontend = Frontend::once_ready(process, &run.path("serve.ports"));
    let mut served = Served::once_ready(&run, 2, frontend);
    for _ in 0..8 {
        let answer = served.http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 3}));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let mut running = served.process.descendants();
    running.sort_unstable();
    served.children.sort_unstable();
    assert_eq!(running, served.children, "one of them died of its log");
    served.process.signal(Signal::SIGTERM);
    assert_eq!(served.process.wait().code(), Some(0));
    served.assert_gone(&run, Duration::ZERO);
}

/// As `timeout` does, which signals the process and then its group.
#[test]
fn a_signal_that_comes_twice_at_once_is_one() {
    let run = Run::new();
    let (served, mut stream) = with_open_stream(&run, 100);
    served.process.signal(Signal::SIGTERM);
    // Else the system would make one of them.
    once_heard(&served, "SIGTERM", 1);
    served.process.signal(Signal::SIGTERM);
    assert_eq!(end_of(&mut stream), "length");
    assert_stopped_well(served, &run);
}

/// As a service manager does, which signals every process of the service; here the supervisor
/// hears of it last.
#[test]
fn a_signal_to_everybody_stops_once() {
    let run = Run::new();
    let (served, mut stream) = with_open_stream(&run, 100);
    for child in &served.children {
        signal(*child, Signal::SIGINT);
    }
    once_heard(&served, "SIGINT", served.children.len());
    served.process.signal(Signal::SIGINT);
    assert_eq!(end_of(&mut stream), "length");
    assert_stopped_well(served, &run);
}

#[test]
fn a_second_signal_cuts_the_drain_short() {
    let run = Run::new();
    let (served, mut stream) = with_open_stream(&run, 5000);
    served.process.signal(Signal::SIGINT);
    // One without a stream stops at once; whoever asks it in that moment gets no answer.
    let draining = || served.http.try_get("/ready").is_some_and(|answer| answer.status == 503);
    wait_for("the drain", || draining().then_some(()));
    // Only time makes another wish of it: within a second it is the same one.
    std::thread::sleep(Duration::from_millis(1100));
    assert!(stream.next().is_some(), "the drain still goes on");
    let hurried = Instant::now();
    served.process.signal(Signal::SIGINT);
    assert_eq!(end_of(&mut stream), "shutting_down");
    assert!(hurried.elapsed() < Duration::from_secs(2), "took {:?}", hurried.elapsed());
    assert_stopped_well(served, &run);
    assert!(hurried.elapsed() < Duration::from_secs(3), "took {:?}", hurried.elapsed());
}

/// The supervisor is gone, so there is no time to drain, but clients are told.
#[test]
fn streams_end_with_an_error_when_the_supervisor_is_killed() {
    let run = Run::new();
    let (mut served, mut stream) = with_open_stream(&run, 5000);
    served.process.signal(Signal::SIGKILL);
    served.process.wait();
    // Core and api-server hear of it at the same time; whichever is first says why.
    let end = end_of(&mut stream);
    assert!(["shutting_down", "engine_unavailable"].contains(&end.as_str()), "{end}");
    served.assert_gone(&run, Duration::from_secs(5));
}
