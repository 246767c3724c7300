//! Scenarios: a script of what happens goes in, a trace of what the machine does comes out. Time
//! stands still unless the script says `wait`.

mod core_scenarios;
mod credit_scenarios;
mod frontend_liveness;
mod frontend_scenarios;
mod handshake_scenarios;
mod random;

use std::time::Duration;

use bytes::Bytes;

use super::message::{ControlMessage, Join, Role};
use super::*;
use crate::clock::{Clock, ManualClock};

/// The words of a line, and the numbers among them.
struct Words<'a>(Vec<&'a str>);

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Self {
        Self(line.split_whitespace().collect())
    }

    fn word(&self, index: usize) -> &'a str {
        self.0.get(index).unwrap_or_else(|| panic!("word {index} is missing in {:?}", self.0))
    }

    fn number(&self, index: usize) -> u64 {
        self.word(index).parse().unwrap_or_else(|_| panic!("no number in {:?}", self.0))
    }
}

fn peer(name: &str) -> PeerId {
    PeerId(Bytes::copy_from_slice(name.as_bytes()))
}

fn join_of(instance: &str, epoch: u64) -> ControlMessage {
    ControlMessage::Join(Join {
        input: format!("ipc:///in-{instance}-{epoch}"),
        output: format!("ipc:///out-{instance}-{epoch}"),
        pid: 7,
        instance: instance.to_owned(),
        epoch,
        role: if instance.starts_with("tap") { Role::Tap } else { Role::Frontend },
        taps: None,
    })
}

/// Runs `script` line by line; `step` says what a line does at the clock's time.
fn trace(
    script: &str,
    clock: &ManualClock,
    mut step: impl FnMut(&Words<'_>) -> Vec<String>,
) -> String {
    let mut out = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        out += &format!("> {line}\n");
        let words = Words::of(line);
        if words.word(0) == "wait" {
            // Time passes in one jump; `beats` passes it in ticks.
            clock.advance(Duration::from_millis(words.number(1)));
            continue;
        }
        for action in step(&words) {
            out += &format!("    {action}\n");
        }
    }
    out
}
