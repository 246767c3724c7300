//! A real Prometheus scrapes a running system: what vLLM's dashboards and ours ask for returns
//! data, and our rules make several frontends one. Configuration and rules are those of
//! `deploy/prometheus/`, the dashboard is that of `deploy/grafana/`.

mod dashboards;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::harness::{Client, PATIENCE, Process, Run, Stop, skip, wait_for, within};
use crate::lifecycle::Served;

/// The folder with `prometheus` and `promtool`, as the test command set it up; `None` means skip.
pub fn programs() -> Option<PathBuf> {
    let folder = std::env::var_os("PAWL_TEST_PROMETHEUS").map(PathBuf::from);
    let folder = folder.filter(|f| ["prometheus", "promtool"].iter().all(|p| f.join(p).exists()));
    if folder.is_none() {
        skip("Prometheus");
    }
    folder
}

fn deployed() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus")
}

/// Runs `promtool ARGS` in `deploy/prometheus/`; what it said. `input` is a file of the run.
fn promtool(run: &Run, args: &[&str], input: &Path) -> (bool, String) {
    let mut command = Command::new(programs().unwrap().join("promtool"));
    command.args(args).current_dir(deployed());
    let name = args.join("-");
    let mut process = run.start_with_input(&name, command, input);
    let status = process.wait();
    (status.success(), process.log())
}

#[test]
fn the_rules_and_the_configuration_are_right_by_prometheus_own_tool() {
    if programs().is_none() {
        return;
    }
    let run = Run::new();
    for args in [
        ["check", "rules", "rules.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "rules_test.yml"],
    ] {
        let (good, said) = promtool(&run, &args, Path::new("/dev/null"));
        assert!(good, "{args:?}: {said}");
    }
}

/// Nothing is said against a page but what follows from vLLM's choice of names.
#[test]
fn prometheus_own_linter_finds_nothing_in_our_names() {
    if programs().is_none() {
        return;
    }
    let run = Run::new();
    let served = Served::start(&run, 2, &["--grpc-port", "0"]);
    served.http.post("/v1/completions", &json!({"prompt": [1, 2], "max_tokens": 3}));
    for (name, page) in [("admin", served.admins[0]), ("shared", served.http)] {
        let file = run.path(name);
        std::fs::write(&file, page.get("/metrics").body).unwrap();
        let (_, said) = promtool(&run, &["check", "metrics"], &file);
        let unexpected: Vec<&str> = said
            .lines()
            .filter(|line| !line.ends_with("metric names should not contain ':'"))
            .filter(|line| !line.starts_with("vllm:iteration_tokens_total non-counter"))
            .collect();
        assert_eq!(unexpected, Vec::<&str>::new());
        assert!(said.contains("vllm:iteration_tokens_total"), "it said {said:?}");
    }
}

/// A Prometheus that scrapes `served` twice a second; killed when dropped.
struct Prometheus {
    process: Process,
    api: Client,
}

impl Prometheus {
    fn start(run: &Run, programs: &Path, served: &Served) -> Self {
        let folder = deployed();
        std::fs::copy(folder.join("rules.yml"), run.path("rules.yml")).unwrap();
        let mut config = std::fs::read_to_string(folder.join("prometheus.yml")).unwrap();
        let target = |client: &Client| format!("\"127.0.0.1:{}\"", client.port());
        let admins: Vec<String> = served.admins.iter().map(target).collect();
        for (theirs, ours) in [
            (r#""127.0.0.1:9000", "127.0.0.1:9001""#, admins.join(", ")),
            (r#""127.0.0.1:8000""#, target(&served.http)),
            ("scrape_interval: 5s", "scrape_interval: 500ms".into()),
            ("evaluation_interval: 5s", "evaluation_interval: 500ms".into()),
        ] {
            assert_eq!(config.matches(theirs).count(), 1, "{theirs} in {config}");
            config = config.replace(theirs, &ours);
        }
        let file = run.path("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(programs.join("prometheus"));
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", run.path("tsdb").display()))
            .args(["--web.listen-address=127.0.0.1:0", "--storage.tsdb.retention.size=64MB"])
            .env("GOMAXPROCS", "1");
        let mut process = run.start("prometheus", command);
        let port = wait_for("Prometheus' port", || {
            assert!(process.ended().is_none(), "{}", process.log());
            let log = process.log();
            let (_, after) = log.split_once("\"Listening on\" address=127.0.0.1:")?;
            after.split_once('\n')?.0.trim().parse().ok()
        });
        let api = Client::new(port);
        wait_for("Prometheus", || api.try_get("/-/ready").filter(|a| a.status == 200));
        Self { process, api }
    }

    fn get(&self, path: &str) -> Value {
        let answer = self.api.get(path);
        let body = answer.json();
        assert_eq!(body["status"], "success", "{path}: {body}\n{}", self.process.log());
        body["data"].clone()
    }

    /// The series that `expression` gives right now, by their labels.
    fn query(&self, expression: &str) -> BTreeMap<String, f64> {
        let data = self.get(&format!("/api/v1/query?query={}", percent(expression)));
        let series = data["result"].as_array().unwrap_or_else(|| panic!("{expression}: {data}"));
        let one = |series: &Value| {
            let value = series["value"][1].as_str().unwrap();
            (series["metric"].to_string(), value.parse().unwrap())
        };
        series.iter().map(one).collect()
    }

    /// The one number that `expression` gives, if it does.
    fn number(&self, expression: &str) -> Option<f64> {
        let series = self.query(expression);
        assert!(series.len() <= 1, "{expression}: {series:?}");
        series.into_values().next()
    }

    /// Waits until `expression` is `value`.
    fn wait_for_number(&self, expression: &str, value: f64) {
        let mut last = None;
        let told = within(PATIENCE, || {
            last = self.number(expression);
            (last == Some(value)).then_some(())
        });
        assert!(told.is_some(), "{expression} is {last:?}, not {value}");
    }
}

fn percent(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        let _ = write!(encoded, "%{byte:02X}");
        encoded
    })
}

/// Requests of every kind that a dashboard shows, until told to stop: more at once than may run.
fn load(http: Client, client: usize, go_on: &AtomicBool) {
    let mut nth = client;
    while go_on.load(Ordering::Relaxed) {
        let mut body = json!({"prompt": vec![10 + client; 40], "max_tokens": 4 + nth % 30,
                              "n": 1 + nth % 2, "stream": true});
        match nth % 4 {
            0 => {
                let mut stream = http.stream("/v1/completions", &body);
                stream.next();
                stream.close();
            }
            1 => {
                body["allowed_token_ids"] = json!([258]);
                http.stream("/v1/completions", &body).rest();
            }
            _ => _ = http.stream("/v1/completions", &body).rest(),
        }
        nth += 1;
    }
}

const ADMINS: &str = r#"job="pawl""#;
const SHARED: &str = r#"job="pawl-shared""#;

#[test]
fn what_dashboards_ask_for_returns_data_and_our_rules_are_right() {
    let Some(programs) = programs() else { return };
    let run = Run::new();
    let flags = [
        "--mock-step-ms",
        "5",
        "--max-num-seqs",
        "4",
        "--num-gpu-blocks-override",
        "64",
        "--max-model-len",
        "512",
    ];
    let served = Served::start(&run, 2, &flags);
    let prometheus = Prometheus::start(&run, &programs, &served);
    let going_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let stop_load = Stop(&going_on);
        for client in 0..10 {
            let going_on = &going_on;
            let http = served.http;
            scope.spawn(move || load(http, client, going_on));
        }
        check_targets(&prometheus);
        for expression in dashboards::expressions(MODEL, "10s") {
            // Any zero is a curve that does not show what happens, and NaN none at all.
            let shows = |series: &BTreeMap<String, f64>| {
                series.values().all(|v| v.is_finite()) && series.values().any(|v| *v > 0.0)
            };
            let mut last = BTreeMap::new();
            let shown = within(PATIENCE, || {
                last = prometheus.query(&expression);
                shows(&last).then_some(())
            });
            assert!(shown.is_some(), "{expression}: {last:?}");
        }
        // Ours also shows what ought to be zero, and shares of what may not have happened.
        for expression in dashboards::ours(MODEL, "10s") {
            let shows = || prometheus.query(&expression).into_values().any(f64::is_finite);
            wait_for(&expression, || shows().then_some(()));
        }
        for series in dashboards::SERIES {
            let both = format!("count(count by (instance) ({series}{{{ADMINS}}}))");
            prometheus.wait_for_number(&both, 2.0);
        }
        let models = prometheus.get("/api/v1/label/model_name/values");
        assert_eq!(models, json!([MODEL]), "what a dashboard's variable offers");
        for rate in ["vllm_generation_tokens", "vllm_prompt_tokens", "vllm_request_success"] {
            let by_rule = format!("sum(core:{rate}:rate1m{{{ADMINS}}}) > 0");
            wait_for(&by_rule, || prometheus.number(&by_rule));
        }
        drop(stop_load);
    });
    check_rules_of_totals(&prometheus, &served);
    check_rules_of_gauges(&prometheus, &served);
    check_that_rules_are_evaluated(&prometheus);
}

/// The mock model's.
const MODEL: &str = "mock";

fn check_targets(prometheus: &Prometheus) {
    wait_for("three targets", || {
        let targets = prometheus.get("/api/v1/targets")["activeTargets"].clone();
        let targets = targets.as_array().unwrap();
        for target in targets {
            assert_eq!(target["lastError"], "", "{target}");
        }
        let up = targets.iter().filter(|target| target["health"] == "up").count();
        (up == 3 && targets.len() == 3).then_some(())
    });
}

/// Both ways to scrape give what the frontends' own pages add up to.
fn check_rules_of_totals(prometheus: &Prometheus, served: &Served) {
    let page = wait_for("an idle system", || {
        let own = served.admins.iter().map(|admin| admin.scrape());
        let sum = own.reduce(|a, b| a.plus(&b)).unwrap();
        Some(sum).filter(|s| s.get("pawl:requests_in_flight") + s.running() == 0.0)
    });
    for name in ["prompt_tokens", "generation_tokens", "num_preemptions"] {
        let total = page.get(&format!("vllm:{name}_total"));
        for job in [ADMINS, SHARED] {
            prometheus.wait_for_number(&format!("core:vllm_{name}_total:sum{{{job}}}"), total);
        }
    }
    for reason in ["stop", "length", "abort", "error"] {
        let ended = page.ended(reason);
        assert_eq!(ended == 0.0, reason == "error", "{ended} requests ended by {reason}");
        for job in [ADMINS, SHARED] {
            let labels = format!("{job}, finished_reason=\"{reason}\"");
            let total = format!("core:vllm_request_success_total:sum{{{labels}}}");
            prometheus.wait_for_number(&total, ended);
        }
    }
}

/// Four streams run and three wait, at whichever frontend they are.
fn check_rules_of_gauges(prometheus: &Prometheus, served: &Served) {
    let long = json!({"prompt": [1], "max_tokens": 100, "ignore_eos": true, "stream": true});
    let going_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let stop_streams = Stop(&going_on);
        for _ in 0..7 {
            scope.spawn(|| {
                while going_on.load(Ordering::Relaxed) {
                    served.http.stream("/v1/completions", &long).rest();
                }
            });
        }
        let frontends = format!("count(vllm:num_requests_running{{{ADMINS}}} == 4)");
        prometheus.wait_for_number(&frontends, 2.0);
        for job in [ADMINS, SHARED] {
            prometheus
                .wait_for_number(&format!("core:vllm_num_requests_running:max{{{job}}}"), 4.0);
            prometheus
                .wait_for_number(&format!("core:vllm_num_requests_waiting:max{{{job}}}"), 3.0);
            prometheus.wait_for_number(&format!("core:pawl_requests_in_flight:sum{{{job}}}"), 7.0);
            prometheus.wait_for_number(&format!("core:pawl_core_up:max{{{job}}}"), 1.0);
        }
        drop(stop_streams);
    });
}

/// No rule fails, none is left out, and nothing fires.
fn check_that_rules_are_evaluated(prometheus: &Prometheus) {
    let text = std::fs::read_to_string(deployed().join("rules.yml")).unwrap();
    let written = text.matches("- record:").count() + text.matches("- alert:").count();
    let groups = prometheus.get("/api/v1/rules")["groups"].clone();
    let rules: Vec<&Value> =
        groups.as_array().unwrap().iter().flat_map(|g| g["rules"].as_array().unwrap()).collect();
    assert_eq!(rules.len(), written);
    for rule in rules {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    assert_eq!(prometheus.query(r#"ALERTS{alertstate="firing"}"#), BTreeMap::new());
}
