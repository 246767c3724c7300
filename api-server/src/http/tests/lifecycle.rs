//! A core that is away, a full house, a stop, a client that leaves.

use super::*;
use crate::config::{HttpLimits, RequestTimingMode};
use pawl_shared::clock::Stamp;
use std::time::Duration;

const COMPLETION: &str = r#"{"prompt":"Hi"}"#;

#[tokio::test]
async fn without_a_core_everything_but_probes_of_the_process_is_503() {
    let stage = Stage::new(|_| Vec::new());
    let mut shown = String::new();
    for status in [
        EngineStatus::Connecting,
        EngineStatus::Hung { since: Stamp::from_nanos(1_000_000_000) },
        EngineStatus::Down { reason: "its process ended".into() },
    ] {
        *stage.engine.status.lock().unwrap() = status;
        shown += &format!("{}\n\n", stage.post("/v1/completions", COMPLETION).await);
    }
    for path in ["/health", "/ready", "/v1/models"] {
        let answer = stage.get(path).await;
        shown += &format!("{path}: {}\n", answer.lines().next().unwrap());
    }
    for path in ["/version", "/load", "/metrics"] {
        let answer = stage.get(path).await;
        shown += &format!("{path}: {}\n", answer.lines().next().unwrap());
    }
    insta::assert_snapshot!(shown);
}

#[tokio::test]
async fn a_full_house_refuses_with_retry_after_and_takes_again_once_there_is_room() {
    let config = FrontendConfig { max_num_queued_reqs: Some(2), ..FrontendConfig::default() };
    let stage = Stage::with(config, |submit| {
        if submit.streaming { Vec::new() } else { ended(words(&["x"]), FinishReason::Stop, None) }
    });
    let open = |n: u32| {
        let body = format!(r#"{{"prompt":"Hi","stream":true,"n":{n}}}"#);
        let request = Request::post("/v1/completions").body(Body::from(body)).unwrap();
        super::super::router(Arc::clone(&stage.app)).oneshot(request)
    };
    let held = open(2).await.unwrap();
    insta::assert_snapshot!(stage.post("/v1/completions", COMPLETION).await);
    drop(held);
    assert_eq!(stage.app.load(), 0);
    assert!(stage.post("/v1/completions", COMPLETION).await.starts_with("200"));
    assert_eq!(stage.aborted(), 1, "the dropped stream was aborted");
}

/// The core's own refusal, which comes when other frontends have filled it.
#[tokio::test]
async fn a_full_core_is_503_until_a_stream_has_begun_and_an_event_from_then_on() {
    let full = || failure(FailureKind::Engine, "queue_full", "6 requests are already waiting");
    let stage = Stage::new(move |_| vec![full()]);
    let mut shown = stage.post("/v1/completions", COMPLETION).await;
    let list = r#"{"prompt":["Hi","Ho"],"n":2,"stream":true}"#;
    for (path, body) in [
        ("/v1/completions", list),
        ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"Hi"}],"stream":true}"#),
    ] {
        shown += &format!("\n\n{}", stage.post(path, body).await);
    }
    let stage = Stage::new(move |_| [words(&["red"]), vec![full()]].concat());
    let begun = stage.post("/v1/completions", r#"{"prompt":"Hi","stream":true}"#).await;
    let events: Vec<&str> = begun.split("data: ").skip(1).collect();
    assert!(events.len() == 2 && events[0].contains("red"), "{begun}");
    insta::assert_snapshot!(shown + "\n\nbegun: " + events[1]);
}

#[tokio::test]
async fn a_paused_core_is_503_with_a_time_to_come_again() {
    let stage =
        Stage::new(|_| vec![failure(FailureKind::Engine, "engine_paused", "generation is paused")]);
    let answer = stage.post("/v1/completions", COMPLETION).await;
    assert!(answer.starts_with("503 Service Unavailable\nretry-after: 1\n"), "{answer}");
    assert!(answer.contains(r#""code":"engine_paused""#), "{answer}");
}

#[tokio::test]
async fn a_quiet_stream_gets_comments_and_a_reader_that_leaves_aborts_it() {
    let limits = HttpLimits { keep_alive: Duration::from_millis(1), ..HttpLimits::default() };
    let stage =
        Stage::with(FrontendConfig { limits, ..FrontendConfig::default() }, |_| words(&["red"]));
    let request = Request::post("/v1/completions")
        .body(Body::from(r#"{"prompt":"Hi","stream":true}"#))
        .unwrap();
    let response = super::super::router(Arc::clone(&stage.app)).oneshot(request).await.unwrap();
    let mut body = response.into_body();
    let mut events = Vec::new();
    for _ in 0..3 {
        let frame = body.frame().await.unwrap().unwrap();
        events.push(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap());
    }
    assert!(events[0].starts_with("data: {"), "{events:?}");
    assert_eq!(events[1..], [": keep-alive\n\n", ": keep-alive\n\n"]);
    assert_eq!((stage.aborted(), stage.app.load()), (0, 1));
    drop(body);
    assert_eq!((stage.aborted(), stage.app.load()), (1, 0));
}

#[tokio::test]
async fn while_draining_new_work_is_refused_and_probes_tell() {
    let stage = Stage::new(|_| ended(words(&["x"]), FinishReason::Stop, None));
    stage.app.begin_drain();
    let mut shown = stage.post("/v1/completions", COMPLETION).await;
    for path in ["/health", "/ready"] {
        shown += &format!("\n\n{path}\n{}", stage.get(path).await);
    }
    insta::assert_snapshot!(shown);
}

#[tokio::test]
async fn timing_is_told_where_it_is_asked_for() {
    let config =
        FrontendConfig { request_timing: RequestTimingMode::Header, ..FrontendConfig::default() };
    let stage = Stage::with(config, |_| {
        let mut script = ended(words(&["x"]), FinishReason::Stop, None);
        script[0].timing = Some(crate::engine_client::RequestTiming {
            intake: Duration::from_micros(100),
            queue: Duration::from_micros(200),
            prefill: Duration::from_millis(3),
            decode: Duration::ZERO,
            deliver: Duration::from_micros(50),
        });
        script
    });
    let told = "intake=0.000100, queue=0.000200, prefill=0.003000, decode=0.000000, \
                deliver=0.000050, total=0.003350";
    let whole = stage.post("/v1/completions", COMPLETION).await;
    assert!(whole.contains(&format!("x-pawl-timing: {told}\n")), "{whole}");
    let stream = stage.post("/v1/completions", r#"{"prompt":"Hi","stream":true}"#).await;
    assert!(stream.ends_with(&format!(": pawl-timing {told}\n\ndata: [DONE]\n\n")), "{stream}");
}

#[tokio::test]
async fn keys_are_bound_to_routes() {
    let config = FrontendConfig {
        api_keys: vec!["one".into(), "two".into()],
        allowed_origins: vec!["https://page.example".into()],
        ..FrontendConfig::default()
    };
    let stage = Stage::with(config, |_| ended(words(&["x"]), FinishReason::Stop, None));
    let mut shown = String::new();
    for (method, path, key) in [
        ("POST", "/v1/completions", None),
        ("POST", "/v1/completions", Some("Bearer three")),
        ("POST", "/v1/completions", Some("Bearer ")),
        ("POST", "/v1/completions", Some("Basic one")),
        ("POST", "/v1/completions", Some("bearer two")),
        ("GET", "/v1/models", None),
        ("HEAD", "/v1/models", None),
        ("OPTIONS", "/v1/completions", None),
        ("POST", "//v1/completions", None),
        ("POST", "/v1/./completions", None),
        ("POST", "/V1/completions", None),
        ("POST", "/v1%2fcompletions", None),
        ("POST", "http://other/v1/completions", None),
        ("POST", "/v1/completions/", None),
        ("POST", "/tokenize", None),
        ("GET", "/health", None),
        ("GET", "/metrics", None),
    ] {
        // Host says /health: no decision may be made by it.
        let mut request = Request::builder().method(method).uri(path).header("host", "x/health?");
        if let Some(key) = key {
            request = request.header("authorization", key);
        }
        let answer = stage.send(request.body(Body::from(COMPLETION)).unwrap()).await;
        let status = answer.lines().next().unwrap().to_owned();
        shown += &format!("{method} {path} {}: {status}\n", key.unwrap_or("-"));
    }
    insta::assert_snapshot!(shown);

    let ask_first = |origin: &str| {
        let request = Request::options("/v1/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST");
        super::super::router(Arc::clone(&stage.app)).oneshot(request.body(Body::empty()).unwrap())
    };
    let allowed = ask_first("https://page.example").await.unwrap();
    assert_eq!(allowed.status(), 204);
    assert_eq!(allowed.headers()["access-control-allow-origin"], "https://page.example");
    let other = ask_first("https://other.example").await.unwrap();
    assert_eq!(other.status(), 401);
    assert!(!other.headers().contains_key("access-control-allow-origin"));
}
