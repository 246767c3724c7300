//! `pawl serve --await-core`: several api-servers behind one handshake socket, and a core that
//! dials in: ours, or an engine of vLLM's as its wire knows it.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::fleet::{ask, assert_asked, replaced};
use crate::harness::{Process, Run, alive, signal, wait_for};
use crate::lifecycle::{Served, admin_of, long_request};
use crate::python::{once_said, peer, python, said, tiny_model};

/// Where the core dials: the supervisor's.
fn handshake(run: &Run) -> String {
    format!("ipc://{}", run.path("handshake").display())
}

/// `pawl serve --await-core` with `api_servers`, not ready before `core` has dialled in.
fn serve_awaiting(run: &Run, api_servers: usize, extra: &[&str], core: impl FnOnce()) -> Served {
    let (at, model, count) = (handshake(run), tiny_model(run), api_servers.to_string());
    let args = [&model, "--await-core", &at, "--api-server-count", &count];
    let process = run.start_serve(&[&args[..], extra].concat());
    core();
    Served::with_core_elsewhere(run, api_servers, process)
}

/// A mock core that dials the supervisor.
fn dialling_core(run: &Run, extra: &[&str]) -> Process {
    let at = handshake(run);
    let args = ["engine-core", "--runner", "mock", "--mock-step-ms", "5", "--handshake", &at];
    run.pawl("core", &[&args[..], extra].concat())
}

/// Waits until every place is served. One that was started again has another admin port.
fn once_all_serve(run: &Run, served: &Served) {
    for index in 0..served.admins.len() {
        wait_for("every api-server", || admin_of(run, index).filter(|admin| admin.is_ready()));
    }
}

/// Ends with a finish reason, or with the code of an error.
fn ends_with(events: &[Value]) -> &str {
    let last = events.last().expect("an event");
    let error = last["error"]["code"].as_str();
    last["choices"][0]["finish_reason"].as_str().or(error).unwrap_or("nothing")
}

fn check_api_servers(count: usize) {
    let run = Run::new();
    let mut core = None;
    let mut served = serve_awaiting(&run, count, &[], || core = Some(dialling_core(&run, &[])));
    ask(served.http, 10 * count);
    assert_asked(&served.http.scrape(), (10 * count) as f64);
    // Each has a pair of its own.
    for admin in &served.admins {
        assert_eq!(admin.scrape().get("vllm:cache_config_info"), 1.0);
    }
    assert!(served.process.stop().success(), "{}", served.process.log());
    served.assert_gone(&run, Duration::ZERO);
    assert!(!served.process.log().contains("ERROR"), "{}", served.process.log());
    assert_eq!(core.as_mut().unwrap().ended(), None, "{}", core.unwrap().log());
}

#[test]
fn one_api_server_behind_a_handshake() {
    check_api_servers(1);
}

#[test]
fn four_api_servers_behind_a_handshake() {
    check_api_servers(4);
}

/// The requests of the one that is killed leave the core. The one that takes its place binds the
/// same pair, and the core finds it there; nobody else notices.
#[test]
fn an_api_server_is_replaced_while_the_core_stays() {
    let run = Run::new();
    let mut core = None;
    let served = serve_awaiting(&run, 2, &[], || core = Some(dialling_core(&run, &[])));
    ask(served.http, 20);
    assert_asked(&served.http.scrape(), 20.0);
    let mut streams = served.streams_at_all(1000);
    let kept = served.admins[0].scrape().get("pawl:requests_in_flight");
    let victim = served.child("api-1.toml");
    let killed = Instant::now();
    signal(victim, Signal::SIGKILL);
    wait_for("its requests to leave the core", || {
        let page = served.admins[0].scrape();
        (page.running() + page.waiting() <= kept).then_some(())
    });
    // By themselves they would have gone on for five seconds.
    assert!(killed.elapsed() < Duration::from_secs(2), "took {:?}", killed.elapsed());
    replaced(&served, victim);
    once_all_serve(&run, &served);
    assert!(killed.elapsed() < Duration::from_secs(20), "took {:?}", killed.elapsed());
    // Those of the other end as they should; those of the dead one just end.
    let whole = streams.iter_mut().map(|stream| stream.rest()).filter(|rest| !rest.is_empty());
    let whole = whole.filter(|rest| ends_with(rest) == "length").count();
    assert_eq!(whole as f64, kept);
    ask(served.http, 20);
    let page = served.http.scrape();
    assert_eq!(page.get("vllm:request_success_total"), (40 + whole) as f64);
    let core = core.unwrap();
    assert_eq!(core.log().matches("client left").count(), 1, "{}", core.log());
    assert_eq!(core.log().matches("client joined").count(), 3, "{}", core.log());
}

#[test]
fn a_core_that_died_is_followed_by_the_next_that_dials() {
    let run = Run::new();
    let mut core = None;
    let served = serve_awaiting(&run, 3, &[], || core = Some(dialling_core(&run, &[])));
    ask(served.http, 10);
    let mut streams: Vec<_> =
        (0..6).map(|_| served.http.stream("/v1/completions", &long_request(5000))).collect();
    streams.iter_mut().for_each(|stream| assert!(stream.next().is_some()));
    // Another one has to wait for its turn.
    let at = handshake(&run);
    let mut next = run.pawl("next", &["engine-core", "--runner", "mock", "--handshake", &at]);
    let dialled = || served.process.log().matches("a core dials in").count();
    wait_for("its word", || (dialled() == 2).then_some(()));
    ask(served.http, 10);
    drop(core.take());
    for stream in &mut streams {
        assert_eq!(ends_with(&stream.rest()), "engine_unavailable");
    }
    once_all_serve(&run, &served);
    ask(served.http, 10);
    let page = served.http.scrape();
    assert_eq!((page.ended("error"), page.ended("length")), (6.0, 30.0));
    assert_eq!(next.ended(), None, "{}", next.log());
}

/// Clients that were let in are served to their end; the core is nobody's child and lives on, for
/// the next supervisor at the same place.
#[test]
fn a_stop_drains_and_leaves_the_core() {
    let run = Run::new();
    let mut core = None;
    let drain = ["--shutdown-timeout", "60"];
    let mut served = serve_awaiting(&run, 2, &drain, || core = Some(dialling_core(&run, &[])));
    let mut stream = served.http.stream("/v1/completions", &long_request(200));
    assert!(stream.next().is_some());
    served.process.signal(Signal::SIGTERM);
    assert_eq!(ends_with(&stream.rest()), "length");
    assert_eq!(served.process.wait().code(), Some(0), "{}", served.process.log());
    served.assert_gone(&run, Duration::ZERO);
    let mut core = core.unwrap();
    assert_eq!(core.ended(), None, "{}", core.log());
    std::fs::remove_file(run.path("serve.ports")).unwrap();
    let again = serve_awaiting(&run, 1, &[], || {});
    ask(again.http, 3);
}

#[test]
fn nothing_outlives_a_killed_supervisor_but_its_core() {
    let run = Run::new();
    let mut core = None;
    let mut served = serve_awaiting(&run, 2, &[], || core = Some(dialling_core(&run, &[])));
    served.process.signal(Signal::SIGKILL);
    served.process.wait();
    served.assert_gone(&run, Duration::from_secs(5));
    assert_eq!(core.as_mut().unwrap().ended(), None);
}

/// One core for the api-servers of a supervisor, an api-server of ours that joins it, and a
/// frontend as vLLM's.
#[test]
fn one_core_for_all_kinds_of_frontends() {
    let Some(python) = python() else { return };
    let run = Run::new();
    let args = ["frontend", "--handshake", "tcp://127.0.0.1:*", "--requests", "3"];
    let mut foreign = peer(&run, &python, "vllm_wire.py", &args);
    let bound = once_said(&mut foreign, "bound");
    let mut core = None;
    let served = serve_awaiting(&run, 2, &[], || {
        let (listen, theirs) = (run.core_address(), bound["handshake"].as_str().unwrap());
        core = Some(dialling_core(&run, &["--listen", &listen, "--handshake", theirs]));
    });
    let native = run.frontend("native", &[]);
    ask(native.http, 10);
    ask(served.http, 10);
    assert!(foreign.wait().success(), "{}", foreign.log());
    assert_asked(&served.http.scrape(), 10.0);
    let own = native.scrape();
    assert_eq!(own.get("vllm:request_success_total"), 10.0);
    // vLLM's has ended, the others have not noticed.
    ask(native.http, 1);
    ask(served.http, 1);
    assert!(alive(core.unwrap().pid()));
}

/// vLLM's engine says its ready response once, and its sockets connect again by themselves. What
/// the dead one had asked for is aborted by its successor.
#[test]
fn an_api_server_is_replaced_before_a_vllm_engine() {
    let Some(python) = python() else { return };
    let run = Run::new();
    let at = handshake(&run);
    let mut engine = None;
    let served = serve_awaiting(&run, 2, &[], || {
        let args = ["engine", "--handshake", &at, "--step-ms", "20"];
        engine = Some(peer(&run, &python, "vllm_wire.py", &args));
    });
    let engine = engine.as_mut().unwrap();
    let body = json!({"prompt": "ab", "max_tokens": 3});
    for _ in 0..10 {
        let answer = served.http.post("/v1/completions", &body).json();
        assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    }
    let _streams = served.streams_at_all(1900);
    let victim = served.child("api-0.toml");
    signal(victim, Signal::SIGKILL);
    replaced(&served, victim);
    once_all_serve(&run, &served);
    for _ in 0..10 {
        let answer = served.http.post("/v1/completions", &body).json();
        assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    }
    let aborted = |engine: &Process| {
        let aborts = said(engine).into_iter().filter(|line| line["event"] == "abort");
        aborts.filter(|line| line["client"] == 0).count()
    };
    wait_for("the orphans' end", || (aborted(engine) > 0).then_some(()));
    assert_eq!(engine.ended(), None, "{}", engine.log());
}
