//! What operators ask of the engine through a frontend's admin listener, while clients are served.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Answer, Client, Run, wait_for};

fn order(admin: Client, path: &str) -> Answer {
    admin.request("POST", path, &[], None).unwrap()
}

fn told(admin: Client, path: &str, name: &str) -> Value {
    let answer = admin.get(path);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()[name].clone()
}

fn long(max_tokens: u64) -> Value {
    json!({"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": true, "stream": true,
           "return_token_ids": true, "temperature": 0})
}

fn ids(events: &[Value]) -> Vec<Value> {
    let of = |event: &Value| event["choices"][0]["token_ids"].as_array().cloned();
    events.iter().filter_map(of).flatten().collect()
}

#[test]
fn the_prefix_cache_is_reset_under_a_running_stream_which_goes_on_as_before() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "10", "--seed", "7"]);
    let frontend = run.frontend("api", &[]);
    let expected = ids(&frontend.http.stream("/v1/completions", &long(60)).rest());
    assert_eq!(expected.len(), 60);

    let mut stream = frontend.http.stream("/v1/completions", &long(60));
    let mut events = vec![stream.next().unwrap()];
    let refused = order(frontend.admin, "/reset_prefix_cache");
    assert_eq!((refused.status, refused.json()), (200, json!({"reset": false})));
    let path = "/reset_prefix_cache?reset_running_requests=true";
    let done = order(frontend.admin, path);
    assert_eq!((done.status, done.json()), (200, json!({"reset": true})));
    events.extend(stream.rest());
    assert!(stream.is_done());
    assert_eq!(ids(&events), expected);
    let page = frontend.idle();
    assert_eq!(page.get("vllm:num_preemptions_total"), 1.0);
    assert_eq!(page.get("vllm:prompt_tokens_total"), 6.0);
    assert_eq!(page.get("vllm:generation_tokens_total"), 120.0);
}

#[test]
fn a_paused_engine_keeps_its_streams_or_refuses_with_a_time_to_come_again() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "10"]);
    let (frontend, other) = (run.frontend("a", &[]), run.frontend("b", &[]));
    let mut stream = frontend.http.stream("/v1/completions", &long(50));
    assert!(stream.next().is_some());
    let paused = order(frontend.admin, "/pause?mode=keep&clear_cache=false");
    assert_eq!((paused.status, paused.json()), (200, json!({"status": "paused"})));
    // The engine is one, whichever frontend is asked.
    assert_eq!(told(other.admin, "/is_paused", "is_paused"), true);
    assert_eq!(told(other.admin, "/is_sleeping", "is_sleeping"), false);
    // No more than the steps that were in flight, however long one looks: here for thirty steps.
    let tokens = || frontend.scrape().get("vllm:generation_tokens_total");
    let (before, began) = (tokens(), Instant::now());
    while began.elapsed() < Duration::from_millis(300) {
        assert!(tokens() <= before + 2.0, "it goes on: {before} tokens, then {}", tokens());
    }
    assert!(tokens() < 50.0, "{before} tokens came before the pause");
    assert_eq!(order(other.admin, "/resume").status, 200);
    assert_eq!(told(frontend.admin, "/is_paused", "is_paused"), false);
    stream.rest();
    assert!(stream.is_done());
    assert_eq!(tokens(), 50.0);

    let asleep = order(frontend.admin, "/sleep?level=1");
    assert_eq!(asleep.status, 200, "{}", asleep.text());
    assert_eq!(told(other.admin, "/is_sleeping", "is_sleeping"), true);
    let success = frontend.scrape().get("vllm:request_success_total");
    let mut body = long(5);
    for stream in [true, false] {
        body["stream"] = stream.into();
        body["n"] = 3.into();
        let refused = frontend.http.post("/v1/completions", &body);
        assert_eq!(refused.status, 503, "{}", refused.text());
        assert_eq!(refused.json()["error"]["code"], "engine_paused");
        assert!(refused.header("retry-after").is_some());
    }
    let page = frontend.idle();
    assert_eq!(page.rejected("engine_unavailable"), 2.0);
    assert_eq!(page.get("vllm:request_success_total"), success);
    let part = order(other.admin, "/wake_up?tags=weights");
    assert_eq!(part.json(), json!({"awake": false}));
    assert_eq!(order(other.admin, "/wake_up").json(), json!({"awake": true}));
    assert_eq!(frontend.http.post("/v1/completions", &body).status, 200);
}

#[test]
fn what_makes_no_sense_is_refused_and_clients_cannot_ask_at_all() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    for (path, status, words) in [
        ("/reset_mm_cache", 200, "true"),
        ("/reset_encoder_cache", 200, "true"),
        ("/sleep?level=2", 400, "level: must be 0 (pause) or 1"),
        ("/sleep?mode=nap", 400, "mode: must be abort, wait or keep"),
        ("/pause?clear_cache=maybe", 400, "clear_cache: must be true or false"),
        ("/pause?cheese=1", 400, "cheese: is not known here"),
        ("/wake_up?tags=soul", 400, "weights, kv_cache, scheduling"),
        ("/start_profile", 501, "no profiler"),
        ("/stop_profile", 501, "no profiler"),
    ] {
        let answer = order(frontend.admin, path);
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
        assert!(answer.text().contains(words), "{path}: {}", answer.text());
        assert_eq!(frontend.admin.get(path).status, 405, "{path} changes state");
        assert_eq!(order(frontend.http, path).status, 404, "{path} on the clients' port");
    }
    assert_eq!(told(frontend.admin, "/is_paused", "is_paused"), false);
    wait_for("an answer", || {
        let answer =
            frontend.http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 1}));
        (answer.status == 200).then_some(())
    });
}

/// Each mode says what becomes of a stream that runs, and is reached when the answer says so.
#[test]
fn a_pause_ends_what_runs_or_waits_for_its_end() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "10"]);
    let frontend = run.frontend("api", &[]);
    for (path, tokens, ends) in [
        ("/pause", 5000, "abort"),
        ("/pause?mode=wait", 60, "wait"),
        ("/sleep?level=0&mode=abort", 5000, "abort"),
        ("/sleep?level=1&mode=wait", 60, "wait"),
    ] {
        let mut stream = frontend.http.stream("/v1/completions", &long(tokens));
        assert!(stream.next().is_some());
        let reached = order(frontend.admin, path);
        assert_eq!(reached.status, 200, "{path}: {}", reached.text());
        let last = stream.rest().pop().unwrap();
        match ends {
            "abort" => assert_eq!(last["error"]["code"], "engine_paused", "{path}: {last}"),
            _ => assert_eq!(last["choices"][0]["finish_reason"], "length", "{path}: {last}"),
        }
        assert_eq!(stream.is_done(), ends == "wait", "{path}");
        assert_eq!(told(frontend.admin, "/is_paused", "is_paused"), true, "{path}");
        let sleeps = path.starts_with("/sleep");
        assert_eq!(told(frontend.admin, "/is_sleeping", "is_sleeping"), sleeps, "{path}");
        let again = if sleeps { "/wake_up" } else { "/resume" };
        assert_eq!(order(frontend.admin, again).status, 200, "{path}");
        assert_eq!(told(frontend.admin, "/is_paused", "is_paused"), false, "{path}");
    }
    let page = frontend.scrape();
    let ended = |reason| page.sum("vllm:request_success_total", &[("finished_reason", reason)]);
    assert_eq!((ended("abort"), ended("length")), (2.0, 2.0));
}
