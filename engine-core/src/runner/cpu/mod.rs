//! The runner of real models on the CPU: a model's programs, the requests' tokens and block tables,
//! and the sampler.
//!
//! A step is run in runs of at most as many rows as the device takes, cut without regard to
//! requests: what a row computes depends neither on the rows beside it nor on where a prompt was
//! cut, so cutting changes no bit.

pub(in crate::runner) mod config;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod weights_tests;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pawl_shared::model_card::GgufFile;

pub use config::{CpuConfig, KvCacheDtype, LoadError};

use super::requests::Requests;
use super::sampler::{self, Choice, Scratch};
use crate::device::cpu::profile::Profile;
use crate::device::cpu::{CpuDevice, CpuDeviceConfig, Isa};
use crate::device::{Batch, Device, Program, Sequence, TensorId};
use crate::model;
use crate::step::{
    Progress, Runner, RunnerError, RunnerSpec, Sampled, ScheduledRequest, StepPlan, StepResult,
};

/// How far loading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights packed.
    pub done_bytes: u64,
    /// Bytes of weights in the file.
    pub total_bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub struct CpuRunner {
    device: CpuDevice,
    body: Program,
    head: Program,
    logits: TensorId,
    spec: RunnerSpec,
    requests: Requests,
    /// One for each thread.
    samplers: Vec<Mutex<ThreadSampler>>,
    rows: RowBuffers,
}

/// What a thread samples with, and what it has sampled in this run.
#[derive(Debug)]
struct ThreadSampler {
    scratch: Scratch,
    /// With the row in its group.
    choices: Vec<(usize, Choice)>,
}

/// The rows of one run; kept for their capacity, which is that of the largest run from the start: a
/// step allocates nothing.
#[derive(Debug)]
struct RowBuffers {
    tokens: Vec<u32>,
    sequences: Vec<Sequence>,
    block_tables: Vec<u32>,
    /// Rows that sample, and the index of their request in the plan.
    sampling: Vec<(u32, usize)>,
    taken: Vec<u32>,
    /// Of the rows taken.
    choices: Vec<Option<Choice>>,
}

impl CpuRunner {
    /// Reads, packs and allocates. `progress` is bumped, and `loading` called, after each weight.
    ///
    /// # Errors
    /// [`LoadError`], naming the key, tensor or setting that will not do.
    pub fn load(
        file: &GgufFile,
        config: &CpuConfig,
        progress: &Progress,
        loading: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let plan = model::plan(file)?;
        let isa = Isa::choose(config.isa.as_deref())?;
        let threads = config.threads();
        let sizes = config.sizes(&plan.hyper, &plan.attention)?;
        let total_bytes = plan.weights.iter().map(|weight| weight.data.len() as u64).sum();
        let mut done_bytes = 0;
        let device_config = CpuDeviceConfig {
            threads,
            isa,
            attention: plan.attention,
            rope: plan.rope,
            tensors: plan.tensors,
            kv_dtype: sizes.kv_dtype,
            block_size: sizes.block_size as usize,
            num_blocks: sizes.num_blocks as usize,
        };
        let device = CpuDevice::load(device_config, &plan.weights, &mut |bytes| {
            done_bytes += bytes;
            progress.fetch_add(1, Ordering::Relaxed);
            loading(LoadProgress { done_bytes, total_bytes });
        })?;
        let vocab_size = u32::try_from(plan.hyper.vocab_size)
            .map_err(|_| LoadError::Setting("the vocabulary does not fit in 32 bits".to_owned()))?;
        let spec = RunnerSpec {
            vocab_size,
            max_model_len: sizes.max_model_len,
            num_blocks: sizes.num_blocks,
            block_size: sizes.block_size,
            overlaps: true,
            dtype: "float32",
        };
        tracing::info!(
            isa = isa.as_str(),
            threads,
            weight_bytes = total_bytes,
            kv_tokens = u64::from(sizes.num_blocks - 1) * u64::from(sizes.block_size),
            max_model_len = sizes.max_model_len,
            "model loaded"
        );
        let sampler = |_| {
            Mutex::new(ThreadSampler {
                scratch: Scratch::new(isa, plan.hyper.vocab_size),
                choices: Vec::with_capacity(device.taken_max()),
            })
        };
        Ok(Self {
            samplers: (0..device.num_threads()).map(sampler).collect(),
            rows: RowBuffers::for_runs(&device, spec),
            device,
            body: plan.body,
            head: plan.head,
            logits: plan.logits,
            spec,
            requests: Requests::new(spec),
        })
    }

    /// The kernels that run.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.device.isa()
    }

    /// Threads that compute.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.device.num_threads()
    }

    /// From now on measures where the time of steps goes.
    pub fn start_profile(&mut self) {
        self.device.start_profile();
    }

    /// Ends what [`CpuRunner::start_profile`] began.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.device.take_profile()
    }

    /// Bytes that a step of `batch` requests of `context` positions each must read, if each of them
    /// samples: the weights, which they share, and their keys and values.
    #[must_use]
    pub fn bytes_of_decode(&self, batch: u32, context: u32) -> u64 {
        let weights = self.device.matrix_bytes(&self.body) + self.device.matrix_bytes(&self.head);
        let kv = u64::from(batch) * u64::from(context);
        weights as u64 + kv * self.device.kv_bytes_per_position() as u64
    }

    /// Runs the rows collected, and samples where rows ask for it.
    fn run_rows(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        sampled: &mut Vec<Sampled>,
    ) -> Result<(), RunnerError> {
        let device_failed = |error: crate::device::DeviceError| RunnerError::Device {
            step: plan.step,
            reason: error.to_string(),
        };
        let rows = &mut self.rows;
        let batch = Batch {
            tokens: &rows.tokens,
            sequences: &rows.sequences,
            block_tables: &rows.block_tables,
            taken: &[],
        };
        self.device.run(&self.body, &batch, progress).map_err(device_failed)?;
        for group in rows.sampling.chunks(self.device.taken_max()) {
            rows.taken.clear();
            rows.taken.extend(group.iter().map(|&(row, _)| row));
            let batch = Batch { taken: &rows.taken, ..batch };
            self.device.run(&self.head, &batch, progress).map_err(device_failed)?;
            let (requests, samplers) = (&self.requests, &self.samplers);
            self.device.for_each_row(self.logits, group.len(), &|thread, row, logits| {
                let request = requests.get(plan.scheduled[group[row].1].key);
                let mut own = samplers[thread].lock().unwrap_or_else(PoisonError::into_inner);
                let (params, history) = (&request.sampling, request.history());
                let ThreadSampler { scratch, choices } = &mut *own;
                let choice = sampler::sample(logits, params, history, request.seed, scratch);
                choices.push((row, choice));
            });
            rows.choices.resize(group.len(), None);
            for sampler in &mut self.samplers {
                let sampler = sampler.get_mut().unwrap_or_else(PoisonError::into_inner);
                for (row, choice) in sampler.choices.drain(..) {
                    rows.choices[row] = Some(choice);
                }
            }
            for (choice, &(_, index)) in rows.choices.drain(..).zip(group) {
                let choice = choice.expect("every row of the group was sampled");
                let key = plan.scheduled[index].key;
                self.requests.push_token(key, choice.token);
                let Choice { token, logprobs, num_nans } = choice;
                sampled.push(Sampled { key, token, logprobs, num_nans });
            }
        }
        progress.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Adds rows of `scheduled`, from its `done`-th token on, until the device's limit.
    fn collect(&mut self, scheduled: &ScheduledRequest, index: usize, done: usize) -> usize {
        let rows = &mut self.rows;
        let room = self.device.tokens_max() - rows.tokens.len();
        let count = room.min(scheduled.num_tokens as usize - done);
        let request = self.requests.get(scheduled.key);
        let first_position = scheduled.first_position as usize + done;
        let first_row = rows.tokens.len();
        rows.sequences.push(Sequence {
            first_row,
            num_rows: count,
            first_position,
            blocks_start: rows.block_tables.len(),
        });
        let blocks = (first_position + count).div_ceil(self.spec.block_size as usize);
        rows.block_tables.extend(request.blocks[..blocks].iter().map(|block| block.0));
        rows.tokens.extend(&request.tokens[first_position..first_position + count]);
        if scheduled.samples && done + count == scheduled.num_tokens as usize {
            rows.sampling.push(((first_row + count - 1) as u32, index));
        }
        count
    }
}

impl Runner for CpuRunner {
    fn spec(&self) -> RunnerSpec {
        self.spec
    }

    fn execute(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<(), RunnerError> {
        let started = Instant::now();
        self.requests.apply(plan)?;
        let sampled = &mut result.sampled;
        sampled.clear();
        self.rows.clear();
        for (index, scheduled) in plan.scheduled.iter().enumerate() {
            let mut done = 0;
            while done < scheduled.num_tokens as usize {
                done += self.collect(scheduled, index, done);
                if self.rows.tokens.len() == self.device.tokens_max() {
                    self.run_rows(plan, progress, sampled)?;
                    self.rows.clear();
                }
            }
        }
        if !self.rows.tokens.is_empty() {
            self.run_rows(plan, progress, sampled)?;
        }
        (result.step, result.execute) = (plan.step, started.elapsed());
        Ok(())
    }
}

impl RowBuffers {
    fn for_runs(device: &CpuDevice, spec: RunnerSpec) -> Self {
        let (tokens, taken) = (device.tokens_max(), device.taken_max());
        let blocks_of_a_row = spec.max_model_len.div_ceil(spec.block_size) as usize;
        Self {
            tokens: Vec::with_capacity(tokens),
            sequences: Vec::with_capacity(tokens),
            block_tables: Vec::with_capacity(tokens * blocks_of_a_row),
            sampling: Vec::with_capacity(tokens),
            taken: Vec::with_capacity(taken),
            choices: Vec::with_capacity(taken),
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.block_tables.clear();
        self.sampling.clear();
    }
}
