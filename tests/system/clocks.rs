//! The means on the page are those of the clients' own clocks, for streams over HTTP and gRPC.
//!
//! A client's clock starts before the server's and stops after it. What lies between the two is a
//! request's way there and a token's way back, which is what a trivial request takes: on a machine
//! that is busy with other things as well, that is measured beside the streams and allowed for.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::grpc::client::{Grpc, grpc_port};
use crate::harness::{Frontend, Run, Stop};

const STREAMS: usize = 6;
const ROUNDS: usize = 2;
const TOKENS: usize = 8;

/// When one client had each of its tokens, counted from just before it asked.
type Seen = Vec<Duration>;

/// The page's means against the clients', over streams that `ask` reads.
fn check(surface: &str, frontend: &Frontend, ask: impl Fn(usize) -> Seen + Sync) {
    let before = frontend.scrape();
    let streaming = AtomicBool::new(true);
    let seen: Mutex<Vec<Seen>> = Mutex::default();
    let way = std::thread::scope(|scope| {
        let stop_probing = Stop(&streaming);
        let probe = scope.spawn(|| {
            let mut ways = Vec::new();
            while streaming.load(Ordering::Relaxed) {
                let asked = Instant::now();
                frontend.http.get("/ping");
                ways.push(asked.elapsed().as_secs_f64());
                // Twenty a second are no load.
                std::thread::sleep(Duration::from_millis(50));
            }
            mean(ways)
        });
        let clients: Vec<_> = (0..STREAMS)
            .map(|client| {
                let (seen, ask) = (&seen, &ask);
                scope.spawn(move || {
                    let all = (0..ROUNDS).map(|round| ask(client * ROUNDS + round));
                    let all: Vec<Seen> = all.collect();
                    seen.lock().unwrap().extend(all);
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        drop(stop_probing);
        probe.join().unwrap()
    });
    let after = frontend.scrape_until("an idle core", |s| s.running() == 0.0);
    let seen = seen.into_inner().unwrap();
    assert!(seen.iter().all(|tokens| tokens.len() == TOKENS), "{seen:?}");

    let of = |family: &str, count: usize| {
        let moved = |end: &str| {
            let name = format!("vllm:{family}_seconds_{end}");
            after.get(&name) - before.get(&name)
        };
        assert_eq!(moved("count"), count as f64, "{surface}: {family}");
        moved("sum") / count as f64
    };
    let streams = STREAMS * ROUNDS;
    let told = [
        of("time_to_first_token", streams),
        of("e2e_request_latency", streams),
        of("inter_token_latency", streams * (TOKENS - 1)),
    ];
    let first = mean(seen.iter().map(|tokens| tokens[0].as_secs_f64()).collect());
    let last = mean(seen.iter().map(|tokens| tokens[TOKENS - 1].as_secs_f64()).collect());
    let seen = [first, last, (last - first) / (TOKENS - 1) as f64];
    eprintln!("{surface}: first token, whole, gap: seen {seen:.4?}, told {told:.4?}, way {way:.4}");
    for (told, seen) in told.into_iter().zip(seen) {
        let bound = (0.1 * seen).max(0.005) + way;
        assert!((told - seen).abs() <= bound, "{surface}: {told} s told, {seen} s seen ({way})");
    }
    // The server's time lies within the client's.
    assert!(told[0] <= seen[0] && told[1] <= seen[1], "{surface}: {told:?} told, {seen:?} seen");
}

fn mean(values: Vec<f64>) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn times_are_those_on_the_clients_clocks() {
    let run = Run::new();
    let _core = run.mock_core(&["--mock-step-ms", "100"]);
    let frontend = run.frontend("api", &["--grpc-port", "0"]);
    check("HTTP", &frontend, |nth| {
        let body = json!({"prompt": [nth, 2, 3], "max_tokens": TOKENS, "ignore_eos": true,
                          "return_token_ids": true, "stream": true});
        let asked = Instant::now();
        let mut stream = frontend.http.stream("/v1/completions", &body);
        let mut seen = Seen::new();
        while let Some(event) = stream.next() {
            let tokens = event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
            seen.extend(vec![asked.elapsed(); tokens]);
        }
        seen
    });
    let port = grpc_port(&run.path("api.ports"));
    check("gRPC", &frontend, |nth| {
        let grpc = Grpc::connect(port);
        let mut request = crate::grpc::ask(TOKENS as u32);
        request.request_id = format!("timed-{nth}");
        let asked = Instant::now();
        let mut stream = grpc.stream(request).unwrap();
        let mut seen = Seen::new();
        while let Some(message) = stream.next().unwrap() {
            let tokens = message.outputs.unwrap().token_ids.len();
            seen.extend(vec![asked.elapsed(); tokens]);
        }
        seen
    });
}
