//! The engine thread: turns of [`Engine`] over channels, blocked whenever there is nothing to do.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use crossbeam_channel::{Receiver, Select, Sender};
use pawl_shared::clock::Clock;
use tokio::sync::Notify;

use super::{Batch, Engine, Inbox};
use crate::step::{StepPlan, StepResult};

/// The engine thread's ends of its channels.
pub(crate) struct EngineChannels {
    /// From the io thread.
    pub inbox: Receiver<Inbox>,
    /// Told after messages were taken: the io thread may be holding one for which there was no
    /// room.
    pub inbox_space: Arc<Notify>,
    /// To the runner. Bounded by the depth, and no more steps than that are ever in flight, so it
    /// is never full.
    pub plans: Sender<StepPlan>,
    /// From the runner.
    pub results: Receiver<anyhow::Result<StepResult>>,
    /// To the runner, results that have been read. What finds no room is dropped.
    pub spent: Sender<StepResult>,
    /// To the io thread. When it is full the engine waits: the io thread only encodes and queues,
    /// so it is never behind for long.
    pub out: tokio::sync::mpsc::Sender<Batch>,
}

/// What ended the wait.
enum Woken {
    Message(Inbox),
    Result(anyhow::Result<StepResult>),
    Deadline,
}

/// Runs the engine until it has shut down.
///
/// # Errors
/// The runner failed, or another thread is gone: the core must end, and says why.
pub(crate) fn run(
    engine: &mut Engine,
    channels: &EngineChannels,
    clock: &dyn Clock,
) -> anyhow::Result<()> {
    loop {
        turn(engine, channels)?;
        if engine.is_stopped() {
            return Ok(());
        }
        match wait(engine, channels, clock)? {
            Woken::Message(message) => engine.handle(message),
            Woken::Result(result) => collect(engine, channels, result?)?,
            Woken::Deadline => {}
        }
    }
}

/// All that can be done before the next wait.
pub(crate) fn turn(engine: &mut Engine, channels: &EngineChannels) -> anyhow::Result<()> {
    drain_inbox(engine, channels);
    // Filling goes before collecting: the device must not wait for the host.
    while let Some(plan) = engine.next_plan() {
        channels.plans.send(plan).map_err(|_| why_the_runner_is_gone(channels))?;
    }
    engine.settle();
    flush(engine, channels)
}

/// Takes what the oldest step in flight has come to.
pub(crate) fn collect(
    engine: &mut Engine,
    channels: &EngineChannels,
    result: StepResult,
) -> anyhow::Result<()> {
    // An abort that has arrived while the step ran must keep its tokens from going out.
    drain_inbox(engine, channels);
    engine.complete(&result)?;
    // A runner that is gone needs no memory.
    let _ = channels.spent.try_send(result);
    flush(engine, channels)
}

/// Takes what has arrived. What arrives meanwhile is for the next turn, so that a flood of
/// messages cannot hold up the steps.
fn drain_inbox(engine: &mut Engine, channels: &EngineChannels) {
    for message in channels.inbox.try_iter().take(channels.inbox.len()) {
        engine.handle(message);
    }
    channels.inbox_space.notify_one();
}

/// A runner that fails says so in its last result, and then takes no more plans.
fn why_the_runner_is_gone(channels: &EngineChannels) -> anyhow::Error {
    let cause = channels.results.iter().find_map(Result::err);
    cause.unwrap_or_else(|| anyhow::anyhow!("the runner thread is gone"))
}

fn flush(engine: &mut Engine, channels: &EngineChannels) -> anyhow::Result<()> {
    let batch = engine.take_batch();
    if batch.is_empty() {
        return Ok(());
    }
    channels.out.blocking_send(batch).ok().context("the io thread is gone")
}

fn wait(engine: &Engine, channels: &EngineChannels, clock: &dyn Clock) -> anyhow::Result<Woken> {
    let mut select = Select::new();
    let inbox = select.recv(&channels.inbox);
    if engine.num_in_flight() > 0 {
        select.recv(&channels.results);
    }
    let ready = match engine.deadline() {
        None => select.select(),
        Some(deadline) => {
            let left = deadline.since(clock.now()).max(Duration::from_millis(1));
            match select.select_timeout(left) {
                Ok(ready) => ready,
                Err(_) => return Ok(Woken::Deadline),
            }
        }
    };
    if ready.index() == inbox {
        let message = ready.recv(&channels.inbox).ok().context("the io thread is gone")?;
        return Ok(Woken::Message(message));
    }
    let result = ready.recv(&channels.results).ok().context("the runner thread is gone")?;
    Ok(Woken::Result(result))
}
