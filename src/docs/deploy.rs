//! The files under `deploy/`, compared with the code: command lines, environment, paths, times to
//! stop, and the series that the dashboard asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::{read, root, rows, ticked};
use crate::cli::{Cli, Command, parse_words, unknown_variables};

const UNITS: [&str; 3] = ["pawl.service", "pawl-engine-core.service", "pawl-api-server@.service"];

/// Text files under `deploy/`: paths from the top of the tree, and what is in them.
fn files() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("deploy")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// What stands for a value that is known only where it is deployed.
fn filled_in(word: &str) -> String {
    let word = word.replace("%i", "8000").replace("$PWD", "/home");
    match word.split_once("${").and_then(|(head, rest)| Some((head, rest.split_once('}')?))) {
        Some((head, (variable, tail))) => {
            let default = variable.split_once(":-").map_or("", |(_, default)| default);
            format!("{head}{default}{tail}")
        }
        None => word,
    }
}

/// Every list in brackets of words in quotes, as command lines are written in these files.
fn lists(text: &str) -> Vec<Vec<String>> {
    let starts = text.match_indices("[\"").map(|(at, _)| at);
    let lists = starts.filter_map(|at| Some(&text[at..=at + text[at..].find(']')?]));
    lists.filter_map(|list| serde_json::from_str(list).ok()).collect()
}

/// Every command line of `pawl` in these files, with the file that has it.
fn commands() -> Vec<(String, Vec<String>)> {
    const ROLES: [&str; 3] = ["serve", "engine-core", "api-server"];
    let mut found = Vec::new();
    for (path, text) in files() {
        let whole = text.replace("\\\n", " ");
        let mut lines: Vec<Vec<String>> = lists(&text);
        for line in whole.lines() {
            if let Some(command) = line.strip_prefix("ExecStart=/usr/bin/pawl ") {
                lines.push(command.split_whitespace().map(str::to_owned).collect());
            }
            // `docker run … pawl ROLE …`: the image and what it is to do.
            let role = ROLES.iter().find_map(|role| line.find(&format!(" pawl {role} ")));
            if let Some(at) = role.filter(|_| path.ends_with(".md") && line.contains("docker run"))
            {
                let command = line[at..].split('`').next().unwrap();
                lines.push(command.split_whitespace().skip(1).map(str::to_owned).collect());
            }
        }
        for words in lines.iter().filter(|w| w.first().is_some_and(|w| ROLES.contains(&&**w))) {
            let words =
                std::iter::once("pawl".to_owned()).chain(words.iter().map(|w| filled_in(w)));
            found.push((path.clone(), words.collect()));
        }
    }
    found
}

#[test]
fn command_lines_parse() {
    let mut by_file: BTreeMap<String, usize> = BTreeMap::new();
    for (path, words) in commands() {
        parse_words(&words).unwrap_or_else(|why| panic!("{path}: {words:?}: {why}"));
        *by_file.entry(path).or_default() += 1;
    }
    let counted: Vec<(&str, usize)> = by_file.iter().map(|(p, n)| (p.as_str(), *n)).collect();
    let expected = [
        ("deploy/README.md", 1),
        ("deploy/compose/compose.yaml", 2),
        ("deploy/container/Dockerfile", 1),
        ("deploy/container/README.md", 3),
        ("deploy/kubernetes/deployment.yaml", 3),
        ("deploy/systemd/pawl-api-server@.service", 1),
        ("deploy/systemd/pawl-engine-core.service", 1),
        ("deploy/systemd/pawl.service", 1),
    ];
    assert_eq!(counted, expected, "a command line was not found, or a new one is not expected");
}

#[test]
fn variables_are_flags() {
    let mut variables = BTreeSet::new();
    for (path, text) in files() {
        let words =
            text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
        for word in words.filter(|word| word.starts_with("PAWL_") && word.len() > 5) {
            // Read by compose, not by Pawl.
            if !["PAWL_MODELS", "PAWL_MODEL_FILE"].contains(&word) {
                variables.insert((word.to_owned(), path.clone()));
            }
        }
    }
    assert!(variables.len() >= 5, "{variables:?}");
    let unknown: Vec<String> = unknown_variables(variables.into_iter()).collect();
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// `--shutdown-timeout` of each command line of a file, or of its environment.
fn drain_seconds(path: &str) -> Vec<f64> {
    let of_file = commands().into_iter().filter(|(p, _)| p == path);
    let timeouts = of_file.map(|(_, words)| match parse_words(&words).unwrap() {
        Cli { command: Command::Serve(args), .. } => args.shared.shutdown_timeout,
        Cli { command: Command::ApiServer(args), .. } => args.shared.shutdown_timeout,
        Cli { command: Command::EngineCore(args), .. } => args.shared.shutdown_timeout,
        other => panic!("{path}: {other:?}"),
    });
    timeouts.collect()
}

/// The seconds in the line of `path` that begins with `key`, once for each such line.
fn seconds(path: &str, key: &str) -> Vec<f64> {
    let text = read(path);
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix(key));
    let value = |rest: &str| rest.trim().trim_matches('"').trim_end_matches('s').parse().unwrap();
    lines.map(value).collect()
}

/// Whoever stops a process kills it when it takes too long: never before it has drained, aborted
/// the rest and closed, for which it takes some seconds of its own.
#[test]
fn nothing_is_killed_while_it_drains() {
    const OWN: f64 = 10.0;
    for unit in UNITS {
        let path = format!("deploy/systemd/{unit}");
        let (drain, kill) = (drain_seconds(&path), seconds(&path, "TimeoutStopSec="));
        assert_eq!((drain.len(), kill.len()), (1, 1), "{path}");
        assert!(kill[0] >= drain[0] + OWN, "{path}: {drain:?} {kill:?}");
    }
    let pod = "deploy/kubernetes/deployment.yaml";
    let before = lists(&read(pod)).into_iter().find(|list| list[0] == "sleep").unwrap();
    let before: f64 = before[1].parse().unwrap();
    let longest = drain_seconds(pod).into_iter().fold(0.0, f64::max);
    assert!(longest >= 30.0);
    let kill = seconds(pod, "terminationGracePeriodSeconds:")[0];
    assert!(kill >= before + longest + 2.0 * OWN, "{kill}");
    let compose = "deploy/compose/compose.yaml";
    let (drain, kill) =
        (seconds(compose, "PAWL_SHUTDOWN_TIMEOUT:"), seconds(compose, "stop_grace_period:"));
    assert_eq!((drain.len(), kill.len()), (1, 1));
    assert!(kill[0] >= drain[0] + OWN, "{drain:?} {kill:?}");
}

/// Files that others of these files name, from where they name them.
#[test]
fn named_files_exist() {
    let mut named: Vec<PathBuf> = Vec::new();
    let docker = read("deploy/container/Dockerfile");
    let copies = docker.lines().filter_map(|line| line.strip_prefix("COPY "));
    named.extend(
        copies
            .filter_map(|line| line.split(' ').find(|w| w.starts_with("deploy/")))
            .map(|path| root().join(path)),
    );
    let compose = read("deploy/compose/compose.yaml");
    let volumes = compose.lines().filter_map(|line| line.trim().strip_prefix("- ."));
    let folder = root().join("deploy/compose");
    let hosts = volumes.map(|volume| format!(".{}", volume.split(':').next().unwrap()));
    named.extend(hosts.map(|path| folder.join(path)));
    let build = compose.lines().find_map(|line| line.trim().strip_prefix("dockerfile: ")).unwrap();
    named.push(folder.join("../..").join(build));
    let kustomization = read("deploy/kubernetes/kustomization.yaml");
    let resources = kustomization.lines().filter_map(|line| line.trim().strip_prefix("- "));
    named.extend(resources.map(|path| root().join("deploy/kubernetes").join(path)));
    assert!(named.len() >= 10, "{named:#?}");
    let missing: Vec<_> = named.iter().filter(|path| !path.exists()).collect();
    assert!(missing.is_empty(), "{missing:#?}");
    // What is built is not sent there first.
    let ignored = read(".dockerignore");
    for folder in ["target", ".git"] {
        assert!(ignored.lines().any(|line| line == folder), "{folder}");
    }
}

/// The sockets between core and frontends are closed to every other user.
#[test]
fn containers_run_as_one_user() {
    for (path, keys) in [
        ("deploy/container/Dockerfile", &["--uid ", "--gid ", "USER "][..]),
        ("deploy/compose/compose.yaml", &["uid=", "gid="]),
        ("deploy/kubernetes/deployment.yaml", &["runAsUser: ", "runAsGroup: ", "fsGroup: "]),
    ] {
        let text = read(path);
        for key in keys {
            let rest = text.split_once(key).unwrap_or_else(|| panic!("{path}: no {key}")).1;
            assert!(rest.starts_with("10001"), "{path}: {key} is not 10001");
        }
    }
}

/// Families of `/metrics` with their labels.
fn families() -> BTreeMap<String, BTreeSet<String>> {
    let reference = pawl_api_server::metrics::reference_markdown();
    let rows = rows(&reference).filter(|row| row.len() > 3);
    let family = |row: Vec<&str>| {
        let labels = ticked(row[2]).map(str::to_owned).collect();
        (row[0].trim_matches('`').to_owned(), labels)
    };
    rows.map(family).collect()
}

/// Words of PromQL, without what stands in quotes.
fn words(expression: &str) -> Vec<String> {
    let outside: String = expression.split('"').step_by(2).collect::<Vec<_>>().join(" ");
    let word = |c: char| c.is_ascii_alphanumeric() || "_:$".contains(c);
    let words =
        outside.split(|c| !word(c)).filter(|w| w.starts_with(|c: char| !c.is_ascii_digit()));
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Every expression of our dashboard, and of its variables.
fn expressions() -> Vec<String> {
    let text = read("deploy/grafana/dashboards/pawl.json");
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            found.push(target["expr"].as_str().unwrap().to_owned());
        }
    }
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let queries = variables.filter_map(|variable| variable["query"].as_str());
    found.extend(queries.filter(|query| query.contains('(')).map(str::to_owned));
    found
}

#[test]
fn the_dashboard_asks_for_what_the_page_has() {
    // Functions, and labels that a scrape or our settings of it add.
    const KNOWN: [&str; 11] = [
        "sum",
        "max",
        "by",
        "rate",
        "histogram_quantile",
        "label_values",
        "$__rate_interval",
        "le",
        "core",
        "instance",
        "job",
    ];
    let families = families();
    assert!(families.len() > 60, "{} families", families.len());
    let expressions = expressions();
    assert!(expressions.len() >= 40, "{}", expressions.len());
    for expression in &expressions {
        let words = words(expression);
        let plain = |word: &String| {
            let ends = ["_bucket", "_sum", "_count"];
            let base = ends.iter().find_map(|end| word.strip_suffix(end));
            families.get(word).or_else(|| families.get(base?))
        };
        let labels: BTreeSet<&String> = words.iter().filter_map(plain).flatten().collect();
        assert!(words.iter().any(|w| plain(w).is_some()), "{expression}: no series");
        let strangers = words
            .iter()
            .filter(|w| plain(w).is_none() && !labels.contains(w) && !KNOWN.contains(&w.as_str()));
        let strangers: Vec<_> = strangers.collect();
        assert!(strangers.is_empty(), "{expression}: {strangers:?} are not on the page");
    }
}
