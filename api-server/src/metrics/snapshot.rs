//! What a registry stands at, as plain data: what the page is written from, and what frontends of
//! one port send to their supervisor.

use std::collections::BTreeMap;

use prometheus::proto::{Metric, MetricFamily, MetricType};
use serde::{Deserialize, Serialize};

use super::render::{self, Format};
use super::table::TABLE;

/// The series of every family of the table that has any.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot(pub(super) BTreeMap<String, Family>);

/// The series of one family, by their labels.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<(Labels, Reading)>", into = "Vec<(Labels, Reading)>")]
pub(super) struct Family(pub BTreeMap<Labels, Reading>);

/// Names and values, in the order in which the page shows them.
pub(super) type Labels = Vec<(String, String)>;

/// What one series stands at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Reading {
    /// A counter or a gauge.
    Number(Exact),
    /// Observations, and their sum.
    Summary { count: u64, sum: Exact },
    /// The same, and how many were at or below each bound.
    Histogram { count: u64, sum: Exact, buckets: Vec<(Exact, u64)> },
}

/// A number that comes through JSON as it was, to the last bit: a sum that is a hair smaller than
/// the one before would be taken for a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(from = "u64", into = "u64")]
pub(super) struct Exact(pub f64);

impl From<u64> for Exact {
    fn from(bits: u64) -> Self {
        Self(f64::from_bits(bits))
    }
}

impl From<Exact> for u64 {
    fn from(number: Exact) -> Self {
        number.0.to_bits()
    }
}

impl From<Vec<(Labels, Reading)>> for Family {
    fn from(series: Vec<(Labels, Reading)>) -> Self {
        Self(series.into_iter().collect())
    }
}

impl From<Family> for Vec<(Labels, Reading)> {
    fn from(family: Family) -> Self {
        family.0.into_iter().collect()
    }
}

impl Snapshot {
    /// What is in `families`.
    pub(super) fn of(families: &[MetricFamily]) -> Self {
        let mut all = BTreeMap::new();
        for family in families {
            let name = family.name();
            debug_assert!(TABLE.iter().any(|spec| spec.name == name), "{name} is not in the table");
            let series = family.get_metric().iter().map(|metric| {
                let labels = metric.get_label().iter();
                let labels = labels.map(|pair| (pair.name().into(), pair.value().into())).collect();
                (labels, Reading::of(metric, family.get_field_type()))
            });
            all.insert(name.to_string(), Family(series.collect()));
        }
        Self(all)
    }

    /// The sum over the series of a family that bear `labels`: their numbers, or how often they
    /// were observed. 0 where there is none.
    #[must_use]
    pub fn total(&self, family: &str, labels: &[(&str, &str)]) -> f64 {
        let bears = |series: &Labels| {
            labels.iter().all(|(name, value)| series.iter().any(|(n, v)| n == name && v == value))
        };
        let series = self.0.get(family).into_iter().flat_map(|family| &family.0);
        let totals = series.filter(|(labels, _)| bears(labels)).map(|(_, reading)| reading.total());
        totals.fold(0.0, |sum, total| sum + total)
    }

    /// What the observations of a histogram or a summary add up to, over all its series. 0 where
    /// there is none.
    #[must_use]
    pub fn observed(&self, family: &str) -> f64 {
        let series = self.0.get(family).into_iter().flat_map(|family| &family.0);
        let sums = series.map(|(_, reading)| match reading {
            Reading::Summary { sum, .. } | Reading::Histogram { sum, .. } => sum.0,
            Reading::Number(_) => 0.0,
        });
        sums.fold(0.0, |all, sum| all + sum)
    }

    /// The page: content type and body.
    #[must_use]
    pub fn render(&self, format: Format) -> (&'static str, Vec<u8>) {
        (format.content_type(), render::render(self, format))
    }

    /// For [`Snapshot::decode`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a snapshot is names and numbers")
    }

    /// The snapshot in `bytes`.
    ///
    /// # Errors
    /// When `bytes` is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

impl Reading {
    fn total(&self) -> f64 {
        match self {
            Self::Number(number) => number.0,
            Self::Summary { count, .. } | Self::Histogram { count, .. } => *count as f64,
        }
    }

    fn of(metric: &Metric, kind: MetricType) -> Self {
        match kind {
            MetricType::COUNTER => Self::Number(Exact(metric.get_counter().get_value())),
            MetricType::GAUGE => Self::Number(Exact(metric.get_gauge().get_value())),
            MetricType::UNTYPED => unreachable!("no family of the table is untyped"),
            MetricType::SUMMARY => Self::Summary {
                count: metric.get_summary().sample_count(),
                sum: Exact(metric.get_summary().sample_sum()),
            },
            MetricType::HISTOGRAM => {
                let histogram = metric.get_histogram();
                let buckets = histogram.get_bucket().iter();
                Self::Histogram {
                    count: histogram.get_sample_count(),
                    sum: Exact(histogram.get_sample_sum()),
                    buckets: buckets
                        .map(|b| (Exact(b.upper_bound()), b.cumulative_count()))
                        .collect(),
                }
            }
        }
    }
}
