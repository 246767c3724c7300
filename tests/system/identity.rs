//! An id that a client chooses twice names two requests.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::harness::{Client, Run, rounds};

const CLIENTS: usize = 40;
const IDS: usize = 200;

/// The mock answers a prompt with tokens that depend on the prompt alone, so a token of another
/// life shows as a wrong token.
#[test]
fn abort_and_reuse_of_an_id_never_shows_an_earlier_life() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "0.2", "--num-gpu-blocks-override", "2000"]);
    let frontend = run.frontend("api", &[]);
    let http = frontend.http;

    let expected: Vec<Vec<u64>> = (0..4).map(|kind| whole_answer(http, kind)).collect();
    assert!(
        (1..4).all(|kind| expected[kind][..3] != expected[0][..3]),
        "prompts must differ in their answers: {expected:?}"
    );

    let rounds = rounds(2_000, 10_000);
    let next_round = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let round = next_round.fetch_add(1, Ordering::Relaxed);
                    if round >= rounds {
                        break;
                    }
                    abort_then_reuse(http, round, &expected);
                }
            });
        }
    });
    assert_eq!(frontend.idle().ended("error"), 0.0);
}

fn body(kind: usize, max_tokens: usize) -> Value {
    json!({"prompt": [20 + kind, 30, 40], "max_tokens": max_tokens, "ignore_eos": true,
           "stream": true, "seed": 7, "return_token_ids": true})
}

fn token_ids(event: &Value) -> Vec<u64> {
    let ids = event["choices"][0]["token_ids"].as_array();
    ids.map(|ids| ids.iter().map(|id| id.as_u64().unwrap()).collect()).unwrap_or_default()
}

fn whole_answer(http: Client, kind: usize) -> Vec<u64> {
    http.stream("/v1/completions", &body(kind, 12)).rest().iter().flat_map(token_ids).collect()
}

/// A long request under an id is dropped after its first token; the same id at once asks for
/// something else and must get exactly that. Rounds share the ids.
fn abort_then_reuse(http: Client, round: usize, expected: &[Vec<u64>]) {
    let id = format!("shared-{}", round % IDS);
    let headers = [("x-request-id", id.as_str())];
    let (first, second) = (round % 4, (round + 1) % 4);

    let mut dropped = http.stream_with("/v1/completions", &headers, &body(first, 400)).unwrap();
    assert_eq!(dropped.status, 200);
    let seen = dropped.next().map(|event| token_ids(&event)).unwrap_or_default();
    assert!(expected[first].starts_with(&seen), "round {round}: {seen:?}");
    dropped.close();

    let mut kept = http.stream_with("/v1/completions", &headers, &body(second, 12)).unwrap();
    assert_eq!(kept.status, 200);
    let tokens: Vec<u64> = kept.rest().iter().flat_map(token_ids).collect();
    assert!(kept.is_done(), "round {round}: the stream was cut");
    assert_eq!(tokens, expected[second], "round {round}");
}
