//! `pawl bench`: how fast it is, inside the engine and as clients see it.

mod serve;
mod step;
#[cfg(feature = "vulkan")]
mod step_vulkan;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Measure speed.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Put load on a server that speaks the OpenAI API, and say what its clients saw
    Serve(Box<serve::BenchServeArgs>),
    /// Time steps of a model inside the engine: no scheduler and no sockets
    Step(step::BenchStepArgs),
}

/// Runs `pawl bench …`.
///
/// # Errors
/// When the server or the model cannot be had.
pub fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        BenchCommand::Serve(args) => serve::run(*args),
        BenchCommand::Step(args) => step::run(&args),
    }
}
