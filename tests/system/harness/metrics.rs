//! Reads the Prometheus text format, strictly enough to notice a broken page.

use std::collections::BTreeMap;

/// One scrape: series, as printed, to value.
#[derive(Clone, Debug)]
pub struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    /// Parses text format 0.0.4.
    ///
    /// # Panics
    /// On a malformed line, a duplicate series, or a value that is no number.
    pub fn parse(text: &str) -> Self {
        let mut series = BTreeMap::new();
        for line in text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("line {line:?}"));
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("value in line {line:?}"));
            assert!(!value.is_nan(), "NaN in line {line:?}");
            let twice = series.insert(name.to_owned(), value);
            assert!(twice.is_none(), "series {name} stands twice");
        }
        Self(series)
    }

    /// Sum over the series of family `name` that have all `labels`.
    ///
    /// # Panics
    /// When there is no such series: a test that reads a misspelt name must not see a zero.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let matching: Vec<f64> = self.matching(name, labels).collect();
        assert!(!matching.is_empty(), "no series {name} with {labels:?}");
        matching.iter().sum()
    }

    /// [`Self::sum`], 0 for a series that shows only once it has moved.
    pub fn sum_if_any(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).sum()
    }

    fn matching(&self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = f64> {
        self.0
            .iter()
            .filter(move |(series, _)| {
                let (family, rest) = series.split_once('{').unwrap_or((series, ""));
                family == name
                    && labels.iter().all(|(label, value)| {
                        rest.split([',', '}']).any(|pair| pair == format!("{label}=\"{value}\""))
                    })
            })
            .map(|(_, value)| *value)
    }

    /// [`Self::sum`] without labels.
    pub fn get(&self, name: &str) -> f64 {
        self.sum(name, &[])
    }

    /// Requests that ended by `reason`.
    pub fn ended(&self, reason: &str) -> f64 {
        self.sum("vllm:request_success_total", &[("finished_reason", reason)])
    }

    /// Requests that were not taken, by why.
    pub fn rejected(&self, reason: &str) -> f64 {
        self.sum("vllm:admission_rejections_total", &[("reason", reason)])
    }

    /// Nothing is open, nothing runs or waits, and every block is free.
    pub fn is_idle(&self) -> bool {
        self.get("pawl:requests_in_flight") + self.running() + self.waiting() + self.kv_usage()
            == 0.0
    }

    pub fn running(&self) -> f64 {
        self.get("vllm:num_requests_running")
    }

    pub fn waiting(&self) -> f64 {
        self.get("vllm:num_requests_waiting")
    }

    pub fn kv_usage(&self) -> f64 {
        self.get("vllm:kv_cache_usage_perc")
    }

    /// Every series, for comparisons of whole pages.
    pub fn series(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Both pages together, series by series.
    pub fn plus(&self, other: &Self) -> Self {
        let mut sum = self.0.clone();
        for (series, value) in &other.0 {
            *sum.entry(series.clone()).or_default() += value;
        }
        Self(sum)
    }

    /// No counter fell or vanished since `earlier`, and none is negative.
    pub fn assert_counters_since(&self, earlier: &Self) {
        for (series, value) in earlier.series() {
            let family = series.split('{').next().unwrap_or_default();
            if ["_total", "_count", "_sum", "_bucket"].iter().any(|end| family.ends_with(end)) {
                let now = self.0.get(series).unwrap_or_else(|| panic!("{series} vanished"));
                assert!(*now >= value && value >= 0.0, "{series} fell from {value} to {now}");
            }
        }
    }
}
