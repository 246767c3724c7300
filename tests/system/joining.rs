//! Many frontends on one core, started by hand while it runs: each serves at once, all show the
//! same gauges, each shows its own part of the core's statistics, and no one's leaving is felt.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{Client, Frontend, Run, Scrape, Stop, rounds, wait_for};

const COMPLETIONS: &str = "/v1/completions";

/// What clients of one frontend had looked up in the prefix cache, and what was found.
#[derive(Default)]
struct LookedUp {
    tokens: u64,
    cached: u64,
}

/// The same prompt twice, of a length of its own.
fn serve(frontend: &Frontend, nth: usize) -> LookedUp {
    let length = 40 + nth;
    let body = json!({"prompt": vec![10 + nth; length], "max_tokens": 3, "ignore_eos": true});
    let mut looked_up = LookedUp::default();
    for _ in 0..2 {
        let answer = frontend.http.post(COMPLETIONS, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let usage = answer.json()["usage"].clone();
        looked_up.tokens += usage["prompt_tokens"].as_u64().unwrap();
        looked_up.cached += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    }
    assert_eq!(looked_up.tokens, 2 * length as u64);
    assert!(looked_up.cached > 0, "nothing of a prompt was found again");
    looked_up
}

/// The page shows of the core's statistics what this frontend's clients caused, and no more.
fn assert_own_part(frontend: &Frontend, own: &LookedUp) -> Scrape {
    let of = |s: &Scrape| {
        let hits = s.get("vllm:prefix_cache_hits_total");
        (s.get("vllm:prefix_cache_queries_total"), hits)
    };
    let expected = (own.tokens as f64, own.cached as f64);
    let mut last = (0.0, 0.0);
    // They come with the stats after the step, a moment after the answer.
    wait_for("the statistics", || {
        last = of(&frontend.scrape());
        (last.0 >= expected.0).then_some(())
    });
    assert_eq!(last, expected, "{}", frontend.process.log());
    frontend.scrape()
}

/// A stream that is read until it ends or it is told to; the tokens that came.
fn read(http: Client, tokens: &Mutex<Vec<Value>>, go_on: &AtomicBool) {
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": true, "stream": true,
                      "temperature": 0, "seed": 1, "return_token_ids": true});
    let Ok(mut stream) = http.stream_with(COMPLETIONS, &[], &body) else { return };
    while go_on.load(Ordering::Relaxed) {
        let Some(event) = stream.next() else { return };
        let Some(ids) = event["choices"][0]["token_ids"].as_array() else { return };
        tokens.lock().unwrap().extend(ids.clone());
    }
}

#[test]
fn frontends_join_and_leave_a_running_core() {
    let most = rounds(8, 32);
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "20"]);
    // Those with an even number have a stream; the others hear of the core by its gauges alone.
    let tokens: Vec<Mutex<Vec<Value>>> = (0..most).map(|_| Mutex::default()).collect();
    let streams = most.div_ceil(2) as f64;
    let going_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let stop_streams = Stop(&going_on);
        let mut frontends = Vec::new();
        let mut parts = Vec::new();
        for nth in 0..most {
            let frontend = run.frontend(&format!("f{nth}"), &["--enable-prompt-tokens-details"]);
            let mut part = serve(&frontend, nth);
            if nth % 2 == 0 {
                let (http, tokens, going_on) = (frontend.http, &tokens[nth], &going_on);
                scope.spawn(move || read(http, tokens, going_on));
                part.tokens += 3;
            }
            frontends.push(frontend);
            parts.push(part);
        }
        all_show(&frontends, streams);
        let pages = frontends.iter().zip(&parts).map(|(f, part)| assert_own_part(f, part));
        let sum = pages.reduce(|a, b| a.plus(&b)).unwrap();
        let total: u64 = parts.iter().map(|part| part.tokens).sum();
        assert_eq!(sum.get("vllm:prefix_cache_queries_total"), total as f64);
        assert_eq!(sum.get("vllm:request_success_total"), 2.0 * most as f64);

        // A machine may stand still for a while; a core that tells some of them late always does.
        let took: Vec<Duration> = (0..3).map(|_| one_more(&frontends, streams)).collect();
        assert!(took.iter().any(|t| *t <= Duration::from_secs(1)), "gauges differed for {took:?}");

        // All but the first leave, from the last: told to, or killed.
        let mut left = streams;
        for nth in (1..most).rev() {
            let mut frontend = frontends.pop().unwrap();
            let killed = nth % 4 >= 2;
            frontend.process.signal(if killed { Signal::SIGKILL } else { Signal::SIGTERM });
            let status = frontend.process.wait();
            assert_eq!(status.code(), (!killed).then_some(0), "{}", frontend.process.log());
            left -= if nth % 2 == 0 { 1.0 } else { 0.0 };
            if nth % 4 == 1 {
                all_show(&frontends, left);
                serve(&frontends[nth - 1], 100 + nth);
            }
        }
        let length = || tokens[0].lock().unwrap().len();
        let so_far = length();
        wait_for("further tokens", || (length() > so_far).then_some(()));
        drop(stop_streams);
        all_show(&frontends, 0.0);
        frontends[0].scrape_until("free blocks", |s| s.kv_usage() == 0.0);
    });
    // The first one's stream has gone on all the time, and all others had what it had until then.
    let tokens: Vec<Vec<Value>> =
        tokens.into_iter().map(|tokens| tokens.into_inner().unwrap()).collect();
    for (nth, others) in tokens.iter().enumerate().step_by(2) {
        assert!(!others.is_empty(), "no tokens at {nth}");
        assert!(tokens[0].starts_with(others), "{nth}: {others:?}, and {:?}", tokens[0]);
    }
}

/// Waits until every page shows so many running requests.
fn all_show(frontends: &[Frontend], running: f64) {
    for frontend in frontends {
        frontend.scrape_until("the gauges", |s| s.running() == running);
    }
}

/// One more stream, at the first; how long after its own page the last of the others showed it.
fn one_more(frontends: &[Frontend], running: f64) -> Duration {
    let body = json!({"prompt": [9], "max_tokens": 8000, "ignore_eos": true, "stream": true});
    let stream = frontends[0].http.stream(COMPLETIONS, &body);
    frontends[0].scrape_until("one more", |s| s.running() == running + 1.0);
    let shown = Instant::now();
    all_show(frontends, running + 1.0);
    let took = shown.elapsed();
    drop(stream);
    all_show(frontends, running);
    took
}
