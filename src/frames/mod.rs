//! `pawl frames`: look at what passes between a core and its frontends, and play a part in it.
//!
//! [`tap`] and [`decode`] show messages, live or from a recording; [`replay`] gives the requests of
//! a recording to another core; [`call`], [`send`] and [`top`] join a core as a frontend does.
//! Nothing here is needed to serve, and nothing here can hold up what serves.

mod call;
mod client;
mod decode;
mod find;
mod line;
mod output;
mod recording;
mod replay;
mod send;
mod tap;
#[cfg(test)]
mod testing;
mod top;
mod wanted;

#[cfg(test)]
pub use wanted::Kind;

use std::process::ExitCode;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct FramesArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show messages as they pass, until interrupted
    Tap(tap::TapArgs),
    /// Keep messages in a file as they pass, until interrupted
    Record(tap::RecordArgs),
    /// Show the messages of a recording
    Decode(decode::DecodeArgs),
    /// Give the requests of a recording to a core, and compare the tokens
    Replay(replay::ReplayArgs),
    /// Call a method of a core
    Call(call::CallArgs),
    /// Send one request to a core and show its tokens as they come
    Send(send::SendArgs),
    /// Watch a core: its frontends, its requests, its cache and its steps
    Top(top::TopArgs),
}

/// Runs one action.
///
/// # Errors
/// When a process cannot be reached, or a file not be read or written.
pub fn run(args: FramesArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match args.action {
            Action::Tap(args) => tap::tap(&args).await,
            Action::Record(args) => tap::record(&args).await,
            Action::Decode(args) => decode::run(&args),
            Action::Replay(args) => replay::run(&args).await,
            Action::Call(args) => call::run(&args).await,
            Action::Send(args) => send::run(&args).await,
            Action::Top(args) => top::run(&args).await,
        }
    })
}

/// A time that a flag gives, which is not 0.
fn seconds(text: &str) -> Result<std::time::Duration, String> {
    match crate::cli::seconds(text)? {
        0.0 => Err("write more than 0 seconds".into()),
        seconds => Ok(std::time::Duration::from_secs_f64(seconds)),
    }
}
