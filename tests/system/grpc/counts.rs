//! The numbers of both surfaces are the same numbers.

use std::sync::Mutex;

use pawl_proto::finish_info::FinishReason;
use pawl_proto::{DecodingParameters, GenerateRequest, RandomSampling, StoppingCriteria};
use serde_json::json;

use super::client::{Grpc, grpc_port};
use super::{Sequence, ask, frontend, reason, sequences};
use crate::harness::{Client, Run, Scrape, wait_for};

/// What the clients saw, added up.
#[derive(Clone, Debug, Default)]
struct Book {
    /// Submissions, whatever their `n`.
    requests: f64,
    choices: f64,
    prompt_tokens: f64,
    generation_tokens: f64,
    /// By finish reason.
    ended: std::collections::BTreeMap<&'static str, f64>,
    /// By method and code.
    calls: std::collections::BTreeMap<(&'static str, &'static str), f64>,
    http: f64,
}

impl Book {
    fn request(&mut self, prompt: usize, choices: &[(usize, &'static str)]) {
        self.requests += 1.0;
        for (tokens, reason) in choices {
            self.choices += 1.0;
            self.prompt_tokens += prompt as f64;
            self.generation_tokens += *tokens as f64;
            *self.ended.entry(reason).or_default() += 1.0;
        }
    }

    fn call(&mut self, method: &'static str, code: &'static str) {
        *self.calls.entry((method, code)).or_default() += 1.0;
    }

    fn answer(&mut self, method: &'static str, sequences: &[Sequence]) {
        let told = |sequence: &Sequence| {
            let reason = match reason(sequence) {
                FinishReason::Length => "length",
                FinishReason::Stop => "stop",
                FinishReason::Aborted => "abort",
                other => panic!("{other:?}"),
            };
            (sequence.token_ids.len(), reason)
        };
        self.request(3, &sequences.iter().map(told).collect::<Vec<_>>());
        self.call(method, "OK");
    }
}

/// One request of one of the kinds, written down.
fn ask_one(nth: u32, grpc: &Grpc, http: Client, book: &Mutex<Book>) {
    let tokens = 3 + nth % 11;
    let book = || book.lock().unwrap();
    match nth % 8 {
        0 => {
            let answer = sequences(&[grpc.generate(ask(tokens)).unwrap()]);
            book().answer("Generate", &answer);
        }
        1 => {
            let (messages, end) = grpc.stream(ask(tokens)).unwrap().rest();
            end.unwrap();
            book().answer("GenerateStream", &sequences(&messages));
        }
        2 => {
            let three = RandomSampling { num_sequences: 3, ..Default::default() };
            let request = GenerateRequest { sampling: Some(three), ..ask(tokens) };
            let (messages, end) = grpc.stream(request).unwrap().rest();
            end.unwrap();
            book().answer("GenerateStream", &sequences(&messages));
        }
        3 => {
            // Ended by its id in the middle, and read to its end: the client has every token.
            let mut stream = grpc.stream(ask(3_000)).unwrap();
            let mut messages = vec![stream.next().unwrap().unwrap()];
            assert_eq!(grpc.abort(&[&stream.id.clone()]), 1);
            let (rest, end) = stream.rest();
            end.unwrap();
            messages.extend(rest);
            let mut book = book();
            book.answer("GenerateStream", &sequences(&messages));
            book.call("Abort", "OK");
        }
        4 => {
            let stopping = StoppingCriteria {
                max_new_tokens: 60,
                stop_token_ids: vec![303],
                ..Default::default()
            };
            let allowed_token_ids = vec![303, 304, 305];
            let decoding = DecodingParameters { allowed_token_ids, ..Default::default() };
            let request =
                GenerateRequest { stopping: Some(stopping), decoding: Some(decoding), ..ask(1) };
            book().answer("Generate", &sequences(&[grpc.generate(request).unwrap()]));
        }
        5 => {
            let refused = GenerateRequest { temperature: Some(-1.0), ..ask(1) };
            grpc.generate(refused).unwrap_err();
            book().call("Generate", "InvalidArgument");
        }
        6 => {
            let body = json!({"prompt": [4, 5], "max_tokens": tokens, "ignore_eos": true, "n": 2});
            let answer = http.post("/v1/completions", &body).json();
            assert_eq!(answer["usage"]["completion_tokens"], 2 * tokens);
            let mut book = book();
            book.request(2, &[(tokens as usize, "length"); 2]);
            book.http += 1.0;
        }
        _ => {
            let body = json!({"prompt": [4, 5, 6, 7], "max_tokens": tokens, "ignore_eos": true,
                              "stream": true});
            let mut stream = http.stream("/v1/completions", &body);
            stream.rest();
            assert!(stream.is_done());
            let mut book = book();
            book.request(4, &[(tokens as usize, "length")]);
            book.http += 1.0;
        }
    }
}

#[test]
fn counters_are_what_clients_of_both_surfaces_saw() {
    const REQUESTS: u32 = 96;
    const CLIENTS: u32 = 6;
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "2"]);
    let (frontend, _) = frontend(&run, &[]);
    let port = grpc_port(&run.path("api.ports"));
    // Only the checks of the set-up were counted until now.
    let before = frontend.scrape();
    assert_eq!(
        before.sum_if_any("grpc_server_handled_total", &[("grpc_service", "pawl.Inference")]),
        0.0
    );
    let book = Mutex::new(Book::default());
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let book = &book;
            let http = frontend.http;
            scope.spawn(move || {
                let grpc = Grpc::connect(port);
                for nth in (client..REQUESTS).step_by(CLIENTS as usize) {
                    ask_one(nth, &grpc, http, book);
                }
            });
        }
    });
    let book = book.into_inner().unwrap();
    let handled = book.calls.values().sum::<f64>();
    // A call is counted when its client has the end; that it has it comes a moment before.
    let after = wait_for("every call counted", || {
        Some(frontend.scrape()).filter(|s| {
            s.get("grpc_server_handled_total") - before.get("grpc_server_handled_total") >= handled
                && s.get("pawl:requests_in_flight") + s.running() == 0.0
        })
    });
    let differences = differences(&book, &before, &after);
    assert!(differences.is_empty(), "{differences:#?}\n{book:#?}");
    for reason in ["length", "stop", "abort"] {
        assert!(book.ended[reason] > 0.0, "none ended by {reason}: {book:#?}");
    }
}

fn differences(book: &Book, before: &Scrape, after: &Scrape) -> Vec<String> {
    let completed = book.choices - book.ended["abort"];
    let calls: f64 = book.calls.values().sum();
    let mut expected = vec![
        ("vllm:prompt_tokens_total", vec![], book.prompt_tokens),
        ("vllm:generation_tokens_total", vec![], book.generation_tokens),
        ("vllm:request_success_total", vec![], book.choices),
        ("vllm:time_to_first_token_seconds_count", vec![], book.choices),
        ("vllm:e2e_request_latency_seconds_count", vec![], completed),
        ("vllm:request_prompt_tokens_count", vec![], completed),
        ("vllm:request_params_n_count", vec![], book.requests - book.ended["abort"]),
        ("vllm:admission_rejections_total", vec![], 0.0),
        ("http_requests_total", vec![], book.http),
        ("grpc_server_handled_total", vec![], calls),
        ("grpc_server_started_total", vec![], calls),
        ("grpc_server_handling_seconds_count", vec![], calls),
    ];
    for (reason, count) in &book.ended {
        let labels = vec![("finished_reason", *reason)];
        expected.push(("vllm:request_success_total", labels, *count));
    }
    for ((method, code), count) in &book.calls {
        let labels = vec![("grpc_method", *method), ("grpc_code", *code)];
        expected.push(("grpc_server_handled_total", labels, *count));
    }
    expected
        .into_iter()
        .filter_map(|(name, labels, expected)| {
            let told = after.sum_if_any(name, &labels) - before.sum_if_any(name, &labels);
            (told != expected).then(|| format!("{name} {labels:?}: {expected} seen, {told} told"))
        })
        .collect()
}
