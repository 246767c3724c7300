//! A tap that does not read: it misses messages and is told how many, and nobody waits for it.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{command, complete, mock_core, status, taps_of};
use crate::harness::{Frontend, PATIENCE, Run, wait_for};

/// A core that reads a long prompt in one step, so that few steps carry much.
const CORE: [&str; 6] = [
    "--no-async-scheduling",
    "--no-enable-prefix-caching",
    "--max-num-batched-tokens",
    "131072",
    "--num-gpu-blocks-override",
    "16384",
];

/// `count` times 16 ADDs of some 20 KB each.
fn workload(frontend: &Frontend, count: u32) {
    let prompt: Vec<u32> = (0..7000).map(|nth| 259 + nth % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true, "n": 16,
                      "temperature": 1, "seed": 1});
    (0..count).for_each(|_| drop(complete(frontend, &body)));
}

fn steps(run: &Run) -> u64 {
    status(run)["steps"].as_u64().unwrap()
}

/// Steps and time of one round.
fn round(run: &Run, frontend: &Frontend) -> (u64, Duration) {
    let before = steps(run);
    let began = Instant::now();
    workload(frontend, 5);
    (steps(run) - before, began.elapsed())
}

/// Rounds on a system with a tap that does not read and on one without, in turns: what else the
/// machine does hits both alike. More rounds are run while it looks as if the tap slowed its
/// system; were it so, every round would show it.
fn compare(tapped: (&Run, &Frontend), free: (&Run, &Frontend)) {
    const ROUNDS: std::ops::Range<usize> = 4..30;
    let best = |rounds: &[(u64, Duration)]| rounds.iter().map(|(_, time)| *time).min().unwrap();
    // How many of a round's requests share a step is chance; the least is what it takes.
    let least = |rounds: &[(u64, Duration)]| rounds.iter().map(|(steps, _)| *steps).min().unwrap();
    let (mut with, mut without) = (Vec::new(), Vec::new());
    let mut alike = false;
    while !alike && with.len() < ROUNDS.end {
        with.push(round(tapped.0, tapped.1));
        without.push(round(free.0, free.1));
        alike = with.len() >= ROUNDS.start
            && least(&with) < least(&without) * 3 / 2
            && best(&with) < best(&without) * 3 / 2;
    }
    assert!(alike, "tapped {with:?}, free {without:?}");
}

fn check_stalled(run: &Run, frontend: &Frontend, address: &str) {
    let plain = Run::new();
    let _plain_core = mock_core(&plain, &CORE);
    let other = plain.frontend("plain", &[]);
    workload(&other, 5);
    workload(frontend, 5);
    let mut tap = command(run, &["tap", address, "--json", "--kind", "add"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tap.stdout.take().unwrap()).lines();
    // One line is read, so that it has joined; then its pipe is left alone.
    let first = std::thread::scope(|scope| {
        let first = scope.spawn(|| lines.next().unwrap().unwrap());
        wait_for("the tap's first line", || {
            workload(frontend, 1);
            first.is_finished().then_some(())
        });
        first.join().unwrap()
    });
    let missed = |line: &str| serde_json::from_str::<Value>(line).unwrap()["missed"].clone();
    assert_eq!(missed(&first), 0);
    // The tap's own buffers and its share of the core's are full after some 15 MB.
    workload(frontend, 60);
    compare((run, frontend), (&plain, &other));
    // Reading again, it is told.
    let reader = std::thread::spawn(move || {
        let mut told = lines.map_while(Result::ok).map(|line| missed(&line).as_u64().unwrap());
        told.find(|told| *told > 0)
    });
    let began = Instant::now();
    while !reader.is_finished() {
        assert!(began.elapsed() < PATIENCE, "the tap was not told of what it missed");
        workload(frontend, 1);
    }
    assert!(reader.join().unwrap().is_some(), "the tap ended untold");
    // Its reader is gone, so it ends.
    let end = wait_for("the tap's end", || {
        workload(frontend, 1);
        tap.try_wait().unwrap()
    });
    assert!(end.success());
}

#[test]
fn a_tap_of_the_core_that_does_not_read_slows_nobody() {
    let run = Run::new();
    let mut core = mock_core(&run, &CORE);
    let frontend = run.frontend("api", &[]);
    check_stalled(&run, &frontend, &run.core_address());
    assert!(core.stop().success(), "{}", core.log());
}

#[test]
fn a_tap_of_a_frontend_that_does_not_read_slows_nobody() {
    let run = Run::new();
    let _core = mock_core(&run, &CORE);
    let mut frontend = run.frontend("api", &[]);
    let address = taps_of(&run, &frontend);
    check_stalled(&run, &frontend, &address);
    assert!(frontend.process.stop().success(), "{}", frontend.process.log());
}
