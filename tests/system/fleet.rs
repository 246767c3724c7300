//! Several api-servers as one: their metrics on the port they share, and what becomes of a child
//! that hangs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{Client, Run, Scrape, Stop, alive, assert_within, rounds, signal, wait_for};
use crate::lifecycle::Served;

/// So many requests of 3 + 4 tokens, one after another.
pub fn ask(http: Client, count: usize) {
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": true});
    for _ in 0..count {
        let answer = http.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

/// Waits until the supervisor has taken note of the end of `victim`, and started another. Before
/// that some of its threads may still be ending, and its sockets be open.
pub fn replaced(served: &Served, victim: i32) {
    wait_for("the next one", || {
        let children = served.process.descendants();
        (children.len() == served.children.len() && !children.contains(&victim)).then_some(())
    });
}

/// Of all `vllm:` series that only grow.
fn counters(scrape: &Scrape) -> Vec<(String, f64)> {
    let grows = |series: &str| {
        let family = series.split('{').next().unwrap_or_default();
        ["_total", "_count", "_sum", "_bucket"].iter().any(|end| family.ends_with(end))
    };
    let counters = scrape.series().filter(|(series, _)| series.starts_with("vllm:"));
    counters.filter(|(series, _)| grows(series)).map(|(s, v)| (s.to_owned(), v)).collect()
}

/// Tokens of the answers to `ask`, as the page on the shared port has them.
pub fn assert_asked(page: &Scrape, requests: f64) {
    assert_eq!(page.get("vllm:generation_tokens_total"), 4.0 * requests);
    assert_eq!(page.get("vllm:prompt_tokens_total"), 3.0 * requests);
    assert_eq!(page.get("vllm:request_success_total"), requests);
    assert_eq!(page.get("vllm:e2e_request_latency_seconds_count"), requests);
    assert_eq!(page.get("vllm:prefix_cache_queries_total"), 3.0 * requests);
}

#[test]
fn the_shared_port_shows_the_sum_of_all_api_servers() {
    let run = Run::new();
    let served = Served::start(&run, 3, &["--mock-step-ms", "1"]);
    ask(served.http, 40);
    let page = served.http.scrape();
    assert_asked(&page, 40.0);
    // Whichever api-server answers.
    for _ in 0..12 {
        assert_eq!(counters(&served.http.scrape()), counters(&page));
    }
    let own: Vec<Scrape> = served.admins.iter().map(|admin| admin.scrape()).collect();
    assert!(own.iter().all(|page| page.get("vllm:request_success_total") < 40.0));
    let sum = own.iter().skip(1).fold(own[0].clone(), |sum, page| sum.plus(page));
    for (series, value) in counters(&page) {
        let sum = sum.series().find(|(name, _)| *name == series).unwrap().1;
        assert!((sum - value).abs() <= 1e-9 * value, "{series}: {value} is not {sum}");
    }

    // The core's gauges are told to each, and shown once.
    let long = json!({"prompt": [1], "max_tokens": 8000, "ignore_eos": true, "stream": true});
    let mut streams: Vec<_> =
        (0..6).map(|_| served.http.stream("/v1/completions", &long)).collect();
    streams.iter_mut().for_each(|stream| assert!(stream.next().is_some()));
    wait_for("six running", || {
        let page = served.http.scrape();
        assert!(page.running() <= 6.0, "{} of 6 running", page.running());
        assert_eq!(page.get("vllm:cache_config_info"), 1.0);
        (page.running() == 6.0 && page.get("pawl:requests_in_flight") == 6.0).then_some(())
    });
    drop(streams);
    wait_for("none running", || {
        let page = served.http.scrape();
        (page.running() == 0.0 && page.get("pawl:requests_in_flight") == 0.0).then_some(())
    });
}

#[test]
fn the_shared_page_never_falls_while_api_servers_die() {
    let run = Run::new();
    let served = Served::start(&run, 3, &["--mock-step-ms", "1"]);
    let scraping = AtomicBool::new(true);
    let scrapes = std::thread::scope(|scope| {
        let stop_scraping = Stop(&scraping);
        let scraper = scope.spawn(|| {
            let mut last = served.http.scrape();
            let mut count = 0;
            while scraping.load(Ordering::Relaxed) {
                // The one that is asked may be the one that dies.
                let Some(answer) = served.http.try_get("/metrics") else { continue };
                assert_eq!(answer.status, 200, "{}", answer.text());
                let now = Scrape::parse(&answer.text());
                now.assert_counters_since(&last);
                last = now;
                count += 1;
            }
            count
        });
        let mut asked = 0;
        for index in 0..3 {
            ask(served.http, 20);
            asked += 20;
            // This page is of reports made after the answers, so nothing is lost with a process.
            assert_asked(&served.http.scrape(), f64::from(asked));
            let victim = served.child(&format!("api-{index}.toml"));
            signal(victim, Signal::SIGKILL);
            replaced(&served, victim);
            assert_asked(&served.http.scrape(), f64::from(asked));
        }
        ask(served.http, 20);
        assert_asked(&served.http.scrape(), f64::from(asked + 20));
        drop(stop_scraping);
        scraper.join().unwrap()
    });
    assert!(scrapes >= 20, "{scrapes} scrapes");
}

#[test]
fn an_api_server_that_hangs_is_replaced() {
    let run = Run::new();
    let served = Served::start(&run, 2, &["--mock-step-ms", "1"]);
    ask(served.http, 20);
    served.http.scrape();
    let victim = served.child("api-1.toml");
    let stopped = Instant::now();
    signal(victim, Signal::SIGSTOP);
    wait_for("its end", || (!alive(victim)).then_some(()));
    let took = stopped.elapsed();
    eprintln!("figure: a stopped api-server was killed: {:.3} s", took.as_secs_f64());
    assert!((Duration::from_secs(9)..Duration::from_secs(15)).contains(&took), "{took:?}");
    replaced(&served, victim);
    ask(served.http, 20);
    assert_asked(&served.http.scrape(), 40.0);
}

/// Health turns within the time that is set, streams are kept, and no token is lost or repeated.
#[test]
fn a_core_that_is_stopped_for_a_while_goes_on() {
    for _ in 0..rounds(1, 20) {
        check_stopped_core();
    }
}

fn check_stopped_core() {
    let run = Run::new();
    let hang = rounds(3, 10);
    let flags = ["--mock-step-ms", "20", "--engine-hang-timeout", &hang.to_string()];
    let served = Served::start(&run, 2, &flags);
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": true, "seed": 1,
                      "temperature": 0, "return_token_ids": true, "stream": true});
    let tokens = |events: Vec<Value>| -> Vec<Value> {
        let ids = |event: &Value| event["choices"][0]["token_ids"].as_array().cloned();
        events.iter().filter_map(ids).flatten().collect()
    };
    let whole = tokens(served.http.stream("/v1/completions", &body).rest());
    assert_eq!(whole.len(), 100);

    let mut streams: Vec<_> =
        (0..20).map(|_| served.http.stream("/v1/completions", &body)).collect();
    let first: Vec<Value> = streams.iter_mut().map(|s| s.next().unwrap()).collect();
    let core = served.child("engine-core");
    let stopped = Instant::now();
    signal(core, Signal::SIGSTOP);
    for admin in &served.admins {
        wait_for("503", || (admin.get("/health").status == 503).then_some(()));
    }
    // Pings go out each second, so it may be noticed one late; a busy machine adds to it.
    let limit = Duration::from_secs((hang + rounds(2, 1)) as u64);
    assert_within(limit, stopped, "/health was 503 after the core was stopped");
    // The soak keeps it stopped for longer than it takes to notice.
    std::thread::sleep(Duration::from_secs(rounds(0, 4) as u64));
    assert_eq!(served.http.post("/v1/completions", &body).status, 503);
    signal(core, Signal::SIGCONT);
    let went_on = Instant::now();
    for admin in &served.admins {
        wait_for("200", || (admin.get("/health").status == 200).then_some(()));
    }
    assert_within(Duration::from_secs(2), went_on, "/health was 200 after the core went on");
    for (stream, first) in streams.iter_mut().zip(first) {
        let events = std::iter::once(first).chain(stream.rest()).collect();
        assert!(stream.is_done());
        assert_eq!(tokens(events), whole);
    }
    assert_eq!(served.child("engine-core"), core);
}

#[test]
fn a_core_that_hangs_for_long_is_replaced() {
    let run = Run::new();
    let timeouts = ["--engine-hang-timeout", "3", "--engine-dead-timeout", "5"];
    let served = Served::start(&run, 2, &[&timeouts[..], &["--mock-step-ms", "20"]].concat());
    let long = json!({"prompt": [1], "max_tokens": 8000, "ignore_eos": true, "stream": true});
    let mut streams: Vec<_> =
        (0..8).map(|_| served.http.stream("/v1/completions", &long)).collect();
    streams.iter_mut().for_each(|stream| assert!(stream.next().is_some()));
    let core = served.child("engine-core");
    let stopped = Instant::now();
    signal(core, Signal::SIGSTOP);
    for stream in &mut streams {
        let last = stream.rest().pop().expect("an error event");
        assert_eq!(last["error"]["code"], "engine_unavailable", "{last}");
    }
    wait_for("its end", || (!alive(core)).then_some(()));
    let took = stopped.elapsed();
    eprintln!("figure: a core stopped beyond 5 s was killed: {:.3} s", took.as_secs_f64());
    assert!((Duration::from_secs(4)..Duration::from_secs(10)).contains(&took), "{took:?}");
    let serve = || served.admins.iter().all(|admin| admin.is_ready());
    wait_for("the next one", || serve().then_some(()));
    ask(served.http, 8);
    // Counters go on from where they were.
    let page = served.http.scrape();
    assert_eq!((page.ended("error"), page.ended("length")), (8.0, 8.0));
}
