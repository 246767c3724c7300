//! Where the time of runs goes, by kinds of operations: measured on one thread, from meeting to
//! meeting, so that the parts are those of the wall clock.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Products of all that share an input: `rows` outputs of `cols` columns.
    Product {
        /// Input width.
        cols: usize,
        /// Widths of all outputs together.
        rows: usize,
    },
    /// Attention over the cache.
    Attention,
    /// What sees one row at a time: norms, rotations, gates, writing to the cache, rounding of
    /// activations.
    Rows,
    /// From one run to the next: what the caller does, sampling included.
    Between,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Product { cols, rows } => write!(f, "products {cols} × {rows}"),
            Self::Attention => f.write_str("attention"),
            Self::Rows => f.write_str("row by row"),
            Self::Between => f.write_str("sampling and the rest"),
        }
    }
}

/// Time by part.
#[derive(Clone, Debug)]
pub struct Profile {
    since: Instant,
    parts: BTreeMap<Part, Duration>,
}

impl Profile {
    pub(super) fn start() -> Self {
        Self { since: Instant::now(), parts: BTreeMap::new() }
    }

    /// The time since the last call was spent on `part`.
    pub(super) fn lap(&mut self, part: Part) {
        let now = Instant::now();
        *self.parts.entry(part).or_default() += now - std::mem::replace(&mut self.since, now);
    }

    /// Each part, the longest first.
    #[must_use]
    pub fn parts(&self) -> Vec<(Part, Duration)> {
        let mut parts: Vec<_> = self.parts.iter().map(|(part, time)| (*part, *time)).collect();
        parts.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        parts
    }
}
