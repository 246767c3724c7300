//! A child process of the supervisor.

use std::ffi::OsString;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pawl_shared::ready;
use pawl_shared::shutdown::Shutdown;
use tokio::process::{ChildStdin, Command};

use crate::cli::LogFlags;

/// How long children may take to abort what is under way when the shutdown is hurried.
const HURRIED_GRACE: Duration = Duration::from_secs(2);

/// What is started, and started again.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    name: String,
    pub args: Vec<OsString>,
    /// Variables taken out of its environment: the file says what they said.
    without: Vec<String>,
    /// The socket at which it says that it is ready.
    ready: PathBuf,
}

impl ChildSpec {
    /// `pawl SUBCOMMAND --config FILE`, called `name` in logs.
    pub fn new(name: &str, subcommand: &str, file: &Path, log: &LogFlags) -> Self {
        let mut args: Vec<OsString> = vec![subcommand.into(), "--config".into(), file.into()];
        args.extend(["--log-level".into(), log.log_level.clone().into()]);
        let format = match log.log_format {
            crate::cli::LogFormatFlag::Text => "text",
            crate::cli::LogFormatFlag::Json => "json",
        };
        args.extend(["--log-format".into(), format.into(), "--supervised".into()]);
        let without = crate::cli::remove_flag_variables(subcommand);
        Self { name: name.into(), args, without, ready: file.with_extension("ready") }
    }

    /// The process, and its standard input, whose end tells it that we are gone.
    fn spawn(&self) -> anyhow::Result<(tokio::process::Child, Option<ChildStdin>)> {
        let program = std::env::current_exe().context("while looking for this program's file")?;
        let mut command = Command::new(program);
        command.args(&self.args).stdin(Stdio::piped()).env(ready::SOCKET_VARIABLE, &self.ready);
        // A group of its own: Ctrl-C in a terminal reaches the supervisor alone, which passes it
        // on in the right order.
        command.process_group(0);
        for name in &self.without {
            command.env_remove(name);
        }
        let mut process =
            command.spawn().with_context(|| format!("while starting {}", self.name))?;
        tracing::debug!("started {} as process {:?}", self.name, process.id());
        let alive = process.stdin.take();
        Ok((process, alive))
    }
}

pub struct Child {
    spec: ChildSpec,
    process: tokio::process::Child,
    /// Held here, since waiting for the process would close it there.
    _alive: Option<ChildStdin>,
    ready: UnixDatagram,
    was_ready: bool,
}

impl Child {
    /// Starts it for the first time.
    pub async fn start(spec: ChildSpec) -> anyhow::Result<Self> {
        let bound = UnixDatagram::bind(&spec.ready);
        let ready = bound.and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
        let ready = ready.with_context(|| format!("while making {}", spec.ready.display()))?;
        let (process, _alive) = spec.spawn()?;
        Ok(Self { spec, process, _alive, ready, was_ready: false })
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    pub async fn restart(&mut self) -> anyhow::Result<()> {
        (self.process, self._alive) = self.spec.spawn()?;
        Ok(())
    }

    /// Whether it has said that it is ready, in this life or an earlier one.
    fn was_ready(&mut self) -> bool {
        let mut message = [0; 64];
        while let Ok(length) = self.ready.recv(&mut message) {
            self.was_ready |= message[..length].starts_with(ready::READY);
        }
        self.was_ready
    }

    /// Whether an end with `status` is a start that failed: it gave up by itself before it was ever
    /// ready. Its settings, its model or this machine are the cause, and it would give up again.
    pub fn failed_to_start(&mut self, status: ExitStatus) -> bool {
        let gave_up = status.code().is_some_and(|code| code != 0);
        gave_up && !self.was_ready()
    }

    fn signal(&self, signal: Signal) {
        let Some(id) = self.process.id().and_then(|id| i32::try_from(id).ok()) else { return };
        // It may have ended in this very moment, which is what was wanted.
        let _ = kill(Pid::from_raw(id), signal);
    }
}

/// Waits until one of `fleet` ends; which, and how.
pub async fn first_exit(fleet: &mut [Child]) -> (usize, ExitStatus) {
    let waits = fleet.iter_mut().enumerate().map(|(index, child)| {
        Box::pin(async move {
            loop {
                match child.process.wait().await {
                    Ok(status) => return (index, status),
                    // Only an interrupted wait comes here.
                    Err(error) => tracing::debug!("waiting for {}: {error}", child.spec.name),
                }
            }
        })
    });
    futures::future::select_all(waits).await.0
}

/// Asks all of `fleet` to stop and waits for it at most `patience`, and not for long once
/// `shutdown` is hurried; then kills the rest.
pub async fn stop(mut fleet: Vec<Child>, patience: Duration, shutdown: &Shutdown) {
    signal_all(&fleet, Signal::SIGTERM);
    let mut patience = patience;
    tokio::select! {
        () = all_ended(&mut fleet) => return,
        () = tokio::time::sleep(patience) => {}
        () = shutdown.hurried() => {
            patience = HURRIED_GRACE;
            signal_all(&fleet, Signal::SIGQUIT);
            if tokio::time::timeout(patience, all_ended(&mut fleet)).await.is_ok() {
                return;
            }
        }
    }
    for child in &mut fleet {
        if matches!(child.process.try_wait(), Ok(None)) {
            tracing::warn!("{} did not stop within {patience:?}: killing it", child.spec.name);
            // Fails only if it has just ended.
            let _ = child.process.kill().await;
        }
    }
}

fn signal_all(fleet: &[Child], signal: Signal) {
    fleet.iter().for_each(|child| child.signal(signal));
}

async fn all_ended(fleet: &mut [Child]) {
    futures::future::join_all(fleet.iter_mut().map(|child| child.process.wait())).await;
}
