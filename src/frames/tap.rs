//! `pawl frames tap` and `record`: messages as they pass, shown or kept.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use pawl_shared::clock::{Clock, Stamp, SystemClock};
use pawl_shared::transport::{Address, Tap, TapEvent};
use serde_json::json;

use super::wanted::{Kind, Seen, Wanted};
use super::{find, line, output, recording};
use crate::cli::Bytes;

/// A process that is there answers sooner.
const WAIT_TOLD_AFTER: Duration = Duration::from_secs(1);
const RATES_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct TapArgs {
    /// A core's --listen address, or the address a frontend serves its taps at (`pawl frames top`
    /// shows them) [default: the one core that runs here]
    address: Option<Address>,
    /// Stop after so many messages
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Give up when nobody has answered for so long [default: wait for somebody]
    #[arg(long, value_name = "SECONDS", value_parser = super::seconds)]
    timeout: Option<Duration>,
    /// Each second, how many messages of each kind passed and how large they were, instead of the
    /// messages
    #[arg(long)]
    rates: bool,
    /// One JSON object a message (or a second), with every field as it came
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    wanted: Wanted,
}

#[derive(Debug, Args)]
pub struct RecordArgs {
    /// A core's --listen address, or the address a frontend serves its taps at
    address: Address,
    /// The file, which must not exist
    file: PathBuf,
    /// Stop after so many messages
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Give up when nobody has answered for so long [default: wait for somebody]
    #[arg(long, value_name = "SECONDS", value_parser = super::seconds)]
    timeout: Option<Duration>,
    /// Stop after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = super::seconds)]
    seconds: Option<Duration>,
    /// Stop before the file grows beyond this
    #[arg(long, value_name = "BYTES", default_value = "1g")]
    max_bytes: Bytes,
    #[command(flatten)]
    wanted: Wanted,
}

/// Shows messages until interrupted.
///
/// # Errors
/// Sockets of ours that cannot be made, or output that cannot be written.
pub async fn tap(args: &TapArgs) -> anyhow::Result<ExitCode> {
    let address = find::core(args.address.as_ref())?;
    let mut show = |seen: &Seen| {
        if args.rates {
            return Ok(true);
        }
        let text = if args.json { line::json(seen).to_string() } else { line::text(seen) };
        output::line(&text)
    };
    let rates = |rates: &Rates, span| {
        if !args.rates {
            return Ok(true);
        }
        if args.json {
            return output::line(&rates.json(span).to_string());
        }
        output::write(rates.table(span).as_bytes())
    };
    let stop = Stop { count: args.count, after: None, timeout: args.timeout };
    watch(&address, &args.wanted, stop, &mut show, rates).await
}

/// Keeps messages until interrupted.
///
/// # Errors
/// As [`tap`], and a file that exists or cannot be written.
pub async fn record(args: &RecordArgs) -> anyhow::Result<ExitCode> {
    let at = || args.file.display().to_string();
    let mut file =
        recording::Writer::create(&args.file, &args.address.to_string()).with_context(at)?;
    let stop = Stop { count: args.count, after: args.seconds, timeout: args.timeout };
    let mut keep = |seen: &Seen| {
        // What a record takes besides its frames is far less than this.
        if file.bytes() + seen.bytes() + 1024 > args.max_bytes.0 {
            tracing::warn!("{} is full at --max-bytes {}: stopping", at(), args.max_bytes);
            return Ok(false);
        }
        file.write(&seen.record).with_context(at).map(|()| true)
    };
    watch(&args.address, &args.wanted, stop, &mut keep, |_, _| Ok(true)).await
}

struct Stop {
    count: Option<u64>,
    after: Option<Duration>,
    timeout: Option<Duration>,
}

/// Hands `each` wanted message on until one of them answers `false`, or until told to stop.
async fn watch(
    address: &Address,
    wanted: &Wanted,
    stop: Stop,
    each: &mut dyn FnMut(&Seen) -> anyhow::Result<bool>,
    each_second: impl Fn(&Rates, Duration) -> anyhow::Result<bool>,
) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let deadline = stop.after.map(|after| tokio::time::Instant::now() + after);
    let clock = SystemClock;
    let mut tap = Tap::start(address.clone()).await?;
    let mut total = Total::start(clock.now());
    let (mut rates, mut rates_since) = (Rates::default(), clock.now());
    let mut seconds = tokio::time::interval(RATES_EVERY);
    seconds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    seconds.tick().await;
    let mut wait = Wait::begin(stop.timeout);
    while stop.count.is_none_or(|count| total.seen < count) {
        let event = tokio::select! {
            () = shutdown.requested() => break,
            () = tokio::time::sleep_until(deadline.unwrap_or_else(far)), if deadline.is_some() => {
                break;
            }
            outcome = wait.goes_on(address) => {
                outcome?;
                continue;
            }
            _ = seconds.tick() => {
                let now = clock.now();
                if !each_second(&rates, now.since(rates_since))? {
                    break;
                }
                (rates, rates_since) = (Rates::default(), now);
                continue;
            }
            event = tap.next() => event,
        };
        let record = match event {
            TapEvent::Record(record) => record?,
            TapEvent::Up => {
                tracing::info!("tapping {address}");
                wait.over = true;
                total.joined();
                continue;
            }
            TapEvent::Down { reason } => {
                tracing::warn!("not tapping {address}: {reason}");
                wait = Wait::begin(stop.timeout);
                wait.refusal = Some(reason);
                continue;
            }
        };
        let missed = total.note_missed(record.missed);
        if missed > 0 {
            tracing::warn!("this tap is too slow: {missed} messages missed");
        }
        let mut seen = Seen::new(record);
        if !wanted.takes(&mut seen) {
            continue;
        }
        rates.add(&seen);
        if !each(&seen)? {
            break;
        }
        total.add(&seen);
    }
    tap.close().await;
    tracing::info!("{}", total.text(clock.now()));
    Ok(ExitCode::SUCCESS)
}

/// A moment that does not come.
fn far() -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_secs(365 * 86_400)
}

/// The wait for somebody who answers.
struct Wait {
    since: tokio::time::Instant,
    timeout: Option<Duration>,
    told: bool,
    over: bool,
    /// What the process said that does not let this tap in, or is gone.
    refusal: Option<String>,
}

impl Wait {
    fn begin(timeout: Option<Duration>) -> Self {
        let since = tokio::time::Instant::now();
        Self { since, timeout, told: false, over: false, refusal: None }
    }

    /// Returns when there is something to say of it: once that it goes on, then that it took too
    /// long. Cancel-safe.
    async fn goes_on(&mut self, address: &Address) -> anyhow::Result<()> {
        let next = match (self.over, self.told, self.timeout) {
            (true, ..) | (false, true, None) => return std::future::pending().await,
            (false, false, None) => WAIT_TOLD_AFTER,
            (false, false, Some(timeout)) => timeout.min(WAIT_TOLD_AFTER),
            (false, true, Some(timeout)) => timeout,
        };
        tokio::time::sleep_until(self.since + next).await;
        if self.timeout.is_some_and(|timeout| timeout <= next) {
            match &self.refusal {
                None => anyhow::bail!("nobody answers at {address} within --timeout {next:?}"),
                Some(why) => {
                    anyhow::bail!("not let in at {address} within --timeout {next:?}: {why}")
                }
            }
        }
        self.told = true;
        match &self.refusal {
            None => tracing::warn!("nobody at {address} yet: waiting for somebody"),
            Some(why) => tracing::warn!("not let in at {address} yet ({why}): trying again"),
        }
        Ok(())
    }
}

/// What has been seen from the start.
struct Total {
    began: Stamp,
    seen: u64,
    bytes: u64,
    missed: u64,
    /// As told in the link that stands.
    missed_here: u64,
    /// Links so far. What passed between two of them was missed, and nobody has counted it.
    links: u64,
}

impl Total {
    fn start(now: Stamp) -> Self {
        Self { began: now, seen: 0, bytes: 0, missed: 0, missed_here: 0, links: 0 }
    }

    /// A new link counts anew.
    fn joined(&mut self) {
        self.links += 1;
        self.missed_here = 0;
    }

    /// How many messages went missing since the last one.
    fn note_missed(&mut self, told: u64) -> u64 {
        let missed = told.saturating_sub(self.missed_here);
        self.missed_here = told;
        self.missed += missed;
        missed
    }

    fn add(&mut self, seen: &Seen) {
        self.seen += 1;
        self.bytes += seen.bytes();
    }

    fn text(&self, now: Stamp) -> String {
        let seconds = now.since(self.began).as_secs_f64();
        let Self { seen, bytes, missed, .. } = self;
        let gaps = match self.links {
            0 | 1 => String::new(),
            2 => ", and whatever passed while not connected, once".into(),
            links => format!(", and whatever passed while not connected, {} times", links - 1),
        };
        format!("{seen} messages of {bytes} bytes in {seconds:.1} s; {missed} missed{gaps}")
    }
}

/// Messages of one second, by kind.
#[derive(Default)]
struct Rates(BTreeMap<Kind, Rate>);

#[derive(Clone, Copy, Default)]
struct Rate {
    messages: u64,
    bytes: u64,
    largest: u64,
}

impl Rates {
    fn add(&mut self, seen: &Seen) {
        let rate = self.0.entry(seen.kind()).or_default();
        let bytes = seen.bytes();
        rate.messages += 1;
        rate.bytes += bytes;
        rate.largest = rate.largest.max(bytes);
    }

    fn table(&self, span: Duration) -> String {
        let mut text = format!(
            "{:<8} {:>12} {:>14} {:>10} {:>10}\n",
            "kind", "messages/s", "bytes/s", "mean B", "largest B"
        );
        let span = span.as_secs_f64().max(1e-9);
        for (kind, rate) in &self.0 {
            text += &format!(
                "{:<8} {:>12.1} {:>14.0} {:>10.0} {:>10}\n",
                kind.name(),
                rate.messages as f64 / span,
                rate.bytes as f64 / span,
                rate.bytes as f64 / rate.messages as f64,
                rate.largest
            );
        }
        text
    }

    fn json(&self, span: Duration) -> serde_json::Value {
        let kinds: serde_json::Map<_, _> = self
            .0
            .iter()
            .map(|(kind, Rate { messages, bytes, largest })| {
                let rate = json!({"messages": messages, "bytes": bytes, "largest": largest});
                (kind.name().to_owned(), rate)
            })
            .collect();
        json!({"seconds": span.as_secs_f64(), "kinds": kinds})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missed_is_told_once_and_counted_over_links() {
        let mut total = Total::start(Stamp::from_nanos(1));
        assert_eq!([0, 0, 4, 4, 9].map(|told| total.note_missed(told)), [0, 0, 4, 0, 5]);
        total.joined();
        assert_eq!([0, 2].map(|told| total.note_missed(told)), [0, 2]);
        assert_eq!(total.missed, 11);
        let now = Stamp::from_nanos(1);
        assert_eq!(total.text(now), "0 messages of 0 bytes in 0.0 s; 11 missed");
        total.joined();
        let end = "; 11 missed, and whatever passed while not connected, once";
        assert!(total.text(now).ends_with(end), "{}", total.text(now));
    }
}
