//! A child process: what it is started with, and its line.

use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pawl_shared::lifeline::{Heard, Line, ToChild};
use pawl_shared::ready;
use tokio::process::Command;
use tokio::sync::mpsc;

use super::fleet::{Life, Role};
use crate::cli::LogFlags;

/// What is started, and started again.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    name: String,
    role: Role,
    pub args: Vec<OsString>,
    /// Variables taken out of its environment: the file says what they said.
    without: Vec<String>,
}

impl ChildSpec {
    /// `pawl SUBCOMMAND --config FILE`, called `name` in logs.
    pub fn new(name: &str, role: Role, file: &Path, log: &LogFlags) -> Self {
        let subcommand = match role {
            Role::Core => "engine-core",
            Role::Frontend => "api-server",
        };
        let mut args: Vec<OsString> = vec![subcommand.into(), "--config".into(), file.into()];
        args.extend(["--log-level".into(), log.log_level.clone().into()]);
        let format = match log.log_format {
            crate::cli::LogFormatFlag::Text => "text",
            crate::cli::LogFormatFlag::Json => "json",
        };
        args.extend(["--log-format".into(), format.into(), "--supervised".into()]);
        let without = crate::cli::remove_flag_variables(subcommand);
        Self { name: name.into(), role, args, without }
    }

    pub fn role(&self) -> Role {
        self.role
    }
}

/// A started process.
pub struct Child {
    spec: ChildSpec,
    process: tokio::process::Child,
    line: Line,
    ended: bool,
}

impl Child {
    /// Starts the process of `spec`; what it says goes to `heard` as from `life`.
    pub fn start(
        spec: ChildSpec,
        life: Life,
        heard: mpsc::Sender<(Life, Heard)>,
    ) -> anyhow::Result<Self> {
        let starting = || format!("while starting {}", spec.name);
        let program = std::env::current_exe().context("while looking for this program's file")?;
        let (line, stdin) = Line::open(life, heard).with_context(starting)?;
        let mut command = Command::new(program);
        command.args(&spec.args).stdin(Stdio::from(stdin));
        // Whoever started us waits for our word, not for theirs.
        command.env_remove(ready::SOCKET_VARIABLE);
        // A group of its own: Ctrl-C in a terminal reaches the supervisor alone, which passes it
        // on in the right order.
        command.process_group(0);
        for name in &spec.without {
            command.env_remove(name);
        }
        let process = command.spawn().with_context(starting)?;
        tracing::debug!("started {} as process {:?}", spec.name, process.id());
        Ok(Self { spec, process, line, ended: false })
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    pub fn role(&self) -> Role {
        self.spec.role
    }

    pub fn spec(&self) -> &ChildSpec {
        &self.spec
    }

    pub fn ended(&self) -> bool {
        self.ended
    }

    pub fn send(&self, message: &ToChild) {
        self.line.send(message);
    }

    pub fn signal(&self, signal: Signal) {
        let Some(id) = self.process.id().and_then(|id| i32::try_from(id).ok()) else { return };
        // It may have ended in this very moment, which is what was wanted.
        let _ = kill(Pid::from_raw(id), signal);
    }
}

/// Waits until one of `children` ends; which, and how. Each end is told once.
pub async fn first_exit(children: &mut [Child]) -> (usize, ExitStatus) {
    let living = children.iter_mut().enumerate().filter(|(_, child)| !child.ended);
    let waits: Vec<_> = living
        .map(|(index, child)| {
            Box::pin(async move {
                loop {
                    match child.process.wait().await {
                        Ok(status) => {
                            child.ended = true;
                            return (index, status);
                        }
                        // Only an interrupted wait comes here.
                        Err(error) => tracing::debug!("waiting for {}: {error}", child.spec.name),
                    }
                }
            })
        })
        .collect();
    match waits.is_empty() {
        true => std::future::pending().await,
        false => futures::future::select_all(waits).await.0,
    }
}
