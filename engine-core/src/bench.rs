//! Steps measured inside the engine: the runner alone, no scheduler and no sockets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pawl_shared::protocol::SamplingParams;

use crate::device::cpu::profile::Part;
use crate::runner::cpu::CpuRunner;
#[cfg(feature = "vulkan")]
use crate::runner::vulkan::VulkanRunner;
use crate::step::{
    BlockId, BlockTableUpdate, NewRequest, Progress, RequestKey, Runner, RunnerError,
    ScheduledRequest, StepPlan, StepResult,
};

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBench {
    /// Requests that decode together.
    pub batch: u32,
    /// Tokens of each before the first step that counts.
    pub context: u32,
    /// Decode steps that count.
    pub decode_steps: u32,
    /// Tokens of a prompt; 0 measures no prefill.
    pub prefill: u32,
    /// Prompts that count.
    pub prefill_rounds: u32,
}

impl Default for StepBench {
    fn default() -> Self {
        Self { batch: 1, context: 256, decode_steps: 64, prefill: 512, prefill_rounds: 5 }
    }
}

/// Medians: other work on the machine makes single steps late, not early.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFigures {
    /// A decode step of the whole batch.
    pub decode_step: Duration,
    /// The CPU time of all threads in it: this can be compared where other work takes the cores.
    pub decode_step_cpu: Duration,
    /// Tokens a second of the whole batch.
    pub decode_tokens_per_s: f64,
    /// One prompt.
    pub prefill: Duration,
    /// Its CPU time.
    pub prefill_cpu: Duration,
    /// Prompt tokens a second.
    pub prefill_tokens_per_s: f64,
}

/// Measures `runner` as it is loaded. Its cache must hold the batch.
///
/// # Errors
/// The runner's.
pub fn step(runner: &mut dyn Runner, bench: StepBench) -> Result<StepFigures, RunnerError> {
    let mut driver = Driver::new(runner);
    let (decode_step, decode_step_cpu) = driver.decode(bench, |_| ())?;
    let (prefill, prefill_cpu) = driver.prefill(bench)?;
    let per_s = |tokens: u32, time: Duration| {
        if time.is_zero() { 0.0 } else { f64::from(tokens) / time.as_secs_f64() }
    };
    Ok(StepFigures {
        decode_step,
        decode_step_cpu,
        decode_tokens_per_s: per_s(bench.batch, decode_step),
        prefill,
        prefill_cpu,
        prefill_tokens_per_s: per_s(bench.prefill, prefill),
    })
}

/// Where the time of a decode step goes, the longest part first; of steps of their own, since
/// looking costs a little.
///
/// # Errors
/// The runner's.
pub fn decode_profile(
    runner: &mut CpuRunner,
    bench: StepBench,
) -> Result<Vec<(Part, Duration)>, RunnerError> {
    Driver::new(runner).decode(bench, CpuRunner::start_profile)?;
    let parts = runner.take_profile().map(|profile| profile.parts()).unwrap_or_default();
    Ok(parts.into_iter().map(|(part, time)| (part, time / bench.decode_steps)).collect())
}

/// A decode step by the device's own clock, if it has one; of steps of their own.
///
/// # Errors
/// The runner's.
#[cfg(feature = "vulkan")]
pub fn decode_device_time(
    runner: &mut VulkanRunner,
    bench: StepBench,
) -> Result<Option<Duration>, RunnerError> {
    let forget = |runner: &mut VulkanRunner| {
        runner.take_device_time();
    };
    Driver::new(runner).decode(bench, forget)?;
    Ok(runner.take_device_time())
}

struct Driver<'a, R: Runner + ?Sized> {
    runner: &'a mut R,
    progress: Progress,
    step: u64,
    key: u64,
    sampling: Arc<SamplingParams>,
    result: StepResult,
}

impl<'a, R: Runner + ?Sized> Driver<'a, R> {
    fn new(runner: &'a mut R) -> Self {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let progress = Progress::default();
        let (sampling, result) = (Arc::new(sampling), StepResult::default());
        Self { runner, progress, step: 0, key: 0, sampling, result }
    }

    /// A request of `len` arbitrary tokens, whole, in blocks from `first_block` on that also hold
    /// `room` tokens more.
    fn prompt(&mut self, plan: &mut StepPlan, len: u32, room: u32, first_block: u32) -> RequestKey {
        let spec = self.runner.spec();
        self.key += 1;
        let key = RequestKey(self.key);
        let token = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(self.key as u32);
        let prompt: Vec<u32> = (0..len).map(|i| token(i) % spec.vocab_size).collect();
        let sampling = Arc::clone(&self.sampling);
        plan.new_requests.push(NewRequest { key, prompt: prompt.into(), sampling, seed: 0 });
        let blocks = (len + room).div_ceil(spec.block_size);
        let blocks = (first_block..first_block + blocks).map(BlockId).collect();
        plan.scheduled.push(ScheduledRequest {
            key,
            first_position: 0,
            num_tokens: len,
            blocks: BlockTableUpdate::Replace(blocks),
            samples: true,
        });
        key
    }

    /// Runs a step; its time on the wall and on the processors.
    fn execute(&mut self, mut plan: StepPlan) -> Result<(Duration, Duration), RunnerError> {
        self.step += 1;
        plan.step = self.step;
        let (started, cpu) = (Instant::now(), cpu_time());
        self.runner.execute(&plan, &self.progress, &mut self.result)?;
        Ok((started.elapsed(), cpu_time().saturating_sub(cpu)))
    }

    /// `begin` is called when the prompts are computed.
    fn decode(
        &mut self,
        bench: StepBench,
        begin: impl FnOnce(&mut R),
    ) -> Result<(Duration, Duration), RunnerError> {
        let block_size = self.runner.spec().block_size;
        let blocks = (bench.context + bench.decode_steps).div_ceil(block_size);
        let mut keys = Vec::new();
        for index in 0..bench.batch {
            let mut plan = StepPlan::default();
            let first_block = 1 + index * blocks;
            keys.push(self.prompt(&mut plan, bench.context, bench.decode_steps, first_block));
            self.execute(plan)?;
        }
        begin(self.runner);
        let mut times = Vec::new();
        for index in 0..bench.decode_steps {
            let one = |&key: &RequestKey| ScheduledRequest {
                key,
                first_position: bench.context + index,
                num_tokens: 1,
                blocks: BlockTableUpdate::Append(Vec::new()),
                samples: true,
            };
            let scheduled = keys.iter().map(one).collect();
            times.push(self.execute(StepPlan { scheduled, ..StepPlan::default() })?);
        }
        self.execute(StepPlan { finished: keys, ..StepPlan::default() })?;
        Ok(medians(times))
    }

    fn prefill(&mut self, bench: StepBench) -> Result<(Duration, Duration), RunnerError> {
        let mut times = Vec::new();
        let rounds = if bench.prefill == 0 { 0 } else { bench.prefill_rounds };
        for _ in 0..rounds {
            let mut plan = StepPlan::default();
            let key = self.prompt(&mut plan, bench.prefill, 0, 1);
            times.push(self.execute(plan)?);
            self.execute(StepPlan { finished: vec![key], ..StepPlan::default() })?;
        }
        Ok(medians(times))
    }
}

/// Each by itself.
fn medians(times: Vec<(Duration, Duration)>) -> (Duration, Duration) {
    let (wall, cpu) = times.into_iter().unzip();
    (median(wall), median(cpu))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// What all threads of this process have computed so far.
fn cpu_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID;
    nix::time::clock_gettime(clock).map(Duration::from).unwrap_or_default()
}
