//! What clients get: whole answers and streams, in vLLM's shapes.

use super::*;

fn three(submit: &Submit) -> Vec<Update> {
    let script = ended(words(&["red", " green", " blue"]), FinishReason::Length, None);
    let script = if submit.params.logprobs.is_some() { logprobs(script) } else { script };
    // With n choices the pieces of each come in turn.
    let n = submit.params.n;
    script
        .into_iter()
        .flat_map(|update| (0..n).map(move |choice| Update { choice, ..update.clone() }))
        .collect()
}

#[tokio::test]
async fn a_completion() {
    let stage = Stage::new(three);
    let body = r#"{"model":"mock","prompt":"Hi","max_tokens":3}"#;
    insta::assert_snapshot!(stage.post("/v1/completions", body).await);
}

#[tokio::test]
async fn a_completion_of_two_prompts_twice_each() {
    let stage = Stage::new(three);
    let body =
        r#"{"prompt":[[1,2,3],[4]],"n":2,"max_tokens":3,"echo":true,"return_token_ids":true}"#;
    insta::assert_snapshot!(stage.post("/v1/completions", body).await);
}

#[tokio::test]
async fn a_completion_with_logprobs() {
    let stage = Stage::new(three);
    let body = r#"{"prompt":"Hi","max_tokens":3,"logprobs":1}"#;
    insta::assert_snapshot!(stage.post("/v1/completions", body).await);
}

#[tokio::test]
async fn a_streamed_completion() {
    let stage = Stage::new(three);
    let body = r#"{"prompt":"Hi","max_tokens":3,"n":2,"logprobs":0,"stream":true,
                   "stream_options":{"include_usage":true}}"#;
    insta::assert_snapshot!(stage.post("/v1/completions", body).await);
}

#[tokio::test]
async fn a_chat() {
    let config = FrontendConfig { enable_prompt_tokens_details: true, ..FrontendConfig::default() };
    let stage = Stage::with(config, |_| {
        ended(words(&["red", " green"]), FinishReason::Stop, Some(StopReason::Token(66)))
    });
    let body = r#"{"model":"alias","messages":[{"role":"user","content":"Hi"}],"max_tokens":3}"#;
    insta::assert_snapshot!(stage.post("/v1/chat/completions", body).await);
}

#[tokio::test]
async fn a_streamed_chat() {
    let stage = Stage::new(|submit| {
        let script = ended(words(&["red", " green"]), FinishReason::Stop, None);
        if submit.params.logprobs.is_some() { logprobs(script) } else { script }
    });
    let body = r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"stream":true,
                   "logprobs":true,"top_logprobs":1,"return_token_ids":true,
                   "stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#;
    insta::assert_snapshot!(stage.post("/v1/chat/completions", body).await);
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_error_event_and_never_a_finish() {
    let stage = Stage::new(|_| {
        let mut script = words(&["red"]);
        script.push(failure(FailureKind::CoreDown, "engine_down", "the core was killed"));
        script
    });
    let body = r#"{"prompt":"Hi","stream":true,"stream_options":{"include_usage":true}}"#;
    insta::assert_snapshot!(stage.post("/v1/completions", body).await);
    let body = r#"{"messages":[{"role":"user","content":"Hi"}]}"#;
    insta::assert_snapshot!(stage.post("/v1/chat/completions", body).await);
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_an_error() {
    // Two choices asked for, the second never ends.
    let stage = Stage::new(|_| ended(words(&["red"]), FinishReason::Stop, None));
    let body = r#"{"prompt":"Hi","n":2,"stream":true}"#;
    let shown = stage.post("/v1/completions", body).await;
    assert!(shown.contains(r#""code":"engine_error""#), "{shown}");
    assert!(!shown.contains("[DONE]"), "{shown}");
}

#[tokio::test]
async fn what_the_core_is_asked() {
    let stage = Stage::new(three);
    let body = r#"{"prompt":["ab","c"],"max_tokens":5,"temperature":0,"top_p":0.5,"seed":7,
                   "stop":"\n","bad_words":["x"],"min_tokens":1,"logit_bias":{"5":-100},
                   "stop_token_ids":[9],"ignore_eos":true,"cache_salt":"s","n":1}"#;
    stage.post("/v1/completions", body).await;
    let submitted = stage.engine.submitted.lock().unwrap();
    insta::assert_debug_snapshot!(*submitted);
}

#[tokio::test]
async fn the_small_routes() {
    let stage = Stage::new(three);
    let mut shown = String::new();
    for path in ["/v1/models", "/health", "/ready", "/ping", "/version", "/load"] {
        shown += &format!("GET {path}\n{}\n\n", stage.get(path).await);
    }
    for (path, body) in [
        ("/ping", ""),
        ("/tokenize", r#"{"prompt":"Hi","return_token_strs":true}"#),
        (
            "/tokenize",
            r#"{"messages":[{"role":"user","content":"Hi"}],"add_generation_prompt":false}"#,
        ),
        ("/tokenize", r#"{"prompt":"Hi","messages":[{"role":"user","content":"Hi"}]}"#),
        ("/tokenize", r#"{"prompt":"Hi","messages":null}"#),
        ("/detokenize", r#"{"tokens":[257,72,105]}"#),
        ("/detokenize", r#"{"tokens":[]}"#),
    ] {
        shown += &format!("POST {path} {body}\n{}\n\n", stage.post(path, body).await);
    }
    insta::assert_snapshot!(shown);
}
