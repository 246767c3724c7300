//! What Grafana dashboards read: vLLM's, as PromQL over the series that they name, and ours.

/// Every series that one of them names.
pub const SERIES: &[&str] = &[
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
];

/// The expressions for `model`, with rates over `window`, of all targets together and of each.
pub fn expressions(model: &str, window: &str) -> Vec<String> {
    let of = |series: &str| format!("vllm:{series}{{model_name=\"{model}\"}}");
    let rate = |series: &str| format!("rate({}[{window}])", of(series));
    let increase = |series: &str| format!("increase({}[{window}])", of(series));
    let mut all = Vec::new();
    for latency in [
        "e2e_request_latency_seconds",
        "inter_token_latency_seconds",
        "time_to_first_token_seconds",
    ] {
        let buckets = rate(&format!("{latency}_bucket"));
        for quantile in ["0.99", "0.95", "0.9", "0.5"] {
            all.push(format!("histogram_quantile({quantile}, sum by (le) ({buckets}))"));
        }
        let (sum, count) = (rate(&format!("{latency}_sum")), rate(&format!("{latency}_count")));
        all.push(format!("{sum} / {count}"));
        all.push(format!("sum({sum}) / sum({count})"));
        all.push(format!("sum by (le) ({})", increase(&format!("{latency}_bucket"))));
    }
    for gauge in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
        all.push(of(gauge));
    }
    for tokens in ["prompt_tokens_total", "generation_tokens_total"] {
        all.push(rate(tokens));
        all.push(format!("sum({})", rate(tokens)));
        all.push(format!("sum({})", increase(tokens)));
    }
    let (prompt, generated) = (rate("prompt_tokens_total"), rate("generation_tokens_total"));
    all.push(format!("sum({prompt}) + sum({generated})"));
    for tokens in ["request_prompt_tokens_bucket", "request_generation_tokens_bucket"] {
        all.push(format!("sum by (le) ({})", increase(tokens)));
        all.push(format!("histogram_quantile(0.9, sum by (le) ({}))", rate(tokens)));
    }
    all.push(format!("sum by (finished_reason) ({})", increase("request_success_total")));
    all.push(format!("sum({})", rate("request_success_total")));
    for seconds in ["queue", "prefill", "decode"] {
        all.push(rate(&format!("request_{seconds}_time_seconds_sum")));
    }
    all.push(rate("request_max_num_generation_tokens_sum"));
    all
}

/// The expressions of our own dashboard.
pub fn ours(model: &str, window: &str) -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/grafana/dashboards/pawl.json");
    let text = std::fs::read_to_string(path).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    expressions.map(|e| e.replace("$model", model).replace("$__rate_interval", window)).collect()
}
