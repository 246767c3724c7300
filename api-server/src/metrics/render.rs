//! The page, in both text formats, from one gathered set of families: they carry the same samples.

use std::collections::BTreeMap;
use std::fmt::Write;

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use super::table::{Kind, TABLE};

/// The text formats `/metrics` can be given in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `text/plain; version=0.0.4`: the default.
    Text004,
    /// `application/openmetrics-text; version=1.0.0`: only when asked for.
    OpenMetrics,
}

impl Format {
    /// What the answer's `Content-Type` says.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text004 => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Writes `families`, sorted by name. A family of the table that has no series yet (its labels are
/// not known before a core has joined) is shown by its HELP and TYPE alone.
pub(super) fn render(families: &[MetricFamily], format: Format) -> Vec<u8> {
    let by_name: BTreeMap<&str, &MetricFamily> =
        families.iter().map(|family| (family.name(), family)).collect();
    let mut names: Vec<&str> = TABLE.iter().map(|spec| spec.name).collect();
    names.extend(by_name.keys().filter(|name| TABLE.iter().all(|spec| spec.name != **name)));
    names.sort_unstable();
    let mut page = String::with_capacity(64 * 1024);
    for name in names {
        let spec = TABLE.iter().find(|spec| spec.name == name);
        match (by_name.get(name), spec) {
            (Some(family), _) => {
                let kind = type_name(family.get_field_type());
                let help = spec.map_or(family.help(), |spec| spec.help);
                header(&mut page, name, kind, help, format);
                for metric in family.get_metric() {
                    samples(&mut page, name, family.get_field_type(), metric);
                }
            }
            (None, Some(spec)) => header(&mut page, name, spec.kind.name(), spec.help, format),
            (None, None) => unreachable!("every name comes from one of the two"),
        }
    }
    if format == Format::OpenMetrics {
        page.push_str("# EOF\n");
    }
    page.into_bytes()
}

/// OpenMetrics names a family of counters without the `_total` that its samples carry.
fn header(page: &mut String, name: &str, kind: &str, help: &str, format: Format) {
    let family = match format {
        Format::OpenMetrics if kind == "counter" => name.strip_suffix("_total").unwrap_or(name),
        _ => name,
    };
    let mut escaped = help.replace('\\', "\\\\").replace('\n', "\\n");
    if format == Format::OpenMetrics {
        escaped = escaped.replace('"', "\\\"");
    }
    let _ = writeln!(page, "# HELP {family} {escaped}\n# TYPE {family} {kind}");
}

fn samples(page: &mut String, name: &str, kind: MetricType, metric: &Metric) {
    let labels = metric.get_label();
    match kind {
        MetricType::COUNTER => {
            sample(page, name, "", labels, None, metric.get_counter().get_value())
        }
        MetricType::GAUGE => sample(page, name, "", labels, None, metric.get_gauge().get_value()),
        MetricType::UNTYPED => {}
        MetricType::SUMMARY => {
            let summary = metric.get_summary();
            sample(page, name, "_count", labels, None, summary.sample_count() as f64);
            sample(page, name, "_sum", labels, None, summary.sample_sum());
        }
        MetricType::HISTOGRAM => {
            let histogram = metric.get_histogram();
            for bucket in histogram.get_bucket() {
                // Debug keeps the point (`1.0`), which is the canonical form in OpenMetrics.
                let bound = format!("{:?}", bucket.upper_bound());
                let count = bucket.cumulative_count() as f64;
                sample(page, name, "_bucket", labels, Some(&bound), count);
            }
            let count = histogram.get_sample_count() as f64;
            sample(page, name, "_bucket", labels, Some("+Inf"), count);
            sample(page, name, "_count", labels, None, count);
            sample(page, name, "_sum", labels, None, histogram.get_sample_sum());
        }
    }
}

fn sample(
    page: &mut String,
    name: &str,
    suffix: &str,
    labels: &[LabelPair],
    bound: Option<&str>,
    value: f64,
) {
    page.push_str(name);
    page.push_str(suffix);
    let mut separator = '{';
    let pairs = labels.iter().map(|pair| (pair.name(), pair.value()));
    for (label, text) in pairs.chain(bound.map(|bound| ("le", bound))) {
        page.push(separator);
        separator = ',';
        page.push_str(label);
        page.push_str("=\"");
        for c in text.chars() {
            match c {
                '\\' => page.push_str("\\\\"),
                '"' => page.push_str("\\\""),
                '\n' => page.push_str("\\n"),
                c => page.push(c),
            }
        }
        page.push('"');
    }
    if separator == ',' {
        page.push('}');
    }
    let _ = if value.is_infinite() {
        writeln!(page, " {}Inf", if value > 0.0 { '+' } else { '-' })
    } else {
        writeln!(page, " {value}")
    };
}

fn type_name(kind: MetricType) -> &'static str {
    match kind {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::SUMMARY => "summary",
        MetricType::HISTOGRAM => "histogram",
        MetricType::UNTYPED => "untyped",
    }
}

impl Kind {
    /// As a TYPE line says it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter | Self::ProcessCounter => "counter",
            Self::Gauge | Self::ProcessGauge => "gauge",
            Self::Histogram(_) => "histogram",
            Self::Summary => "summary",
        }
    }
}

/// The reference page's table, from the same rows that are registered.
#[must_use]
pub fn reference_markdown() -> String {
    let mut page = String::from("| name | type | labels | what it tells | moves |\n");
    page.push_str("|---|---|---|---|---|\n");
    for spec in TABLE {
        let labels = spec.labels.iter().map(|l| format!("`{l}`")).collect::<Vec<_>>().join(", ");
        let kind = match spec.kind {
            Kind::Histogram(buckets) => format!("histogram, buckets `{}`", buckets.name()),
            kind => kind.name().to_string(),
        };
        let _ = writeln!(
            page,
            "| `{}` | {kind} | {labels} | {} | {} |",
            spec.name, spec.help, spec.moves
        );
    }
    page.push_str("\n| buckets | upper bounds |\n|---|---|\n");
    for buckets in super::table::Buckets::ALL {
        let bounds: Vec<String> =
            buckets.bounds(2048).iter().map(|bound| format!("{bound}")).collect();
        let note = match buckets {
            super::table::Buckets::RequestTokens => {
                " (1, 2, 5 × powers of ten up to the model's \
                 length; here for 2048)"
            }
            _ => "",
        };
        let _ = writeln!(page, "| `{}` | {}{note} |", buckets.name(), bounds.join(" "));
    }
    page
}
