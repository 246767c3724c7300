//! Errors: the same words as over HTTP, under a status that clients' libraries understand.

use std::time::Duration;

use pawl_proto::generate_request::Prompt;
use pawl_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, GetModelInfoRequest,
    GetServerInfoRequest, ResponseOptions, StoppingCriteria, TokenIds, candidate_tokens::Select,
};
use serde_json::{Value, json};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

use super::{ask, frontend};
use crate::harness::{Run, wait_for};

fn reason(status: &Status) -> String {
    status.get_error_details().error_info().expect("a reason").reason.clone()
}

fn retry_after(status: &Status) -> Option<Duration> {
    status.get_error_details().retry_info().and_then(|info| info.retry_delay)
}

#[test]
fn refusals_say_what_http_says() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let (frontend, grpc) = frontend(&run, &[]);
    let ids = |ids: Vec<u32>| Some(Prompt::TokenIds(TokenIds { ids }));
    let stop = |stopping| Some(StoppingCriteria { ignore_eos: true, ..stopping });
    let long: Vec<u32> = vec![5; 20_000];
    let cases: Vec<(GenerateRequest, Value, Code, &str)> = vec![
        (
            GenerateRequest { temperature: Some(-0.5), ..ask(5) },
            json!({"temperature": -0.5}),
            Code::InvalidArgument,
            "temperature",
        ),
        (
            GenerateRequest { model: "other".into(), ..ask(5) },
            json!({"model": "other"}),
            Code::NotFound,
            "model",
        ),
        (
            GenerateRequest { prompt: ids(long.clone()), ..ask(5) },
            json!({"prompt": long}),
            Code::InvalidArgument,
            "prompt",
        ),
        (
            GenerateRequest { prompt: ids(vec![]), ..ask(5) },
            json!({"prompt": []}),
            Code::InvalidArgument,
            "prompt",
        ),
        (
            GenerateRequest { prompt: ids(vec![512]), ..ask(5) },
            json!({"prompt": [512]}),
            Code::InvalidArgument,
            "prompt",
        ),
        (
            ask(9_000),
            json!({"max_tokens": 9_000}),
            Code::InvalidArgument,
            "stopping.max_new_tokens",
        ),
        (
            GenerateRequest {
                stopping: stop(StoppingCriteria {
                    max_new_tokens: 5,
                    min_new_tokens: 6,
                    ..Default::default()
                }),
                ..ask(5)
            },
            json!({"max_tokens": 5, "min_tokens": 6}),
            Code::InvalidArgument,
            "stopping.min_new_tokens",
        ),
        (
            GenerateRequest {
                decoding: Some(DecodingParameters {
                    logit_bias: [(600, 1.0)].into(),
                    ..Default::default()
                }),
                ..ask(5)
            },
            json!({"logit_bias": {"600": 1.0}}),
            Code::InvalidArgument,
            "decoding.logit_bias",
        ),
        (
            GenerateRequest {
                response: Some(ResponseOptions {
                    output_logprobs: true,
                    output_candidates: Some(CandidateTokens { select: Some(Select::TopN(21)) }),
                    ..Default::default()
                }),
                ..ask(5)
            },
            json!({"logprobs": 21}),
            Code::InvalidArgument,
            "response.output_candidates.top_n",
        ),
        (
            GenerateRequest { request_id: "a b".into(), ..ask(5) },
            json!({"request_id": "a b"}),
            Code::InvalidArgument,
            "request_id",
        ),
        (
            GenerateRequest { priority: 1, ..ask(5) },
            json!({"priority": 1}),
            Code::InvalidArgument,
            "priority",
        ),
    ];
    for (message, fields, code, place) in cases {
        let mut body = json!({"prompt": [7, 8, 9], "max_tokens": 5});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let http = frontend.http.post("/v1/completions", &body).json();
        let shown = http["error"]["message"].as_str().unwrap_or_default().to_owned();
        for streamed in [false, true] {
            let refused = match streamed {
                false => grpc.generate(message.clone()).unwrap_err(),
                true => grpc.stream(message.clone()).map(|_| ()).unwrap_err(),
            };
            assert_eq!((refused.code(), refused.message()), (code, shown.as_str()), "{place}");
            assert_eq!(reason(&refused), http["error"]["code"], "{place}");
            let details = refused.get_error_details();
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, place);
            assert_eq!(retry_after(&refused), None, "{place}");
        }
    }
    // Both lengths are named.
    let long = GenerateRequest { prompt: ids(vec![5; 20_000]), ..ask(5) };
    let refused = grpc.generate(long).unwrap_err();
    assert_eq!(reason(&refused), "context_length_exceeded");
    let model = grpc.wait(grpc.control().get_server_info(GetServerInfoRequest {})).unwrap();
    let context = model.into_inner().max_model_len.to_string();
    for length in ["20000", context.as_str()] {
        assert!(refused.message().contains(length), "{length} in {}", refused.message());
    }
}

#[test]
fn calls_are_bounded_in_number_size_and_form() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "20"]);
    let flags = ["--max-num-queued-reqs", "1", "--max-body-bytes", "64KiB"];
    let (frontend, grpc) = frontend(&run, &flags);

    let mut running = grpc.stream(ask(2_000)).unwrap();
    running.next().unwrap().unwrap();
    let full = grpc.generate(ask(1)).unwrap_err();
    assert_eq!((full.code(), reason(&full).as_str()), (Code::ResourceExhausted, "queue_full"));
    assert!(retry_after(&full).is_some_and(|after| after >= Duration::from_secs(1)), "{full:?}");
    let http = frontend.http.post("/v1/completions", &json!({"prompt": [1], "max_tokens": 1}));
    assert_eq!(
        (http.status, http.json()["error"]["message"].as_str()),
        (503, Some(full.message()))
    );
    drop(running);
    frontend.scrape_until("room", |s| s.get("pawl:requests_in_flight") == 0.0);

    let large = GenerateRequest { prompt: Some(Prompt::Text("x".repeat(70_000))), ..ask(1) };
    let large = grpc.generate(large).unwrap_err();
    assert_eq!(large.code(), Code::OutOfRange, "{large:?}");
    assert!(large.message().contains("65536"), "{large:?}");

    let unknown = grpc.wait(async {
        let mut raw = grpc.raw();
        raw.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<GenerateRequest, ()>::default();
        let path = "/pawl.Inference/Guess".parse().unwrap();
        raw.unary(Request::new(ask(1)), path, codec).await.unwrap_err()
    });
    assert_eq!(unknown.code(), Code::Unimplemented);

    let mut odd = Request::new(ask(1));
    odd.metadata_mut().insert("grpc-timeout", "soon".parse().unwrap());
    let odd = grpc.wait(async { grpc.inference().generate(odd).await }).unwrap_err();
    assert_eq!(odd.code(), Code::InvalidArgument);
    assert!(odd.message().contains("grpc-timeout"), "{odd:?}");
    // None of this hurt the connection.
    grpc.generate(ask(3)).unwrap();
}

#[test]
fn keys_are_asked_for_as_over_http() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let (frontend, grpc) = frontend(&run, &["--api-key", "open-sesame"]);
    let with = |key: &str| {
        let mut request = Request::new(ask(2));
        request.metadata_mut().insert("authorization", key.parse().unwrap());
        grpc.wait(async { grpc.inference().generate(request).await })
    };
    assert!(with("Bearer open-sesame").is_ok());
    let http = frontend.http.post("/v1/completions", &json!({"prompt": [1]}));
    let message = http.json()["error"]["message"].as_str().unwrap().to_owned();
    for refused in [grpc.generate(ask(2)).unwrap_err(), with("Bearer guess").unwrap_err()] {
        assert_eq!(refused.code(), Code::Unauthenticated);
        assert_eq!((refused.message(), reason(&refused).as_str()), (&*message, "invalid_api_key"));
    }
    let control = grpc.wait(grpc.control().get_model_info(GetModelInfoRequest {}));
    assert_eq!(control.unwrap_err().code(), Code::Unauthenticated);
    // As over HTTP, whoever watches the server needs none.
    let request = tonic_health::pb::HealthCheckRequest::default();
    assert_eq!(grpc.wait(grpc.health().check(request)).unwrap().into_inner().status, 1);
}

#[test]
fn without_a_core_calls_are_told_to_come_back() {
    let run = Run::new();
    let mut core = run.mock_core(&[]);
    let (frontend, grpc) = frontend(&run, &[]);
    assert!(core.stop().success());
    let refused = wait_for("its absence", || grpc.generate(ask(1)).err());
    assert_eq!(
        (refused.code(), reason(&refused).as_str()),
        (Code::Unavailable, "engine_unavailable")
    );
    assert!(retry_after(&refused).is_some());
    let http = frontend.http.post("/v1/completions", &json!({"prompt": [1]})).json();
    assert_eq!(http["error"]["message"], refused.message());
    let control = grpc.wait(grpc.control().get_model_info(GetModelInfoRequest {}));
    assert_eq!(control.unwrap_err().code(), Code::Unavailable);
}
