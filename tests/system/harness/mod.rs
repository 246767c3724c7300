//! Starts `pawl` processes for a test and takes them away again.
//!
//! Each test has a [`Run`]: a folder of its own with a log for each process. The folder is kept,
//! and named, when the test fails. Ports are chosen by the system and read from a port file.

pub mod exposition;
mod http;
mod metrics;
mod proc;

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use http::{Answer, Client, SseStream};
pub use metrics::Scrape;
pub use proc::{cpu_time, listening_ports, resident_kib};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// How long anything that ought to happen may take on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this is `tests/soak/run`.
pub fn is_soak() -> bool {
    std::env::var_os("PAWL_TEST_SOAK").is_some()
}

/// Says that a test is skipped for want of `what`, which is a failure where that is not allowed.
pub fn skip(what: &str) {
    assert!(
        std::env::var_os("PAWL_TEST_NO_SKIP").is_none(),
        "no {what}, and skipping is not allowed: run tests/run"
    );
    eprintln!("SKIPPED: no {what} (tests/run installs it)");
}

/// How often a test does a thing: `few` times in `tests/run`, `many` times in the soak.
pub fn rounds(few: usize, many: usize) -> usize {
    if is_soak() { many } else { few }
}

/// Ends what goes on while the flag is set when dropped, also by a failed test's panic.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// What `condition` gives as soon as it gives something, if that is within `time`.
pub fn within<T>(time: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + time;
    loop {
        let late = Instant::now() >= deadline;
        let value = condition();
        if value.is_some() || late {
            return value;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until `condition` gives a value; fails naming `what` after [`PATIENCE`].
pub fn wait_for<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, condition).unwrap_or_else(|| panic!("waited {PATIENCE:?} for {what}"))
}

/// Sends `signal` to process `pid`.
pub fn signal(pid: i32, signal: Signal) {
    nix::sys::signal::kill(Pid::from_raw(pid), signal).unwrap();
}

/// The port called `name` in a port file, once it is there.
pub fn port_in(file: &Path, name: &str) -> Option<u16> {
    let text = std::fs::read_to_string(file).ok()?;
    let bound: serde_json::Value = serde_json::from_str(&text).ok()?;
    Some(
        u16::try_from(bound[name].as_u64().unwrap_or_else(|| panic!("no {name}: {text}"))).unwrap(),
    )
}

/// Both listeners of an api-server by its port file, once it is there: the clients' and the
/// operators'.
pub fn listeners(file: &Path) -> Option<(Client, Client)> {
    Some((Client::new(port_in(file, "port")?), Client::new(port_in(file, "admin_port")?)))
}

/// Less than `limit` may have passed since `from`. How much it was is told, so that the figures of
/// a soak can be read off what its tests print.
pub fn assert_within(limit: Duration, from: Instant, what: &str) {
    let took = from.elapsed();
    eprintln!("figure: {what}: {:.3} s of {} s", took.as_secs_f64(), limit.as_secs_f64());
    assert!(took < limit, "{what} took {took:?}, which may be {limit:?}");
}

/// One test's folder and processes.
pub struct Run {
    folder: Option<tempfile::TempDir>,
    path: PathBuf,
}

impl Run {
    /// A fresh folder. Its name is short: unix socket paths have little room.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("pawl").tempdir().unwrap();
        let path = folder.path().to_owned();
        Self { folder: Some(folder), path }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Where this run's core listens.
    pub fn core_address(&self) -> String {
        format!("ipc://{}", self.path("core").display())
    }

    /// Starts `pawl ARGS`, logging to `NAME.log`.
    pub fn pawl(&self, name: &str, args: &[&str]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pawl"));
        command.args(args);
        self.start(name, command)
    }

    /// Starts any program, logging to `NAME.log`.
    pub fn start(&self, name: &str, command: Command) -> Process {
        self.start_with_input(name, command, Path::new("/dev/null"))
    }

    /// [`Self::start`] with the file `input` as standard input.
    pub fn start_with_input(&self, name: &str, mut command: Command, input: &Path) -> Process {
        let log = self.path(&format!("{name}.log"));
        let out = std::fs::File::options().create(true).append(true).open(&log).unwrap();
        command.stdin(std::fs::File::open(input).unwrap());
        command.stdout(out.try_clone().unwrap()).stderr(out);
        self.spawn(name, &mut command, log)
    }

    /// [`Self::start`], but whoever reads what it says leaves after the first line, as `| head -1`
    /// does.
    pub fn start_half_read(&self, name: &str, mut command: Command) -> Process {
        let log = self.path(&format!("{name}.log"));
        let (reader, writer) = std::io::pipe().unwrap();
        command.stdin(std::process::Stdio::null());
        command.stdout(writer.try_clone().unwrap()).stderr(writer);
        let process = self.spawn(name, &mut command, log.clone());
        // Our copies of the writing end go with it.
        drop(command);
        let mut line = String::new();
        std::io::BufReader::new(reader).read_line(&mut line).unwrap();
        std::fs::write(log, line).unwrap();
        process
    }

    fn spawn(&self, name: &str, command: &mut Command, log: PathBuf) -> Process {
        for (variable, _) in std::env::vars().filter(|(v, _)| v.starts_with("PAWL_")) {
            command.env_remove(variable);
        }
        command
            .env("RUST_BACKTRACE", "1")
            .env("PAWL_CACHE_DIR", self.path("cache"))
            // Socket folders lie in the test's own folder, where what is left over shows.
            .env("TMPDIR", &self.path)
            .env_remove("XDG_RUNTIME_DIR");
        let child = command.spawn().unwrap_or_else(|e| panic!("{name} does not start: {e}"));
        Process { name: name.into(), child, log, ended: None }
    }

    /// A core with the mock runner and `extra` flags.
    pub fn mock_core(&self, extra: &[&str]) -> Process {
        let address = self.core_address();
        let mut args = vec!["engine-core", "--runner", "mock", "--listen", &address];
        args.extend(extra);
        self.pawl("core", &args)
    }

    /// An api-server of this run's core, ready to serve.
    pub fn frontend(&self, name: &str, extra: &[&str]) -> Frontend {
        self.frontend_of(&self.core_address(), name, extra)
    }

    /// [`Self::frontend`] of the core at `address`.
    pub fn frontend_of(&self, address: &str, name: &str, extra: &[&str]) -> Frontend {
        let ports = self.path(&format!("{name}.ports"));
        let ports_text = ports.display().to_string();
        let mut args = vec!["api-server", "--core", address, "--port", "0", "--admin-port", "0"];
        args.extend(["--port-file", &ports_text]);
        args.extend(extra);
        let process = self.pawl(name, &args);
        Frontend::once_ready(process, &ports)
    }

    /// `pawl serve ARGS` with one api-server, ready to serve.
    pub fn serve(&self, extra: &[&str]) -> Frontend {
        let process = self.start_serve(extra);
        Frontend::once_ready(process, &self.path("serve.ports"))
    }

    /// `pawl serve ARGS`, just started.
    pub fn start_serve(&self, extra: &[&str]) -> Process {
        self.start("serve", self.serve_command(extra))
    }

    /// `pawl serve ARGS` on free ports, not started yet.
    pub fn serve_command(&self, extra: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pawl"));
        command.args(["serve", "--port", "0", "--admin-port", "0", "--port-file"]);
        command.arg(self.path("serve.ports")).args(extra);
        command
    }

    /// Folders of sockets in this run's folder: none may be there once their processes are gone.
    pub fn socket_folders(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.path).unwrap().flatten().map(|e| e.path());
        entries.filter(|path| path.is_dir() && !path.ends_with("cache")).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kept = self.folder.take().map(tempfile::TempDir::keep);
            eprintln!("logs of the failed test: {}", kept.unwrap_or_default().display());
            for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
                if entry.path().extension().is_some_and(|e| e == "log") {
                    let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                    let tail: Vec<&str> = text.lines().rev().take(25).collect();
                    eprintln!("-- {}", entry.path().display());
                    tail.iter().rev().for_each(|line| eprintln!("   {line}"));
                }
            }
        }
    }
}

/// State and parent of process `pid`.
fn stat(pid: i32) -> Option<(char, i32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Whether process `pid` still runs (one that has ended and waits for its parent does not).
pub fn alive(pid: i32) -> bool {
    stat(pid).is_some_and(|(state, _)| !"ZX".contains(state))
}

/// The command line of process `pid`.
pub fn command_line(pid: i32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// A started process; killed when dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        self::signal(self.pid(), signal);
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().unwrap();
        }
        self.ended
    }

    /// Its children, and theirs.
    pub fn descendants(&self) -> Vec<i32> {
        let parents: Vec<(i32, i32)> = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter_map(|pid| Some((pid, stat(pid)?.1)))
            .collect();
        let mut found = vec![self.pid()];
        let mut next = 0;
        while next < found.len() {
            let parent = found[next];
            found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
            next += 1;
        }
        found.split_off(1)
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        wait_for(&what, || self.ended())
    }

    /// SIGTERM, then its end.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            // A supervisor's children end with it.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// An api-server that serves: its process (or its supervisor's) and its two addresses.
pub struct Frontend {
    pub process: Process,
    pub http: Client,
    pub admin: Client,
}

impl Frontend {
    /// Waits for the port file, then for `/ready`.
    pub fn once_ready(mut process: Process, ports: &Path) -> Self {
        let (http, admin) = wait_for("the port file", || {
            if let Some(status) = process.ended() {
                panic!("{} ended ({status}) before it listened:\n{}", process.name, process.log());
            }
            listeners(ports)
        });
        wait_for("/ready", || {
            if let Some(status) = process.ended() {
                panic!("{} ended ({status}) before it was ready:\n{}", process.name, process.log());
            }
            http.is_ready().then_some(())
        });
        Self { process, http, admin }
    }

    /// `/metrics` of the admin listener.
    pub fn scrape(&self) -> Scrape {
        self.admin.scrape()
    }

    /// Waits until nothing is under way, here or in the core; the page that says so.
    pub fn idle(&self) -> Scrape {
        self.scrape_until("nothing under way", Scrape::is_idle)
    }

    /// Scrapes until `condition` holds; the scrape that did.
    pub fn scrape_until(&self, what: &str, condition: impl Fn(&Scrape) -> bool) -> Scrape {
        wait_for(what, || Some(self.scrape()).filter(|s| condition(s)))
    }
}
