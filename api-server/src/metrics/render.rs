//! The page, in both text formats, from one gathered set of families: they carry the same samples.

use std::fmt::Write;

use super::snapshot::{Exact, Labels, Reading, Snapshot};
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

/// Writes `snapshot`, sorted by name. A family of the table that has no series yet (its labels are
/// not known before a core has joined) is shown by its HELP and TYPE alone.
pub(super) fn render(snapshot: &Snapshot, format: Format) -> Vec<u8> {
    let mut specs: Vec<_> = TABLE.iter().collect();
    specs.sort_unstable_by_key(|spec| spec.name);
    let mut page = String::with_capacity(64 * 1024);
    for spec in specs {
        header(&mut page, spec.name, spec.kind.name(), spec.help, format);
        let series = snapshot.0.get(spec.name).into_iter().flat_map(|family| &family.0);
        for (labels, reading) in series {
            samples(&mut page, spec.name, labels, reading);
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

fn samples(page: &mut String, name: &str, labels: &Labels, reading: &Reading) {
    match reading {
        Reading::Number(Exact(number)) => sample(page, name, "", labels, None, *number),
        Reading::Summary { count, sum } => {
            sample(page, name, "_count", labels, None, *count as f64);
            sample(page, name, "_sum", labels, None, sum.0);
        }
        Reading::Histogram { count, sum, buckets } => {
            for (bound, count) in buckets {
                let bound = canonical(bound.0);
                sample(page, name, "_bucket", labels, Some(&bound), *count as f64);
            }
            sample(page, name, "_bucket", labels, Some("+Inf"), *count as f64);
            sample(page, name, "_count", labels, None, *count as f64);
            sample(page, name, "_sum", labels, None, sum.0);
        }
    }
}

/// As OpenMetrics has bounds: `1.0`, `0.25`, `1e-05`. Another spelling is another series.
fn canonical(bound: f64) -> String {
    let text = format!("{bound:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let exponent: i32 = exponent.parse().expect("an exponent is a number");
            format!("{digits}e{exponent:+03}")
        }
        None => text,
    }
}

fn sample(
    page: &mut String,
    name: &str,
    suffix: &str,
    labels: &Labels,
    bound: Option<&str>,
    value: f64,
) {
    page.push_str(name);
    page.push_str(suffix);
    let mut separator = '{';
    let pairs = labels.iter().map(|(label, text)| (&**label, &**text));
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
    let mut page = String::from("| name | type | labels | what it tells | moves | of several |\n");
    page.push_str("|---|---|---|---|---|---|\n");
    for spec in TABLE {
        let labels = spec.labels.iter().map(|l| format!("`{l}`")).collect::<Vec<_>>().join(", ");
        let kind = match spec.kind {
            Kind::Histogram(buckets) => format!("histogram, buckets `{}`", buckets.name()),
            kind => kind.name().to_string(),
        };
        let _ = writeln!(
            page,
            "| `{}` | {kind} | {labels} | {} | {} | {} |",
            spec.name,
            spec.help,
            spec.moves,
            spec.across.name()
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
