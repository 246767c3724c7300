//! `pawl frames`: look at what passes between a core and its frontends.
//!
//! A tap joins the core as an onlooker: it is sent a copy of every message, both ways, and has no
//! requests of its own. A tap that reads too slowly misses messages, and is told how many; it never
//! holds up the core.

mod line;
mod recording;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use pawl_shared::tap::{Direction, TapRecord};

#[derive(Debug, Args)]
pub struct FramesArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show the messages of a recording
    Decode(DecodeArgs),
}

#[derive(Debug, Args)]
struct DecodeArgs {
    /// A recording, or `-` for standard input
    file: PathBuf,
    /// The file holds bare frames as hexadecimal lines (frames of a message separated by spaces)
    #[arg(long)]
    hex: bool,
    #[command(flatten)]
    show: ShowArgs,
}

#[derive(Debug, Args)]
struct ShowArgs {
    /// One JSON object a message, with every field as it came
    #[arg(long)]
    json: bool,
    /// Only messages of this client
    #[arg(long, value_name = "INDEX")]
    client: Option<u32>,
    /// Leave out frames that carry stats alone
    #[arg(long)]
    no_stats_only: bool,
}

/// Runs one action.
///
/// # Errors
/// When the core cannot be reached, or a file not be read or written.
pub fn run(args: FramesArgs) -> anyhow::Result<ExitCode> {
    match args.action {
        Action::Decode(args) => decode(&args),
    }
}

fn decode(args: &DecodeArgs) -> anyhow::Result<ExitCode> {
    let input: Box<dyn std::io::Read> = if args.file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        let file = std::fs::File::open(&args.file);
        Box::new(file.with_context(|| args.file.display().to_string())?)
    };
    let mut all_fine = true;
    let records: Box<dyn Iterator<Item = anyhow::Result<TapRecord>>> = if args.hex {
        Box::new(recording::HexLines::new(input))
    } else {
        Box::new(recording::Reader::new(input)?)
    };
    for record in records {
        let record = record?;
        all_fine &= line::decodes(&record);
        if !show(&args.show, &record)? {
            break;
        }
    }
    Ok(if all_fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints `record` if it is wanted; `false` once nobody reads any more (`| head`).
fn show(args: &ShowArgs, record: &TapRecord) -> anyhow::Result<bool> {
    if args.client.is_some_and(|client| client != record.client)
        || (args.no_stats_only && line::is_stats_only(record))
    {
        return Ok(true);
    }
    let text = if args.json { line::json(record).to_string() } else { line::text(record) };
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true).map_err(Into::into),
    }
}

/// `core→2` or `2→core`.
fn way(record: &TapRecord) -> String {
    match record.direction {
        Direction::ToCore => format!("{}→core", record.client),
        Direction::ToClient => format!("core→{}", record.client),
    }
}
