//! A queue that is full: whoever finds no room is told so with a remedy, and leaves nothing behind.

use serde_json::{Value, json};

use crate::harness::{Answer, Run};

/// Room for two that run and six that wait. A step takes so long that no choice has a token before
/// the core has refused what it has no room for.
const SMALL_CORE: &[&str] =
    &["--max-num-seqs", "2", "--max-num-queued-reqs", "6", "--mock-step-ms", "400"];

fn choices(n: u32) -> Value {
    json!({"prompt": [5, 6], "n": n, "max_tokens": 2, "ignore_eos": true})
}

fn prompts(count: u32) -> Value {
    let prompts: Vec<Value> = (0..count).map(|i| json!([5, 6, i % 200])).collect();
    json!({"prompt": prompts, "max_tokens": 2, "ignore_eos": true})
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = true.into();
    body
}

fn assert_queue_full(answer: &Answer) {
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "queue_full", "{}", answer.text());
    let after = answer.header("retry-after").expect("when to come again");
    assert!(after.parse::<u32>().unwrap() >= 1, "{after}");
}

/// Frontends count what they themselves let in; together they may ask for more than the core has
/// room for. Then the core's word is final, for all choices of a request or for none.
#[test]
fn what_the_core_has_no_room_for_is_refused_whole() {
    let run = Run::new();
    let _core = run.mock_core(SMALL_CORE);
    let frontend = run.frontend("api", &[]);
    let cases = [choices(100), prompts(100), streamed(choices(100)), streamed(prompts(100))];
    for (refused, body) in (1..).zip(cases) {
        let answer = frontend.http.post("/v1/completions", &body);
        assert_queue_full(&answer);
        let page = frontend.idle();
        let rejected = page.rejected("queue_full");
        assert_eq!(rejected, f64::from(refused), "{body}");
        // Refused, so neither failed nor aborted.
        assert_eq!(page.get("vllm:request_success_total"), 0.0, "{body}");
        assert_eq!(page.get("vllm:generation_tokens_total"), 0.0, "{body}");
        assert_eq!(page.sum("http_requests_total", &[("status", "5xx")]), f64::from(refused));
    }
    for body in [choices(6), prompts(6)] {
        let answer = frontend.http.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 6);
    }
    assert_eq!(frontend.idle().get("vllm:request_success_total"), 12.0);
}

/// More than the bound can ever hold: no use in coming again.
#[test]
fn more_choices_than_there_can_be_room_for_are_a_mistake_of_the_request() {
    let run = Run::new();
    let _core = run.mock_core(SMALL_CORE);
    let frontend = run.frontend("api", &["--max-num-queued-reqs", "6"]);
    for (body, field) in [(choices(7), "n"), (prompts(7), "prompt"), (streamed(choices(100)), "n")]
    {
        let answer = frontend.http.post("/v1/completions", &body);
        assert_eq!(answer.status, 400, "{}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!("invalid_value")));
        let message = error["message"].as_str().unwrap();
        for part in [field, "at most 6", "--max-num-queued-reqs"] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    let page = frontend.idle();
    assert_eq!(page.get("vllm:admission_rejections_total"), 0.0);
    assert_eq!(page.get("vllm:request_success_total"), 0.0);

    // What fits, but not beside what is being made, is worth another try.
    let mut held = frontend.http.stream("/v1/completions", &streamed(choices(4)));
    assert_eq!(held.status, 200);
    assert_queue_full(&frontend.http.post("/v1/completions", &choices(3)));
    let ends = held.rest().iter().filter(|e| e["choices"][0]["finish_reason"] == "length").count();
    assert_eq!(ends, 4);
    let page = frontend.idle();
    assert_eq!(page.rejected("queue_full"), 1.0);
    assert_eq!(page.get("vllm:request_success_total"), 4.0);
}
