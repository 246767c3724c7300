//! Peers that break every rule of the sockets, beside clients who must not notice.

mod payloads;
mod streams;
mod zmtp;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::frames::status;
use crate::harness::{
    Client, Frontend, Process, Run, Scrape, Stop, listening_ports, resident_kib, wait_for, within,
};

/// What a process may have grown by when it is over.
const GROWTH_KIB_MAX: u64 = 16 << 10;

/// A source of chances that a failing run can repeat.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// A core and an api-server that meet over ipc or tcp. The core also listens on ipc, where nothing
/// hostile goes on, so that it can be asked how it fares.
struct System {
    run: Run,
    core: Process,
    frontend: Frontend,
    /// Where the api-server joined.
    address: String,
}

impl System {
    fn start(tcp: bool) -> Self {
        let run = Run::new();
        let listen: &[&str] = if tcp { &["--listen", "tcp://127.0.0.1:0"] } else { &[] };
        let core = run.mock_core(&[listen, &["--mock-step-ms", "0.5"]].concat());
        let address = if tcp {
            let port = wait_for("the core's port", || listening_ports(core.pid()).first().copied());
            format!("tcp://127.0.0.1:{port}")
        } else {
            run.core_address()
        };
        let frontend = run.frontend_of(&address, "api", &[]);
        Self { run, core, frontend, address }
    }

    fn pids(&self) -> [i32; 2] {
        [self.core.pid(), self.frontend.process.pid()]
    }

    /// Both processes serve as they did, and nothing is left over.
    fn assert_unharmed(&mut self) {
        assert!(self.core.ended().is_none(), "the core has ended");
        assert_serves(&mut self.frontend);
        self.frontend.idle();
        wait_for("the hostile ones to be forgotten", || {
            // The api-server, and whoever asks.
            (self.status()["clients"] == 2).then_some(())
        });
        assert!(!self.core.log().contains("panicked"), "{}", self.core.log());
    }

    fn status(&self) -> Value {
        status(&self.run)
    }
}

fn assert_serves(frontend: &mut Frontend) {
    assert!(frontend.process.ended().is_none(), "the api-server has ended");
    assert_eq!(frontend.http.get("/health").status, 200);
    assert_eq!(tokens(frontend.http, 1).map(|tokens| tokens.len()), Some(TOKENS));
    assert!(!frontend.process.log().contains("panicked"), "{}", frontend.process.log());
}

/// What processes have in memory.
struct Memory(Vec<(i32, u64)>);

impl Memory {
    fn of(pids: &[i32]) -> Self {
        Self(pids.iter().map(|pid| (*pid, resident_kib(*pid))).collect())
    }

    /// Waits for memory to come back, which allocators give when they like to.
    fn assert_grown_little(&self) {
        let mut grown = Vec::new();
        let little = within(Duration::from_secs(10), || {
            let growth = |(pid, before): &(i32, u64)| resident_kib(*pid).saturating_sub(*before);
            grown = self.0.iter().map(growth).collect();
            grown.iter().all(|grown| *grown <= GROWTH_KIB_MAX).then_some(())
        });
        eprintln!("grown by {grown:?} KiB");
        assert!(little.is_some(), "grown by {grown:?} KiB");
    }
}

const TOKENS: usize = 12;
const KINDS: usize = 4;

/// The tokens of a whole stream; `None` if it was cut. They depend on the prompt alone.
fn tokens(http: Client, kind: usize) -> Option<Vec<u64>> {
    let body = json!({"prompt": [20 + kind, 30, 40], "max_tokens": TOKENS, "ignore_eos": true,
                      "stream": true, "seed": 7, "return_token_ids": true});
    let mut stream = http.stream("/v1/completions", &body);
    let events = stream.rest();
    let ids = events.iter().filter_map(|event| event["choices"][0]["token_ids"].as_array());
    let ids = ids.flatten().map(|id| id.as_u64().unwrap()).collect();
    (stream.status == 200 && stream.is_done()).then_some(ids)
}

/// Runs `hostile` while clients stream without a break; each of their streams must be whole and
/// right.
fn beside_live_traffic<T>(http: Client, hostile: impl FnOnce() -> T) -> T {
    let expected: Vec<Vec<u64>> = (0..KINDS).map(|kind| tokens(http, kind).unwrap()).collect();
    assert!(expected.iter().all(|tokens| tokens.len() == TOKENS), "{expected:?}");
    let on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let stop = Stop(&on);
        let clients: Vec<_> = (0..KINDS)
            .map(|kind| {
                let (on, expected) = (&on, &expected[kind]);
                scope.spawn(move || {
                    let mut streams = 0;
                    while on.load(Ordering::Relaxed) {
                        assert_eq!(tokens(http, kind).as_ref(), Some(expected), "kind {kind}");
                        streams += 1;
                    }
                    streams
                })
            })
            .collect();
        let result = hostile();
        drop(stop);
        let streams: u32 = clients.into_iter().map(|client| client.join().unwrap()).sum();
        eprintln!("{streams} streams beside it");
        assert!(streams > 0);
        result
    })
}

/// Numbers by kind.
type Counts = BTreeMap<String, u64>;

fn counts(value: &Value) -> Counts {
    let counts = value.as_object().unwrap().iter();
    counts.map(|(kind, count)| (kind.clone(), count.as_u64().unwrap())).collect()
}

/// The series of a counter by its label `kind`, those that have moved.
fn counts_of(page: &Scrape, family: &str) -> Counts {
    let prefix = format!("{family}{{kind=\"");
    let ours = page.series().filter_map(|(series, value)| {
        let kind = series.strip_prefix(&prefix)?.trim_end_matches("\"}");
        (value > 0.0).then(|| (kind.to_owned(), value as u64))
    });
    ours.collect()
}

fn counted(frontend: &Frontend, family: &str) -> Counts {
    counts_of(&frontend.scrape(), family)
}
