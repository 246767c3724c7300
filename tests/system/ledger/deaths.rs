//! The ledger through violent deaths: over HTTP and gRPC, while one of three frontends is killed
//! and replaced, and then the core. What died with a process is told apart by who asked for it: its
//! client saw neither an end nor an error. All else differs by nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use super::book::{Book, ChoiceEnd, difference, preemptions_of};
use super::clients::{self, Entry, KINDS};
use super::{FRONTEND, calls, scrape_while};
use crate::grpc::client::{Grpc, grpc_port};
use crate::harness::{Client, Frontend, Process, Run, Scrape, Stop, rounds, wait_for};

const CLIENTS: usize = 12;

/// So little room that requests are preempted.
const CORE: &[&str] = &[
    "--no-async-scheduling",
    "--mock-step-ms",
    "2",
    "--max-num-seqs",
    "40",
    "--num-gpu-blocks-override",
    "34",
    "--max-model-len",
    "512",
    "--max-num-batched-tokens",
    "64",
];

struct Server {
    frontend: Frontend,
    grpc: u16,
    /// Its page at its start.
    before: Scrape,
}

impl Server {
    fn start(run: &Run, name: &str) -> Self {
        // A core that the test stops for a moment does not hang, however slow the machine is.
        let own = ["--grpc-port", "0", "--engine-hang-timeout", "60"];
        let frontend =
            run.frontend(name, &[FRONTEND, &own, &["--engine-dead-timeout", "120"]].concat());
        let grpc = grpc_port(&run.path(&format!("{name}.ports")));
        let before = frontend.scrape();
        Self { frontend, grpc, before }
    }

    /// Waits until none of its requests is under way.
    fn idle(&self) -> Scrape {
        self.frontend.scrape_until("nothing under way", |s| s.get("pawl:requests_in_flight") == 0.0)
    }
}

/// Puts the requests of `range` to `servers`, scraping all of them, while `event` happens, which is
/// told how far the clients are.
fn mixed<R>(
    servers: &[&Server],
    range: Range<usize>,
    event: impl FnOnce(&AtomicUsize) -> R,
) -> (Vec<Entry>, R) {
    let next = AtomicUsize::new(range.start);
    let scraping = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let stop_scraping = Stop(&scraping);
        let (next, scraping, end) = (&next, &scraping, range.end);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| scope.spawn(move || ask_all(servers, client, next, end)))
            .collect();
        let scrapers: Vec<_> = servers
            .iter()
            .map(|server| scope.spawn(|| scrape_while(&server.frontend, scraping)))
            .collect();
        let outcome = event(next);
        let entries = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        drop(stop_scraping);
        scrapers.into_iter().for_each(|scraper| _ = scraper.join().unwrap());
        (entries, outcome)
    })
}

fn ask_all(servers: &[&Server], client: usize, next: &AtomicUsize, end: usize) -> Vec<Entry> {
    let called = servers[client % servers.len()];
    let grpc = Grpc::connect(called.grpc);
    let mut entries = Vec::new();
    loop {
        let nth = next.fetch_add(1, Ordering::Relaxed);
        if nth >= end {
            return entries;
        }
        // Every kind goes round the servers.
        let asked = servers[(nth / KINDS + nth) % servers.len()];
        let mut put = |server: &Server, entry: Entry| {
            if entry.refused.as_deref() == Some("engine_unavailable") {
                // Else all requests would be refused before the next core is there.
                wait_for("a core", || server.frontend.http.is_ready().then_some(()));
            }
            entries.push(entry);
        };
        put(asked, clients::ask(asked.frontend.http, nth));
        if nth.is_multiple_of(4) {
            put(called, calls::call(&grpc, nth / 4));
        }
    }
}

/// As many as there is room for: such a request does not end by itself while a test looks.
const LONG: usize = 490;

/// Streams at one server that are read until they end or break off, over HTTP and gRPC; `seen` is
/// how many tokens their clients have.
fn hold<'scope>(
    scope: &'scope Scope<'scope, '_>,
    server: &Server,
    name: &'static str,
    seen: &'scope AtomicU64,
) -> Vec<ScopedJoinHandle<'scope, Entry>> {
    let (http, grpc) = (server.frontend.http, server.grpc);
    (0..6)
        .map(|nth| {
            scope.spawn(move || match nth % 3 {
                0 => held_call(&Grpc::connect(grpc), &format!("{name}{nth}"), nth, seen),
                _ => held_stream(http, &format!("{name}{nth}"), nth, seen),
            })
        })
        .collect()
}

fn held_stream(http: Client, id: &str, nth: usize, seen: &AtomicU64) -> Entry {
    let prompt: Vec<usize> = (0..calls::PROMPT).map(|at| 10 + (at + 7 * nth) % 240).collect();
    let body = json!({"request_id": id, "prompt": prompt, "max_tokens": LONG, "ignore_eos": true,
                      "return_token_ids": true, "stream": true});
    let mut entry = Entry {
        kind: "held",
        id: format!("cmpl-{id}"),
        method: "POST",
        route: "/v1/completions",
        status: Some(200),
        n: 1,
        prompt_tokens: calls::PROMPT as u64,
        max_tokens: LONG as u64,
        ..Entry::default()
    };
    let Ok(mut stream) = http.stream_with(entry.route, &[], &body) else {
        return Entry { died: true, ..entry };
    };
    while let Some(event) = stream.next() {
        if event.get("error").is_some() {
            return Entry { failed: true, ..entry };
        }
        entry.take_in(&event["choices"][0]);
        let tokens = event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
        seen.fetch_add(tokens as u64, Ordering::Relaxed);
    }
    Entry { died: !stream.is_done(), ..entry }
}

fn held_call(grpc: &Grpc, id: &str, nth: usize, seen: &AtomicU64) -> Entry {
    let mut entry = calls::entry("held call", id, "GenerateStream", LONG);
    let mut stream = match grpc.stream(calls::request(id, 1000 + nth, LONG)) {
        Ok(stream) => stream,
        Err(status) => return entry.end_with(&status),
    };
    loop {
        match stream.next() {
            Ok(Some(message)) => {
                entry.take_in_message(&message);
                let tokens = message.outputs.map_or(0, |piece| piece.token_ids.len());
                seen.fetch_add(tokens as u64, Ordering::Relaxed);
            }
            Ok(None) => return entry,
            Err(status) => return entry.end_with(&status),
        }
    }
}

/// What is left of a killed frontend.
struct Killed {
    /// Its page when the requests that died with it began, and the last one.
    idle: Scrape,
    last: Scrape,
    log: String,
    entries: Vec<Entry>,
}

/// Kills `victim` under requests in several phases. The core stands still while the last page is
/// taken, so that nothing is counted after it.
fn kill_frontend(mut victim: Server, core: &Process) -> Killed {
    let idle = victim.idle();
    let generated = |s: &Scrape| s.get("vllm:generation_tokens_total");
    let seen = AtomicU64::new(0);
    let (last, entries) = std::thread::scope(|scope| {
        let held = hold(scope, &victim, "victim", &seen);
        wait_for("tokens", || (seen.load(Ordering::Relaxed) > 20).then_some(()));
        core.signal(Signal::SIGSTOP);
        // What was under way has arrived when, for three pages, clients have what is counted.
        let mut settled = 0;
        let last = wait_for("clients that have all that is counted", || {
            std::thread::sleep(Duration::from_millis(100));
            let page = victim.frontend.scrape();
            page.assert_counters_since(&idle);
            let counted = generated(&page) - generated(&idle);
            settled = if counted == seen.load(Ordering::Relaxed) as f64 { settled + 1 } else { 0 };
            (settled == 3).then_some(page)
        });
        victim.frontend.process.signal(Signal::SIGKILL);
        victim.frontend.process.wait();
        core.signal(Signal::SIGCONT);
        let entries: Vec<Entry> = held.into_iter().map(|held| held.join().unwrap()).collect();
        (last, entries)
    });
    assert!(entries.iter().any(|entry| entry.died), "none died: {entries:#?}");
    Killed { idle, last, log: victim.frontend.process.log(), entries }
}

/// Kills the core under requests, sees one refused, and starts the next.
fn kill_core(run: &Run, core: &mut Process, servers: &[&Server]) -> Vec<Entry> {
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let held: Vec<_> = ["first", "second"]
            .into_iter()
            .zip(servers)
            .flat_map(|(name, server)| hold(scope, server, name, &seen))
            .collect();
        wait_for("tokens", || (seen.load(Ordering::Relaxed) > 20).then_some(()));
        core.signal(Signal::SIGKILL);
        core.wait();
        let server = &servers[0].frontend;
        server.scrape_until("no core", |s| s.get("pawl:core_up") == 0.0);
        let refused = clients::ask(server.http, 1_000 * KINDS);
        assert_eq!(refused.refused.as_deref(), Some("engine_unavailable"));
        *core = run.mock_core(CORE);
        held.into_iter().map(|held| held.join().unwrap()).chain([refused]).collect()
    })
}

#[test]
fn ledger_of_three_frontends_through_deaths_of_one_and_of_the_core() {
    let run = Run::new();
    let mut core = run.mock_core(CORE);
    let [a, b, c] = ["a", "b", "c"].map(|name| Server::start(&run, name));
    let all_before = [&a, &b, &c].map(|server| server.before.clone());
    let requests = rounds(225, 5_000);
    let third = requests / 3;

    let (mut entries, ()) = mixed(&[&a, &b, &c], 0..third, |_| ());
    // Sixty at once, which have the core to themselves and twice the blocks that there are.
    for (server, nth) in [(&a, 100_072), (&b, 100_172)] {
        [&a, &b, &c].iter().for_each(|server| _ = server.idle());
        let sixty = clients::ask(server.frontend.http, nth);
        assert_eq!((sixty.n, sixty.refused.as_deref()), (60, None));
        entries.push(sixty);
    }
    let others = [&a, &c];
    let (more, (killed, next)) = mixed(&others, third..2 * third, |_| {
        let killed = kill_frontend(b, &core);
        (killed, Server::start(&run, "next"))
    });
    // The others felt nothing of it.
    assert!(more.iter().all(|e| !e.failed && !e.died), "{more:#?}");
    entries.extend(more);
    let servers = [&a, &next, &c];
    let (more, failed) = mixed(&servers, 2 * third..requests, |asked| {
        let some = 2 * third + third / 4;
        wait_for("some requests", || (asked.load(Ordering::Relaxed) > some).then_some(()));
        kill_core(&run, &mut core, &servers)
    });
    entries.extend(more);
    entries.extend(failed);

    let mut logs = killed.log;
    servers.iter().for_each(|server| logs.push_str(&server.frontend.process.log()));
    let died: Vec<&str> = killed.entries.iter().map(|entry| entry.id.as_str()).collect();
    let victims = killed.last.get("vllm:num_preemptions_total")
        - killed.idle.get("vllm:num_preemptions_total");
    entries.extend(killed.entries.iter().cloned());

    let before = [&next.before]
        .into_iter()
        .chain(&all_before)
        .fold(None, |sum: Option<Scrape>, page| Some(sum.map_or(page.clone(), |s| s.plus(page))));
    let before = before.unwrap();
    let http = entries.iter().filter(|e| e.call.is_none() && !e.died).count() as f64;
    let calls = entries.iter().filter(|e| e.call.is_some() && !e.died).count() as f64;
    // An answer is counted a moment after its client has it.
    let after = wait_for("every answer counted", || {
        let living = servers.iter().map(|server| server.idle());
        let sum = living.fold(killed.last.clone(), |sum, page| sum.plus(&page));
        let more = |name| sum.sum_if_any(name, &[]) - before.sum_if_any(name, &[]);
        let handled = [("grpc_service", "pawl.Inference")];
        let handled = sum.sum_if_any("grpc_server_handled_total", &handled);
        (more("http_requests_total") >= http && handled >= calls).then_some(sum)
    });

    let ends = ChoiceEnd::read(&logs);
    let mut book = Book::new(&entries, &ends);
    // Of requests that have not ended no client and no log tells how often they were preempted.
    book.add_preemptions(victims - preemptions_of(&ends, &died));
    let differences = difference(&book, &before, &after);
    assert!(differences.is_empty(), "{}\n{book:#?}", differences.join("\n"));
    for (kind, fate) in [
        ("held", "its frontend died"),
        ("held", "error"),
        ("held call", "error"),
        ("length, text", "length"),
        ("length, text", "engine_unavailable"),
        ("stop token", "stop"),
        ("stop string, stream", "stop"),
        ("left in the middle", "abort"),
        ("three choices, stream", "length"),
        ("bad value", "invalid_value"),
        ("call", "length"),
        ("call, stream", "length"),
        ("call for three", "length"),
        ("call left in the middle", "abort"),
        ("refused call", "invalid_value"),
    ] {
        book.assert_met(kind, fate);
    }
    assert!(after.get("vllm:num_preemptions_total") > 0.0, "there was room for all");
    for server in servers {
        server.frontend.scrape_until("an idle core", |s| {
            s.running() + s.waiting() + s.kv_usage() == 0.0 && s.get("pawl:core_up") == 1.0
        });
    }
}
