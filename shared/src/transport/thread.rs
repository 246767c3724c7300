//! Threads with a runtime of their own.
//!
//! The socket crate spawns tasks that nobody can end, and they hold memory and descriptors for as
//! long as a peer does not read. Dropping the runtime ends them.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

use super::TransportError;

/// What the owner of a thread wants of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Go on.
    Run,
    /// Send what waits, at most this long, then end.
    Finish(Duration),
    /// End at once.
    Stop,
}

/// The thread's view of its owner's wish.
pub(super) struct Wishes(watch::Receiver<Wish>);

impl Wishes {
    /// Waits until the owner wants something else than running. A vanished owner wants an end.
    pub(super) async fn changed(&mut self) -> Wish {
        match self.0.wait_for(|wish| *wish != Wish::Run).await {
            Ok(wish) => *wish,
            Err(_) => Wish::Stop,
        }
    }

    /// Waits for a wish that is still news to one who may be `finishing` already.
    pub(super) async fn next(&mut self, finishing: bool) -> Wish {
        if finishing {
            self.stopped().await;
            Wish::Stop
        } else {
            self.changed().await
        }
    }

    /// Waits for [`Wish::Stop`].
    pub(super) async fn stopped(&mut self) {
        let _ = self.0.wait_for(|wish| *wish == Wish::Stop).await;
    }
}

/// The owner's handle. Dropping it stops the thread, without waiting for it.
pub(super) struct Thread {
    wish: watch::Sender<Wish>,
    handle: Option<std::thread::JoinHandle<()>>,
}

impl Thread {
    /// Starts `body` on a thread called `name` (at most 15 bytes are seen by the system).
    pub(super) fn start(
        name: &str,
        body: impl FnOnce(Wishes) + Send + 'static,
    ) -> Result<Self, TransportError> {
        let (wish, wishes) = watch::channel(Wish::Run);
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(Wishes(wishes)))
            .map_err(TransportError::Thread)?;
        Ok(Self { wish, handle: Some(handle) })
    }

    /// Asks the thread to send what waits and end.
    pub(super) fn finish(&self, linger: Duration) {
        let _ = self.wish.send(Wish::Finish(linger));
    }

    /// Stops the thread and waits for its end.
    pub(super) fn stop_and_join(mut self) {
        let _ = self.wish.send(Wish::Stop);
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }

    /// Waits until the thread has ended by itself, at most until `deadline`; then stops it.
    pub(super) async fn ended(mut self, deadline: tokio::time::Instant) {
        while self.handle.as_ref().is_some_and(|handle| !handle.is_finished()) {
            if tokio::time::Instant::now() >= deadline {
                let _ = self.wish.send(Wish::Stop);
                break;
            }
            // A thread's end cannot be awaited; this is asked only while closing.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if let Some(handle) = self.handle.take() {
            let _ = tokio::task::spawn_blocking(move || handle.join()).await;
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let _ = self.wish.send(Wish::Stop);
    }
}

/// A fresh runtime for one set of sockets.
pub(super) fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Waits until the crate's writer tasks have written what they hold. Call it after dropping the
/// sockets: the writers end once their queues are empty, and are all that runs here.
pub(super) async fn writers_done(linger: Duration) {
    let flushed = async {
        while Handle::current().metrics().num_alive_tasks() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let _ = tokio::time::timeout(linger, flushed).await;
}

/// Runs `body` to its end on `runtime`, then ends whatever the crate left running.
pub(super) fn run_on(runtime: Runtime, body: impl Future<Output = ()>) {
    runtime.block_on(body);
    // Ends the crate's tasks. Its blocking jobs (removing a file) are not waited for.
    runtime.shutdown_background();
}
