//! A file of requests, answered offline.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{Run, Scrape, wait_for};

/// `pawl batch` on `input` with the mock runner.
struct Batch<'a> {
    run: &'a Run,
    args: Vec<String>,
}

impl<'a> Batch<'a> {
    fn new(run: &'a Run, lines: &[String], extra: &[&str]) -> Self {
        std::fs::write(run.path("in.jsonl"), lines.join("\n")).unwrap();
        let path = |name: &str| run.path(name).display().to_string();
        let mut args = vec!["batch".into(), path("in.jsonl"), path("out.jsonl")];
        args.extend(["--runner".into(), "mock".into()]);
        args.extend(["--metrics-file".into(), path("metrics.txt")]);
        args.extend(extra.iter().map(ToString::to_string));
        Self { run, args }
    }

    fn start(&self, extra: &[&str]) -> crate::harness::Process {
        let args = self.args.iter().map(String::as_str).chain(extra.iter().copied());
        let args: Vec<&str> = args.collect();
        self.run.pawl("batch", &args)
    }

    /// Runs to the end, which must be `code`; then the log.
    fn ends(&self, extra: &[&str], code: i32) -> String {
        let mut process = self.start(extra);
        let status = process.wait();
        assert_eq!(status.code(), Some(code), "{}", process.log());
        process.log()
    }

    fn answers(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.run.path(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn scrape(&self) -> Scrape {
        Scrape::parse(&std::fs::read_to_string(self.run.path("metrics.txt")).unwrap())
    }
}

fn completion(name: &str, body: Value) -> String {
    let line = json!({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body});
    line.to_string()
}

/// A prompt of `prompt` tokens, answered with `max_tokens`.
fn plain(number: usize, prompt: usize, max_tokens: usize) -> String {
    let tokens: Vec<usize> = (0..prompt).map(|i| (number * 7 + i) % 200 + 10).collect();
    let body = json!({"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": true});
    completion(&format!("plain-{number}"), body)
}

/// 50 lines: 30 completions, 10 chats, 4 that the routes refuse, 6 that are no requests.
fn fifty_lines() -> Vec<String> {
    let mut lines: Vec<String> = (0..30).map(|i| plain(i, 1 + i % 5, 1 + i % 7)).collect();
    for i in 0..10 {
        let body = json!({"messages": [{"role": "user", "content": format!("hello {i}")}],
                          "max_tokens": 3, "ignore_eos": true, "n": 1 + i % 2});
        let line = json!({"custom_id": format!("chat-{i}"), "method": "POST",
                          "url": "/v1/chat/completions", "body": body});
        lines.insert(i * 3, line.to_string());
    }
    lines.push(completion("hot", json!({"prompt": [1], "temperature": -1})));
    lines.push(completion("other", json!({"prompt": [1], "model": "no-such-model"})));
    lines.push(completion("long", json!({"prompt": [1], "max_tokens": 10_000_000})));
    lines.push(completion("none", json!({})));
    lines.push("{\"custom_id\": \"cut".into());
    lines.push("[]".into());
    lines.push(json!({"custom_id": "get", "method": "GET", "url": "/v1/models"}).to_string());
    lines.push(plain(0, 1, 1));
    lines.push(completion("streamed", json!({"prompt": [1], "stream": true})));
    lines.push(json!({"method": "POST", "url": "/v1/completions", "body": {}}).to_string());
    assert_eq!(lines.len(), 50);
    lines
}

/// What the answers say must be in the metrics: nothing more, nothing less.
fn check_ledger(answers: &[Value], scrape: &Scrape) {
    let mut ledger: BTreeMap<&str, u64> = BTreeMap::new();
    let mut statuses: BTreeMap<(String, String), u64> = BTreeMap::new();
    for answer in answers {
        if answer["response"].is_null() {
            continue;
        }
        let (status, body) = (&answer["response"]["status_code"], &answer["response"]["body"]);
        let handler = if answer["custom_id"].as_str().unwrap().starts_with("chat") {
            "/v1/chat/completions"
        } else {
            "/v1/completions"
        };
        let class = format!("{}xx", status.as_u64().unwrap() / 100);
        *statuses.entry((handler.into(), class)).or_default() += 1;
        if status != 200 {
            continue;
        }
        let choices = body["choices"].as_array().unwrap().len() as u64;
        *ledger.entry("requests").or_default() += choices;
        let usage = |name: &str| body["usage"][name].as_u64().unwrap();
        // Each choice is a request with the same prompt.
        *ledger.entry("prompt").or_default() += usage("prompt_tokens") * choices;
        *ledger.entry("generation").or_default() += usage("completion_tokens");
    }
    assert_eq!(scrape.get("vllm:prompt_tokens_total"), ledger["prompt"] as f64);
    assert_eq!(scrape.get("vllm:generation_tokens_total"), ledger["generation"] as f64);
    assert_eq!(scrape.get("vllm:request_success_total"), ledger["requests"] as f64);
    assert_eq!(scrape.ended("length"), ledger["requests"] as f64);
    for family in ["time_to_first_token_seconds", "e2e_request_latency_seconds"] {
        assert_eq!(scrape.get(&format!("vllm:{family}_count")), ledger["requests"] as f64);
    }
    for ((handler, class), count) in &statuses {
        let labels = [("handler", handler.as_str()), ("status", class.as_str())];
        assert_eq!(scrape.sum("http_requests_total", &labels), *count as f64, "{labels:?}");
    }
    let all: u64 = statuses.values().sum();
    assert_eq!(scrape.get("http_requests_total"), all as f64);
}

#[test]
fn fifty_lines_are_answered_and_counted() {
    let run = Run::new();
    let batch = Batch::new(&run, &fifty_lines(), &["--concurrency", "8"]);
    let log = batch.ends(&[], 0);
    assert!(log.contains("lines        40 answered, 4 refused, 6 bad"), "{log}");
    let answers = batch.answers("out.jsonl");
    check_ledger(&answers, &batch.scrape());

    // One answer a line, under the line's own name.
    let mut ids: Vec<&str> = answers.iter().map(|a| a["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 50);
    let named =
        |name: &str| answers.iter().filter(|a| a["custom_id"] == name).cloned().collect::<Vec<_>>();
    assert_eq!(named("plain-3")[0]["response"]["body"]["usage"]["completion_tokens"], 4);
    assert_eq!(named("chat-1")[0]["response"]["body"]["choices"].as_array().unwrap().len(), 2);
    let refused = |name: &str| named(name)[0]["response"]["body"]["error"]["code"].clone();
    assert_eq!(refused("hot"), "invalid_value");
    assert_eq!(refused("other"), "model_not_found");
    assert_eq!(refused("none"), "missing_field");
    let twice = named("plain-0");
    assert_eq!(twice.len(), 2);
    let errors: Vec<&Value> =
        answers.iter().map(|a| &a["error"]).filter(|error| !error.is_null()).collect();
    assert_eq!(errors.len(), 6);
    for error in errors {
        let text = format!("line {} ", error["line"]);
        assert!(error["message"].as_str().unwrap().starts_with(&text), "{error}");
    }

    let refusal = batch.ends(&[], 1);
    assert!(refusal.contains("--overwrite"), "{refusal}");
    assert_eq!(batch.answers("out.jsonl").len(), 50, "the answers of before are kept");
}

#[test]
fn answers_go_through_pipes_in_order() {
    let run = Run::new();
    let mut lines: Vec<String> = (0..20).map(|i| plain(i, 2, 20 - i)).collect();
    lines.insert(5, "nonsense".into());
    let mut child = Command::new(env!("CARGO_BIN_EXE_pawl"))
        .args(["batch", "-", "-", "--runner", "mock", "--keep-order"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(run.path("batch.log")).unwrap())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(lines.join("\n").as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", std::fs::read_to_string(run.path("batch.log")).unwrap());
    let text = String::from_utf8(output.stdout).unwrap();
    let ids: Vec<String> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].as_str().unwrap().into())
        .collect();
    let expected: Vec<String> = (1..=21).map(|line| format!("batch_req_{line}")).collect();
    assert_eq!(ids, expected);
}

#[test]
fn a_stopped_run_ends_cleanly_and_is_gone_on_with() {
    let run = Run::new();
    let lines: Vec<String> = (0..60).map(|i| plain(i, 2, 5)).collect();
    let batch = Batch::new(&run, &lines, &["--concurrency", "2"]);
    let mut process = batch.start(&["--mock-step-ms", "20"]);
    let partial = run.path("out.jsonl.partial");
    wait_for("five answers", || {
        let text = std::fs::read_to_string(&partial).ok()?;
        (text.lines().count() >= 5).then_some(())
    });
    process.signal(Signal::SIGINT);
    let status = process.wait();
    assert_eq!(status.code(), Some(130), "{}", process.log());
    assert!(process.log().contains("--resume"), "{}", process.log());
    assert!(!run.path("out.jsonl").exists());
    let before = batch.answers("out.jsonl.partial");
    assert!((5..60).contains(&before.len()), "{}", before.len());
    // Whatever was under way counts as aborted, and as nothing else.
    let scrape = batch.scrape();
    assert!(scrape.ended("length") >= before.len() as f64);
    assert_eq!(
        scrape.ended("length") + scrape.ended("abort"),
        scrape.get("vllm:request_success_total")
    );

    let log = batch.ends(&["--resume"], 0);
    let left = 60 - before.len();
    let told = format!("lines        {left} answered, 0 refused, 0 bad");
    assert!(log.contains(&told), "{log}");
    assert_eq!(batch.answers("out.jsonl").len(), 60);
    assert!(!partial.exists());
}

#[test]
fn a_core_that_dies_ends_the_run_with_its_cause() {
    let run = Run::new();
    let lines: Vec<String> = (0..40).map(|i| plain(i, 2, 6)).collect();
    let batch = Batch::new(&run, &lines, &["--concurrency", "2"]);
    let log = batch.ends(&["--mock-fail-at", "30"], 1);
    assert!(log.contains("the engine-core ended (exit status: 1)"), "{log}");
    assert!(log.contains("step 30"), "the core's own words are missing: {log}");
    // Every line that was written is a real answer.
    let answers = batch.answers("out.jsonl.partial");
    assert!(!answers.is_empty());
    assert!(answers.iter().all(|a| a["response"]["status_code"] == 200), "{answers:?}");
    batch.ends(&["--resume"], 0);
    assert_eq!(batch.answers("out.jsonl").len(), 40);
}
