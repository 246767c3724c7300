//! When a process must stop: signals, or the end of the process that started it.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// How long a process may take to stop once its supervisor is gone. After that it kills itself:
/// nothing may outlive its supervisor.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// Signals within this time of one another are one wish. Whoever stops a whole group of processes
/// often reaches some of them twice, `timeout` for one.
const SAME_WISH: Duration = Duration::from_secs(1);

/// That a process is to stop, and whether what is under way may still finish. Clones are the same
/// shutdown.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    requested: CancellationToken,
    hurried: CancellationToken,
}

impl Shutdown {
    /// Asks for a stop. What was admitted may finish in the time that is configured for it.
    pub fn request(&self) {
        self.requested.cancel();
    }

    /// Asks for a stop now: what is under way is aborted, in good order.
    pub fn hurry(&self) {
        self.requested.cancel();
        self.hurried.cancel();
    }

    /// Waits until a stop is asked for.
    pub async fn requested(&self) {
        self.requested.cancelled().await;
    }

    /// Waits until there is no more time to finish anything.
    pub async fn hurried(&self) {
        self.hurried.cancelled().await;
    }

    /// Whether a stop is asked for.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.requested.is_cancelled()
    }
}

/// What the signals so far ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Stop,
    Hurry,
    Die,
}

/// Tells the wishes of people, who may press Ctrl-C again, from signals that only came twice.
#[derive(Debug, Default)]
struct Wishes {
    last: Option<(Wish, Instant)>,
}

impl Wishes {
    /// A signal has come; the wish, if it is a new one. With `at_once` there is nothing to wait
    /// for from the first on.
    fn note(&mut self, now: Instant, at_once: bool) -> Option<Wish> {
        let next = match self.last {
            None if at_once => Wish::Hurry,
            None => Wish::Stop,
            Some((Wish::Stop, _)) if at_once => Wish::Hurry,
            Some((_, since)) if now.duration_since(since) < SAME_WISH => return None,
            Some((Wish::Stop, _)) => Wish::Hurry,
            Some(_) => Wish::Die,
        };
        self.last = Some((next, now));
        Some(next)
    }
}

/// Listens for signals. The first SIGTERM or SIGINT requests a stop; one that comes at least a
/// second later hurries it, as SIGQUIT does at once; another one yet kills the process.
///
/// # Errors
/// When the system refuses a signal handler.
///
/// # Panics
/// Outside a tokio runtime.
pub fn on_signal() -> std::io::Result<Shutdown> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    let shutdown = Shutdown::default();
    let told = shutdown.clone();
    tokio::spawn(async move {
        let mut wishes = Wishes::default();
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
                _ = quit.recv() => "SIGQUIT",
            };
            match wishes.note(Instant::now(), name == "SIGQUIT") {
                None => {}
                Some(Wish::Stop) => {
                    tracing::info!("{name}: stopping");
                    told.request();
                }
                Some(Wish::Hurry) => {
                    tracing::warn!("{name}: stopping now, whatever is under way");
                    told.hurry();
                }
                Some(Wish::Die) => {
                    tracing::warn!("{name} once more: ending at once");
                    kill_self();
                }
            }
        }
    });
    Ok(shutdown)
}

/// The supervisor is gone, whatever it died of: hurries `shutdown`, and ends the process if it is
/// still there a while later. To be called on a thread of its own.
pub(crate) fn end_with_supervisor(shutdown: &Shutdown) {
    shutdown.hurry();
    tracing::warn!("the supervisor is gone: stopping");
    std::thread::sleep(ORPHAN_GRACE);
    tracing::error!("still here {} s after the supervisor: ending", ORPHAN_GRACE.as_secs());
    kill_self();
}

fn kill_self() {
    // SIGKILL to oneself cannot fail in a way that could be answered.
    let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Signals at so many milliseconds, SIGQUIT with a minus; the wishes that are new.
    fn check(signals: &[i64], wishes: &[Wish]) {
        let start = Instant::now();
        let mut state = Wishes::default();
        let told = signals
            .iter()
            .filter_map(|&at| state.note(start + Duration::from_millis(at.unsigned_abs()), at < 0));
        assert_eq!(told.collect::<Vec<_>>(), wishes, "{signals:?}");
    }

    #[test]
    fn signals_within_a_second_are_one_wish() {
        check(&[0, 1, 999], &[Wish::Stop]);
        check(&[0, 1000, 1001, 1999], &[Wish::Stop, Wish::Hurry]);
        check(&[0, 1, 1500, 2400, 2600], &[Wish::Stop, Wish::Hurry, Wish::Die]);
    }

    #[test]
    fn quit_hurries_at_once_and_only_once() {
        check(&[-1], &[Wish::Hurry]);
        check(&[0, -1, 2, -3], &[Wish::Stop, Wish::Hurry]);
        check(&[-1, 2], &[Wish::Hurry]);
    }
}
