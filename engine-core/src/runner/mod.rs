//! Runners, and the thread one lives on.
//!
//! A runner executes steps one at a time, in order. Its thread loads the model first, tells the
//! engine what came of it, and then turns plans into results until the plans end. A failure or a
//! panic is a result like any other, so that the engine hears the cause and dies of it loudly.

pub mod cpu;
pub mod mock;
mod requests;
pub mod sampler;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(feature = "vulkan")]
pub mod vulkan;

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use crate::step::{Progress, Runner, RunnerSpec, StepPlan, StepResult};

/// A model on its device, and what frontends must know of it.
pub struct Loaded<C> {
    /// Runs the steps.
    pub runner: Box<dyn Runner>,
    /// What the core tells its frontends.
    pub card: C,
}

/// The runner thread's ends of its channels.
pub(crate) struct RunnerChannels<C> {
    /// One message: what came of loading.
    pub loaded: Sender<anyhow::Result<(RunnerSpec, C)>>,
    /// Plans, at most the batch queue's depth at a time.
    pub plans: Receiver<StepPlan>,
    /// One for each plan. Never full: its bound is the depth, and so many plans are in flight.
    pub results: Sender<anyhow::Result<StepResult>>,
    /// Results that have been read: their memory is used again, so that a step allocates none.
    pub spent: Receiver<StepResult>,
}

/// The life of the runner thread: load, tell, execute until the plans end or a step fails.
pub(crate) fn run<C>(
    load: impl FnOnce(&Progress) -> anyhow::Result<Loaded<C>>,
    channels: &RunnerChannels<C>,
    progress: &Progress,
) {
    let mut runner = match catch_panic("loading the model", || load(progress)) {
        Ok(Loaded { runner, card }) => {
            if channels.loaded.send(Ok((runner.spec(), card))).is_err() {
                return; // The core was stopped while the model loaded.
            }
            runner
        }
        Err(error) => {
            // An engine that is gone needs no cause.
            let _ = channels.loaded.send(Err(error));
            return;
        }
    };
    while let Some(result) = next_result(runner.as_mut(), channels, progress).transpose() {
        let failed = result.is_err();
        if failed {
            tracing::error!("the runner failed");
        }
        if channels.results.send(result).is_err() || failed {
            return;
        }
    }
}

/// How long a device is waited for before new plans are looked for: a plan that waits this long
/// still finds the device busy, and a result that does is not felt.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Begins steps as they are planned, until one is done; `None` when the plans have ended.
fn next_result<C>(
    runner: &mut dyn Runner,
    channels: &RunnerChannels<C>,
    progress: &Progress,
) -> anyhow::Result<Option<StepResult>> {
    catch_panic("running a step", || {
        let mut result = channels.spent.try_recv().unwrap_or_default();
        loop {
            let plan = if runner.num_begun() == 0 {
                let Ok(plan) = channels.plans.recv() else { return Ok(None) };
                Some(plan)
            } else {
                channels.plans.try_recv().ok()
            };
            let done = match plan {
                Some(plan) => runner.submit(&plan, progress, &mut result)?,
                None => runner.collect(LOOK_EVERY, progress, &mut result)?,
            };
            if done {
                return Ok(Some(result));
            }
        }
    })
}

/// Runs `work` and turns a panic into an error that names what was being done.
pub(crate) fn catch_panic<T>(
    doing: &str,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    // Whatever a panic leaves half done is dropped with the closure: nothing is used again.
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        Err(anyhow::anyhow!("panic while {doing}: {}", panic_text(payload.as_ref())))
    })
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no message)")
}
