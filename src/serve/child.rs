//! A child process of the supervisor.

use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;

use crate::cli::LogFlags;

/// A child that gives up within this time of its first start is not started again.
const START_TIME: Duration = Duration::from_secs(30);

/// What is started, and started again.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    name: String,
    pub args: Vec<OsString>,
    /// Variables taken out of its environment: the file says what they said.
    without: Vec<String>,
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
        Self { name: name.into(), args, without: crate::cli::remove_flag_variables(subcommand) }
    }
}

pub struct Child {
    spec: ChildSpec,
    process: tokio::process::Child,
    /// Its standard input, whose end tells it that we are gone. Held here, since waiting for the
    /// process would close it there.
    _alive: Option<tokio::process::ChildStdin>,
    started: Instant,
    restarted: bool,
}

impl Child {
    pub async fn start(spec: ChildSpec) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("while looking for this program's file")?;
        let mut command = Command::new(program);
        command.args(&spec.args).stdin(Stdio::piped());
        // A group of its own: Ctrl-C in a terminal reaches the supervisor alone, which passes it
        // on in the right order.
        command.process_group(0);
        for name in &spec.without {
            command.env_remove(name);
        }
        let mut process =
            command.spawn().with_context(|| format!("while starting {}", spec.name))?;
        tracing::debug!("started {} as process {:?}", spec.name, process.id());
        let _alive = process.stdin.take();
        let started = Instant::now();
        Ok(Self { spec, process, _alive, started, restarted: false })
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    pub async fn restart(&mut self) -> anyhow::Result<()> {
        *self = Self { restarted: true, ..Self::start(self.spec.clone()).await? };
        Ok(())
    }

    /// Whether an end with `status` now is a start that failed: the child itself gave up, soon
    /// after its first start. Its settings, its model or this machine are the cause, and it would
    /// give up again.
    pub fn failed_to_start(&self, status: ExitStatus) -> bool {
        let gave_up = status.code().is_some_and(|code| code != 0);
        gave_up && !self.restarted && self.started.elapsed() < START_TIME
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

/// Asks all of `fleet` to stop and waits for it at most `patience`, then kills the rest.
pub async fn stop(mut fleet: Vec<Child>, patience: Duration) {
    for child in &fleet {
        child.signal(Signal::SIGTERM);
    }
    let all = futures::future::join_all(fleet.iter_mut().map(|child| child.process.wait()));
    if tokio::time::timeout(patience, all).await.is_ok() {
        return;
    }
    for child in &mut fleet {
        if matches!(child.process.try_wait(), Ok(None)) {
            tracing::warn!("{} did not stop within {patience:?}: killing it", child.spec.name);
            // Fails only if it has just ended.
            let _ = child.process.kill().await;
        }
    }
}
