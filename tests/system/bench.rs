//! The load generator: what it says must be what the server counted.

use std::io::{BufRead as _, BufReader, Write as _};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{Frontend, PATIENCE, Run, wait_for};

const MOCK: [&str; 4] = ["--runner", "mock", "--mock-step-ms", "2"];

/// Runs `pawl bench serve` against `server` to its end, which must be `code`; its result.
fn bench(run: &Run, server: &Frontend, code: i32, extra: &[&str]) -> (Value, String) {
    let (url, folder) = (server.http.url(), run.path("results").display().to_string());
    let mut args = vec!["bench", "serve", "--base-url", &url, "--save-result", "--result-dir"];
    args.extend([&folder, "--result-filename", "result.json"]);
    args.extend(extra);
    let mut process = run.pawl("bench", &args);
    assert_eq!(process.wait().code(), Some(code), "{}", process.log());
    let text = std::fs::read_to_string(run.path("results/result.json")).unwrap();
    (serde_json::from_str(&text).unwrap(), process.log())
}

fn number(result: &Value, name: &str) -> f64 {
    result[name].as_f64().unwrap_or_else(|| panic!("{name} in {result}"))
}

#[test]
fn what_it_says_is_what_the_server_counted() {
    let run = Run::new();
    let server = run.serve(&MOCK);
    let (result, log) = bench(
        &run,
        &server,
        0,
        &[
            "--num-prompts",
            "40",
            "--max-concurrency",
            "4",
            "--random-input-len",
            "20",
            "--random-output-len",
            "9",
            "--random-range-ratio",
            "0.5",
            "--random-prefix-len",
            "3",
            "--ignore-eos",
            "--request-rate",
            "400",
            "--save-detailed",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--metric-percentiles",
            "50,99",
            "--goodput",
            "e2el:600000",
            "--metadata",
            "machine=mine",
        ],
    );
    let scrape = server.scrape();
    assert_eq!(number(&result, "completed"), 40.0, "{log}");
    assert_eq!(number(&result, "failed"), 0.0, "{log}");
    let lens = |name: &str| result[name].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
    assert!(lens("input_lens").all(|len| (13..=33).contains(&len)), "{result}");
    assert!(lens("output_lens").all(|len| (5..=13).contains(&len)), "{result}");
    assert!(lens("output_lens").max() > lens("output_lens").min(), "{result}");
    assert_eq!(number(&result, "total_input_tokens"), scrape.get("vllm:prompt_tokens_total"));
    assert_eq!(number(&result, "total_output_tokens"), scrape.get("vllm:generation_tokens_total"));
    let itls: usize =
        result["itls"].as_array().unwrap().iter().map(|itls| itls.as_array().unwrap().len()).sum();
    assert_eq!(itls as f64, scrape.get("vllm:inter_token_latency_seconds_count"));
    assert!((1.0..=4.0).contains(&number(&result, "max_concurrent_requests")), "{result}");
    let mean = |name: &str| number(&result, &format!("mean_{name}_ms"));
    // A step takes 2 ms and more, and an output up to 13 of them.
    assert!(mean("itl") >= 1.0 && mean("tpot") >= 1.0 && mean("ttft") >= 2.0, "{result}");
    assert!(mean("e2el") > mean("ttft") + 4.0 * mean("tpot"), "{result}");
    assert!(number(&result, "p50_ttft_ms") <= number(&result, "p99_ttft_ms"), "{result}");
    assert_eq!(result["request_goodput"], result["request_throughput"]);
    assert_eq!(result["machine"], "mine");
}

#[test]
fn chats_and_prompts_of_a_file() {
    let run = Run::new();
    let server = run.serve(&MOCK);
    let flags = ["--num-prompts", "3", "--random-output-len", "4", "--ignore-eos"];
    let chat = ["--backend", "openai-chat", "--random-input-len", "5", "--num-warmups", "2"];
    let (result, log) = bench(&run, &server, 0, &[&flags[..], &chat[..]].concat());
    assert_eq!(number(&result, "total_output_tokens"), 12.0, "{log}");
    // The warm-ups were served, and are not in the result.
    assert_eq!(server.scrape().get("vllm:generation_tokens_total"), 20.0);
    let file = run.path("prompts.jsonl");
    std::fs::write(&file, "{\"prompt\": \"one\"}\n{\"prompt\": \"two\"}\n").unwrap();
    let file = file.display().to_string();
    let custom = ["--dataset-name", "custom", "--dataset-path", &file];
    let (result, log) = bench(&run, &server, 0, &[&flags[..], &custom[..]].concat());
    assert_eq!(number(&result, "completed"), 3.0, "{log}");
    assert_eq!(server.scrape().get("vllm:generation_tokens_total"), 32.0);
}

#[test]
fn refusals_are_failures_and_are_counted() {
    let run = Run::new();
    let server = run.serve(&[&MOCK[..], &["--max-model-len", "64"]].concat());
    let flags = ["--num-prompts", "5", "--random-input-len", "80", "--random-output-len", "4"];
    let (result, log) = bench(&run, &server, 1, &flags);
    assert_eq!((number(&result, "completed"), number(&result, "failed")), (0.0, 5.0), "{log}");
    assert!(log.contains("The first failure: 400 Bad Request"), "{log}");
}

#[test]
fn a_signal_ends_it_and_what_was_seen_is_told() {
    let run = Run::new();
    let server = run.serve(&["--runner", "mock", "--mock-step-ms", "20"]);
    let url = server.http.url();
    let mut process = run.pawl(
        "bench",
        &[
            "bench",
            "serve",
            "--base-url",
            &url,
            "--num-prompts",
            "100000",
            "--max-concurrency",
            "2",
            "--random-input-len",
            "4",
            "--random-output-len",
            "2",
        ],
    );
    server.scrape_until("two answers", |s| s.get("vllm:e2e_request_latency_seconds_count") >= 2.0);
    process.signal(Signal::SIGINT);
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.log().contains("stopped: the figures are of"), "{}", process.log());
    assert!(process.log().contains("Requests failed                                         0"));
    wait_for("no request left", || (server.scrape().running() == 0.0).then_some(()));
}

/// A server that takes connections and answers the first of its `answers`, and then nothing.
fn half_dead(answers: &'static [&'static str]) -> (String, std::sync::mpsc::Receiver<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (asked, was_asked) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let mut answers = answers.iter();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // Kept open until the test's process ends.
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let asked = asked.clone();
            let answer = answers.next().copied();
            std::thread::spawn(move || {
                let mut line = String::new();
                while reader.read_line(&mut line).unwrap_or(0) > 2 {
                    line.clear();
                }
                match answer {
                    Some(body) => {
                        let length = body.len();
                        let head = "HTTP/1.1 200 OK\r\nConnection: close";
                        let _ = write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}");
                    }
                    None => {
                        let _ = asked.try_send(());
                        let _ = reader.read_line(&mut line);
                    }
                }
            });
        }
    });
    (url, was_asked)
}

#[test]
fn a_server_that_does_not_answer_is_not_waited_for_longer_than_asked() {
    let run = Run::new();
    let (url, _asked) = half_dead(&[]);
    let args = ["bench", "serve", "--base-url", &url, "--ready-check-timeout-sec", "1"];
    let mut process = run.pawl("bench", &args);
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.log().contains("does not answer"), "{}", process.log());
}

#[test]
fn a_signal_ends_it_also_while_prompts_are_made() {
    let run = Run::new();
    let (url, asked) = half_dead(&[r#"{"data": [{"id": "m"}]}"#]);
    let mut process = run.pawl("bench", &["bench", "serve", "--base-url", &url]);
    asked.recv_timeout(PATIENCE).unwrap();
    process.signal(Signal::SIGINT);
    assert_eq!(process.wait().code(), Some(1));
}

#[test]
fn prompts_that_memory_could_not_hold_are_refused() {
    let run = Run::new();
    let mut process = run.pawl("bench", &["bench", "serve", "--num-prompts", "1000000"]);
    assert_eq!(process.wait().code(), Some(1));
    assert!(
        process.log().contains("--random-input-len are 1024000000 tokens"),
        "{}",
        process.log()
    );
}

#[test]
fn without_a_server_it_says_so() {
    let run = Run::new();
    let base = "http://127.0.0.1:1";
    let args = ["bench", "serve", "--base-url", base, "--ready-check-timeout-sec", "0"];
    let mut process = run.pawl("bench", &args);
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.log().contains("no server answers at http://127.0.0.1:1"), "{}", process.log());
}
