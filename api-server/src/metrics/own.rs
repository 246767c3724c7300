//! The `pawl:` families: what vLLM's catalogue has no name for.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use prometheus::{Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec};

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{DecodeErrorKind, PawlStats};
use pawl_shared::transport::{self, Violation};

use super::register::{Registrar, Resolve};
use super::table;

/// What a message of the core was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Outputs, with or without stats.
    Step,
    /// Stats alone.
    Stats,
    /// The answer to a call.
    Utility,
    /// The death notice.
    Dead,
    /// Not to be read.
    Undecodable,
}

impl FrameKind {
    const ALL: [Self; 5] = [Self::Step, Self::Stats, Self::Utility, Self::Dead, Self::Undecodable];

    fn as_str(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Stats => "stats",
            Self::Utility => "utility",
            Self::Dead => "dead",
            Self::Undecodable => "undecodable",
        }
    }
}

const DECODE_ERRORS: usize = DecodeErrorKind::ALL.len();

pub(super) struct OwnHandles {
    core_up: Gauge,
    stats_age: Gauge,
    sessions: IntCounter,
    frames: [IntCounter; FrameKind::ALL.len()],
    frame_bytes: [IntCounter; FrameKind::ALL.len()],
    decode_errors: [IntCounter; DECODE_ERRORS],
    violations: [IntCounter; Violation::ALL.len()],
    unknown_outputs: IntCounter,
    phases: [Histogram; 3],
    preemptions: IntCounter,
    in_flight: Gauge,
    slow_readers: IntCounter,
    negative_intervals: IntCounter,
    recording: Gauge,
    state: State,
}

/// What is known whether anything is recorded or not; the gauges take it at each scrape.
struct State {
    up: AtomicBool,
    open: AtomicI64,
    /// Nanoseconds of this process's monotonic clock.
    stats_at: AtomicU64,
    /// `step_counter` of the last step whose phases were observed, so that a frame that repeats
    /// a step's stats does not observe them twice.
    step_seen: AtomicU64,
    /// Held by the scrape that brings counters up to date.
    adding: Mutex<()>,
}

impl OwnHandles {
    pub(super) fn register(at: &Registrar<'_>, started: Stamp) -> Self {
        // Several cores behind one frontend come later; the label is there from the start.
        let engine = &["0"][..];
        let frames: IntCounterVec = at.counter(&table::FRAMES);
        let bytes: IntCounterVec = at.counter(&table::FRAME_BYTES);
        let errors: IntCounterVec = at.counter(&table::DECODE_ERRORS);
        let violations: IntCounterVec = at.counter(&table::WIRE_VIOLATIONS);
        let phases: HistogramVec = at.histogram(&table::STEP_PHASE);
        let gauge = |spec, labels: &[&str]| -> Gauge {
            let family: GaugeVec = at.gauge(spec);
            family.at(labels)
        };
        let counter = |spec, labels: &[&str]| at.counter(spec).at(labels);
        Self {
            core_up: gauge(&table::CORE_UP, engine),
            stats_age: gauge(&table::STATS_AGE, engine),
            sessions: counter(&table::CORE_SESSIONS, engine),
            frames: FrameKind::ALL.map(|kind| frames.at(&[kind.as_str()])),
            frame_bytes: FrameKind::ALL.map(|kind| bytes.at(&[kind.as_str()])),
            decode_errors: DecodeErrorKind::ALL.map(|kind| errors.at(&[kind.as_str()])),
            violations: Violation::ALL.map(|kind| violations.at(&[kind.as_str()])),
            unknown_outputs: counter(&table::UNKNOWN_REQUEST_OUTPUTS, engine),
            phases: ["schedule", "execute", "update"].map(|phase| phases.at(&["0", phase])),
            preemptions: counter(&table::SCHEDULER_PREEMPTIONS, engine),
            in_flight: gauge(&table::REQUESTS_IN_FLIGHT, &[]),
            slow_readers: counter(&table::SLOW_READER_ABORTS, &[]),
            negative_intervals: counter(&table::NEGATIVE_INTERVALS, engine),
            recording: gauge(&table::RECORDING, &[]),
            state: State {
                up: AtomicBool::new(false),
                open: AtomicI64::new(0),
                stats_at: AtomicU64::new(started.nanos()),
                step_seen: AtomicU64::new(0),
                adding: Mutex::default(),
            },
        }
    }

    pub(super) fn session(&self, recording: bool) {
        self.sessions.inc_by(u64::from(recording));
        // A new core counts its steps from the start again.
        self.state.step_seen.store(0, Ordering::Relaxed);
    }

    pub(super) fn frame(&self, kind: FrameKind, bytes: u64) {
        self.frames[kind as usize].inc();
        self.frame_bytes[kind as usize].inc_by(bytes);
    }

    pub(super) fn decode_error(&self, kind: DecodeErrorKind) {
        let index = DecodeErrorKind::ALL.iter().position(|known| *known == kind);
        self.decode_errors[index.expect("ALL names every kind")].inc();
    }

    pub(super) fn unknown_outputs(&self, count: u64) {
        self.unknown_outputs.inc_by(count);
    }

    pub(super) fn slow_reader(&self) {
        self.slow_readers.inc();
    }

    pub(super) fn negative_intervals(&self, count: u64) {
        self.negative_intervals.inc_by(count);
    }

    pub(super) fn step(&self, stats: &PawlStats, step_counter: u64, with_outputs: bool) {
        self.preemptions.inc_by(stats.num_preemptions);
        let seen = self.state.step_seen.fetch_max(step_counter, Ordering::Relaxed);
        if with_outputs && step_counter > seen {
            let seconds = [stats.schedule_seconds, stats.execute_seconds, stats.update_seconds];
            for (histogram, seconds) in self.phases.iter().zip(seconds) {
                histogram.observe(seconds.max(0.0));
            }
        }
    }

    pub(super) fn set_up(&self, up: bool) {
        self.state.up.store(up, Ordering::Relaxed);
    }

    pub(super) fn set_open(&self, open: usize) {
        self.state.open.store(open as i64, Ordering::Relaxed);
    }

    pub(super) fn stats_came(&self, now: Stamp) {
        self.state.stats_at.store(now.nanos(), Ordering::Relaxed);
    }

    /// Brings the computed gauges up to date, just before a scrape reads them.
    pub(super) fn before_scrape(&self, now: Stamp, recording: bool) {
        let came = Stamp::from_nanos(self.state.stats_at.load(Ordering::Relaxed));
        self.stats_age.set(now.since(came).as_secs_f64());
        self.core_up.set(f64::from(u8::from(self.state.up.load(Ordering::Relaxed))));
        self.in_flight.set(self.state.open.load(Ordering::Relaxed) as f64);
        self.recording.set(f64::from(u8::from(recording)));
        if recording {
            // Counted where the connections are. Two scrapes at once must not both add what is new.
            let _one = self.state.adding.lock().expect("nothing here panics");
            for (counter, (_, count)) in self.violations.iter().zip(transport::violations()) {
                counter.inc_by(count.saturating_sub(counter.get()));
            }
        }
    }
}
