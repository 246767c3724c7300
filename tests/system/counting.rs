//! Every series moves with what the clients really got.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Run, Scrape, wait_for};

/// Two one-token prompts, four tokens each, on a fresh system.
fn two_short_requests(depth_flag: &str, streaming: bool) -> Scrape {
    let run = Run::new();
    let _core = run.mock_core(&[depth_flag]);
    let frontend = run.frontend("api", &[]);
    let before = frontend.scrape();
    assert_eq!(before.get("vllm:prompt_tokens_total"), 0.0);

    std::thread::scope(|scope| {
        for token in [5, 6] {
            let http = frontend.http;
            scope.spawn(move || {
                let body = json!({"prompt": [token], "max_tokens": 4, "ignore_eos": true,
                                  "stream": streaming});
                if streaming {
                    let events = http.stream("/v1/completions", &body).rest();
                    let last = events.last().expect("events");
                    assert_eq!(last["choices"][0]["finish_reason"], "length");
                } else {
                    let answer = http.post("/v1/completions", &body).json();
                    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
                    assert_eq!(answer["choices"][0]["finish_reason"], "length");
                }
            });
        }
    });
    frontend.scrape_until("an idle core", |s| s.running() == 0.0 && s.waiting() == 0.0)
}

fn check_two_short_requests(scrape: &Scrape) {
    let count = |family: &str| scrape.get(&format!("vllm:{family}_count"));
    let sum = |family: &str| scrape.get(&format!("vllm:{family}_sum"));
    assert_eq!(scrape.get("vllm:prompt_tokens_total"), 2.0);
    assert_eq!(scrape.get("vllm:generation_tokens_total"), 8.0);
    assert_eq!(scrape.ended("length"), 2.0);
    assert_eq!(scrape.get("vllm:request_success_total"), 2.0);

    let per_request = [
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_generation_tokens",
        "request_prompt_tokens",
    ];
    for family in per_request {
        assert_eq!(count(family), 2.0, "count of {family}");
        assert!(sum(family) > 0.0, "sum of {family}: {}", sum(family));
    }
    assert_eq!(count("inter_token_latency_seconds"), 6.0);
    assert!(sum("inter_token_latency_seconds") > 0.0);
    assert!(count("iteration_tokens_total") >= 1.0);
    assert_eq!(sum("iteration_tokens_total"), 10.0);
    let inference = sum("request_inference_time_seconds");
    let parts = sum("request_prefill_time_seconds") + sum("request_decode_time_seconds");
    assert!((inference - parts).abs() < 1e-6, "{inference} is not {parts}");
}

#[test]
fn two_short_requests_at_depth_1() {
    check_two_short_requests(&two_short_requests("--no-async-scheduling", false));
}

#[test]
fn two_short_requests_at_depth_2() {
    check_two_short_requests(&two_short_requests("--async-scheduling", false));
}

#[test]
fn two_short_streams_at_depth_2() {
    check_two_short_requests(&two_short_requests("--async-scheduling", true));
}

/// A slow step must not hide the request that it runs.
#[test]
fn eight_scrapers_see_the_one_running_request() {
    let run = Run::new();
    let _core = run.mock_core(&["--async-scheduling", "--mock-step-ms", "100"]);
    let frontend = run.frontend("api", &[]);
    let seen_running = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let request = scope.spawn(|| {
            let body = json!({"prompt": [7], "max_tokens": 20, "ignore_eos": true});
            frontend.http.post("/v1/completions", &body)
        });
        for _ in 0..8 {
            scope.spawn(|| {
                let seen = wait_for("running = 1", || {
                    Some(frontend.scrape().running()).filter(|&running| running > 0.0)
                });
                assert_eq!(seen, 1.0);
                seen_running.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            });
        }
        assert_eq!(request.join().unwrap().status, 200);
    });
    assert_eq!(seen_running.into_inner(), 8);
    let after = frontend.scrape_until("an idle core", |s| s.running() == 0.0);
    assert!(after.get("vllm:time_to_first_token_seconds_sum") > 0.0);
    assert!(after.get("vllm:e2e_request_latency_seconds_sum") >= 2.0 * 0.9);
}

/// A lone long prompt is visible while it is being prefilled, and gone once its client is.
#[test]
fn a_lone_long_prompt_shows_before_its_first_token() {
    let run = Run::new();
    let _core = run.mock_core(&["--max-num-batched-tokens", "256", "--mock-step-ms", "150"]);
    let frontend = run.frontend("api", &[]);
    let prompt: Vec<Value> = (0..2000).map(|i| json!(i % 200 + 10)).collect();
    let body = json!({"prompt": prompt, "max_tokens": 50, "ignore_eos": true, "stream": true});

    let connection = frontend.http.open("POST", "/v1/completions", &body);
    let early = frontend.scrape_until("the prompt in the running list", |s| {
        s.running() == 1.0 && s.kv_usage() > 0.0
    });
    assert_eq!(early.get("vllm:time_to_first_token_seconds_count"), 0.0, "it has its first token");

    drop(connection);
    let cut = Instant::now();
    frontend.scrape_until("an idle core", |s| s.running() == 0.0 && s.kv_usage() == 0.0);
    assert!(cut.elapsed() < Duration::from_secs(1), "took {:?}", cut.elapsed());
    let after = frontend.scrape();
    assert_eq!(after.ended("abort"), 1.0);
    assert_eq!(after.get("vllm:generation_tokens_total"), 0.0);
}

/// A server that has done little has used a fraction of a second, and more with each thing it does.
#[test]
fn processor_time_is_told_in_fractions_of_seconds() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let used = || frontend.scrape().get("process_cpu_seconds_total");
    let early = used();
    assert!(early > 0.0 && early.fract() != 0.0, "{early} seconds");
    let later = wait_for("more processor time", || Some(used()).filter(|now| *now > early));
    assert!(later - early < 1.0, "from {early} to {later} seconds");
}

/// However soon a client leaves: what it has sent was a request.
#[test]
fn a_client_that_closes_in_the_instant_after_sending_is_counted() {
    const CLIENTS: usize = 40;
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "20"]);
    let frontend = run.frontend("api", &[]);
    let before = frontend.scrape();
    let body = json!({"prompt": [7], "max_tokens": 100, "ignore_eos": true});
    for _ in 0..CLIENTS {
        drop(frontend.http.open("POST", "/v1/completions", &body));
    }
    let left = |s: &Scrape| s.sum_if_any("http_requests_total", &[("status", "4xx")]);
    let page = frontend.scrape_until("each of them", |s| left(s) == CLIENTS as f64);
    let started = "pawl:http_requests_started_total";
    assert_eq!(page.get(started) - before.get(started), CLIENTS as f64);
}
