//! When a process must stop: a signal, or the end of the process that started it.

use std::io::Read;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How long a process may take to stop once its supervisor is gone. After that it kills itself:
/// nothing may outlive its supervisor.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// A token that is cancelled by the first SIGTERM or SIGINT. The second one ends the process at
/// once, for people who do not want to wait for a drain.
///
/// # Errors
/// When the system refuses a signal handler.
///
/// # Panics
/// Outside a tokio runtime.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancel = token.clone();
    tokio::spawn(async move {
        for round in 0.. {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if round == 0 {
                tracing::info!("{name}: stopping");
                cancel.cancel();
            } else {
                tracing::warn!("{name} again: ending at once");
                kill_self();
            }
        }
    });
    Ok(token)
}

/// Cancels `token` when standard input ends: a supervisor holds its other end open for as long as
/// it lives, and the kernel closes it whatever the supervisor dies of. The watch is a thread, so
/// that it also works while a model loads.
///
/// # Errors
/// When the thread cannot be started.
pub fn on_supervisor_end(token: CancellationToken) -> std::io::Result<()> {
    std::thread::Builder::new().name("supervisor-watch".into()).spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = [0u8; 64];
        // Bytes mean nothing here; an error on the pipe is as good as its end.
        while matches!(stdin.read(&mut buffer), Ok(n) if n > 0) {}
        token.cancel();
        tracing::warn!("the supervisor is gone: stopping");
        std::thread::sleep(ORPHAN_GRACE);
        tracing::error!("still here {} s after the supervisor: ending", ORPHAN_GRACE.as_secs());
        kill_self();
    })?;
    Ok(())
}

fn kill_self() {
    // SIGKILL to oneself cannot fail in a way that could be answered.
    let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
}
