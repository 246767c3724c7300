//! From a row of the table to a registered family, and from a family to a resolved handle.

use std::collections::BTreeMap;

use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, Opts, Registry,
};

use super::table::{Kind, MetricSpec};

/// Registers families. Every failure here is a mistake in the table, hence the `expect`s.
pub(super) struct Registrar<'a> {
    pub registry: &'a Registry,
    pub custom_buckets: &'a BTreeMap<String, Vec<f64>>,
    pub max_model_len: u32,
}

const TABLE_IS_SOUND: &str = "the table's names, labels and buckets are valid and unique";

impl Registrar<'_> {
    /// A family of whole-number counters.
    pub fn counter(&self, spec: &MetricSpec) -> IntCounterVec {
        assert_eq!(spec.kind, Kind::Counter, "{}", spec.name);
        let family =
            IntCounterVec::new(Opts::new(spec.name, spec.help), spec.labels).expect(TABLE_IS_SOUND);
        self.registry.register(Box::new(family.clone())).expect(TABLE_IS_SOUND);
        family
    }

    /// A family of counters with fractions.
    pub fn float_counter(&self, spec: &MetricSpec) -> CounterVec {
        assert_eq!(spec.kind, Kind::Counter, "{}", spec.name);
        let family =
            CounterVec::new(Opts::new(spec.name, spec.help), spec.labels).expect(TABLE_IS_SOUND);
        self.registry.register(Box::new(family.clone())).expect(TABLE_IS_SOUND);
        family
    }

    /// A family of gauges.
    pub fn gauge(&self, spec: &MetricSpec) -> GaugeVec {
        assert_eq!(spec.kind, Kind::Gauge, "{}", spec.name);
        let family =
            GaugeVec::new(Opts::new(spec.name, spec.help), spec.labels).expect(TABLE_IS_SOUND);
        self.registry.register(Box::new(family.clone())).expect(TABLE_IS_SOUND);
        family
    }

    /// A family of histograms, with the user's buckets where there are any.
    pub fn histogram(&self, spec: &MetricSpec) -> HistogramVec {
        let Kind::Histogram(buckets) = spec.kind else {
            panic!("{} is not a histogram in the table", spec.name);
        };
        let bounds = self
            .custom_buckets
            .get(buckets.name())
            .cloned()
            .unwrap_or_else(|| buckets.bounds(self.max_model_len));
        let options = HistogramOpts::new(spec.name, spec.help).buckets(bounds);
        let family = HistogramVec::new(options, spec.labels).expect(TABLE_IS_SOUND);
        self.registry.register(Box::new(family.clone())).expect(TABLE_IS_SOUND);
        family
    }
}

/// A handle on one series; asking for it is what makes the series appear, at zero.
pub(super) trait Resolve {
    type Handle;
    fn at(&self, labels: &[&str]) -> Self::Handle;
}

macro_rules! resolve {
    ($($family:ty => $handle:ty),*) => {$(
        impl Resolve for $family {
            type Handle = $handle;
            fn at(&self, labels: &[&str]) -> $handle {
                self.get_metric_with_label_values(labels).expect("as many values as the table has")
            }
        }
    )*};
}

resolve!(
    IntCounterVec => IntCounter,
    CounterVec => Counter,
    GaugeVec => Gauge,
    HistogramVec => Histogram
);
