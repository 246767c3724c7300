//! Recording on and off, and the pages that show it.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::{Answer, Client, Run, Scrape, wait_for};

/// Requests of several kinds, each by a name of its own, so that two systems can be compared.
fn requests() -> Vec<(&'static str, Value)> {
    let chat = json!({"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 9,
                      "temperature": 0, "stream": true, "request_id": "chat",
                      "stream_options": {"include_usage": true}});
    let completion = |name: &str, extra: Value| {
        let mut body = json!({"prompt": "count", "max_tokens": 12, "temperature": 0, "seed": 3,
                              "ignore_eos": true, "request_id": name});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ("/v1/completions", body)
    };
    vec![
        completion("whole", json!({"logprobs": 2})),
        completion("stream", json!({"stream": true, "logprobs": 1, "return_token_ids": true})),
        completion("echo", json!({"stream": true, "echo": true, "prompt": "twice"})),
        completion("stopped", json!({"stream": true, "stop": [" t3"]})),
        completion("refused", json!({"temperature": -1})),
        ("/v1/chat/completions", chat),
    ]
}

/// The answers as bytes, but for when they were made.
fn answers(http: Client) -> Vec<String> {
    let answer = |(path, body): &(&str, Value)| {
        let text = http.post(path, body).text();
        let mut parts = text.split("\"created\":");
        let mut rest = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            rest.push_str("\"created\":0");
            rest.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
        }
        rest
    };
    requests().iter().map(answer).collect()
}

/// Series that a page computes when it is asked for, whatever is recorded.
fn computed(series: &str) -> bool {
    let names = ["pawl:core_up", "pawl:stats_age_seconds", "pawl:requests_in_flight"];
    series.starts_with("process_")
        || series.starts_with("pawl:recording")
        || names.iter().any(|name| series.starts_with(name))
}

/// What moved between two pages, apart from what is computed.
fn moved(before: &Scrape, after: &Scrape) -> Vec<String> {
    let before: std::collections::BTreeMap<_, _> = before.series().collect();
    after
        .series()
        .filter(|(series, value)| !computed(series) && before.get(series) != Some(value))
        .map(|(series, value)| format!("{series} {value}"))
        .collect()
}

#[test]
fn nothing_is_recorded_and_every_byte_is_the_same() {
    let run = Run::new();
    let _core = run.mock_core(&["--async-scheduling"]);
    let on = run.frontend("on", &[]);
    let off = run.frontend("off", &["--disable-log-stats"]);
    let before = off.scrape();
    assert_eq!(answers(off.http), answers(on.http));
    assert_eq!(moved(&before, &off.scrape()), Vec::<String>::new());
    assert_eq!(off.scrape().get("pawl:recording"), 0.0);
    assert!(on.scrape().get("vllm:generation_tokens_total") >= 30.0);
}

#[test]
fn the_switch_turns_recording_off_and_on_in_a_running_server() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let switch = |enabled: bool| {
        let answer = frontend.admin.post("/recording", &json!({"enabled": enabled}));
        assert_eq!(answer.json(), json!({"enabled": enabled}));
        assert_eq!(frontend.admin.get("/recording").json(), json!({"enabled": enabled}));
    };
    let body = json!({"prompt": [1, 2], "max_tokens": 5, "ignore_eos": true});
    let ask = || assert_eq!(frontend.http.post("/v1/completions", &body).status, 200);
    let tokens = || frontend.scrape().get("vllm:generation_tokens_total");
    ask();
    assert_eq!(tokens(), 5.0);
    switch(false);
    let before = frontend.scrape();
    ask();
    assert_eq!(moved(&before, &frontend.scrape()), Vec::<String>::new());
    switch(true);
    ask();
    assert_eq!(tokens(), 10.0);
    let wrong = frontend.admin.post("/recording", &json!({"enabled": "perhaps"}));
    assert_eq!(wrong.status, 400, "{}", wrong.text());
}

/// The parts of a timing header, in seconds.
fn parts(timing: &str) -> Vec<(String, f64)> {
    let part = |part: &str| {
        let (name, seconds) = part.split_once('=').unwrap();
        (name.trim().to_owned(), seconds.parse().unwrap())
    };
    timing.split(',').map(part).collect()
}

fn check_timing(timing: &str) {
    let parts = parts(timing);
    let names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["intake", "queue", "prefill", "decode", "deliver", "total"], "{timing}");
    let second = |name: &str| parts.iter().find(|(n, _)| n == name).unwrap().1;
    let sum: f64 = parts[..5].iter().map(|(_, seconds)| seconds).sum();
    assert!((sum - second("total")).abs() < 1e-4, "{timing}");
    // Four steps of 20 ms, one of prefill and three of decode. The next step runs already when the
    // engine takes note of a token, so what it is late for the first one is missing from decode.
    assert!(second("prefill") >= 0.02 && second("decode") > 0.0, "{timing}");
    assert!(second("prefill") + second("decode") > 0.08 - 1e-5, "{timing}");
    assert!(second("total") < 20.0, "{timing}");
}

#[test]
fn clients_are_told_where_the_time_went() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "20"]);
    let frontend = run.frontend("api", &["--request-timing", "header"]);
    let mut body = json!({"prompt": [1, 2], "max_tokens": 4, "ignore_eos": true});
    let whole = frontend.http.post("/v1/completions", &body);
    check_timing(whole.header("x-pawl-timing").expect("the header"));
    body["stream"] = json!(true);
    let stream = frontend.http.post("/v1/completions", &body).text();
    let comment = stream.lines().find_map(|line| line.strip_prefix(": pawl-timing "));
    check_timing(comment.unwrap_or_else(|| panic!("no comment: {stream}")));
    let silent = run.frontend("silent", &[]);
    let whole = silent.http.post("/v1/completions", &json!({"prompt": [1], "max_tokens": 1}));
    assert_eq!(whole.header("x-pawl-timing"), None);
}

/// The core repeats its last stats while a step runs; another frontend sees the same gauges.
#[test]
fn gauges_are_fresh_while_a_long_step_runs() {
    let run = Run::new();
    let _core = run.mock_core(&["--no-async-scheduling", "--mock-step-ms", "4000"]);
    let serving = run.frontend("serving", &[]);
    let other = run.frontend("other", &[]);
    std::thread::scope(|scope| {
        let request = scope.spawn(|| {
            let body = json!({"prompt": [7, 8, 9], "max_tokens": 1, "ignore_eos": true});
            serving.http.post("/v1/completions", &body)
        });
        for frontend in [&serving, &other] {
            frontend.scrape_until("the running request", |s| s.running() == 1.0);
        }
        let mut oldest = 0.0_f64;
        while !request.is_finished() {
            for frontend in [&serving, &other] {
                let page = frontend.scrape();
                oldest = oldest.max(page.get("pawl:stats_age_seconds"));
            }
            std::thread::yield_now();
        }
        assert!(oldest < 2.5, "stats were {oldest} s old");
        assert_eq!(request.join().unwrap().status, 200);
    });
    for frontend in [&serving, &other] {
        frontend.scrape_until("an idle core", |s| s.running() == 0.0 && s.kv_usage() == 0.0);
    }
    assert_eq!(other.scrape().get("vllm:generation_tokens_total"), 0.0);
}

fn page(admin: Client, accept: Option<&str>) -> Answer {
    let headers: Vec<(&str, &str)> = accept.map(|accept| ("accept", accept)).into_iter().collect();
    let answer = admin.request("GET", "/metrics", &headers, None).unwrap();
    assert_eq!(answer.status, 200);
    answer
}

#[test]
fn the_page_is_openmetrics_only_when_asked_for() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let body = json!({"prompt": [1, 2], "max_tokens": 5});
    assert_eq!(frontend.http.post("/v1/completions", &body).status, 200);
    let plain = "text/plain; version=0.0.4; charset=utf-8";
    let open = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,\
                      text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
    for (accept, kind) in [
        (None, plain),
        (Some("*/*"), plain),
        (Some("text/plain;version=0.0.4"), plain),
        (Some("application/openmetrics-text;version=1.0.0"), open),
        (Some(prometheus), open),
    ] {
        let page = page(frontend.admin, accept);
        assert_eq!(page.header("content-type"), Some(kind), "{accept:?}");
        let text = page.text();
        assert_eq!(text.ends_with("# EOF\n"), kind == open, "{accept:?}");
        assert_eq!(text.contains("# EOF"), kind == open, "{accept:?}");
    }
    let names = |accept| -> BTreeSet<String> {
        let text = page(frontend.admin, Some(accept)).text();
        Scrape::parse(&text).series().map(|(series, _)| series.to_owned()).collect()
    };
    assert_eq!(names("text/plain"), names("application/openmetrics-text"));
}

/// What clients make up becomes no label.
#[test]
fn made_up_names_and_paths_add_no_series() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let http = frontend.http;
    let round = |from: usize, to: usize| {
        std::thread::scope(|scope| {
            for start in 0..8 {
                scope.spawn(move || {
                    for nth in (from + start..to).step_by(8) {
                        let body = json!({"model": format!("model-{nth}"), "prompt": "x"});
                        let answer = http.post("/v1/completions", &body);
                        assert_eq!(answer.status, 404, "{}", answer.text());
                        assert_eq!(answer.json()["error"]["code"], "model_not_found");
                        assert_eq!(http.get(&format!("/v1/path-{nth}")).status, 404);
                        assert_eq!(http.get(&format!("/v1/models/model-{nth}")).status, 404);
                        let method = format!("M{nth}");
                        http.request(&method, "/v1/completions", &[], Some(b"{}")).unwrap();
                    }
                });
            }
        });
    };
    round(0, 8);
    let first = frontend.scrape().series().count();
    round(8, 400);
    let page = wait_for("every answer counted", || {
        Some(frontend.scrape()).filter(|s| s.get("http_requests_total") >= 1600.0)
    });
    assert_eq!(page.series().count(), first);
    assert_eq!(page.get("http_requests_total"), 1600.0);
}

/// Every family in the docs is on the page before any traffic, and none that is not in the docs.
#[test]
fn all_documented_families_show_at_zero_from_the_start() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let frontend = run.frontend("api", &[]);
    let text = frontend.admin.get("/metrics").text();
    let shown: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let docs = include_str!("../../docs/metrics.md");
    let (_, reference) = docs.split_once("<!-- generated: begin -->").unwrap();
    let documented: BTreeSet<&str> = reference
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .filter(|(_, rest)| rest.matches('|').count() > 4)
        .map(|(name, _)| name)
        .collect();
    assert!(documented.len() > 50, "{documented:?}");
    assert_eq!(shown, documented);
    for (series, value) in Scrape::parse(&text).series() {
        let family = series.split('{').next().unwrap_or_default();
        let counts = family.starts_with("vllm:") && !family.ends_with("_info");
        let zero = value == 0.0 || series.contains("sleep_state=\"awake\"");
        assert!(!counts || zero, "{series} {value}");
    }
}
