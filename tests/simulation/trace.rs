//! What happened, line by line: the end of it is kept for a failure, all of it is hashed.

use std::collections::VecDeque;
use std::fmt::Arguments;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Lines that a failure shows.
const KEPT: usize = 60;

#[derive(Default)]
pub struct Trace {
    hasher: DefaultHasher,
    lines: u64,
    last: VecDeque<String>,
    shown: bool,
}

/// A whole run, in short: equal for two runs of one seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct History {
    pub hash: u64,
    pub lines: u64,
    pub gauges_checked: u64,
}

impl Trace {
    pub fn new(shown: bool) -> Self {
        Self { shown, ..Self::default() }
    }

    pub fn add(&mut self, nanos: u64, what: Arguments<'_>) {
        let line = format!("{:11.6} {what}", nanos as f64 / 1e9);
        line.hash(&mut self.hasher);
        self.lines += 1;
        if self.shown {
            println!("{line}");
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }

    pub fn history(&self, gauges_checked: u64) -> History {
        History { hash: self.hasher.finish(), lines: self.lines, gauges_checked }
    }

    pub fn end(&self) -> String {
        self.last.iter().map(|line| format!("  {line}\n")).collect()
    }
}
