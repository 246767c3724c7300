//! The registry behind `/metrics`. The only folder that names the metrics crate.
//!
//! - [`table`]: every family, in one table that drives registration, priming, page and docs;
//! - `engine`: the series of one engine and model, as resolved handles;
//! - `own`, `http`, `grpc`, `process`: the `pawl:`, `http_*`, `grpc_*` and `process_*` families;
//! - `snapshot`: what all of that stands at, as plain data;
//! - `render`: the page in both text formats;
//! - `sum`: one page for all frontends that share a port.
//!
//! What is counted is decided elsewhere, in [`crate::output_handler`]; this folder only adds up.

mod engine;
mod grpc;
mod http;
mod own;
mod process;
mod register;
mod render;
mod snapshot;
mod sum;
pub mod table;

pub use engine::EngineHandles;
pub use grpc::{GrpcMethod, GrpcObservation};
pub use http::HttpObservation;
pub use own::FrameKind;
pub use render::{Format, reference_markdown};
pub use snapshot::Snapshot;
pub use sum::FleetSum;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pawl_shared::clock::{Clock, Stamp, SystemClock};
use pawl_shared::protocol::{DecodeErrorKind, ReadyResponse, SchedulerStats, Value};
use prometheus::{GaugeVec, IntCounter, IntCounterVec, Registry};

use self::engine::EngineFamilies;
use self::grpc::GrpcHandles;
use self::http::HttpHandles;
use self::own::OwnHandles;
use self::process::Process;
use self::register::{Registrar, Resolve};
use crate::output_handler::IterationStats;

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionReason {
    /// Too many requests open or queued.
    QueueFull,
    /// The server is stopping.
    Draining,
    /// The core is away or hung.
    EngineUnavailable,
}

impl AdmissionReason {
    const ALL: [Self; 3] = [Self::QueueFull, Self::Draining, Self::EngineUnavailable];

    /// The label's value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Draining => "draining",
            Self::EngineUnavailable => "engine_unavailable",
        }
    }
}

/// How the registry is set up.
pub struct MetricsConfig {
    /// For the age of the stats.
    pub clock: Arc<dyn Clock>,
    /// `--custom-histogram-buckets`: bounds by the name of their family (see [`table::Buckets`]).
    pub custom_buckets: BTreeMap<String, Vec<f64>>,
    /// Whether recording is on at the start (`--disable-log-stats` turns it off).
    pub recording: bool,
    /// Whether the `process_*` series are shown.
    pub process: bool,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            custom_buckets: BTreeMap::new(),
            recording: true,
            process: true,
        }
    }
}

/// A bound that `--custom-histogram-buckets` cannot take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BucketsError {
    /// No family of that name.
    #[error("--custom-histogram-buckets: no family `{name}`; there are: {known}")]
    UnknownFamily {
        /// As given.
        name: String,
        /// Every name.
        known: String,
    },
    /// Bounds must be finite and grow.
    #[error(
        "--custom-histogram-buckets: the bounds of `{name}` must be finite, grow from one to \
             the next, and be at least one"
    )]
    NotGrowing {
        /// As given.
        name: String,
    },
}

/// Every series of this process.
pub struct Metrics {
    registry: Registry,
    clock: Arc<dyn Clock>,
    custom_buckets: BTreeMap<String, Vec<f64>>,
    recording: AtomicBool,
    http: HttpHandles,
    grpc: GrpcHandles,
    own: OwnHandles,
    cache_config: GaugeVec,
    admission: IntCounterVec,
    /// Refusals before the model's name was known; they are counted under it once it is.
    admission_before: [AtomicU64; AdmissionReason::ALL.len()],
    /// Taken when a core joins and by refusals, by the fold only for those of the core. Never held
    /// by a scrape.
    engines: Mutex<Engines>,
}

#[derive(Default)]
struct Engines {
    families: Option<EngineFamilies>,
    admission: Option<[IntCounter; AdmissionReason::ALL.len()]>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").field("recording", &self.recording()).finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(MetricsConfig::default()).expect("no custom bounds that could be wrong")
    }
}

const UNPOISONED: &str = "no panic happens under this lock";

impl Metrics {
    /// A registry of its own, with every series at zero whose labels are known already.
    ///
    /// # Errors
    /// When custom bounds name no family or do not grow.
    pub fn new(config: MetricsConfig) -> Result<Self, BucketsError> {
        check_custom(&config.custom_buckets)?;
        let registry = Registry::new();
        let at = Registrar {
            registry: &registry,
            custom_buckets: &config.custom_buckets,
            max_model_len: 0,
        };
        let http = HttpHandles::register(&at);
        let grpc = GrpcHandles::register(&at);
        let own = OwnHandles::register(&at, config.clock.now());
        let cache_config = at.gauge(&table::CACHE_CONFIG_INFO);
        let admission = at.counter(&table::ADMISSION_REJECTIONS);
        if config.process {
            registry
                .register(Box::new(Process::new()))
                .expect("the process collector is registered once");
        }
        Ok(Self {
            registry,
            clock: config.clock,
            custom_buckets: config.custom_buckets,
            recording: AtomicBool::new(config.recording),
            http,
            grpc,
            own,
            cache_config,
            admission,
            admission_before: Default::default(),
            engines: Mutex::default(),
        })
    }

    /// The series of an engine that serves `model_name`; the first call registers the families
    /// (`max_model_len` bounds those that count tokens), and each call shows its series at zero.
    pub fn engine(
        &self,
        model_name: &str,
        engine_index: u32,
        max_model_len: u32,
    ) -> Arc<EngineHandles> {
        let mut engines = self.engines.lock().expect(UNPOISONED);
        let families = engines.families.get_or_insert_with(|| {
            EngineFamilies::register(&Registrar {
                registry: &self.registry,
                custom_buckets: &self.custom_buckets,
                max_model_len,
            })
        });
        let handles = EngineHandles::resolve(families, model_name, &engine_index.to_string());
        let admission =
            AdmissionReason::ALL.map(|reason| self.admission.at(&[model_name, reason.as_str()]));
        for (counter, before) in admission.iter().zip(&self.admission_before) {
            counter.inc_by(before.swap(0, Ordering::Relaxed));
        }
        engines.admission = Some(admission);
        Arc::new(handles)
    }

    /// A core has joined: shows how its KV cache is set up.
    pub fn core_joined(&self, engine_index: u32, ready: &ReadyResponse) {
        self.own.session(self.recording());
        // Another core may have another cache: one series at a time.
        self.cache_config.reset();
        let extra = |key: &str| {
            let key = format!("pawl_{key}");
            let found = ready.extra.iter().find(|(name, _)| *name == key);
            found.map_or_else(|| "None".to_string(), |(_, value)| label_text(value))
        };
        let size = ready.kv_cache_size_tokens;
        self.cache_config
            .at(&[
                &engine_index.to_string(),
                &ready.block_size.to_string(),
                &ready.num_gpu_blocks.to_string(),
                &extra("cache_dtype"),
                &extra("enable_prefix_caching"),
                &extra("prefix_caching_hash_algo"),
                &extra("gpu_memory_utilization"),
                &size.map_or_else(|| "None".to_string(), |tokens| tokens.to_string()),
            ])
            .set(1.0);
    }

    /// Whether the core serves right now.
    pub fn core_up(&self, up: bool) {
        self.own.set_up(up);
    }

    /// How many choices are open in the core.
    pub fn open_requests(&self, open: usize) {
        self.own.set_open(open);
    }

    /// A message came from the core.
    pub fn frame(&self, kind: FrameKind, bytes: u64) {
        if self.recording() {
            self.own.frame(kind, bytes);
        }
    }

    /// A message of the core could not be read.
    pub fn decode_error(&self, kind: DecodeErrorKind) {
        if self.recording() {
            self.own.decode_error(kind);
        }
    }

    /// A request was aborted because its reader was too slow.
    pub fn slow_reader(&self) {
        if self.recording() {
            self.own.slow_reader();
        }
    }

    /// Adds up what one frame's outputs amounted to.
    pub fn record_iteration(&self, engine: &EngineHandles, stats: &IterationStats) {
        if self.recording() {
            engine.record_iteration(stats);
            self.own.unknown_outputs(stats.unknown_outputs);
            self.own.negative_intervals(stats.negative_intervals);
        }
    }

    /// Takes over one frame's scheduler stats, which came at `now`. A copy that was sent again
    /// while a long step runs sets gauges only.
    pub fn record_scheduler(
        &self,
        engine: &EngineHandles,
        stats: &SchedulerStats,
        with_outputs: bool,
        now: Stamp,
    ) {
        self.own.stats_came(now);
        if !self.recording() {
            return;
        }
        let resent = stats.pawl.is_some_and(|own| own.resent);
        engine.record_scheduler(stats, resent);
        if let (Some(own), false) = (&stats.pawl, resent) {
            self.own.step(own, stats.step_counter, with_outputs);
        }
    }

    /// The engine is gone: its gauges go to zero.
    pub fn engine_gone(&self, engine: &EngineHandles) {
        if self.recording() {
            engine.engine_gone();
        }
    }

    /// A request's head was read.
    pub fn http_started(&self) {
        if self.recording() {
            self.http.started();
        }
    }

    /// A request was answered (or its client left: then with what was sent so far).
    pub fn http_observed(&self, observation: &HttpObservation) {
        if self.recording() {
            self.http.observe(observation);
        }
    }

    /// gRPC is served: shows the series of `methods` at zero.
    pub fn grpc_served(&self, methods: &[GrpcMethod]) {
        self.grpc.prime(methods);
    }

    /// A gRPC call's head was read.
    pub fn grpc_started(&self, method: GrpcMethod) {
        if self.recording() {
            self.grpc.started(method);
        }
    }

    /// A gRPC call has ended, or its client left.
    pub fn grpc_observed(&self, observation: &GrpcObservation) {
        if self.recording() {
            self.grpc.observe(observation);
        }
    }

    /// A request was not taken, here or by the core.
    pub fn admission_rejected(&self, reason: AdmissionReason) {
        if !self.recording() {
            return;
        }
        match &self.engines.lock().expect(UNPOISONED).admission {
            Some(counters) => counters[reason as usize].inc(),
            None => {
                self.admission_before[reason as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Turns recording on or off; the token stream is the same either way. Off, nothing moves but
    /// the gauges that are computed at each scrape.
    pub fn set_recording(&self, on: bool) {
        self.recording.store(on, Ordering::Relaxed);
    }

    /// Whether anything is recorded.
    #[must_use]
    pub fn recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    /// What every series stands at.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.own.before_scrape(self.clock.now(), self.recording());
        Snapshot::of(&self.registry.gather())
    }

    /// The page of this process: content type and body.
    #[must_use]
    pub fn render(&self, format: Format) -> (&'static str, Vec<u8>) {
        self.snapshot().render(format)
    }
}

fn check_custom(custom: &BTreeMap<String, Vec<f64>>) -> Result<(), BucketsError> {
    for (name, bounds) in custom {
        if table::Buckets::ALL.iter().all(|known| known.name() != name) {
            let known: Vec<&str> = table::Buckets::ALL.iter().map(|known| known.name()).collect();
            return Err(BucketsError::UnknownFamily {
                name: name.clone(),
                known: known.join(", "),
            });
        }
        let growing = bounds.windows(2).all(|pair| pair[0] < pair[1]);
        if bounds.is_empty() || !growing || bounds.iter().any(|bound| !bound.is_finite()) {
            return Err(BucketsError::NotGrowing { name: name.clone() });
        }
    }
    Ok(())
}

fn label_text(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Bool(true) => "True".to_string(),
        Value::Bool(false) => "False".to_string(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        _ => "None".to_string(),
    }
}

#[cfg(test)]
mod tests;
