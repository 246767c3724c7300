//! The registry by itself: its table, its page, its switch.

use std::collections::BTreeSet;

use pawl_shared::clock::ManualClock;
use pawl_shared::protocol::testing::{idle_stats, small_ready};

use super::table::{Kind, TABLE};
use super::*;

fn page(metrics: &Metrics, format: Format) -> String {
    String::from_utf8(metrics.render(format).1).expect("the page is text")
}

fn with_everything() -> Metrics {
    let metrics = Metrics::default();
    metrics.core_joined(0, &small_ready());
    metrics.engine("a \"quoted\" name", 0, 2048);
    let method = GrpcMethod { kind: "unary", service: "pawl.Inference", method: "Generate" };
    metrics.grpc_started(method);
    metrics.grpc_observed(&GrpcObservation { method, code: "OK", seconds: 0.25 });
    for (handler, status) in [("/v1/completions", 200), ("none", 404)] {
        metrics.http_started();
        metrics.http_observed(&HttpObservation {
            method: if status == 404 { "BREW" } else { "POST" },
            handler,
            status,
            seconds: 0.25,
            request_bytes: 10,
            response_bytes: 1000,
        });
    }
    metrics
}

/// `(family, type)` of every TYPE line, and the name and labels of every sample.
fn parse(page: &str) -> (BTreeSet<(String, String)>, Vec<String>) {
    let mut families = BTreeSet::new();
    let mut samples = Vec::new();
    let mut current = (String::new(), String::new());
    for line in page.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a TYPE line has a type");
            current = (name.to_string(), kind.to_string());
            assert!(families.insert(current.clone()), "{name} appears twice");
        } else if line.starts_with('#') {
            assert!(line.starts_with("# HELP "), "{line}");
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a sample has a value");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let bare = name.split('{').next().expect("split gives at least one");
            let suffix = bare.strip_prefix(&current.0).expect("samples follow their family");
            let allowed: &[&str] = match current.1.as_str() {
                "counter" => &["", "_total"],
                "gauge" => &[""],
                "summary" => &["_sum", "_count"],
                _ => &["_bucket", "_sum", "_count"],
            };
            assert!(allowed.contains(&suffix), "{line} in {current:?}");
            samples.push(name.to_string());
        }
    }
    let unique: BTreeSet<&String> = samples.iter().collect();
    assert_eq!(unique.len(), samples.len(), "a sample appears twice");
    (families, samples)
}

#[test]
fn the_page_shows_the_whole_table_and_nothing_else() {
    for metrics in [Metrics::default(), with_everything()] {
        let (families, _) = parse(&page(&metrics, Format::Text004));
        let table = TABLE.iter().map(|spec| (spec.name.into(), spec.kind.name().into()));
        let table: BTreeSet<(String, String)> = table.collect();
        assert_eq!(families, table);
    }
}

#[test]
fn every_series_is_there_from_the_first_scrape() {
    let (_, samples) = parse(&page(&with_everything(), Format::Text004));
    for spec in TABLE {
        let shown = samples.iter().any(|sample| {
            sample.strip_prefix(spec.name).is_some_and(|rest| {
                let bare = rest.split('{').next().expect("split gives at least one");
                ["", "_count"].contains(&bare)
            })
        });
        assert!(shown, "{} has no series", spec.name);
    }
}

#[test]
fn both_formats_carry_the_same_samples() {
    let metrics = with_everything();
    let (families, samples) = parse(&page(&metrics, Format::Text004));
    let open = page(&metrics, Format::OpenMetrics);
    assert!(open.ends_with("\n# EOF\n") && !page(&metrics, Format::Text004).contains("# EOF"));
    let (open_families, open_samples) = parse(&open);
    assert_eq!(samples, open_samples);
    // In OpenMetrics no counter's family ends in _total, and everything else keeps its name.
    let renamed: BTreeSet<(String, String)> = families
        .into_iter()
        .map(|(name, kind)| match kind.as_str() {
            "counter" => (name.trim_end_matches("_total").to_string(), kind),
            _ => (name, kind),
        })
        .collect();
    assert_eq!(renamed, open_families);
    assert!(open.contains("# TYPE vllm:iteration_tokens_total histogram"));
    assert_eq!(
        metrics.render(Format::OpenMetrics).0,
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
}

#[test]
fn labels_are_escaped_and_bounded() {
    let page = page(&with_everything(), Format::Text004);
    assert!(page.contains("model_name=\"a \\\"quoted\\\" name\""));
    assert!(
        page.contains("http_requests_total{handler=\"none\",method=\"OTHER\",status=\"4xx\"} 1\n")
    );
    assert!(page.contains(
        "vllm:cache_config_info{block_size=\"16\",cache_dtype=\"None\",\
         enable_prefix_caching=\"True\",engine=\"0\",gpu_memory_utilization=\"None\",\
         kv_cache_size_tokens=\"2048\",num_gpu_blocks=\"128\",\
         prefix_caching_hash_algo=\"None\"} 1\n"
    ));
}

#[test]
fn token_buckets_end_with_the_models_length() {
    let page = page(&with_everything(), Format::Text004);
    let bounds: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("vllm:request_prompt_tokens_bucket"))
        .filter_map(|line| line.split("le=\"").nth(1)?.split('"').next())
        .collect();
    assert_eq!(
        bounds,
        [
            "1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0",
            "2000.0", "+Inf"
        ]
    );
}

#[test]
fn buckets_can_be_chosen() {
    let with = |name: &str, bounds: Vec<f64>| {
        let custom_buckets = [(name.to_string(), bounds)].into();
        Metrics::new(MetricsConfig { custom_buckets, ..MetricsConfig::default() })
    };
    let metrics = with("time_to_first_token", vec![0.5, 2.0]).expect("sound bounds");
    metrics.engine("m", 0, 64);
    let page = page(&metrics, Format::Text004);
    let bounds = page.matches("vllm:time_to_first_token_seconds_bucket").count();
    assert_eq!(bounds, 3);
    let wrong = [
        with("time_to_frist_token", vec![1.0]),
        with("request_latency", vec![2.0, 1.0]),
        with("request_latency", vec![]),
        with("request_latency", vec![f64::INFINITY]),
    ];
    let texts: Vec<String> = wrong.map(|result| result.expect_err("wrong").to_string()).into();
    insta::assert_debug_snapshot!(texts);
}

#[test]
fn refusals_before_the_model_is_known_are_not_lost() {
    let metrics = Metrics::default();
    metrics.admission_rejected(AdmissionReason::EngineUnavailable);
    metrics.engine("m", 0, 64);
    metrics.admission_rejected(AdmissionReason::EngineUnavailable);
    let page = page(&metrics, Format::Text004);
    let line = "vllm:admission_rejections_total{model_name=\"m\",reason=\"engine_unavailable\"} 2";
    assert!(page.lines().any(|shown| shown == line), "{page}");
}

#[test]
fn the_age_of_the_stats_grows_from_the_start() {
    let clock = ManualClock::at(5_000_000_000);
    let metrics =
        Metrics::new(MetricsConfig { clock: Arc::new(clock.clone()), ..MetricsConfig::default() })
            .expect("no custom buckets");
    clock.advance(std::time::Duration::from_millis(1500));
    let page = page(&metrics, Format::Text004);
    assert!(page.contains("pawl:stats_age_seconds{engine=\"0\"} 1.5\n"));
}

/// A scrape that takes for ever delays nothing that is counted meanwhile, by a frame or an answer.
#[test]
fn a_scrape_under_way_holds_nothing_that_counting_needs() {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::time::Duration;

    /// One of the registry's collectors, which stands still in the middle of a scrape.
    struct Stuck {
        description: prometheus::core::Desc,
        entered: Mutex<SyncSender<()>>,
        go_on: Mutex<Receiver<()>>,
    }

    impl prometheus::core::Collector for Stuck {
        fn desc(&self) -> Vec<&prometheus::core::Desc> {
            vec![&self.description]
        }

        fn collect(&self) -> Vec<prometheus::proto::MetricFamily> {
            self.entered.lock().expect(UNPOISONED).send(()).expect("the test waits");
            self.go_on.lock().expect(UNPOISONED).recv().expect("the test says so");
            Vec::new()
        }
    }

    let patience = Duration::from_secs(20);
    let metrics = Arc::new(with_everything());
    let engine = metrics.engine("a \"quoted\" name", 0, 2048);
    let (entered, has_entered) = sync_channel(1);
    let (let_on, go_on) = sync_channel(1);
    let labels = std::collections::HashMap::new();
    let description = prometheus::core::Desc::new("stuck".into(), "-".into(), vec![], labels);
    let stuck = Stuck {
        description: description.expect("a name"),
        entered: Mutex::new(entered),
        go_on: Mutex::new(go_on),
    };
    metrics.registry.register(Box::new(stuck)).expect("no other of that name");
    let scrape = std::thread::spawn({
        let metrics = metrics.clone();
        move || metrics.snapshot()
    });
    has_entered.recv_timeout(patience).expect("a scrape has begun");

    let (done, is_done) = sync_channel(1);
    let counting = std::thread::spawn({
        let metrics = metrics.clone();
        move || {
            let stats = IterationStats {
                outputs: 1,
                generation_tokens: 7,
                first_token_seconds: vec![0.1],
                inter_token_seconds: vec![0.1],
                refused: vec![AdmissionReason::QueueFull],
                ..IterationStats::default()
            };
            metrics.record_iteration(&engine, &stats);
            let stats = idle_stats();
            metrics.record_scheduler(
                &engine,
                &stats,
                true,
                pawl_shared::clock::Stamp::from_nanos(1),
            );
            metrics.frame(FrameKind::Step, 100);
            metrics.open_requests(3);
            metrics.core_up(true);
            metrics.admission_rejected(AdmissionReason::Draining);
            metrics.http_started();
            metrics.http_observed(&HttpObservation {
                method: "POST",
                handler: "/v1/chat/completions",
                status: 200,
                seconds: 0.25,
                request_bytes: 10,
                response_bytes: 1000,
            });
            metrics.engine_gone(&engine);
            done.send(()).expect("the test waits");
        }
    });
    is_done.recv_timeout(patience).expect("counted while a scrape stands still");
    let_on.send(()).expect("the scrape waits");
    scrape.join().expect("the scrape ends");
    counting.join().expect("counting ends");
    let_on.send(()).expect("the next scrape asks for it");
    let page = page(&metrics, Format::Text004);
    assert!(page.contains("vllm:generation_tokens_total{engine=\"0\",model_name=\"a \\\"quoted"));
    assert!(page.contains("name\"} 7\n"), "{page}");
}

/// Processes of a few MB, not a few kB: the scale of the process series.
#[test]
fn this_process_is_shown() {
    let page = page(&Metrics::default(), Format::Text004);
    let line = page.lines().find_map(|l| l.strip_prefix("process_resident_memory_bytes "));
    let bytes: f64 = line.expect("shown").parse().expect("a number");
    assert!(bytes > 1e6, "{bytes}");
}

#[test]
fn the_table_says_what_it_must() {
    for spec in TABLE {
        assert!(spec.help.ends_with('.') && !spec.moves.is_empty(), "{}", spec.name);
        let counts = matches!(spec.kind, Kind::Counter | Kind::ProcessCounter);
        assert_eq!(
            counts,
            spec.name.ends_with("_total") && spec.name != "vllm:iteration_tokens_total",
            "{}",
            spec.name
        );
    }
}

/// `docs/metrics.md` carries the generated reference between its markers; with `UPDATE_DOCS` set
/// the test writes it.
#[test]
fn the_reference_page_is_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let page = std::fs::read_to_string(path).expect("docs/metrics.md is in the tree");
    let (begin, end) = ("<!-- generated: begin -->\n", "<!-- generated: end -->\n");
    let (before, rest) = page.split_once(begin).expect("the marker before the table");
    let (_, after) = rest.split_once(end).expect("the marker after the table");
    let current = format!("{before}{begin}\n{}\n{end}{after}", reference_markdown());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &current).expect("docs/metrics.md can be written");
        return;
    }
    assert!(page == current, "docs/metrics.md is stale: run this test with UPDATE_DOCS=1");
}
