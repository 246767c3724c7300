//! `pawl frames replay`: the requests of a recording, given to another core.
//!
//! Each gets a fresh wire id and goes out as it was recorded, at the recorded pace or as fast as
//! the core takes them. Tokens that do not depend on chance must come out the same.

mod compare;
mod recorded;

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::protocol::{ClientMessage, EngineCoreOutput, RequestId};
use pawl_shared::transport::Address;
use serde_json::json;
use tokio::time::Instant;

use self::compare::{Ended, Verdict, verdict};
use self::recorded::{Finish, Gathered, Outcome, Recorded};
use super::client::{CoreClient, Incoming};
use super::{output, recording};

/// Letters of a client's id that are kept in the new wire id.
const EXTERNAL_ID_CHARS_MAX: usize = 64;

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The recording
    file: PathBuf,
    /// The --listen address of the core that is given the requests
    core: Address,
    /// `recorded`, `full`, or a factor: 2 is twice as fast as recorded
    #[arg(long, value_name = "SPEED", default_value = "recorded", value_parser = Speed::parse)]
    speed: Speed,
    /// Requests under way at most; more wait
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    /// Abort the requests that were aborted, once they have come as far as then
    #[arg(long)]
    aborts: bool,
    /// Take at most so many requests of the recording
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_requests: u32,
    /// Give up when nothing comes for so long
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = super::seconds)]
    timeout: Duration,
    /// How long the core may take to let us in
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = super::seconds)]
    wait: Duration,
    /// One JSON object a request, and one for all
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug)]
enum Speed {
    Full,
    Times(f64),
}

impl Speed {
    fn parse(text: &str) -> Result<Self, String> {
        match (text, text.parse::<f64>()) {
            ("full", _) => Ok(Self::Full),
            ("recorded", _) => Ok(Self::Times(1.0)),
            (_, Ok(times)) if times > 0.0 && times <= 1e6 => Ok(Self::Times(times)),
            _ => Err("write recorded, full, or a factor above 0 such as 2".into()),
        }
    }

    /// When what was recorded at `seconds` is due.
    fn due(self, seconds: f64) -> Duration {
        match self {
            Self::Full => Duration::ZERO,
            Self::Times(times) => {
                Duration::try_from_secs_f64(seconds / times).unwrap_or(Duration::MAX)
            }
        }
    }
}

/// Replays. The exit code says whether every request that could be compared came out equal, and
/// there was one.
///
/// # Errors
/// No recording, no core, or output that cannot be written.
pub async fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let requests = gather(&args.file, args.max_requests as usize)?;
    let client = tokio::select! {
        client = CoreClient::join(&args.core, args.wait) => client?,
        () = shutdown.requested() => return Ok(ExitCode::FAILURE),
    };
    let began = Instant::now();
    let total = requests.len();
    let mut replay = Replay {
        args,
        client,
        began,
        waiting: requests.into(),
        under_way: HashMap::new(),
        heard: began,
        summary: Summary::default(),
        closed: false,
    };
    let interrupted = tokio::select! {
        outcome = replay.run() => { outcome?; false }
        () = shutdown.requested() => true,
    };
    let seconds = began.elapsed().as_secs_f64();
    let Replay { client, summary, .. } = replay;
    client.leave().await;
    if interrupted {
        tracing::warn!("interrupted: what was under way is aborted");
    }
    summary.tell(args.json, total, seconds)?;
    let all_equal = summary.all_equal() && !interrupted;
    Ok(if all_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn gather(file: &Path, requests_max: usize) -> anyhow::Result<Vec<Recorded>> {
    let at = || file.display().to_string();
    let reader =
        recording::Reader::new(std::fs::File::open(file).with_context(at)?).with_context(at)?;
    tracing::info!("{}", reader.about());
    let mut gathered = Gathered::default();
    for record in reader {
        match record {
            Ok(record) => gathered.take(&record, requests_max),
            // What comes before the cut is as good as ever.
            Err(error) => tracing::warn!("{}: {error:#}; replaying what comes before", at()),
        }
    }
    let Gathered { requests, left_out, undecodable, .. } = gathered;
    if undecodable > 0 {
        tracing::warn!("{undecodable} messages of it do not decode and are left out");
    }
    if left_out > 0 {
        tracing::warn!("{left_out} requests are left out: see --max-requests");
    }
    ensure!(!requests.is_empty(), "{}: no request begins in this recording", at());
    Ok(requests)
}

struct Replay<'a> {
    args: &'a ReplayArgs,
    client: CoreClient,
    began: Instant,
    waiting: VecDeque<Recorded>,
    // Bounded by `--concurrency`.
    under_way: HashMap<RequestId, Running>,
    /// When anything came of a request last.
    heard: Instant,
    summary: Summary,
    /// Nobody reads what is told.
    closed: bool,
}

struct Running {
    recorded: Recorded,
    tokens: Vec<u32>,
    /// When to abort one of which nothing had come yet.
    abort_at: Option<Instant>,
}

impl Replay<'_> {
    async fn run(&mut self) -> anyhow::Result<()> {
        while !self.closed {
            self.send_due()?;
            self.abort_due()?;
            if self.under_way.is_empty() && self.waiting.is_empty() {
                break;
            }
            let wake = self.next_wake();
            let incoming = tokio::select! {
                incoming = self.client.next() => incoming?,
                () = tokio::time::sleep_until(wake) => {
                    self.give_up_if_silent()?;
                    continue;
                }
            };
            match incoming {
                Incoming::Outputs(outputs) => {
                    self.heard = Instant::now();
                    for output in outputs {
                        self.take(&output)?;
                    }
                }
                Incoming::Down(reason) => {
                    self.fail_all(&format!("the core is gone: {reason}"))?;
                }
                Incoming::Hung(silent_for) => {
                    tracing::warn!("the core makes no progress for {} s", silent_for.as_secs());
                }
                Incoming::Reply(_) => {}
            }
        }
        Ok(())
    }

    fn room(&self) -> bool {
        self.under_way.len() < usize::from(self.args.concurrency)
    }

    fn due(&self, recorded: &Recorded) -> Instant {
        self.began.checked_add(self.args.speed.due(recorded.at)).unwrap_or_else(far)
    }

    fn send_due(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        while self.room()
            && let Some(recorded) = self.waiting.pop_front()
        {
            if self.due(&recorded) > now {
                self.waiting.push_front(recorded);
                return Ok(());
            }
            self.send(recorded, now)?;
        }
        Ok(())
    }

    fn send(&mut self, recorded: Recorded, now: Instant) -> anyhow::Result<()> {
        let external = recorded.request.external_req_id.as_deref().unwrap_or("replay");
        let external: String = external.chars().take(EXTERNAL_ID_CHARS_MAX).collect();
        let mut request = recorded.request.clone();
        request.request_id = self.client.fresh_id(&external);
        request.client_index = self.client.client;
        request.arrival_time = SystemClock.wall().0;
        let abort_at = match recorded.outcome {
            Outcome::Aborted { seconds } if self.args.aborts => {
                now.checked_add(self.args.speed.due(seconds)).filter(|_| recorded.tokens.is_empty())
            }
            _ => None,
        };
        let id = request.request_id.clone();
        self.client.send(&ClientMessage::Add(Box::new(request))).context("while sending")?;
        if self.under_way.is_empty() {
            self.heard = now;
        }
        self.under_way.insert(id, Running { recorded, tokens: Vec::new(), abort_at });
        Ok(())
    }

    fn abort_due(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        let due: Vec<RequestId> = self
            .under_way
            .iter()
            .filter(|(_, running)| running.abort_at.is_some_and(|at| at <= now))
            .map(|(id, _)| id.clone())
            .collect();
        due.into_iter().try_for_each(|id| self.abort(id))
    }

    fn abort(&mut self, id: RequestId) -> anyhow::Result<()> {
        self.client.send(&ClientMessage::Abort(vec![id.clone()])).context("while aborting")?;
        self.end(&id, &Ended::Aborted)
    }

    fn take(&mut self, output: &EngineCoreOutput) -> anyhow::Result<()> {
        // Tokens that were under way when it was aborted.
        let Some(running) = self.under_way.get_mut(&output.request_id) else { return Ok(()) };
        running.tokens.extend(&output.new_token_ids);
        if let Some(finish) = Finish::of(output) {
            return self.end(&output.request_id, &Ended::Finished(finish));
        }
        let Running { recorded, tokens, .. } = running;
        let aborted = matches!(recorded.outcome, Outcome::Aborted { .. }) && self.args.aborts;
        if aborted && !recorded.tokens.is_empty() && tokens.len() >= recorded.tokens.len() {
            return self.abort(output.request_id.clone());
        }
        Ok(())
    }

    fn end(&mut self, id: &RequestId, ended: &Ended) -> anyhow::Result<()> {
        let Some(running) = self.under_way.remove(id) else { return Ok(()) };
        self.tell(&running.recorded, &running.tokens, ended)
    }

    fn tell(&mut self, recorded: &Recorded, tokens: &[u32], ended: &Ended) -> anyhow::Result<()> {
        let verdict = verdict(recorded, tokens, ended);
        self.summary.count(&verdict, tokens.len());
        let id = &recorded.request.request_id;
        let open = if self.args.json {
            output::line(
                &json!({
                    "request": id.as_str(),
                    "verdict": verdict.name(),
                    "detail": verdict.detail(),
                    "tokens": tokens.len(),
                    "recorded_tokens": recorded.tokens.len(),
                })
                .to_string(),
            )?
        } else if let Some(detail) = verdict.detail() {
            output::line(&format!("{id}: {}: {detail}", verdict.name()))?
        } else {
            true
        };
        self.closed |= !open;
        Ok(())
    }

    fn fail_all(&mut self, why: &str) -> anyhow::Result<()> {
        let failed = Ended::Failed(why.to_owned());
        for id in self.under_way.keys().cloned().collect::<Vec<_>>() {
            self.end(&id, &failed)?;
        }
        for recorded in std::mem::take(&mut self.waiting) {
            self.tell(&recorded, &[], &failed)?;
        }
        Ok(())
    }

    fn next_wake(&self) -> Instant {
        let silent = self.heard.checked_add(self.args.timeout).unwrap_or_else(far);
        let silent = Some(silent).filter(|_| !self.under_way.is_empty());
        let send = self.waiting.front().filter(|_| self.room()).map(|next| self.due(next));
        let aborts = self.under_way.values().filter_map(|running| running.abort_at);
        aborts.chain(silent).chain(send).min().unwrap_or_else(far)
    }

    fn give_up_if_silent(&mut self) -> anyhow::Result<()> {
        if self.under_way.is_empty() || self.heard.elapsed() < self.args.timeout {
            return Ok(());
        }
        let seconds = self.args.timeout.as_secs_f64();
        self.fail_all(&format!("nothing came for {seconds} s (--timeout)"))
    }
}

/// A moment that does not come.
fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 86_400)
}

#[derive(Clone, Debug, Default)]
struct Summary {
    equal: u64,
    equal_so_far: u64,
    different: u64,
    incomparable: u64,
    failed: u64,
    tokens: u64,
}

impl Summary {
    fn count(&mut self, verdict: &Verdict, tokens: usize) {
        *match verdict {
            Verdict::Equal => &mut self.equal,
            Verdict::EqualSoFar => &mut self.equal_so_far,
            Verdict::Different(_) => &mut self.different,
            Verdict::Incomparable(_) => &mut self.incomparable,
            Verdict::Failed(_) => &mut self.failed,
        } += 1;
        self.tokens += tokens as u64;
    }

    fn all_equal(&self) -> bool {
        self.different + self.failed == 0 && self.equal + self.equal_so_far > 0
    }

    fn tell(&self, as_json: bool, total: usize, seconds: f64) -> anyhow::Result<()> {
        let Self { equal, equal_so_far, different, incomparable, failed, tokens } = self;
        let text = if as_json {
            json!({
                "requests": total, "equal": equal, "equal_so_far": equal_so_far,
                "different": different, "incomparable": incomparable, "failed": failed,
                "tokens": tokens, "seconds": seconds, "all_equal": self.all_equal(),
            })
            .to_string()
        } else {
            let mut text = format!(
                "{total} requests: {equal} equal, {equal_so_far} equal as far as recorded, \
                 {different} different, {incomparable} incomparable, {failed} failed; {tokens} \
                 tokens in {seconds:.2} s"
            );
            if equal + equal_so_far + different + failed == 0 {
                text += "; nothing could be compared";
            }
            text
        };
        output::line(&text).map(drop)
    }
}
