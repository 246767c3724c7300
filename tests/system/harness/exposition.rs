//! What both text formats of a page of metrics demand, read strictly: every line, every family and
//! every histogram as a whole. Written from the formats, not from what our pages look like.

use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

/// Everything that is wrong with `page`, by line; nothing for a sound one.
pub fn faults(page: &str, format: Format) -> Vec<String> {
    let mut reader = Reader::new(format);
    let mut lines: Vec<&str> = page.split('\n').collect();
    if lines.pop() != Some("") {
        reader.fault("the last line has no end");
    }
    if format == Format::OpenMetrics {
        match lines.pop() {
            Some("# EOF") => {}
            last => reader.fault(&format!("ends with {last:?}, not with # EOF")),
        }
    }
    for line in lines {
        reader.number += 1;
        reader.line(line);
    }
    reader.end_family();
    reader.faults
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
    Summary,
}

/// In the order in which they stand.
type Labels = Vec<(String, String)>;

#[derive(Debug)]
struct Sample {
    line: usize,
    suffix: String,
    labels: Labels,
    value: f64,
}

#[derive(Debug, Default)]
struct Family {
    name: String,
    helped: bool,
    kind: Option<Kind>,
    samples: Vec<Sample>,
}

struct Reader {
    format: Format,
    number: usize,
    faults: Vec<String>,
    family: Family,
    /// Names of families, and of all samples that they could have.
    taken: BTreeSet<String>,
    /// Whole series.
    series: BTreeSet<(String, Labels)>,
}

impl Reader {
    fn new(format: Format) -> Self {
        Self {
            format,
            number: 0,
            faults: Vec::new(),
            family: Family::default(),
            taken: BTreeSet::new(),
            series: BTreeSet::new(),
        }
    }

    fn fault(&mut self, what: &str) {
        self.faults.push(format!("line {}: {what}", self.number));
    }

    fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            self.help(rest);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            self.kind(rest);
        } else if line.starts_with('#') {
            self.fault(&format!("neither HELP nor TYPE: {line:?}"));
        } else if line.is_empty() {
            self.fault("an empty line");
        } else {
            match sample(line) {
                Ok((name, labels, value)) => self.sample(&name, labels, value),
                Err(why) => self.fault(&format!("{why}: {line:?}")),
            }
        }
    }

    /// A family begins with its HELP.
    fn help(&mut self, rest: &str) {
        self.end_family();
        let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
        if !is_name(name, true) {
            self.fault(&format!("no name of a metric: {name:?}"));
        }
        if text.is_empty() {
            self.fault(&format!("{name} is not explained"));
        }
        let quote = self.format == Format::OpenMetrics;
        if !escapes_are_right(text, quote) {
            self.fault(&format!("wrong escapes in the text of {name}"));
        }
        self.family = Family { name: name.into(), helped: true, ..Family::default() };
    }

    fn kind(&mut self, rest: &str) {
        let (name, kind) = rest.split_once(' ').unwrap_or((rest, ""));
        if name != self.family.name || !self.family.helped {
            self.end_family();
            self.fault(&format!("the TYPE of {name} does not follow its HELP"));
            self.family = Family { name: name.into(), ..Family::default() };
        }
        if self.family.kind.is_some() || !self.family.samples.is_empty() {
            self.fault(&format!("the TYPE of {name} comes twice or late"));
        }
        let kind = match kind {
            "counter" => Kind::Counter,
            "gauge" => Kind::Gauge,
            "histogram" => Kind::Histogram,
            "summary" => Kind::Summary,
            _ => return self.fault(&format!("no such type: {kind:?}")),
        };
        self.family.kind = Some(kind);
        let open = self.format == Format::OpenMetrics;
        if kind == Kind::Counter && open && name.ends_with("_total") {
            self.fault(&format!("the family of counters {name} ends in _total"));
        }
        let mut names: Vec<String> =
            self.suffixes(kind).iter().map(|suffix| format!("{name}{suffix}")).collect();
        names.push(name.into());
        names.sort();
        names.dedup();
        for name in names {
            if !self.taken.insert(name.clone()) {
                self.fault(&format!("{name} stands for two things"));
            }
        }
    }

    /// What the names of a family's samples may end in.
    fn suffixes(&self, kind: Kind) -> &'static [&'static str] {
        match (kind, self.format) {
            (Kind::Counter, Format::OpenMetrics) => &["_total"],
            (Kind::Counter, Format::Text) | (Kind::Gauge, _) => &[""],
            (Kind::Histogram, _) => &["_bucket", "_count", "_sum"],
            (Kind::Summary, _) => &["", "_count", "_sum"],
        }
    }

    fn sample(&mut self, name: &str, labels: Labels, value: f64) {
        let Some(kind) = self.family.kind else {
            return self.fault(&format!("{name} before any TYPE"));
        };
        let suffix = name.strip_prefix(&self.family.name).unwrap_or("none");
        if !self.suffixes(kind).contains(&suffix) {
            return self.fault(&format!("{name} in the {kind:?} {}", self.family.name));
        }
        let suffix = suffix.to_owned();
        let bound = labels.iter().any(|(label, _)| label == "le");
        if bound != (suffix == "_bucket") {
            self.fault(&format!("{name} with or without le"));
        }
        let quantile = labels.iter().any(|(label, _)| label == "quantile");
        if quantile != (kind == Kind::Summary && suffix.is_empty()) {
            self.fault(&format!("{name} with or without quantile"));
        }
        let whole = ["_bucket", "_count"].contains(&suffix.as_str());
        if whole && value.fract() != 0.0 {
            self.fault(&format!("{name} counts {value}"));
        }
        if value.is_nan() {
            self.fault(&format!("{name} is no number"));
        }
        if kind != Kind::Gauge && (value < 0.0 || value.is_infinite()) {
            self.fault(&format!("{name} is {value}"));
        }
        let mut sorted = labels.clone();
        sorted.sort();
        if !self.series.insert((name.into(), sorted)) {
            self.fault(&format!("{name} {labels:?} stands twice"));
        }
        self.family.samples.push(Sample { line: self.number, suffix, labels, value });
    }

    /// Looks at a family as a whole.
    fn end_family(&mut self) {
        let family = std::mem::take(&mut self.family);
        let Some(kind) = family.kind else {
            if family.helped {
                self.fault(&format!("{} has no TYPE", family.name));
            }
            return;
        };
        // By labels but for `le`, in the order in which they come.
        let mut groups: Vec<(Labels, Vec<&Sample>)> = Vec::new();
        for sample in &family.samples {
            let mut labels = sample.labels.clone();
            labels.retain(|(label, _)| label != "le" && label != "quantile");
            labels.sort();
            match groups.iter_mut().rev().find(|(of, _)| *of == labels) {
                Some((_, group)) => group.push(sample),
                None => groups.push((labels, vec![sample])),
            }
        }
        for (labels, group) in groups {
            let told = format!("{} {labels:?}", family.name);
            let first = group[0].line;
            if group.iter().enumerate().any(|(at, sample)| sample.line != first + at) {
                self.fault(&format!("{told} is not in one piece"));
            }
            if matches!(kind, Kind::Histogram | Kind::Summary) {
                for why in distribution(&group, kind, self.format) {
                    self.fault(&format!("{told}: {why}"));
                }
            }
        }
    }
}

/// What is wrong with one histogram or summary.
fn distribution(group: &[&Sample], kind: Kind, format: Format) -> Vec<String> {
    let mut wrong = Vec::new();
    let only = |suffix: &str| -> Option<f64> {
        let mut found = group.iter().filter(|sample| sample.suffix == suffix);
        found.next().filter(|_| found.next().is_none()).map(|sample| sample.value)
    };
    let (Some(count), Some(sum)) = (only("_count"), only("_sum")) else {
        return vec!["it needs one _count and one _sum".into()];
    };
    if count == 0.0 && sum != 0.0 {
        wrong.push(format!("nothing was observed, and its sum is {sum}"));
    }
    if kind == Kind::Summary {
        return wrong;
    }
    let mut buckets = Vec::new();
    for sample in group.iter().filter(|sample| sample.suffix == "_bucket") {
        let Some((_, text)) = sample.labels.iter().find(|(label, _)| label == "le") else {
            continue;
        };
        match number(text) {
            Some(bound) if !bound.is_nan() => buckets.push((bound, sample.value)),
            _ => wrong.push(format!("le={text:?}")),
        }
        if format == Format::OpenMetrics && !is_canonical(text) {
            wrong.push(format!("le={text:?} is not the canonical form of a float"));
        }
    }
    if buckets.last().map(|(bound, _)| *bound) != Some(f64::INFINITY) {
        wrong.push("its last bucket is not le=\"+Inf\"".into());
    }
    if buckets.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
        wrong.push("its bounds do not grow".into());
    }
    if buckets.windows(2).any(|pair| pair[0].1 > pair[1].1) {
        wrong.push("its buckets are not cumulative".into());
    }
    // Buckets are cumulative: what lies in each by itself adds up to the last one.
    if buckets.last().is_some_and(|(_, all)| *all != count) {
        wrong.push(format!("its buckets add up to {:?}, and its count is {count}", buckets.last()));
    }
    let (mut least, mut most) = (0.0, 0.0);
    let (mut bound_below, mut below) = (0.0_f64, 0.0);
    for (bound, at_or_below) in &buckets {
        let here = at_or_below - below;
        least += here * bound_below;
        most += if here > 0.0 { here * bound } else { 0.0 };
        (bound_below, below) = (bound.max(0.0), *at_or_below);
    }
    let hair = 1e-9 * sum;
    if sum + hair < least || sum - hair > most {
        wrong.push(format!("its sum {sum} is not between {least} and {most}, as its buckets say"));
    }
    wrong
}

/// `name{label="value",…} value`, without a timestamp.
fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let name: String = line.chars().take_while(|c| !"{ ".contains(*c)).collect();
    if !is_name(&name, true) {
        return Err("no name of a metric".into());
    }
    let mut rest = &line[name.len()..];
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            if !is_name(label, false) || label.starts_with("__") {
                return Err(format!("no name of a label: {label:?}"));
            }
            let (value, after) = quoted(after)?;
            if labels.iter().any(|(other, _)| other == label) {
                return Err(format!("label {label} twice"));
            }
            labels.push((label.into(), value));
            match after.split_at_checked(1) {
                Some((",", after)) => rest = after,
                Some(("}", after)) => break rest = after,
                _ => return Err("after a label comes a comma or the end".into()),
            }
        }
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    let value = number(value).ok_or("no value, or something after it")?;
    Ok((name, labels, value))
}

/// The text up to the closing quote, and what comes after it.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match chars.next() {
                Some((_, c @ ('\\' | '"'))) => value.push(c),
                Some((_, 'n')) => value.push('\n'),
                _ => return Err("an unknown escape in a label".into()),
            },
            c => value.push(c),
        }
    }
    Err("a label without an end".into())
}

fn is_name(name: &str, colons: bool) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || (colons && c == ':');
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

fn escapes_are_right(text: &str, quotes: bool) -> bool {
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let escaped = match c {
            '\\' => chars.next(),
            '"' if quotes => return false,
            _ => continue,
        };
        match escaped {
            Some('\\' | 'n') => {}
            Some('"') if quotes => {}
            _ => return false,
        }
    }
    true
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        _ if text.bytes().all(|b| b.is_ascii_digit() || b"+-.e".contains(&b)) => text.parse().ok(),
        _ => None,
    }
}

/// As OpenMetrics has floats: `1.0`, `0.25`, `1e-05`, `1e+16`.
fn is_canonical(text: &str) -> bool {
    match text.split_once('e') {
        _ if text == "+Inf" => true,
        None => text.contains('.'),
        Some((_, exponent)) => {
            exponent.starts_with(['-', '+']) && exponent.len() >= 3 && !text.contains(".0e")
        }
    }
}
