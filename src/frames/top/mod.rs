//! `pawl frames top`: what a core is doing, now and again.
//!
//! All of it comes from `pawl_status`, which the engine answers between two steps. A core whose
//! engine does not answer is shown as such, with what was known last.

mod view;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use pawl_shared::clock::{Clock, Stamp, SystemClock};
use pawl_shared::transport::Address;
use serde_json::{Value as Json, json};

use super::client::{CoreClient, Incoming};
use super::{find, output};

/// How long an answer may take. The engine answers also while a step runs, however long that is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The terminal's own words: home and clear below; hide and show the cursor; no line breaks where
/// the window is too narrow.
const REDRAW: &str = "\x1b[H\x1b[J";
const BEGIN: &str = "\x1b[2J\x1b[?25l\x1b[?7l";
const END: &str = "\x1b[?25h\x1b[?7h";

#[derive(Debug, Args)]
pub struct TopArgs {
    /// The core's --listen address [default: the one core that runs here]
    core: Option<Address>,
    /// How often to look
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = super::seconds)]
    interval: Duration,
    /// Look once: two looks --interval apart, for the rates
    #[arg(long)]
    once: bool,
    /// Requests shown at most, the oldest first
    #[arg(long, value_name = "N", default_value_t = 20)]
    requests: u16,
    /// One JSON object a look
    #[arg(long)]
    json: bool,
    /// How long the core may take to let us in
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = super::seconds)]
    wait: Duration,
}

/// Shows until interrupted.
///
/// # Errors
/// No core; with `--once` also one that does not answer.
pub async fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let core = find::core(args.core.as_ref())?;
    let client = tokio::select! {
        client = CoreClient::join(&core, args.wait) => client?,
        () = shutdown.requested() => return Ok(ExitCode::SUCCESS),
    };
    let is_live = !args.once && !args.json && std::io::stdout().is_terminal();
    if is_live {
        output::write(BEGIN.as_bytes())?;
    }
    let mut top = Top { args, core, client, last: None, is_live };
    let outcome = tokio::select! {
        outcome = top.watch() => outcome,
        () = shutdown.requested() => Ok(()),
    };
    if is_live {
        output::write(END.as_bytes())?;
    }
    top.client.leave().await;
    outcome.map(|()| ExitCode::SUCCESS)
}

struct Top<'a> {
    args: &'a TopArgs,
    core: Address,
    client: CoreClient,
    /// The look before, and when its answer came.
    last: Option<(Stamp, Json)>,
    is_live: bool,
}

impl Top<'_> {
    async fn watch(&mut self) -> anyhow::Result<()> {
        if self.args.once {
            self.look().await?;
            tokio::time::sleep(self.args.interval).await;
            let snapshot = self.look().await?;
            return self.show(&snapshot, None).map(drop);
        }
        loop {
            let shown = match self.look().await {
                Ok(snapshot) => self.show(&snapshot, None)?,
                Err(error) => {
                    let known = self.last.as_ref().map_or(Json::Null, |(_, look)| look.clone());
                    let shown = self.show(&known, Some(&format!("{error:#}")))?;
                    self.wait_for_core().await;
                    shown
                }
            };
            if !shown {
                return Ok(());
            }
            self.idle(self.args.interval).await;
        }
    }

    /// One look, with the rates since the one before.
    async fn look(&mut self) -> anyhow::Result<Json> {
        let listed = vec![u64::from(self.args.requests).into()];
        let status = self.client.call("pawl_status", listed, ANSWER_TIMEOUT).await?;
        let mut status = status.to_json_value();
        let now = SystemClock.now();
        let rates =
            self.last.as_ref().and_then(|(then, before)| rates(before, &status, now.since(*then)));
        if let Some(map) = status.as_object_mut() {
            map.insert("rates".into(), rates.unwrap_or_default());
            map.insert("core".into(), self.core.to_string().into());
            map.insert("own_client".into(), self.client.client.into());
        }
        self.last = Some((now, status.clone()));
        Ok(status)
    }

    /// Lets time pass, and takes what comes meanwhile.
    async fn idle(&mut self, time: Duration) {
        let until = tokio::time::Instant::now() + time;
        while let Ok(incoming) = tokio::time::timeout_at(until, self.client.next()).await {
            if matches!(incoming, Ok(Incoming::Down(_))) {
                self.wait_for_core().await;
            }
        }
    }

    /// After a core is gone, nothing can be asked until there is one again.
    async fn wait_for_core(&mut self) {
        if self.client.is_up() {
            return;
        }
        self.last = None;
        while let Err(error) = self.client.joined().await {
            tracing::debug!("{error:#}");
        }
    }

    fn show(&self, snapshot: &Json, trouble: Option<&str>) -> anyhow::Result<bool> {
        if self.args.json {
            return output::line(&with_trouble(snapshot, trouble).to_string());
        }
        let size = self.is_live.then(terminal_size::terminal_size).flatten();
        let rows = size.map_or(usize::MAX, |(_, height)| usize::from(height.0));
        let columns = size.map_or(usize::MAX, |(width, _)| usize::from(width.0));
        let screen = view::screen(snapshot, trouble, rows, columns);
        let before = if self.is_live { REDRAW } else { "" };
        output::write(format!("{before}{screen}").as_bytes())
    }
}

/// The snapshot, which is null where nothing was ever heard, and what is wrong.
fn with_trouble(snapshot: &Json, trouble: Option<&str>) -> Json {
    let mut all = snapshot.as_object().cloned().unwrap_or_default();
    all.extend(trouble.map(|why| ("trouble".to_owned(), why.into())));
    all.into()
}

/// What happened between two looks, a second or a step.
fn rates(before: &Json, now: &Json, span: Duration) -> Option<Json> {
    let seconds = span.as_secs_f64();
    let grown = |key: &str| Some((now[key].as_f64()? - before[key].as_f64()?).max(0.0));
    let steps = grown("steps")?;
    let ms_a_step = |key: &str| {
        let spent = grown(key)?;
        Some(if steps > 0.0 { spent * 1e3 / steps } else { 0.0 })
    };
    let (schedule, execute, update) = (
        ms_a_step("schedule_seconds")?,
        ms_a_step("execute_seconds")?,
        ms_a_step("update_seconds")?,
    );
    Some(json!({
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        "tokens_sampled_per_second": grown("tokens_sampled")? / seconds,
        "tokens_scheduled_per_second": grown("tokens_scheduled")? / seconds,
        "step_ms": schedule + execute + update,
        "schedule_ms": schedule,
        "execute_ms": execute,
        "update_ms": update,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_told_whether_anything_was_heard_before_or_not() {
        assert_eq!(with_trouble(&json!({"steps": 1}), None), json!({"steps": 1}));
        let known = with_trouble(&json!({"steps": 1}), Some("it hangs"));
        assert_eq!(known, json!({"steps": 1, "trouble": "it hangs"}));
        assert_eq!(with_trouble(&Json::Null, Some("it hangs")), json!({"trouble": "it hangs"}));
    }

    #[test]
    fn rates_are_what_grew_by_time_and_by_step() {
        let look = |steps: u64, seconds: f64, tokens: u64| {
            json!({"steps": steps, "schedule_seconds": seconds, "execute_seconds": 2.0 * seconds,
                   "update_seconds": 0.0, "tokens_sampled": tokens, "tokens_scheduled": 3 * tokens})
        };
        let span = Duration::from_secs(2);
        let rates = super::rates(&look(10, 1.0, 100), &look(20, 1.5, 300), span).unwrap();
        assert_eq!(rates["steps_per_second"], 5.0);
        assert_eq!(rates["tokens_sampled_per_second"], 100.0);
        assert_eq!(rates["tokens_scheduled_per_second"], 300.0);
        assert_eq!(rates["schedule_ms"], 50.0);
        assert_eq!(rates["step_ms"], 150.0);
        let still = super::rates(&look(10, 1.0, 1), &look(10, 1.0, 1), span).unwrap();
        assert_eq!(still["step_ms"], 0.0);
        // Another build's core lacks something, or another core has come.
        assert_eq!(super::rates(&json!({}), &look(1, 1.0, 1), span), None);
        let fewer = super::rates(&look(10, 1.0, 9), &look(1, 0.0, 1), span).unwrap();
        assert_eq!(fewer["steps_per_second"], 0.0);
    }
}
