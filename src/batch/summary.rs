//! What a run did, read from the same page of metrics that a server would show.

use std::fmt::Write as _;
use std::time::Duration;

/// How lines were answered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// With status 200.
    pub answered: u64,
    /// With another status.
    pub refused: u64,
    /// Not a request at all.
    pub bad: u64,
    /// By an earlier run.
    pub before: u64,
}

/// `counts` and the `vllm:` series of `page` as a few lines to read.
pub fn summary(counts: Counts, elapsed: Duration, page: &str) -> String {
    let seconds = elapsed.as_secs_f64();
    let sum = |name: &str| sum(page, name, None);
    let mut text = String::new();
    // Writing to a String does not fail.
    let Counts { answered, refused, bad, before } = counts;
    let _ = write!(text, "lines        {answered} answered, {refused} refused, {bad} bad");
    let _ = match before {
        0 => writeln!(text, " in {seconds:.2} s"),
        _ => writeln!(text, " in {seconds:.2} s; {before} answered before"),
    };
    if sum("pawl:recording") == 0.0 {
        text.push_str("metrics      not recorded (--disable-log-stats)\n");
        return text;
    }
    let reasons = ["stop", "length", "abort", "error", "repetition"].map(|reason| {
        let label = format!("finished_reason=\"{reason}\"");
        let ended = self::sum(page, "vllm:request_success_total", Some(&label));
        format!("{reason} {ended}")
    });
    let _ = writeln!(text, "requests     {}", reasons.join(", "));
    let prompt = sum("vllm:prompt_tokens_total");
    let cached = sum("vllm:prompt_tokens_cached_total");
    let _ = writeln!(
        text,
        "prompts      {prompt} tokens, {:.1} a second, {cached} found in the cache",
        rate(prompt, seconds)
    );
    let generated = sum("vllm:generation_tokens_total");
    let _ =
        writeln!(text, "generation   {generated} tokens, {:.1} a second", rate(generated, seconds));
    let means = [
        ("first token", "vllm:time_to_first_token_seconds"),
        ("then each", "vllm:inter_token_latency_seconds"),
        ("end to end", "vllm:e2e_request_latency_seconds"),
    ];
    for (name, family) in means {
        let count = sum(&format!("{family}_count"));
        let mean = rate(sum(&format!("{family}_sum")), count) * 1e3;
        let _ = writeln!(text, "{name:<12} after {mean:.2} ms on average ({count} times)");
    }
    text
}

fn rate(amount: f64, per: f64) -> f64 {
    if per > 0.0 { amount / per } else { 0.0 }
}

/// Sum of the series called `name` (with `label`) of a page in the text format.
fn sum(page: &str, name: &str, label: Option<&str>) -> f64 {
    page.lines()
        .filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                && label.is_none_or(|label| line.contains(label))
        })
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        // Not `sum`: that of nothing is -0.
        .fold(0.0, |sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_come_from_the_page() {
        let page = r#"
# HELP vllm:prompt_tokens_total x
vllm:prompt_tokens_total{model_name="a",engine="0"} 30
vllm:prompt_tokens_cached_total{model_name="a",engine="0"} 16
vllm:prompt_tokens_by_source_total{model_name="a",source="local"} 1000
vllm:generation_tokens_total{model_name="a",engine="0"} 8
vllm:request_success_total{model_name="a",engine="0",finished_reason="stop"} 2
vllm:request_success_total{model_name="a",engine="0",finished_reason="length"} 1
vllm:time_to_first_token_seconds_sum{engine="0"} 0.006
vllm:time_to_first_token_seconds_count{engine="0"} 3
pawl:recording 1
"#;
        let counts = Counts { answered: 3, refused: 1, bad: 2, before: 4 };
        insta::assert_snapshot!(summary(counts, Duration::from_millis(2000), page), @r"
        lines        3 answered, 1 refused, 2 bad in 2.00 s; 4 answered before
        requests     stop 2, length 1, abort 0, error 0, repetition 0
        prompts      30 tokens, 15.0 a second, 16 found in the cache
        generation   8 tokens, 4.0 a second
        first token  after 2.00 ms on average (3 times)
        then each    after 0.00 ms on average (0 times)
        end to end   after 0.00 ms on average (0 times)
        ");
        let off = page.replace("pawl:recording 1", "pawl:recording 0");
        insta::assert_snapshot!(summary(Counts::default(), Duration::ZERO, &off), @r"
        lines        0 answered, 0 refused, 0 bad in 0.00 s
        metrics      not recorded (--disable-log-stats)
        ");
    }
}
