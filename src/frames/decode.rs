//! `pawl frames decode`: the messages of a recording, or typed ones.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use pawl_shared::tap::TapRecord;

use super::wanted::{Meaning, Seen, Wanted};
use super::{line, output, recording};

#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// A recording, or `-` for standard input
    file: PathBuf,
    /// The file holds bare frames as hexadecimal lines (frames of a message separated by spaces)
    #[arg(long)]
    hex: bool,
    /// One JSON object a message, with every field as it came
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    wanted: Wanted,
}

/// Shows what can be shown. The exit code says whether that was all.
///
/// # Errors
/// No such file, no recording, or one that is cut: all before the cut has been shown.
pub fn run(args: &DecodeArgs) -> anyhow::Result<ExitCode> {
    let input: Box<dyn Read> = if args.file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        let file = std::fs::File::open(&args.file);
        Box::new(file.with_context(|| args.file.display().to_string())?)
    };
    let records: Box<dyn Iterator<Item = anyhow::Result<TapRecord>>> = if args.hex {
        Box::new(recording::HexLines::new(input))
    } else {
        Box::new(recording::Reader::new(input)?)
    };
    let mut all_fine = true;
    for record in records {
        let mut seen = Seen::new(record?);
        all_fine &= !matches!(seen.meaning, Meaning::Bad(_));
        if !args.wanted.takes(&mut seen) {
            continue;
        }
        let text = if args.json { line::json(&seen).to_string() } else { line::text(&seen) };
        if !output::line(&text)? {
            break;
        }
    }
    Ok(if all_fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
