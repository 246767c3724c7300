//! A core that stops while its frontends go on: started by hand, or a child that somebody signals.

use pawl_proto::generate_request::Prompt;
use pawl_proto::{GenerateRequest, StoppingCriteria, TokenIds};
use tonic_health::pb::HealthCheckRequest;

use super::*;
use crate::grpc::client::{Grpc, grpc_port};

/// A frontend with a gRPC port.
fn frontend(run: &Run) -> (Frontend, Grpc) {
    let frontend = run.frontend("api", &["--grpc-port", "0"]);
    let grpc = Grpc::connect(grpc_port(&run.path("api.ports")));
    (frontend, grpc)
}

fn grpc_request(tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![7, 8] })),
        stopping: Some(StoppingCriteria {
            max_new_tokens: tokens,
            ignore_eos: true,
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[test]
fn a_core_that_stops_finishes_its_streams_and_its_frontends_refuse_the_rest() {
    let run = Run::new();
    let mut core = run.mock_core(&["--mock-step-ms", "20", "--shutdown-timeout", "50"]);
    let (frontend, grpc) = frontend(&run);
    let http = frontend.http;
    let mut streams: Vec<_> =
        (0..5).map(|_| http.stream("/v1/completions", &long_request(150))).collect();
    for stream in &mut streams {
        assert!(stream.next().is_some());
    }
    let asked = Instant::now();
    core.signal(Signal::SIGTERM);
    wait_for("the drain", || (http.get("/ready").status == 503).then_some(()));
    // It is told, not found out by asking each second.
    assert!(asked.elapsed() < Duration::from_millis(900), "took {:?}", asked.elapsed());
    assert_eq!(http.get("/health").status, 503);
    assert_eq!(frontend.scrape().get("pawl:core_up"), 0.0);
    wait_for("NOT_SERVING", || {
        let status = grpc.wait(grpc.health().check(HealthCheckRequest::default())).unwrap();
        (status.into_inner().status == 2).then_some(())
    });
    for stream in [true, false] {
        let body = json!({"prompt": [5], "max_tokens": 1, "n": 2, "stream": stream});
        let late = http.post("/v1/completions", &body);
        assert_eq!(late.status, 503, "{}", late.text());
        let error = &late.json()["error"];
        assert_eq!(error["code"], "engine_unavailable");
        assert!(error["message"].as_str().unwrap().contains("stopping"), "{error}");
        assert!(late.header("retry-after").is_some(), "{late:?}");
    }
    let late = grpc.generate(grpc_request(3)).unwrap_err();
    assert_eq!(late.code(), tonic::Code::Unavailable, "{late:?}");
    assert_eq!(frontend.scrape().rejected("engine_unavailable"), 3.0);
    for stream in &mut streams {
        let events = stream.rest();
        assert_eq!(events.len(), 149);
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
        assert!(stream.is_done());
    }
    assert_eq!(core.wait().code(), Some(0), "{}", core.log());
    let page = frontend.scrape();
    assert_eq!((page.ended("length"), page.get("vllm:request_success_total")), (5.0, 5.0));

    let _next = run.mock_core(&[]);
    wait_for("the next core", || http.is_ready().then_some(()));
    let answer = http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 1}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(grpc.generate(grpc_request(3)).is_ok());
    assert_eq!(frontend.scrape().get("pawl:core_up"), 1.0);
}

/// Requests and the word that the core stops pass one another on the wire: while the core stands
/// still, neither end has heard of the other.
fn check_crossing(shutdown_timeout: &str) {
    let run = Run::new();
    let extra = ["--mock-step-ms", "20", "--shutdown-timeout", shutdown_timeout];
    let mut core = run.mock_core(&extra);
    let (frontend, grpc) = frontend(&run);
    core.signal(Signal::SIGSTOP);
    core.signal(Signal::SIGTERM);
    let http = frontend.http;
    let (answers, calls) = std::thread::scope(|scope| {
        let body = |nth: u64| json!({"prompt": [5], "max_tokens": 2, "stream": nth % 2 == 1});
        let asked: Vec<_> = (0..6)
            .map(|nth| scope.spawn(move || http.post("/v1/completions", &body(nth))))
            .collect();
        let called = scope.spawn(|| grpc.generate(grpc_request(2)));
        frontend.scrape_until("all sent", |s| s.get("pawl:requests_in_flight") == 7.0);
        core.signal(Signal::SIGCONT);
        let answers: Vec<_> = asked.into_iter().map(|asked| asked.join().unwrap()).collect();
        (answers, called.join().unwrap())
    });
    let mut away = 0.0;
    for answer in &answers {
        if answer.status != 200 {
            assert_eq!(answer.status, 503, "{}", answer.text());
            assert_eq!(answer.json()["error"]["code"], "engine_unavailable");
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
            away += 1.0;
        }
    }
    if let Err(status) = calls {
        assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");
        away += 1.0;
    }
    assert!(core.wait().success(), "{}", core.log());
    let page = frontend.scrape_until("all ended", |s| s.get("pawl:requests_in_flight") == 0.0);
    // Refused by the core's word, or lost with its link where that was first.
    assert_eq!(page.rejected("engine_unavailable") + page.ended("error"), away);
    assert_eq!((page.ended("length"), page.ended("abort")), (7.0 - away, 0.0));
}

#[test]
fn requests_that_cross_the_word_of_a_core_that_drains_are_served_or_refused() {
    check_crossing("50");
}

#[test]
fn requests_that_cross_the_word_of_a_core_that_stops_are_refused() {
    check_crossing("0");
}

fn assert_told_why(stream: &mut crate::harness::SseStream) {
    let last = stream.rest().pop().expect("an error event");
    assert_eq!(last["error"]["code"], "engine_unavailable", "{last}");
    assert!(last["error"]["message"].as_str().unwrap().contains("stopping"), "{last}");
    assert!(!stream.is_done());
}

#[test]
fn without_time_to_drain_streams_are_told_that_the_core_stops() {
    let run = Run::new();
    let mut core = run.mock_core(&["--mock-step-ms", "20", "--max-num-seqs", "2"]);
    let (frontend, grpc) = frontend(&run);
    let http = frontend.http;
    let mut streams: Vec<_> =
        (0..2).map(|_| http.stream("/v1/completions", &long_request(5000))).collect();
    for stream in &mut streams {
        assert!(stream.next().is_some());
    }
    // No room to run beside them, so it has no token; its head has been sent all the same.
    let queued = http.stream("/v1/completions", &long_request(5000));
    assert_eq!(queued.status, 200);
    let called = std::thread::scope(|scope| {
        let called = scope.spawn(|| grpc.generate(grpc_request(5)));
        frontend.scrape_until("four open", |s| s.get("pawl:requests_in_flight") == 4.0);
        core.signal(Signal::SIGTERM);
        called.join().unwrap().unwrap_err()
    });
    assert_eq!(called.code(), tonic::Code::Unavailable, "{called:?}");
    streams.push(queued);
    streams.iter_mut().for_each(assert_told_why);
    assert!(core.wait().success(), "{}", core.log());
    let page = frontend.scrape();
    assert_eq!((page.ended("abort"), page.rejected("engine_unavailable")), (2.0, 2.0));
    assert_eq!(page.get("vllm:request_success_total"), 2.0);
}

#[test]
fn a_child_core_that_somebody_stops_tells_why_and_is_started_again() {
    let run = Run::new();
    let served = Served::start(&run, 2, &["--mock-step-ms", "20"]);
    let mut streams: Vec<_> =
        (0..6).map(|_| served.http.stream("/v1/completions", &long_request(5000))).collect();
    for stream in &mut streams {
        assert!(stream.next().is_some());
    }
    signal(served.child("engine-core"), Signal::SIGTERM);
    streams.iter_mut().for_each(assert_told_why);
    for admin in &served.admins {
        wait_for("the next core", || admin.is_ready().then_some(()));
    }
}
