//! Calls that are left, cut off or outlived by their core, and servers that stop.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pawl_proto::finish_info::FinishReason;
use pawl_proto::{CandidateTokens, GenerateRequest};
use pawl_proto::{GetServerInfoRequest, ResponseOptions, candidate_tokens::Select};
use serde_json::json;
use tonic::{Code, Request, Streaming};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::client::{Grpc, grpc_port};
use super::{ask, frontend, reason, sequences};
use crate::harness::{Run, Scrape, wait_for};

const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

fn calls(scrape: &Scrape, method: &str, code: &str) -> f64 {
    let labels = [("grpc_method", method), ("grpc_code", code)];
    scrape.sum_if_any("grpc_server_handled_total", &labels)
}

#[test]
fn a_call_that_is_cancelled_leaves_the_core() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "10"]);
    let (frontend, grpc) = frontend(&run, &[]);
    // A stream in the middle.
    let mut stream = grpc.stream(ask(4_000)).unwrap();
    stream.next().unwrap().unwrap();
    frontend.scrape_until("it running", |s| s.running() == 1.0);
    let left = Instant::now();
    drop(stream);
    let after = frontend.idle();
    assert!(left.elapsed() < Duration::from_secs(2), "took {:?}", left.elapsed());
    assert_eq!((after.ended("abort"), calls(&after, "GenerateStream", "Canceled")), (1.0, 1.0));

    // A whole answer before it is there.
    let call = async { grpc.inference().generate(ask(4_000)).await };
    assert!(grpc.within(Duration::from_millis(300), call).is_none(), "an answer so soon");
    let after = frontend.idle();
    assert_eq!((after.ended("abort"), calls(&after, "Generate", "Canceled")), (2.0, 1.0));

    // A client that dies with its connection.
    let dying = Grpc::connect(grpc_port(&run.path("api.ports")));
    let mut stream = dying.stream(ask(4_000)).unwrap();
    stream.next().unwrap().unwrap();
    // Without a word: the stream is not dropped, its connection is.
    std::mem::forget(stream);
    drop(dying);
    let after = frontend.idle();
    assert_eq!((after.ended("abort"), after.ended("length")), (3.0, 0.0));
    assert_eq!(after.get("vllm:request_success_total"), 3.0);
}

#[test]
fn deadlines_are_the_servers_too() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "10"]);
    let (frontend, grpc) = frontend(&run, &[]);
    // This client sends its deadline along and then waits: only the server can end the call.
    let late = |request: &mut Request<GenerateRequest>| {
        request.set_timeout(Duration::from_millis(400));
    };
    let mut request = Request::new(ask(4_000));
    late(&mut request);
    let asked = Instant::now();
    let mut stream = grpc.stream(request).unwrap();
    let (messages, end) = stream.rest();
    assert!(!messages.is_empty());
    assert_eq!(end.unwrap_err().code(), Code::DeadlineExceeded);
    let took = asked.elapsed();
    assert!(took > Duration::from_millis(380) && took < Duration::from_secs(3), "took {took:?}");
    let after = frontend.idle();
    assert_eq!(calls(&after, "GenerateStream", "DeadlineExceeded"), 1.0);

    let mut request = Request::new(ask(4_000));
    late(&mut request);
    let status = grpc.wait(async { grpc.inference().generate(request).await }).unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    let after = frontend.idle();
    assert_eq!(after.ended("abort"), 2.0);
    assert_eq!(calls(&after, "Generate", "DeadlineExceeded"), 1.0);
}

#[test]
fn requests_of_both_surfaces_are_aborted_by_their_ids() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "10"]);
    let (frontend, grpc) = frontend(&run, &[]);
    let named = GenerateRequest { request_id: "mine".into(), ..ask(4_000) };
    let mut stream = grpc.stream(named).unwrap();
    assert_eq!(stream.id, "mine");
    let mut unnamed = grpc.stream(ask(4_000)).unwrap();
    let body = json!({"prompt": [1, 2], "max_tokens": 4_000, "ignore_eos": true, "stream": true,
                      "request_id": "theirs", "return_token_ids": true});
    let mut http = frontend.http.stream("/v1/completions", &body);
    let first = stream.next().unwrap().unwrap();
    let other = unnamed.next().unwrap().unwrap();
    let mut tokens = http.next().unwrap()["choices"][0]["token_ids"].as_array().unwrap().len();

    assert_eq!(grpc.abort(&["nobody", "mine", "cmpl-theirs"]), 2);
    let (messages, end) = stream.rest();
    end.expect("an abort is no failure");
    let sequence = sequences(&[vec![first], messages].concat()).remove(0);
    assert_eq!(reason(&sequence), FinishReason::Aborted);
    let events = http.rest();
    assert!(http.is_done());
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "abort");
    for event in &events {
        tokens += event["choices"][0]["token_ids"].as_array().unwrap().len();
    }
    assert_eq!(grpc.abort(&["mine"]), 0, "it has ended");

    let id = unnamed.id.clone();
    let asked = Instant::now();
    assert_eq!(grpc.abort(&[&id]), 1);
    let (messages, end) = unnamed.rest();
    end.unwrap();
    let last = sequences(&[vec![other], messages].concat()).remove(0);
    assert_eq!(reason(&last), FinishReason::Aborted);
    let after = frontend.idle();
    assert!(asked.elapsed() < Duration::from_secs(2), "the core went on: {:?}", asked.elapsed());
    assert_eq!(after.ended("abort"), 3.0);
    // Nothing was counted that its client did not get.
    let seen = sequence.token_ids.len() + last.token_ids.len() + tokens;
    assert_eq!(after.get("vllm:generation_tokens_total"), seen as f64);
    let many = vec![String::from("x"); 1_025];
    let request = pawl_proto::AbortRequest { request_ids: many };
    let refused = grpc.wait(grpc.control().abort(request)).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

fn watch(grpc: &Grpc) -> Streaming<HealthCheckResponse> {
    let request = HealthCheckRequest { service: "pawl.Inference".into() };
    grpc.wait(grpc.health().watch(request)).unwrap().into_inner()
}

#[test]
fn health_follows_the_core_through_its_lives() {
    let run = Run::new();
    let core = run.mock_core(&["--mock-step-ms", "10"]);
    let (frontend, grpc) = frontend(&run, &[]);
    let mut health = watch(&grpc);
    let mut next = || grpc.wait(health.message()).unwrap().unwrap().status;
    assert_eq!(next(), SERVING);
    let mut stream = grpc.stream(ask(4_000)).unwrap();
    stream.next().unwrap().unwrap();
    core.signal(Signal::SIGKILL);
    let killed = Instant::now();
    assert_eq!(next(), NOT_SERVING);
    assert!(killed.elapsed() < Duration::from_secs(1), "took {:?}", killed.elapsed());
    let (_, end) = stream.rest();
    assert_eq!(end.unwrap_err().code(), Code::Unavailable);
    assert!(killed.elapsed() < Duration::from_secs(2), "took {:?}", killed.elapsed());
    drop(core);
    let _next_core = run.mock_core(&[]);
    assert_eq!(next(), SERVING);
    grpc.generate(ask(3)).unwrap();
    let after = frontend.idle();
    assert_eq!((after.ended("error"), after.ended("length")), (1.0, 1.0));
}

#[test]
fn a_drain_finishes_calls_and_refuses_new_ones() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "20"]);
    let (mut frontend, grpc) = frontend(&run, &["--shutdown-timeout", "30"]);
    let mut health = watch(&grpc);
    let mut next = || grpc.wait(health.message()).unwrap().unwrap().status;
    assert_eq!(next(), SERVING);
    let mut stream = grpc.stream(ask(100)).unwrap();
    let first = stream.next().unwrap().unwrap();
    frontend.process.signal(Signal::SIGTERM);
    assert_eq!(next(), NOT_SERVING);
    let refused = grpc.generate(ask(1)).unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("shutting down"), "{refused:?}");
    let newcomer = Grpc::connect(grpc_port(&run.path("api.ports")));
    assert_eq!(newcomer.generate(ask(1)).unwrap_err().code(), Code::Unavailable);
    let (messages, end) = stream.rest();
    end.unwrap();
    let whole = sequences(&[vec![first], messages].concat()).remove(0);
    assert_eq!((whole.token_ids.len(), reason(&whole)), (100, FinishReason::Length));
    let status = frontend.process.wait();
    assert_eq!(status.code(), Some(0), "{}", frontend.process.log());
}

#[test]
fn without_time_to_drain_calls_end_as_unavailable() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "20"]);
    let (mut frontend, grpc) = frontend(&run, &[]);
    let mut stream = grpc.stream(ask(4_000)).unwrap();
    stream.next().unwrap().unwrap();
    let asked = Instant::now();
    frontend.process.signal(Signal::SIGTERM);
    let (_, end) = stream.rest();
    assert_eq!(end.unwrap_err().code(), Code::Unavailable);
    assert!(asked.elapsed() < Duration::from_secs(2), "took {:?}", asked.elapsed());
    assert_eq!(frontend.process.wait().code(), Some(0), "{}", frontend.process.log());
}

/// One call is not read; the other calls of the connection, and the core, feel nothing of it.
#[test]
fn a_call_that_is_not_read_is_cut_off_alone() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let (frontend, _) = frontend(&run, &[]);
    let narrow = Grpc::with_window(grpc_port(&run.path("api.ports")), 65_535);
    let talkative = GenerateRequest {
        response: Some(ResponseOptions {
            output_logprobs: true,
            output_candidates: Some(CandidateTokens { select: Some(Select::TopN(20)) }),
            ..Default::default()
        }),
        sampling: Some(pawl_proto::RandomSampling { num_sequences: 8, ..Default::default() }),
        ..ask(7_000)
    };
    let mut unread = narrow.stream(talkative).unwrap();
    unread.next().unwrap().unwrap();
    let cut = |s: &Scrape| s.get("pawl:slow_reader_aborts_total") == 1.0;
    wait_for("the cut", || {
        assert_eq!(sequences(&[narrow.generate(ask(5)).unwrap()])[0].token_ids.len(), 5);
        Some(frontend.scrape()).filter(cut)
    });
    let after = frontend.idle();
    assert_eq!(after.ended("abort"), 8.0);
    // Should the client come back after all, it reads that the answer is not whole.
    let (_, end) = unread.rest();
    assert_eq!(end.unwrap_err().code(), Code::ResourceExhausted);
}

#[test]
fn api_servers_share_the_port() {
    let run = Run::new();
    let flags = ["--runner", "mock", "--api-server-count", "2", "--grpc-port", "0"];
    let served = run.serve(&flags);
    let port = grpc_port(&run.path("serve.ports"));
    assert_eq!(port, grpc_port(&run.path("serve.ports.1")));
    let mut instances = std::collections::BTreeSet::new();
    wait_for("both api-servers", || {
        let grpc = Grpc::connect(port);
        // The second one may not have its core yet.
        let info = grpc.wait(grpc.control().get_server_info(GetServerInfoRequest {})).ok()?;
        instances.insert(info.into_inner().instance_id);
        assert_eq!(sequences(&[grpc.generate(ask(2)).unwrap()])[0].token_ids.len(), 2);
        (instances.len() == 2).then_some(())
    });
    drop(served);
}
