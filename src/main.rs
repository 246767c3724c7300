//! The command `pawl`: one binary, whose parts run as separate processes of it.

mod api_server;
mod batch;
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
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: cli::Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Serve(args) => serve::run(*args, &cli.log),
        Command::EngineCore(args) => engine_core::run(*args),
        Command::ApiServer(args) => api_server::run(*args),
        Command::Batch(args) => batch::run(*args, &cli.log),
        Command::Frames(args) => frames::run(args),
        Command::Model(args) => model::run(args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(&args),
    }
}
