//! The `http_*` families: every answer by method, class of status and route.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use prometheus::core::{Collector, Desc};
use prometheus::proto;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, Opts, Registry};

use super::register::{Registrar, Resolve};
use super::table::{self, MetricSpec};

/// One answered HTTP request.
#[derive(Clone, Copy, Debug)]
pub struct HttpObservation {
    /// As received; unknown ones are counted as `OTHER`.
    pub method: &'static str,
    /// The route's template, never the path; `none` where no route matched.
    pub handler: &'static str,
    /// The status sent.
    pub status: u16,
    /// From the head of the request to the end of the answer.
    pub seconds: f64,
    /// Of the request's body.
    pub request_bytes: u64,
    /// Of the answer's body.
    pub response_bytes: u64,
}

const METHODS: [&str; 7] = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"];

pub(super) struct HttpHandles {
    started: IntCounter,
    requests: IntCounterVec,
    duration: HistogramVec,
    duration_highr: Histogram,
    request_size: Summaries,
    response_size: Summaries,
}

impl HttpHandles {
    pub(super) fn register(at: &Registrar<'_>) -> Self {
        Self {
            started: at.counter(&table::HTTP_STARTED).at(&[]),
            requests: at.counter(&table::HTTP_REQUESTS),
            duration: at.histogram(&table::HTTP_DURATION),
            duration_highr: at.histogram(&table::HTTP_DURATION_HIGHR).at(&[]),
            request_size: Summaries::register(at.registry, &table::HTTP_REQUEST_SIZE),
            response_size: Summaries::register(at.registry, &table::HTTP_RESPONSE_SIZE),
        }
    }

    pub(super) fn started(&self) {
        self.started.inc();
    }

    pub(super) fn observe(&self, seen: &HttpObservation) {
        let method = METHODS.iter().find(|known| **known == seen.method).unwrap_or(&"OTHER");
        let class = match seen.status {
            100..=199 => "1xx",
            200..=299 => "2xx",
            300..=399 => "3xx",
            400..=499 => "4xx",
            _ => "5xx",
        };
        self.requests.at(&[method, class, seen.handler]).inc();
        self.duration.at(&[method, seen.handler]).observe(seen.seconds);
        self.duration_highr.observe(seen.seconds);
        self.request_size.add(seen.handler, seen.request_bytes);
        self.response_size.add(seen.handler, seen.response_bytes);
    }
}

/// A summary without quantiles, by handler: the crate renders the type but has no recorder for it.
/// Handlers are route templates known to the code, so the map is bounded by the routes.
#[derive(Clone)]
struct Summaries {
    name: &'static str,
    help: &'static str,
    desc: Arc<Desc>,
    sums: Arc<Mutex<BTreeMap<&'static str, (u64, u64)>>>,
}

impl Summaries {
    fn register(registry: &Registry, spec: &MetricSpec) -> Self {
        let labels = spec.labels.iter().map(ToString::to_string).collect();
        let opts = Opts::new(spec.name, spec.help);
        let desc = Desc::new(opts.name, opts.help, labels, opts.const_labels.clone())
            .expect("the table's names and labels are valid");
        let family =
            Self { name: spec.name, help: spec.help, desc: Arc::new(desc), sums: Arc::default() };
        registry.register(Box::new(family.clone())).expect("the table's names are unique");
        family
    }

    fn add(&self, handler: &'static str, bytes: u64) {
        let mut sums = self.sums.lock().expect("no panic happens under this lock");
        let (count, sum) = sums.entry(handler).or_default();
        *count += 1;
        *sum += bytes;
    }
}

impl Collector for Summaries {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let sums = self.sums.lock().expect("no panic happens under this lock").clone();
        let series = sums.into_iter().map(|(handler, (count, sum))| {
            let mut label = proto::LabelPair::default();
            label.set_name("handler".to_string());
            label.set_value(handler.to_string());
            let mut summary = proto::Summary::default();
            summary.set_sample_count(count);
            summary.set_sample_sum(sum as f64);
            let mut metric = proto::Metric::from_label(vec![label]);
            metric.set_summary(summary);
            metric
        });
        let mut family = proto::MetricFamily::default();
        family.set_name(self.name.to_string());
        family.set_help(self.help.to_string());
        family.set_field_type(proto::MetricType::SUMMARY);
        family.set_metric(series.collect());
        vec![family]
    }
}
