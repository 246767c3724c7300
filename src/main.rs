//! The command `pawl`: one binary, whose parts run as separate processes of it.

// It panics once nobody reads standard error any more; `progress::tell` does not.
#![warn(clippy::print_stderr)]

mod api_server;
mod batch;
mod bench;
mod cli;
#[cfg(test)]
mod docs;
mod doctor;
mod engine_core;
mod frames;
mod model;
mod progress;
mod serve;

use std::process::ExitCode;

use cli::Command;

fn main() -> ExitCode {
    let cli = match cli::parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Printing fails only when the terminal is gone, and then nobody reads it.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    pawl_shared::telemetry::init(cli.log.log_format.into(), &cli.log_filter());
    cli.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    match run(cli) {
        Ok(code) => code,
        // Whoever read the result has seen enough, as `head` does.
        Err(error) if is_broken_pipe(&error) => ExitCode::FAILURE,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

fn run(cli: cli::Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Serve(args) => serve::run(*args, &cli.log),
        Command::EngineCore(args) => engine_core::run(*args),
        Command::ApiServer(args) => api_server::run(*args),
        Command::Batch(args) => batch::run(*args, &cli.log),
        Command::Bench(args) => bench::run(args),
        Command::Frames(args) => frames::run(args),
        Command::Model(args) => model::run(args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(&args),
    }
}
