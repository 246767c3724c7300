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
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Subcommand};
use pawl_shared::tap::{Direction, TapRecord};
use pawl_shared::transport::{Address, Tap, TapEvent};

/// A core that is there answers sooner.
const WAIT_TOLD_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct FramesArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show messages as they pass, until interrupted
    Tap(TapArgs),
    /// Show the messages of a recording
    Decode(DecodeArgs),
}

#[derive(Debug, Args)]
struct TapArgs {
    /// The core's --listen address
    core: Address,
    /// Also keep the messages in this file, for `decode`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Stop after so many messages
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Give up when no core has answered for so long [default: wait for one]
    #[arg(long, value_name = "SECONDS", value_parser = crate::cli::seconds)]
    timeout: Option<f64>,
    #[command(flatten)]
    show: ShowArgs,
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
        Action::Tap(args) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(tap(&args))
        }
        Action::Decode(args) => decode(&args),
    }
}

async fn tap(args: &TapArgs) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let mut recording = match &args.record {
        Some(path) => Some(
            recording::Writer::create(path)
                .with_context(|| format!("--record {}", path.display()))?,
        ),
        None => None,
    };
    let mut tap = Tap::start(args.core.clone()).await?;
    let (mut seen, mut missed) = (0, 0);
    let mut wait = Wait::begin(args.timeout);
    while args.count.is_none_or(|count| seen < count) {
        let event = tokio::select! {
            () = shutdown.requested() => break,
            event = tap.next() => event,
            outcome = wait.goes_on(&args.core) => {
                outcome?;
                continue;
            }
        };
        let record = match event {
            TapEvent::Record(record) => record?,
            TapEvent::Up => {
                wait.over = true;
                tracing::info!("tapping {}", args.core);
                missed = 0;
                continue;
            }
            TapEvent::Down { reason } => {
                tracing::warn!("no core at {}: {reason}", args.core);
                wait = Wait::begin(args.timeout);
                continue;
            }
        };
        if record.missed > missed {
            tracing::warn!("this tap is too slow: {} messages missed", record.missed - missed);
            missed = record.missed;
        }
        if let Some(recording) = &mut recording {
            recording.write(&record)?;
        }
        if !show(&args.show, &record)? {
            break;
        }
        seen += 1;
    }
    tap.close().await;
    Ok(ExitCode::SUCCESS)
}

/// The wait for a core that answers.
struct Wait {
    since: Instant,
    timeout: Option<Duration>,
    told: bool,
    over: bool,
}

impl Wait {
    fn begin(timeout: Option<f64>) -> Self {
        let timeout = timeout.map(Duration::from_secs_f64);
        Self { since: Instant::now(), timeout, told: false, over: false }
    }

    /// Returns when there is something to say of it: once that it goes on, then that it took too
    /// long. Cancel-safe.
    async fn goes_on(&mut self, core: &Address) -> anyhow::Result<()> {
        let next = match (self.over, self.told, self.timeout) {
            (true, ..) | (false, true, None) => return std::future::pending().await,
            (false, false, None) => WAIT_TOLD_AFTER,
            (false, false, Some(timeout)) => timeout.min(WAIT_TOLD_AFTER),
            (false, true, Some(timeout)) => timeout,
        };
        tokio::time::sleep_until((self.since + next).into()).await;
        if self.timeout.is_some_and(|timeout| timeout <= next) {
            anyhow::bail!("no core answers at {core} within --timeout {next:?}");
        }
        self.told = true;
        tracing::warn!("no core at {core} yet: waiting for one");
        Ok(())
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
