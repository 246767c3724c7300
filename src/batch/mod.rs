//! `pawl batch`: a file of requests, answered offline over the same path as serving.
//!
//! It starts an engine-core as a child, as `serve` does, and hands each line to the routes of an
//! api-server inside this process: the same checks, the same wire, the same metrics. Answers are
//! written as they come (or in the input's order), so that neither file is ever held in memory.

mod input;
mod output;
mod summary;

use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use futures::stream::{BoxStream, StreamExt};
use indicatif::{ProgressBar, ProgressStyle};
use pawl_api_server::embedded::{Answer, Embedded};
use pawl_api_server::engine_client::EngineStatus;
use pawl_shared::shutdown::Shutdown;
use pawl_shared::transport::{CoreAt, HeartbeatConfig, SocketDir};
use serde_json::json;
use tokio::io::{AsyncBufRead, BufReader};
use tokio_util::task::AbortOnDropHandle;

use crate::cli::{ApiFlags, CoreFlags, LogFlags, RunnerKind, SharedFlags};
use crate::progress::tell;
use crate::serve::{Role, Supervisor};
use input::{Ask, BadLine, Line, Lines};
use output::{Done, Existing, Output, answer_id};
use summary::{Counts, summary};

/// Times that a line is tried while the engine has no room or does not move; then its 503 is the
/// answer. With the pauses that the engine asks for this is ten minutes and more.
const TRIES_MAX: u32 = 600;
/// How long the core may take to end before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// The exit status of a run that was stopped by a signal, as shells have it.
const STOPPED: u8 = 130;

#[derive(Clone, Debug, Args)]
pub struct BatchArgs {
    /// Requests, a line each: {"custom_id", "method": "POST", "url", "body"}; - is standard input
    pub input: PathBuf,
    /// Where the answers go, a line each, in the order they are ready; - is standard output
    pub output: PathBuf,
    /// GGUF file or folder [default: SmolLM2-135M-Instruct, fetched once]
    #[arg(long, env = "PAWL_MODEL", help_heading = "Model")]
    pub model: Option<String>,
    /// Lines under way at once [default: --max-num-seqs]
    #[arg(long, value_name = "N", env = "PAWL_CONCURRENCY", help_heading = "Batch",
          value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub concurrency: Option<u32>,
    /// Write the answers in the order of the requests; one that takes long holds up those after it
    #[arg(long, env = "PAWL_KEEP_ORDER", help_heading = "Batch")]
    pub keep_order: bool,
    /// Start over, and replace OUTPUT once all is answered
    #[arg(long, env = "PAWL_OVERWRITE", help_heading = "Batch", conflicts_with = "resume")]
    pub overwrite: bool,
    /// Go on with OUTPUT.partial, which a run that was stopped has left
    #[arg(long, env = "PAWL_RESUME", help_heading = "Batch")]
    pub resume: bool,
    /// Write the whole page of metrics to this file at the end
    #[arg(long, value_name = "FILE", env = "PAWL_METRICS_FILE", help_heading = "Batch")]
    pub metrics_file: Option<PathBuf>,
    /// Folder for the sockets between the processes [default: one of its own, for this run]
    #[arg(long, value_name = "DIR", env = "PAWL_SOCKET_DIR", help_heading = "Batch")]
    pub socket_dir: Option<PathBuf>,
    #[command(flatten)]
    pub core: CoreFlags,
    #[command(flatten)]
    pub api: ApiFlags,
    #[command(flatten)]
    pub shared: SharedFlags,
}

/// Answers the file.
///
/// # Errors
/// When files cannot be had, or the core cannot be started or dies; what is answered by then is
/// kept.
pub fn run(mut args: BatchArgs, log: &LogFlags) -> anyhow::Result<ExitCode> {
    args.core.fold_negations();
    let output = open_output(&args)?;
    let model = match args.core.runner {
        RunnerKind::Mock if args.model.is_none() => None,
        _ => Some(crate::model::resolve_model(args.model.as_deref())?),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(answer_file(&args, model, output, log));
    // A read of standard input that waits cannot be called off; it goes with the process.
    runtime.shutdown_background();
    outcome
}

fn open_output(args: &BatchArgs) -> anyhow::Result<Output> {
    let same = |path: &Path| path.canonicalize().ok();
    if args.input.as_os_str() != "-"
        && same(&args.input).is_some_and(|i| same(&args.output) == Some(i))
    {
        anyhow::bail!("{} is the input too; name another file", args.output.display());
    }
    let existing = match (args.overwrite, args.resume) {
        (true, _) => Existing::Overwrite,
        (false, true) => Existing::Resume,
        (false, false) => Existing::Keep,
    };
    // Before the output is touched.
    if args.input.as_os_str() != "-" {
        std::fs::File::open(&args.input)
            .with_context(|| format!("while opening {}", args.input.display()))?;
    }
    Output::open(&args.output, existing)
}

async fn answer_file(
    args: &BatchArgs,
    model: Option<PathBuf>,
    output: Output,
    log: &LogFlags,
) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let dir = match &args.socket_dir {
        Some(base) => SocketDir::create(base),
        None => SocketDir::create_default(),
    }?;
    let (address, spec) = crate::serve::core_spec(&args.core, &args.shared, model, log, &dir)?;
    let mut config =
        crate::api_server::api_settings(&args.api, &args.shared, args.core.scheduling_policy)?;
    config.core = CoreAt::Join(address);
    config.socket_dir = Some(dir.path().to_owned());
    let mut core = Supervisor::start(vec![spec], HeartbeatConfig::default())?;
    let outcome = match Embedded::start(config).await {
        Ok(api) => {
            let run = Run { args, api: Arc::new(api), shutdown: shutdown.clone() };
            run.finish(&mut core, output).await
        }
        Err(error) => Err(error),
    };
    core.stop(Role::Core, STOP_GRACE, &shutdown).await;
    outcome
}

/// How a run ended.
enum End {
    /// Every line is answered.
    Whole,
    /// By a signal.
    Stopped,
    /// The core is gone.
    CoreDied(ExitStatus),
}

/// Names the output, or says where its beginning is.
fn conclude(end: End, output: &mut Output) -> anyhow::Result<ExitCode> {
    let kept = output.partial().map_or_else(String::new, |partial| {
        format!("; --resume goes on from {}", partial.display())
    });
    match end {
        End::Whole => output.finish().map(|()| ExitCode::SUCCESS),
        End::Stopped => {
            tracing::warn!("stopped before the end of the input{kept}");
            Ok(ExitCode::from(STOPPED))
        }
        End::CoreDied(status) => {
            anyhow::bail!("the engine-core ended ({status}), its log says why{kept}")
        }
    }
}

struct Run<'a> {
    args: &'a BatchArgs,
    api: Arc<Embedded>,
    shutdown: Shutdown,
}

impl Run<'_> {
    async fn finish(self, core: &mut Supervisor, mut output: Output) -> anyhow::Result<ExitCode> {
        let done = output.take_done();
        let mut tally = Tally::start(self.args, &done)?;
        let mut status = self.api.watch();
        let up = status.wait_for(|status| *status == EngineStatus::Up);
        let end = tokio::select! {
            up = up => {
                // The client lives as long as `self`, so it tells its status.
                drop(up);
                tally.since = Instant::now();
                self.answer_lines(core, &mut output, done, &mut tally).await
            }
            () = self.shutdown.requested() => Ok(End::Stopped),
            (_, status) = core.next_exit() => Ok(End::CoreDied(status)),
        };
        let elapsed = tally.since.elapsed();
        tally.bar.finish_and_clear();
        self.api.close().await;
        let page = self.api.metrics_page();
        tell(summary(tally.counts, elapsed, &page).trim_end());
        let outcome = end.and_then(|end| conclude(end, &mut output));
        if let Some(path) = &self.args.metrics_file {
            std::fs::write(path, &page)
                .with_context(|| format!("while writing the metrics to {}", path.display()))?;
        }
        outcome
    }

    async fn answer_lines(
        &self,
        core: &mut Supervisor,
        output: &mut Output,
        done: Done,
        tally: &mut Tally,
    ) -> anyhow::Result<End> {
        let mut answers = self.answers(done).await?;
        let stopped = self.shutdown.requested();
        tokio::pin!(stopped);
        let died = core.next_exit();
        tokio::pin!(died);
        loop {
            let answer = tokio::select! {
                // A dead core first: the answers that it leaves behind are errors that another run
                // will not have.
                biased;
                (_, status) = &mut died => return Ok(End::CoreDied(status)),
                () = &mut stopped => break,
                answer = answers.next() => answer,
            };
            let Some(answer) = answer else { return Ok(End::Whole) };
            tally.write(output, answer?).await?;
        }
        // No new line is read from here on; those under way may finish for so long.
        let patience = tokio::time::sleep(self.args.shared.shutdown_timeout());
        tokio::pin!(patience);
        loop {
            let answer = tokio::select! {
                biased;
                () = &mut patience => return Ok(End::Stopped),
                () = self.shutdown.hurried() => return Ok(End::Stopped),
                (_, status) = &mut died => return Ok(End::CoreDied(status)),
                answer = answers.next() => answer,
            };
            let Some(answer) = answer else { return Ok(End::Stopped) };
            tally.write(output, answer?).await?;
        }
    }

    /// Answers to the lines of the input, at most as many under way as configured.
    async fn answers(&self, done: Done) -> anyhow::Result<BoxStream<'_, anyhow::Result<Answered>>> {
        let reader: Box<dyn AsyncBufRead + Unpin + Send> = match self.args.input.as_os_str() {
            name if name == "-" => Box::new(BufReader::new(tokio::io::stdin())),
            name => Box::new(BufReader::new(tokio::fs::File::open(name).await?)),
        };
        let bytes_max = usize::try_from(self.args.api.max_body_bytes.0)?;
        let run = uuid::Uuid::new_v4().simple().to_string();
        let lines = Lines::new(reader, bytes_max);
        let asked = futures::stream::try_unfold((lines, done), |(mut lines, done)| async move {
            loop {
                let line = lines.next().await.context("while reading the input")?;
                let Some(line) = line else { return anyhow::Ok(None) };
                if !done.has(&line)? {
                    return Ok(Some((line, (lines, done))));
                }
            }
        })
        .take_until(self.shutdown.requested());
        let answers = asked.map(move |line| {
            let api = Arc::clone(&self.api);
            let name = format!("batch-{}", &run[..8]);
            async move {
                let line = line?;
                // A task of its own: it goes on while an answer is being written.
                let (number, bytes) = (line.number, line.bytes);
                let task = AbortOnDropHandle::new(tokio::spawn(answer(api, name, line)));
                Ok(task.await.unwrap_or_else(|error| {
                    let bad = BadLine { code: "internal_error", message: error.to_string() };
                    Answered::bad(number, bytes, None, &bad)
                }))
            }
        });
        let concurrency = self.args.concurrency.unwrap_or(self.args.core.max_num_seqs) as usize;
        Ok(match self.args.keep_order {
            true => answers.buffered(concurrency).boxed(),
            false => answers.buffer_unordered(concurrency).boxed(),
        })
    }
}

/// A line's answer.
struct Answered {
    bytes: u64,
    /// `None` where nothing was asked.
    status: Option<u16>,
    json: String,
}

impl Answered {
    fn bad(number: u64, bytes: u64, custom_id: Option<&str>, bad: &BadLine) -> Self {
        let message = format!("line {number} {}", bad.message);
        let answer = json!({
            "id": answer_id(number),
            "custom_id": custom_id,
            "response": null,
            "error": {"code": bad.code, "message": message, "line": number},
        });
        Self { bytes, status: None, json: answer.to_string() }
    }
}

async fn answer(api: Arc<Embedded>, run: String, line: Line) -> Answered {
    let Line { number, bytes, custom_id, asks } = line;
    let ask = match asks {
        Ok(ask) => ask,
        Err(bad) => return Answered::bad(number, bytes, custom_id.as_deref(), &bad),
    };
    let given = ask.request_id.is_none().then(|| format!("{run}-{number}"));
    let answer = answer_when_there_is_room(&api, given.as_deref(), &ask).await;
    let request_id = given.or(ask.request_id);
    // The body is put in as it came: its numbers keep every digit.
    let json = format!(
        concat!(
            r#"{{"id":{},"custom_id":{},"response":{{"status_code":{},"request_id":{},"#,
            r#""body":{}}},"error":null}}"#
        ),
        json!(answer_id(number)),
        json!(custom_id),
        answer.status,
        json!(request_id),
        String::from_utf8_lossy(&answer.body),
    );
    Answered { bytes, status: Some(answer.status), json }
}

async fn answer_when_there_is_room(api: &Embedded, id: Option<&str>, ask: &Ask) -> Answer {
    let mut tries = 1;
    loop {
        let answer = api.post(ask.url, id, ask.body.clone()).await;
        if answer.status != 503 || tries == TRIES_MAX {
            return answer;
        }
        tries += 1;
        tokio::time::sleep(answer.retry_after.unwrap_or(Duration::from_secs(1))).await;
    }
}

/// Counts what was written, and shows it.
struct Tally {
    counts: Counts,
    since: Instant,
    bar: ProgressBar,
}

impl Tally {
    fn start(args: &BatchArgs, done: &Done) -> anyhow::Result<Self> {
        let size = match args.input.as_os_str() {
            name if name == "-" => 0,
            name => std::fs::metadata(name)?.len(),
        };
        // Neither is drawn where standard error is no terminal.
        let bar = match size {
            0 => ProgressBar::new_spinner()
                .with_style(ProgressStyle::with_template("{spinner} {msg} answered, {elapsed}")?),
            bytes => ProgressBar::new(bytes).with_style(ProgressStyle::with_template(
                "{msg} answered [{wide_bar}] {percent} %, {elapsed}, {eta} to go",
            )?),
        };
        let before = done.len() as u64;
        bar.set_message(before.to_string());
        let counts = Counts { before, ..Counts::default() };
        Ok(Self { counts, since: Instant::now(), bar })
    }

    async fn write(&mut self, output: &mut Output, answer: Answered) -> anyhow::Result<()> {
        output.write(&answer.json).await?;
        let counts = &mut self.counts;
        match answer.status {
            Some(200) => counts.answered += 1,
            Some(_) => counts.refused += 1,
            None => counts.bad += 1,
        }
        let all = counts.answered + counts.refused + counts.bad + counts.before;
        self.bar.set_message(all.to_string());
        self.bar.inc(answer.bytes);
        Ok(())
    }
}
