//! How far a long piece of work is: a bar on a terminal, a line at each tenth elsewhere.

use std::io::{IsTerminal as _, Write as _};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress of one named piece of work, on standard error.
pub struct Progress {
    what: &'static str,
    total: u64,
    /// Without a terminal there is no bar.
    bar: Option<ProgressBar>,
    tenths_told: u64,
}

impl Progress {
    /// Begins at 0 of `total` bytes.
    pub fn start(what: &'static str, total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            let style = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            bar.set_style(ProgressStyle::with_template(style).expect("a template of known keys"));
            bar.set_message(what);
            bar
        });
        let progress = Self { what, total, bar, tenths_told: 0 };
        if progress.bar.is_none() {
            tell(format_args!("{what}: {:.1} MB", total as f64 / 1e6));
        }
        progress
    }

    /// `done` bytes of the total; more than the total is the total.
    pub fn set(&mut self, done: u64) {
        let done = done.min(self.total);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            return;
        }
        let tenths = (done * 10).checked_div(self.total).unwrap_or(10);
        if tenths > self.tenths_told {
            self.tenths_told = tenths;
            tell(format_args!("{}: {} %", self.what, tenths * 10));
        }
    }

    /// Leaves the terminal as it was.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A line on standard error; lost when nobody reads it any more (`eprintln!` would panic).
pub fn tell(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
