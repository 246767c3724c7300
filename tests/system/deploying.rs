//! What is under `deploy/` as its tools and its processes take it: units by systemd, manifests and
//! the container's files by their schemas, and the pod's command lines by running them.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::harness::{Client, Process, Run, listeners, skip, wait_for};
use crate::lifecycle::long_request;
use crate::prometheus::programs;
use crate::python::python;

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(deploy(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Runs a tool to its end: whether it was content, and what it said.
fn check(run: &Run, program: impl AsRef<Path>, args: &[&str]) -> (bool, String) {
    let name = program.as_ref().file_name().unwrap().to_string_lossy().into_owned();
    let mut command = Command::new(program.as_ref());
    command.args(args).current_dir(deploy(""));
    let mut process = run.start(&name, command);
    let status = process.wait();
    let said = process.log();
    std::fs::remove_file(run.path(&format!("{name}.log"))).unwrap();
    (status.success(), said)
}

/// A tool that comes with the Python peers.
fn tool(name: &str) -> Option<PathBuf> {
    let found = python()?.parent()?.join(name);
    if !found.exists() {
        skip(name);
        return None;
    }
    Some(found)
}

#[test]
fn units_are_what_systemd_takes() {
    let run = Run::new();
    if !Path::new("/usr/bin/systemd-analyze").exists() {
        return skip("systemd-analyze (Debian's package systemd)");
    }
    // By their own names, with a program that is there.
    let units = [
        ("pawl.service", "pawl.service"),
        ("pawl-engine-core.service", "pawl-engine-core.service"),
        ("pawl-api-server@.service", "pawl-api-server@8000.service"),
    ];
    for (file, unit) in units {
        let text = read(&format!("systemd/{file}"));
        assert!(text.contains("ExecStart=/usr/bin/pawl "), "{file}");
        let text = text.replace("/usr/bin/pawl", env!("CARGO_BIN_EXE_pawl"));
        std::fs::write(run.path(file), &text).unwrap();
        std::fs::write(run.path(unit), &text).unwrap();
    }
    for (_, unit) in units {
        let path = run.path(unit).display().to_string();
        // It only warns of lines that it cannot read, and then it leaves them out.
        let (good, said) = check(&run, "/usr/bin/systemd-analyze", &["verify", "--man=no", &path]);
        assert!(good && !said.contains("pawl"), "{unit}: {said}");
        // 10.0 is a service that may do anything; ours are at 0.6 and 1.4.
        let secure = ["security", "--offline=true", "--threshold=20", "--no-pager", &path];
        let (good, said) = check(&run, "/usr/bin/systemd-analyze", &secure);
        let last = said.lines().rev().find(|line| line.contains("exposure")).unwrap_or(&said);
        assert!(good, "{unit}: {last}");
    }
}

#[test]
fn manifests_are_what_kubernetes_takes() {
    let Some(validate) = tool("kubernetes-validate") else { return };
    let run = Run::new();
    let own =
        ["deployment", "service", "network-policy"].map(|name| format!("kubernetes/{name}.yaml"));
    let args: Vec<&str> =
        ["--strict", "--no-warn"].into_iter().chain(own.iter().map(|s| &**s)).collect();
    let (good, said) = check(&run, validate, &args);
    assert!(good, "{said}");
    assert_eq!(said.matches("passed for resource").count(), own.len(), "{said}");
    // Not Kubernetes' own kinds: by a schema of ours, as far as it is used.
    let Some(schemas) = tool("check-jsonschema") else { return };
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/podmonitor.schema.json");
    let schema = schema.display().to_string();
    let args = ["--schemafile", &schema, "kubernetes/podmonitor.yaml"];
    let (good, said) = check(&run, &schemas, &args);
    assert!(good, "{said}");
}

#[test]
fn the_containers_files_are_what_their_tools_take() {
    let Some(schemas) = tool("check-jsonschema") else { return };
    let run = Run::new();
    let args = ["--builtin-schema", "vendor.compose-spec", "compose/compose.yaml"];
    let (good, said) = check(&run, schemas, &args);
    assert!(good, "{said}");
    if let Some(prometheus) = programs() {
        // The rules that it names lie elsewhere than in the container.
        let args = ["check", "config", "--syntax-only", "compose/prometheus.yml"];
        let (good, said) = check(&run, prometheus.join("promtool"), &args);
        assert!(good, "{said}");
    }
    // There is none for other processors.
    if cfg!(target_arch = "x86_64") {
        let Some(hadolint) = tool("hadolint") else { return };
        let (good, said) = check(&run, hadolint, &["container/Dockerfile"]);
        assert!(good, "{said}");
    }
}

/// The command lines of the pod's containers: the core's, then each frontend's.
fn pod() -> Vec<Vec<String>> {
    let text = read("kubernetes/deployment.yaml");
    let lists = text.split("args: ").skip(1).map(|rest| &rest[..=rest.find(']').unwrap()]);
    lists.map(|list| serde_json::from_str(list).unwrap()).collect()
}

/// A command of `deploy/` in a test's folder: with sockets there, no model and free ports.
fn deployed(run: &Run, name: &str, words: &[String], changes: &[(&str, &str)]) -> Process {
    let sockets = run.path("sockets").display().to_string();
    let mut words: Vec<String> = words.iter().map(|w| w.replace("/run/pawl", &sockets)).collect();
    if words[0] == "engine-core" {
        words.retain(|word| !word.ends_with(".gguf"));
        words.extend(["--runner", "mock", "--mock-step-ms", "10"].map(str::to_owned));
    }
    for (flag, value) in changes {
        let at = words.iter().position(|w| w == flag).unwrap_or_else(|| panic!("no {flag}"));
        words[at + 1] = (*value).to_owned();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pawl"));
    command.args(&words).env("PAWL_PORT_FILE", run.path(&format!("{name}.ports")));
    run.start(name, command)
}

/// `deploy/container/pawl-health`, which finds `pawl` as in the image.
fn healthy(run: &Run, of: &str) -> bool {
    let folder = Path::new(env!("CARGO_BIN_EXE_pawl")).parent().unwrap().display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(deploy("container/pawl-health"));
    command.arg(of).env("PATH", format!("{folder}:{path}"));
    run.start("health", command).wait().success()
}

fn bound(run: &Run, name: &str) -> (Client, Client) {
    wait_for("the port file", || listeners(&run.path(&format!("{name}.ports"))))
}

/// In a folder as Kubernetes lays it: open to the group, so the core makes its own in it. All
/// accept on one port; told to stop, the frontends serve to the end, and the core is told after.
#[test]
fn the_processes_of_the_pod_serve_and_drain() {
    let run = Run::new();
    std::fs::create_dir(run.path("sockets")).unwrap();
    let open = std::fs::Permissions::from_mode(0o2777);
    std::fs::set_permissions(run.path("sockets"), open).unwrap();
    let pod = pod();
    assert_eq!(pod.len(), 3, "{pod:?}");
    let at = format!("ipc://{}", run.path("sockets/core/socket").display());
    assert!(!healthy(&run, &at), "before there is a core");
    let mut core = deployed(&run, "core", &pod[0], &[]);
    wait_for("the core", || healthy(&run, &at).then_some(()));
    let free = [("--port", "0"), ("--admin-port", "0")];
    let mut first = deployed(&run, "first", &pod[1], &free);
    let (http, admin) = bound(&run, "first");
    let text = http.port().to_string();
    let mut second = deployed(&run, "second", &pod[2], &[("--port", &text), ("--admin-port", "0")]);
    let admins = [admin, bound(&run, "second").1];
    for admin in admins {
        wait_for("/ready", || admin.is_ready().then_some(()));
        assert_eq!(admin.get("/version").status, 200);
    }
    assert!(healthy(&run, &text));
    for _ in 0..20 {
        let answer = http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 3}));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let mut streams: Vec<_> =
        (0..8).map(|_| http.stream("/v1/completions", &long_request(100))).collect();
    streams.iter_mut().for_each(|stream| assert!(stream.next().is_some()));
    let mode = std::fs::metadata(run.path("sockets/core")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);

    for frontend in [&first, &second] {
        frontend.signal(nix::sys::signal::Signal::SIGTERM);
    }
    for stream in &mut streams {
        let last = stream.rest().pop().expect("an event");
        assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    }
    for frontend in [&mut first, &mut second] {
        assert!(frontend.wait().success(), "{}", frontend.log());
    }
    assert!(!healthy(&run, &text), "nobody serves any more");
    // The probe of liveness asks the core alone, without the frontends.
    assert!(healthy(&run, &at));
    assert!(core.stop().success(), "{}", core.log());
}

/// systemd waits for this word of the core and of each frontend before it starts what comes after.
#[test]
fn the_processes_of_the_units_tell_that_they_are_ready() {
    let run = Run::new();
    let exec = |unit: &str| -> Vec<String> {
        let text = read(&format!("systemd/{unit}")).replace("%i", "0");
        let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/pawl "));
        line.unwrap().split(' ').map(str::to_owned).collect()
    };
    std::fs::create_dir(run.path("sockets")).unwrap();
    let closed = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(run.path("sockets"), closed).unwrap();
    let told = |name: &str, words: &[String]| {
        let path = run.path(&format!("{name}.notify"));
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(crate::harness::PATIENCE)).unwrap();
        let mut command = Command::new("/usr/bin/env");
        command.arg(format!("NOTIFY_SOCKET={}", path.display()));
        command.arg(format!("PAWL_PORT_FILE={}", run.path(&format!("{name}.ports")).display()));
        command.arg(env!("CARGO_BIN_EXE_pawl")).args(words);
        let process = run.start(name, command);
        let mut said = [0; 64];
        let length = socket.recv(&mut said).expect("its word");
        assert_eq!(&said[..length], b"READY=1");
        process
    };
    let sockets = run.path("sockets").display().to_string();
    let here = |words: Vec<String>, more: &[&str]| -> Vec<String> {
        let words = words.into_iter().filter(|word| !word.ends_with(".gguf"));
        let words = words.map(|word| word.replace("/run/pawl", &sockets));
        words.chain(more.iter().map(|word| (*word).to_owned())).collect()
    };
    let mut core = told("core", &here(exec("pawl-engine-core.service"), &["--runner", "mock"]));
    let mut frontend = told("frontend", &here(exec("pawl-api-server@.service"), &[]));
    // It listens by then; and it is served by that very core.
    let (_, admin) = bound(&run, "frontend");
    wait_for("/ready", || admin.is_ready().then_some(()));
    assert!(frontend.stop().success(), "{}", frontend.log());
    assert!(core.stop().success(), "{}", core.log());
    let mock = ["--runner", "mock", "--port", "0"];
    let mut serve = told("serve", &here(exec("pawl.service"), &mock));
    assert!(serve.stop().success(), "{}", serve.log());
}
