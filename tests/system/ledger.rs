//! The clients' own account of what they asked for and got, read by the fate table of
//! `docs/metrics.md`, against `/metrics`: they differ by nothing.
//!
//! What a client cannot know, the frontend's log tells: of a request that its client left, how many
//! tokens had been folded until then (one line for each choice, `--request-timing log`). Where the
//! client does know, that line must say the same.

mod book;
mod calls;
mod clients;
mod deaths;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::json;

use crate::harness::{Frontend, Run, Scrape, Stop, rounds};
use book::{Book, ChoiceEnd, difference};
use clients::{Entry, KINDS};

const CLIENTS: usize = 16;

/// What every frontend of these tests runs with.
const FRONTEND: &[&str] = &[
    "--request-timing",
    "log",
    "--log-format",
    "json",
    "--max-body-bytes",
    "48KiB",
    "--max-num-queued-reqs",
    "60",
];

/// Some hundreds of requests by 16 clients over `frontends`, all scraped meanwhile; the sum of
/// their pages differs from the ledger by nothing. Returns that sum.
fn check(core_flags: &[&str], frontends: usize) -> Scrape {
    let run = Run::new();
    let _core = run.mock_core(core_flags);
    let names = ["a", "b"];
    let frontends: Vec<Frontend> =
        names[..frontends].iter().map(|name| run.frontend(name, FRONTEND)).collect();
    let before = sum_of(&frontends);

    let requests = rounds(200, 5_000);
    let next = AtomicUsize::new(0);
    let scraping = AtomicBool::new(true);
    let (mut entries, scrapes) = std::thread::scope(|scope| {
        let stop_scraping = Stop(&scraping);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let mut entries = Vec::new();
                    loop {
                        let nth = next.fetch_add(1, Ordering::Relaxed);
                        if nth >= requests {
                            break entries;
                        }
                        let frontend = &frontends[nth / KINDS % frontends.len()];
                        entries.push(clients::ask(frontend.http, nth));
                    }
                })
            })
            .collect();
        let scrapers: Vec<_> = frontends
            .iter()
            .map(|frontend| scope.spawn(|| scrape_while(frontend, &scraping)))
            .collect();
        let entries: Vec<Entry> = clients.into_iter().flat_map(|c| c.join().unwrap()).collect();
        drop(stop_scraping);
        let scrapes: usize = scrapers.into_iter().map(|s| s.join().unwrap()).sum();
        (entries, scrapes)
    });
    assert_eq!(entries.len(), requests);
    assert!(scrapes >= 20, "{scrapes} scrapes");
    let idle = || {
        // The last of the clients may have left a moment ago.
        for frontend in &frontends {
            frontend.idle();
        }
    };
    // Sixty at once have the core to themselves: where blocks are few, some are preempted.
    let unused = requests.next_multiple_of(KINDS) + clients::SIXTY;
    for nth in [unused, unused + KINDS] {
        idle();
        entries.push(clients::ask(frontends[0].http, nth));
    }
    for nth in 0..4 {
        idle();
        let frontend = &frontends[nth % frontends.len()];
        let generated = |s: &Scrape| s.get("vllm:generation_tokens_total");
        let before = generated(&frontend.scrape());
        entries.push(clients::leave_unanswered(frontend.http, nth, || {
            frontend.scrape_until("tokens", |s| generated(s) > before);
        }));
    }
    idle();
    let answers = entries.len() as f64;
    let after = crate::harness::wait_for("every answer counted", || {
        Some(sum_of(&frontends)).filter(|s| s.get("http_requests_total") >= answers)
    });

    let logs: String = frontends.iter().map(|frontend| frontend.process.log()).collect();
    let book = Book::new(&entries, &ChoiceEnd::read(&logs));
    let differences = difference(&book, &before, &after);
    assert!(differences.is_empty(), "{}\n{book:#?}", differences.join("\n"));
    book.assert_that_all_fates_occurred();
    after
}

fn sum_of(frontends: &[Frontend]) -> Scrape {
    frontends.iter().map(Frontend::scrape).reduce(|a, b| a.plus(&b)).unwrap()
}

/// Scrapes until told to stop; no counter ever falls or vanishes. Returns how often it scraped.
fn scrape_while(frontend: &Frontend, go_on: &AtomicBool) -> usize {
    let mut last = frontend.scrape();
    let mut count = 1;
    while go_on.load(Ordering::Relaxed) {
        let now = frontend.scrape();
        now.assert_counters_since(&last);
        last = now;
        count += 1;
    }
    count
}

#[test]
fn ledger_and_metrics_differ_by_nothing() {
    let flags = ["--async-scheduling", "--mock-step-ms", "2", "--max-num-seqs", "6"];
    check(&[&flags[..], &["--max-num-batched-tokens", "64"]].concat(), 1);
}

/// With two frontends, whose sum it is, and so little room that requests are preempted.
#[test]
fn ledger_and_metrics_of_two_frontends_differ_by_nothing_through_preemptions() {
    let flags = ["--no-async-scheduling", "--mock-step-ms", "2", "--max-num-seqs", "40"];
    let room = ["--num-gpu-blocks-override", "34", "--max-model-len", "512"];
    let after = check(&[&flags[..], &room[..], &["--max-num-batched-tokens", "64"]].concat(), 2);
    assert!(after.get("vllm:num_preemptions_total") > 0.0, "there was room for all");
}

/// A core that dies ends what it ran as errors, counted once each.
#[test]
fn ledger_of_a_core_that_dies() {
    let run = Run::new();
    let core = run.mock_core(&["--mock-step-ms", "5"]);
    let frontend = run.frontend("a", FRONTEND);
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 5000, "ignore_eos": true, "stream": true,
                      "n": 2, "return_token_ids": true});
    let mut streams: Vec<_> =
        (0..10).map(|_| frontend.http.stream("/v1/completions", &body)).collect();
    for stream in &mut streams {
        assert!(stream.next().is_some());
    }
    core.signal(nix::sys::signal::Signal::SIGKILL);
    for stream in &mut streams {
        let last = stream.rest().pop().expect("a last event");
        assert_eq!(last["error"]["code"], "engine_unavailable", "{last}");
        assert!(!stream.is_done(), "a failed stream looks whole");
    }
    let refused = frontend.http.post("/v1/completions", &body);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.header("retry-after").is_some());

    let after =
        frontend.scrape_until("every answer counted", |s| s.get("http_requests_total") >= 11.0);
    let ends = ChoiceEnd::read(&frontend.process.log());
    assert_eq!(ends.len(), 20);
    let tokens: u64 = ends.iter().map(|end| end.generation_tokens).sum();
    assert_eq!(after.ended("error"), 20.0);
    assert_eq!(after.get("vllm:request_success_total"), 20.0);
    assert_eq!(after.get("vllm:generation_tokens_total"), tokens as f64);
    // A prompt is counted with its first token, and the core died before some choices had theirs.
    let prefilled = ends.iter().filter(|end| end.generation_tokens > 0).count();
    assert_eq!(after.get("vllm:prompt_tokens_total"), 3.0 * prefilled as f64);
    assert_eq!(after.get("vllm:e2e_request_latency_seconds_count"), 0.0);
    assert_eq!(after.rejected("engine_unavailable"), 1.0);
    assert_eq!((after.running(), after.waiting(), after.kv_usage()), (0.0, 0.0, 0.0));
    assert_eq!(after.get("pawl:core_up"), 0.0);
}
