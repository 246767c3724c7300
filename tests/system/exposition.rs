//! Every page of metrics, in both text formats, read strictly: before a core is there, before any
//! request, under load and after it.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::grpc::client::{Grpc, grpc_port};
use crate::harness::exposition::{Format, faults};
use crate::harness::{Client, Run, Stop, listeners, signal, wait_for};
use crate::lifecycle::Served;

/// Reads the page in both formats; returns how many samples the larger one has.
fn check(page: Client, when: &str) -> usize {
    let samples = [
        (Format::Text, "text/plain"),
        (Format::OpenMetrics, "application/openmetrics-text;version=1.0.0"),
    ]
    .map(|(format, accept)| {
        let answer = page.request("GET", "/metrics", &[("accept", accept)], None).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        let text = answer.text();
        let faults = faults(&text, format);
        assert!(faults.is_empty(), "{when}, {format:?}: {faults:#?}");
        text.lines().filter(|line| !line.starts_with('#')).count()
    });
    samples.into_iter().max().unwrap()
}

#[test]
fn every_page_is_right_in_both_formats() {
    const NAME: &str = r#"a "model" in C:\new"#;
    let run = Run::new();
    let flags = ["--mock-step-ms", "1", "--grpc-port", "0", "--served-model-name", NAME];
    let served = Served::start(&run, 2, &flags);
    let pages: Vec<Client> = served.admins.iter().copied().chain([served.http]).collect();
    let before: Vec<usize> = pages.iter().map(|page| check(*page, "before")).collect();
    let escaped = r#"model_name="a \"model\" in C:\\new""#;
    assert!(served.http.get("/metrics").text().contains(escaped));

    let asking = AtomicBool::new(true);
    let grpc = grpc_port(&run.path("serve.ports"));
    let checks = std::thread::scope(|scope| {
        let stop_checking = Stop(&asking);
        let checker = scope.spawn(|| {
            let mut rounds = 0;
            while asking.load(Ordering::Relaxed) {
                pages.iter().for_each(|page| _ = check(*page, "under load"));
                rounds += 1;
            }
            rounds
        });
        let clients: Vec<_> = (0..6)
            .map(|client| {
                let http = served.http;
                scope.spawn(move || {
                    for nth in 0..25 {
                        let body = json!({"prompt": vec![client + 10; nth + 1], "n": nth % 3 + 1,
                                          "max_tokens": 1 + nth % 20, "stream": nth % 2 == 0});
                        http.post("/v1/completions", &body);
                        // One that leaves, and ones that are refused.
                        drop(http.open("POST", "/v1/completions", &json!({"prompt": "x"})));
                        http.post("/v1/completions", &json!({"prompt": 7}));
                        http.get(&format!("/nothing/{nth}"));
                    }
                    let refused = pawl_proto::GenerateRequest::default();
                    Grpc::connect(grpc).generate(refused).unwrap_err();
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        drop(stop_checking);
        checker.join().unwrap()
    });
    assert!(checks >= 5, "{checks} rounds");
    for (page, before) in pages.iter().zip(before) {
        assert!(check(*page, "after") >= before);
    }
    // And when the core is gone, and back.
    let core = served.child("engine-core");
    signal(core, Signal::SIGKILL);
    wait_for("the next core", || {
        pages.iter().for_each(|page| _ = check(*page, "while the core is away"));
        let again = |admin: &Client| {
            let page = admin.scrape();
            page.get("pawl:core_sessions_total") == 2.0 && page.get("pawl:core_up") == 1.0
        };
        served.admins.iter().all(again).then_some(())
    });
}

#[test]
fn a_page_without_a_core_is_right() {
    let run = Run::new();
    let (address, ports) = (run.core_address(), run.path("lone.ports"));
    let flags = ["api-server", "--core", &address, "--port", "0", "--admin-port", "0"];
    let _frontend =
        run.pawl("lone", &[&flags[..], &["--port-file", ports.to_str().unwrap()]].concat());
    let (_, admin) = wait_for("the port file", || listeners(&ports));
    wait_for("the page", || admin.try_get("/metrics"));
    assert!(check(admin, "without a core") > 10);
}

/// A page with one family, and one thing in it replaced.
fn planted(part: &str, by: &str, format: Format) -> Vec<String> {
    let counter = if format == Format::OpenMetrics { "c" } else { "c_total" };
    let sound = format!(
        "# HELP {counter} Counts.\n\
         # TYPE {counter} counter\n\
         c_total{{l=\"x\"}} 1\n\
         c_total{{l=\"y\"}} 2\n\
         # HELP g Stands at.\n\
         # TYPE g gauge\n\
         g -1.5\n\
         # HELP h Observed.\n\
         # TYPE h histogram\n\
         h_bucket{{l=\"x\",le=\"0.5\"}} 1\n\
         h_bucket{{l=\"x\",le=\"2.0\"}} 3\n\
         h_bucket{{l=\"x\",le=\"+Inf\"}} 3\n\
         h_count{{l=\"x\"}} 3\n\
         h_sum{{l=\"x\"}} 2.25\n\
         # HELP s Observed.\n\
         # TYPE s summary\n\
         s_count 3\n\
         s_sum 2.25\n"
    );
    let end = if format == Format::OpenMetrics { "# EOF\n" } else { "" };
    let sound = sound + end;
    assert_eq!(faults(&sound, format), Vec::<String>::new());
    assert!(sound.contains(part), "{part:?} is not on the page");
    faults(&sound.replacen(part, by, 1), format)
}

fn check_planted(part: &str, by: &str, told: &str, formats: &[Format]) {
    for format in formats {
        let faults = planted(part, by, *format);
        let found = faults.iter().any(|fault| fault.contains(told));
        assert!(found, "{format:?}, {part:?} by {by:?}: {told:?} is not in {faults:#?}");
    }
}

#[test]
fn the_reader_sees_every_planted_fault() {
    let both = [Format::Text, Format::OpenMetrics];
    for (part, by, told) in [
        // Lines.
        ("g -1.5\n", "g -1.5\n\n", "an empty line"),
        ("g -1.5", "g  -1.5", "no value"),
        ("g -1.5", "g -1.5 1700000000", "no value"),
        ("g -1.5", "g one", "no value"),
        ("g -1.5", "g", "no space"),
        ("g -1.5", "g NaN", "is no number"),
        ("g -1.5", "# something\ng -1.5", "neither HELP nor TYPE"),
        ("g -1.5", "9g 1", "no name of a metric"),
        // Labels.
        ("{l=\"x\"} 1", "{l=\"x} 1", "without an end"),
        ("{l=\"x\"} 1", "{l=\"x\",l=\"y\"} 1", "label l twice"),
        ("{l=\"x\"} 1", "{l=\"x\" } 1", "a comma or the end"),
        ("{l=\"x\"} 1", "{l=\"\\x\"} 1", "unknown escape"),
        ("{l=\"x\"} 1", "{l-l=\"x\"} 1", "no name of a label"),
        ("{l=\"x\"} 1", "{__l=\"x\"} 1", "no name of a label"),
        ("{l=\"x\"} 1", "{l=\"x\",le=\"1.0\"} 1", "with or without le"),
        ("g -1.5", "g{quantile=\"0.5\"} 1", "with or without quantile"),
        // Families.
        ("# HELP g Stands at.\n", "", "does not follow its HELP"),
        ("# HELP g Stands at.", "# HELP g", "not explained"),
        ("# HELP g Stands at.", "# HELP g Stands \\at.", "wrong escapes"),
        ("# TYPE g gauge\n", "", "before any TYPE"),
        ("# TYPE g gauge", "# TYPE g gouge", "no such type"),
        ("# TYPE g gauge\n", "# TYPE g gauge\n# TYPE g gauge\n", "twice or late"),
        ("g -1.5", "other 1", "other in the Gauge g"),
        ("g -1.5", "g_total 1", "g_total in the Gauge g"),
        ("c_total{l=\"x\"}", "c{l=\"x\"}", "c in the Counter"),
        ("# HELP s ", "# HELP g Again.\n# TYPE g gauge\n# HELP s ", "g stands for two things"),
        ("# HELP s ", "# HELP h_count C.\n# TYPE h_count gauge\n# HELP s ", "h_count stands for"),
        // Series.
        ("c_total{l=\"y\"} 2", "c_total{l=\"x\"} 2", "stands twice"),
        ("c_total{l=\"x\"} 1", "c_total{l=\"x\"} -1", "is -1"),
        ("c_total{l=\"x\"} 1", "c_total{l=\"x\"} +Inf", "is inf"),
        ("s_count 3", "s_count 2.5", "counts 2.5"),
        ("s_count 3", "s_count 0", "its sum is 2.25"),
        ("s_sum 2.25\n", "", "one _count and one _sum"),
        // Histograms.
        ("h_count{l=\"x\"} 3\n", "", "one _count and one _sum"),
        ("h_count{l=\"x\"} 3", "h_count{l=\"x\"} 4", "add up to"),
        ("h_count{l=\"x\"} 3\n", "h_count{l=\"z\"} 3\nh_count{l=\"x\"} 3\n", "not in one piece"),
        ("h_bucket{l=\"x\",le=\"+Inf\"} 3\n", "", "not le=\"+Inf\""),
        ("le=\"2.0\"} 3", "le=\"2.0\"} 0", "not cumulative"),
        ("le=\"2.0\"} 3", "le=\"2.0\"} 2.5", "counts 2.5"),
        ("le=\"2.0\"", "le=\"0.25\"", "do not grow"),
        ("le=\"2.0\"", "le=\"two\"", "le=\"two\""),
        ("h_bucket{l=\"x\",le=\"2.0\"}", "h_bucket{l=\"x\"}", "with or without le"),
        ("h_sum{l=\"x\"} 2.25", "h_sum{l=\"x\"} 4.75", "not between 1 and 4.5"),
        ("h_sum{l=\"x\"} 2.25", "h_sum{l=\"x\"} 0.75", "not between 1 and 4.5"),
    ] {
        check_planted(part, by, told, &both);
    }
    for (part, by, told) in [
        ("# EOF\n", "", "not with # EOF"),
        ("# EOF\n", "# EOF", "no end"),
        ("g -1.5\n", "g -1.5\n# EOF\n", "neither HELP nor TYPE"),
        ("# TYPE c counter", "# TYPE c_total counter", "ends in _total"),
        ("# HELP g Stands at.", "# HELP g Stands \"at\".", "wrong escapes"),
        ("le=\"2.0\"", "le=\"2\"", "canonical"),
        ("le=\"0.5\"", "le=\"5e-1\"", "canonical"),
        ("# HELP s ", "# HELP c_total C.\n# TYPE c_total gauge\n# HELP s ", "c_total stands for"),
    ] {
        check_planted(part, by, told, &[Format::OpenMetrics]);
    }
    check_planted("s_sum 2.25\n", "s_sum 2.25\n# EOF\n", "neither", &[Format::Text]);
    check_planted("s_sum 2.25\n", "s_sum 2.25", "no end", &[Format::Text]);
}
