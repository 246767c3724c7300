//! What is counted of each answer.

use super::*;
use crate::metrics::Format;

fn page(stage: &Stage) -> String {
    String::from_utf8(stage.app.metrics.render(Format::Text004).1).unwrap()
}

/// The samples of `family` that are not zero.
fn samples(stage: &Stage, family: &str) -> String {
    let page = page(stage);
    let samples = page.lines().filter(|line| line.starts_with(family) && !line.ends_with(" 0"));
    samples.map(|line| format!("{line}\n")).collect()
}

#[tokio::test]
async fn every_answer_by_route_and_status() {
    let config = FrontendConfig { api_keys: vec!["k".into()], ..FrontendConfig::default() };
    let stage = Stage::with(config, |submit| {
        if submit.params.seed == Some(7) {
            words(&["endless"])
        } else {
            ended(words(&["x"]), FinishReason::Stop, None)
        }
    });
    let send = async |method: &str, path: &str, body: &str| {
        let request =
            Request::builder().method(method).uri(path).header("authorization", "Bearer k");
        stage.send(request.body(Body::from(body.to_owned())).unwrap()).await
    };
    send("POST", "/v1/completions", r#"{"prompt":"Hi"}"#).await;
    send("POST", "/v1/completions", r#"{"prompt":"Hi","stream":true}"#).await;
    send("POST", "/v1/completions", r#"{"prompt":""}"#).await;
    send("POST", "/v1/completions", r#"{"prompt":"Hi","model":"other"}"#).await;
    send("GET", "/v1/completions", "").await;
    send("BREW", "/v1/models", "").await;
    send("GET", "/v1/models", "").await;
    send("GET", "/nothing", "").await;
    for probe in ["/health", "/ready", "/version", "/load", "/metrics", "/ping"] {
        send("GET", probe, "").await;
    }
    send("DELETE", "/health", "").await;
    let without_key = Request::get("/v1/models").body(Body::empty()).unwrap();
    stage.send(without_key).await;
    // One client leaves before its answer's head, one in the middle of a stream.
    let open = |body: &'static str| {
        let request = Request::post("/v1/completions").header("authorization", "Bearer k");
        super::super::router(Arc::clone(&stage.app))
            .oneshot(request.body(Body::from(body)).unwrap())
    };
    let waiting = tokio::spawn(open(r#"{"prompt":"Hi","seed":7}"#));
    while stage.app.load() == 0 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    waiting.await.unwrap_err();
    drop(open(r#"{"prompt":"Hi","seed":7,"stream":true}"#).await.unwrap());
    assert_eq!((stage.app.open.count(), stage.app.load(), stage.aborted()), (0, 0, 2));
    insta::assert_snapshot!(samples(&stage, "http_requests_total"));
}

#[tokio::test]
async fn names_that_clients_make_up_make_no_series() {
    let stage = Stage::new(|_| ended(words(&["x"]), FinishReason::Stop, None));
    let once = async |at: usize| {
        stage.get(&format!("/path/{at}")).await;
        stage.post("/v1/completions", &format!(r#"{{"prompt":"Hi","model":"m{at}"}}"#)).await;
    };
    once(0).await;
    let before = page(&stage).lines().count();
    for at in 1..300 {
        once(at).await;
    }
    assert_eq!(page(&stage).lines().count(), before);
}

#[tokio::test]
async fn refusals_at_the_door_are_counted_by_reason() {
    let config = FrontendConfig { max_num_queued_reqs: Some(0), ..FrontendConfig::default() };
    let stage = Stage::with(config, |_| words(&["endless"]));
    let request = Request::post("/v1/completions")
        .body(Body::from(r#"{"prompt":"Hi","stream":true}"#))
        .unwrap();
    // The first is let in whatever the bound: else nothing could be served.
    let held = super::super::router(Arc::clone(&stage.app)).oneshot(request).await.unwrap();
    stage.post("/v1/completions", r#"{"prompt":"Hi"}"#).await;
    *stage.engine.status.lock().unwrap() = EngineStatus::Connecting;
    stage.post("/v1/completions", r#"{"prompt":"Hi"}"#).await;
    stage.app.begin_drain();
    stage.post("/v1/completions", r#"{"prompt":"Hi"}"#).await;
    // These counters have a model's name, which a core tells.
    stage.app.metrics.engine("m", 0, 64);
    insta::assert_snapshot!(samples(&stage, "vllm:admission_rejections_total"));
    drop(held);
}
