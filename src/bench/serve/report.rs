//! What the clients saw, as a table for people and as the JSON that `vllm bench serve` writes.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::client::Outcome;

/// The four times that are summed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    Ttft,
    Tpot,
    Itl,
    E2el,
}

impl Metric {
    pub const ALL: [Self; 4] = [Self::Ttft, Self::Tpot, Self::Itl, Self::E2el];

    fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::Itl => "itl",
            Self::E2el => "e2el",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Ttft => "Time to first token",
            Self::Tpot => "Time per output token after it",
            Self::Itl => "Inter-token latency",
            Self::E2el => "End-to-end latency",
        }
    }
}

impl std::str::FromStr for Metric {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|metric| metric.name() == name);
        named.ok_or_else(|| format!("{name:?} is none of ttft, tpot, itl, e2el"))
    }
}

/// `--goodput ttft:200`: a request is good if its time is at most so many milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    metric: Metric,
    ms: f64,
}

impl std::str::FromStr for Goal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ms) = text.split_once(':').ok_or("write NAME:MILLISECONDS, as ttft:200")?;
        let metric: Metric = name.parse()?;
        if metric == Metric::Itl {
            return Err("a request has many inter-token latencies; use ttft, tpot, e2el".into());
        }
        let ms = ms.parse::<f64>().ok().filter(|ms| *ms >= 0.0);
        Ok(Self { metric, ms: ms.ok_or("write the milliseconds as a number, as ttft:200")? })
    }
}

/// What is summed up, and how.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub metrics: Vec<Metric>,
    pub percentiles: Vec<f64>,
    pub goals: Vec<Goal>,
}

/// A bench's end.
#[derive(Debug)]
pub struct Report<'a> {
    pub outcomes: &'a [Outcome],
    pub duration: Duration,
    pub wanted: &'a Wanted,
}

/// Of one metric, in milliseconds.
struct Figures {
    mean: f64,
    median: f64,
    std: f64,
    percentiles: Vec<f64>,
}

impl Report<'_> {
    fn good(&self) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(|outcome| outcome.error.is_none())
    }

    pub fn failed(&self) -> usize {
        self.outcomes.len() - self.good().count()
    }

    fn per_second(&self, amount: f64) -> f64 {
        if self.duration.is_zero() { 0.0 } else { amount / self.duration.as_secs_f64() }
    }

    /// Requests, prompt tokens and output tokens of those that ended well.
    fn totals(&self) -> (usize, u64, u64) {
        let sum = |len: fn(&Outcome) -> u32| self.good().map(|o| u64::from(len(o))).sum();
        (self.good().count(), sum(|o| o.input_len), sum(|o| o.output_len))
    }

    fn goodput(&self) -> Option<f64> {
        let meets = |outcome: &Outcome, goal: &Goal| {
            ms_of(outcome, goal.metric).iter().all(|ms| *ms <= goal.ms)
        };
        let all = |outcome: &&Outcome| self.wanted.goals.iter().all(|goal| meets(outcome, goal));
        let some = !self.wanted.goals.is_empty();
        some.then(|| self.per_second(self.good().filter(all).count() as f64))
    }

    fn figures(&self, metric: Metric) -> Figures {
        let mut values: Vec<f64> = self.good().flat_map(|o| ms_of(o, metric)).collect();
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        let percentiles = &self.wanted.percentiles;
        Figures {
            mean,
            median: percentile(&values, 50.0),
            std: variance.sqrt(),
            percentiles: percentiles.iter().map(|p| percentile(&values, *p)).collect(),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let (completed, input, output) = self.totals();
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<44} {value:>12}");
        };
        row("Requests completed", completed.to_string());
        row("Requests failed", self.failed().to_string());
        row("Duration, s", format!("{:.2}", self.duration.as_secs_f64()));
        row("Prompt tokens", input.to_string());
        row("Output tokens", output.to_string());
        row("Requests a second", format!("{:.2}", self.per_second(completed as f64)));
        if let Some(goodput) = self.goodput() {
            row("Requests a second that met the goals", format!("{goodput:.2}"));
        }
        row("Output tokens a second", format!("{:.2}", self.per_second(output as f64)));
        row("All tokens a second", format!("{:.2}", self.per_second((input + output) as f64)));
        for &metric in &self.wanted.metrics {
            let figures = self.figures(metric);
            row(&format!("{}, ms: mean", metric.title()), format!("{:.2}", figures.mean));
            row("  median", format!("{:.2}", figures.median));
            for (percentile, value) in self.wanted.percentiles.iter().zip(figures.percentiles) {
                row(&format!("  p{percentile}"), format!("{value:.2}"));
            }
        }
        if let Some(error) = self.outcomes.iter().find_map(|outcome| outcome.error.as_ref()) {
            let _ = writeln!(text, "The first failure: {error}");
        }
        text
    }

    /// The fields of `vllm bench serve`'s result, less those that say how it was asked.
    pub fn json(&self, detailed: bool) -> Map<String, Value> {
        let (completed, input, output) = self.totals();
        let mut map = Map::new();
        let mut put = |name: &str, value: Value| map.insert(name.to_owned(), value);
        put("duration", json!(self.duration.as_secs_f64()));
        put("completed", json!(completed));
        put("failed", json!(self.failed()));
        put("total_input_tokens", json!(input));
        put("total_output_tokens", json!(output));
        put("request_throughput", json!(self.per_second(completed as f64)));
        put("request_goodput", json!(self.goodput()));
        put("output_throughput", json!(self.per_second(output as f64)));
        put("total_token_throughput", json!(self.per_second((input + output) as f64)));
        put("max_concurrent_requests", json!(self.most_at_once()));
        for &metric in &self.wanted.metrics {
            let (name, figures) = (metric.name(), self.figures(metric));
            put(&format!("mean_{name}_ms"), json!(figures.mean));
            put(&format!("median_{name}_ms"), json!(figures.median));
            put(&format!("std_{name}_ms"), json!(figures.std));
            for (percentile, value) in self.wanted.percentiles.iter().zip(figures.percentiles) {
                put(&format!("p{percentile}_{name}_ms"), json!(value));
            }
        }
        if detailed {
            let seconds = |time: &Duration| time.as_secs_f64();
            let all = |of: &dyn Fn(&Outcome) -> Value| -> Value {
                self.outcomes.iter().map(of).collect()
            };
            put("input_lens", all(&|o| json!(o.input_len)));
            put("output_lens", all(&|o| json!(o.output_len)));
            put("start_times", all(&|o| json!(seconds(&o.sent))));
            put("ttfts", all(&|o| json!(seconds(&o.ttft))));
            put("itls", all(&|o| json!(o.itls.iter().map(seconds).collect::<Vec<_>>())));
            put("generated_texts", all(&|o| json!(o.text)));
            put("errors", all(&|o| json!(o.error.as_deref().unwrap_or(""))));
        }
        map
    }

    /// Requests that were under way at the same time.
    fn most_at_once(&self) -> usize {
        let mut changes: Vec<(Duration, i64)> = self
            .outcomes
            .iter()
            .flat_map(|outcome| [(outcome.sent, 1), (outcome.sent + outcome.latency, -1)])
            .collect();
        changes.sort_unstable();
        let mut now = 0_i64;
        let counts = changes.iter().map(|(_, change)| {
            now += change;
            now
        });
        counts.max().unwrap_or(0).unsigned_abs() as usize
    }
}

/// A request's times; a single token has no time per output token.
fn ms_of(outcome: &Outcome, metric: Metric) -> Vec<f64> {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    match metric {
        Metric::Ttft => vec![ms(outcome.ttft)],
        Metric::Itl => outcome.itls.iter().map(|itl| ms(*itl)).collect(),
        Metric::E2el => vec![ms(outcome.latency)],
        Metric::Tpot if outcome.output_len < 2 => Vec::new(),
        Metric::Tpot => {
            let rest = outcome.latency.saturating_sub(outcome.ttft);
            vec![ms(rest) / f64::from(outcome.output_len - 1)]
        }
    }
}

/// Linear between the two nearest of sorted values.
fn percentile(sorted: &[f64], percentile: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = last as f64 * percentile / 100.0;
    let below = (place.floor() as usize).min(last);
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(sent: u64, ttft: u64, itls: &[u64], error: Option<&str>) -> Outcome {
        let ms = Duration::from_millis;
        Outcome {
            sent: ms(sent),
            input_len: 10,
            output_len: itls.len() as u32 + 1,
            ttft: ms(ttft),
            itls: itls.iter().map(|itl| ms(*itl)).collect(),
            latency: ms(ttft + itls.iter().sum::<u64>()),
            text: "text".into(),
            error: error.map(Into::into),
        }
    }

    #[test]
    fn figures_of_three_requests_and_a_failure() {
        let outcomes = [
            outcome(0, 100, &[10, 20, 30], None),
            outcome(50, 200, &[40], None),
            outcome(500, 300, &[], None),
            outcome(0, 0, &[], Some("503: full")),
        ];
        let wanted = Wanted {
            metrics: Metric::ALL.to_vec(),
            percentiles: vec![90.0, 99.9],
            goals: vec!["ttft:200".parse().unwrap(), "tpot:30".parse().unwrap()],
        };
        let duration = Duration::from_secs(2);
        let report = Report { outcomes: &outcomes, duration, wanted: &wanted };
        insta::assert_snapshot!(report.text(), @r#"
        Requests completed                                      3
        Requests failed                                         1
        Duration, s                                          2.00
        Prompt tokens                                          30
        Output tokens                                           7
        Requests a second                                    1.50
        Requests a second that met the goals                 0.50
        Output tokens a second                               3.50
        All tokens a second                                 18.50
        Time to first token, ms: mean                      200.00
          median                                           200.00
          p90                                              280.00
          p99.9                                            299.80
        Time per output token after it, ms: mean            30.00
          median                                            30.00
          p90                                               38.00
          p99.9                                             39.98
        Inter-token latency, ms: mean                       25.00
          median                                            25.00
          p90                                               37.00
          p99.9                                             39.97
        End-to-end latency, ms: mean                       233.33
          median                                           240.00
          p90                                              288.00
          p99.9                                            299.88
        The first failure: 503: full
        "#);
        let json = serde_json::to_string(&report.json(true)).unwrap().replace(",\"", ",\n\"");
        insta::assert_snapshot!(json, @r#"
        {"duration":2.0,
        "completed":3,
        "failed":1,
        "total_input_tokens":30,
        "total_output_tokens":7,
        "request_throughput":1.5,
        "request_goodput":0.5,
        "output_throughput":3.5,
        "total_token_throughput":18.5,
        "max_concurrent_requests":2,
        "mean_ttft_ms":200.0,
        "median_ttft_ms":200.0,
        "std_ttft_ms":81.64965809277261,
        "p90_ttft_ms":280.0,
        "p99.9_ttft_ms":299.8,
        "mean_tpot_ms":30.0,
        "median_tpot_ms":30.0,
        "std_tpot_ms":10.0,
        "p90_tpot_ms":38.0,
        "p99.9_tpot_ms":39.980000000000004,
        "mean_itl_ms":25.0,
        "median_itl_ms":25.0,
        "std_itl_ms":11.180339887498949,
        "p90_itl_ms":37.0,
        "p99.9_itl_ms":39.97,
        "mean_e2el_ms":233.33333333333334,
        "median_e2el_ms":240.0,
        "std_e2el_ms":57.34883511361751,
        "p90_e2el_ms":288.0,
        "p99.9_e2el_ms":299.88,
        "input_lens":[10,10,10,10],
        "output_lens":[4,2,1,1],
        "start_times":[0.0,0.05,0.5,0.0],
        "ttfts":[0.1,0.2,0.3,0.0],
        "itls":[[0.01,0.02,0.03],[0.04],[],[]],
        "generated_texts":["text",
        "text",
        "text",
        "text"],
        "errors":["",
        "",
        "",
        "503: full"]}
        "#);
    }

    #[test]
    fn nothing_at_all_is_all_zeros() {
        let wanted = Wanted { metrics: Metric::ALL.to_vec(), percentiles: vec![], goals: vec![] };
        let report = Report { outcomes: &[], duration: Duration::ZERO, wanted: &wanted };
        let numbers = report.json(false).into_iter().filter(|(_, v)| v.is_number());
        assert!(numbers.into_iter().all(|(_, value)| value.as_f64() == Some(0.0)));
    }

    #[test]
    fn goals_that_will_not_do() {
        let refuse = |text: &str| text.parse::<Goal>().unwrap_err();
        let told = [refuse("ttft"), refuse("speed:3"), refuse("itl:3"), refuse("ttft:-1")];
        insta::assert_snapshot!(told.join("\n"), @r#"
        write NAME:MILLISECONDS, as ttft:200
        "speed" is none of ttft, tpot, itl, e2el
        a request has many inter-token latencies; use ttft, tpot, e2el
        write the milliseconds as a number, as ttft:200
        "#);
    }
}
