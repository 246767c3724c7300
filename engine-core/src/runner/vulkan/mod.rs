//! The runner of real models on a Vulkan device.
//!
//! A step is submitted in runs of as many rows as one submission takes, and collected later, so
//! that the host plans the next step while the device works. A greedy request's token stays on the
//! device: the next step reads it from its slot there, and the host learns it when it collects. For
//! any other request the row of logits comes to the host, and the sampler chooses, as on the CPU;
//! then the next step of that request waits for it.

mod config;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pawl_shared::model_card::GgufFile;

pub use config::VulkanConfig;

use super::cpu::{LoadError, LoadProgress};
use super::requests::{Requests, UNREAD};
use super::sampler::{self, Choice, Scratch};
use crate::device::cpu::{Isa, KvDtype, block_bytes};
use crate::device::vulkan::{
    Gpu, IN_SLOT, Programs, Submission, Told, VulkanDevice, VulkanDeviceConfig, choose, list,
};
use crate::device::{Batch, DeviceError, Sequence};
use crate::model;
use crate::step::{
    BlockTableUpdate, Progress, RequestKey, Runner, RunnerError, RunnerSpec, Sampled,
    ScheduledRequest, StepPlan, StepResult,
};

/// Requests whose tokens the device keeps. Further ones are sampled by the host, which is slower
/// and gives the same tokens. Slot 0 takes the tokens that nobody reads.
const SLOTS: usize = 4096;
/// How long the device is waited for before its state is looked at again: a lost device is noticed
/// in this time.
const WAIT: Duration = Duration::from_millis(100);

/// See the module.
pub struct VulkanRunner {
    device: VulkanDevice,
    spec: RunnerSpec,
    requests: Requests,
    slots: Slots,
    scratch: Scratch,
    rows: RowBuffers,
    begun: VecDeque<Begun>,
    /// Collected while another step waited for them.
    done: VecDeque<StepResult>,
    last_result: Instant,
    kv_bytes_per_position: u64,
    /// Time of the device since it was last asked for, and submissions that it is of.
    device_times: (Duration, u32),
}

/// Bytes that a decode step reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeReads {
    /// As weights and cache lie on the device.
    pub bytes: u64,
    /// If the weights lay as in the file.
    pub fewest: u64,
}

/// A step that is submitted.
struct Begun {
    step: u64,
    started: Instant,
    /// What each submission samples, in order.
    runs: VecDeque<Vec<Sampling>>,
    sampled: Vec<Sampled>,
}

#[derive(Clone, Copy, Debug)]
struct Sampling {
    key: RequestKey,
    /// The device's choice counts.
    on_device: bool,
}

/// The rows of one submission; kept for their capacity.
#[derive(Debug, Default)]
struct RowBuffers {
    tokens: Vec<u32>,
    sequences: Vec<Sequence>,
    block_tables: Vec<u32>,
    taken: Vec<u32>,
    slots: Vec<u32>,
    wanted: Vec<usize>,
    sampling: Vec<Sampling>,
}

/// Which request's token is in which slot.
#[derive(Debug)]
struct Slots {
    by_key: BTreeMap<RequestKey, u32>,
    free: Vec<u32>,
}

impl Slots {
    fn new() -> Self {
        Self { by_key: BTreeMap::new(), free: (1..SLOTS as u32).rev().collect() }
    }

    fn take(&mut self, key: RequestKey) -> Option<u32> {
        if let Some(slot) = self.by_key.get(&key) {
            return Some(*slot);
        }
        let slot = self.free.pop()?;
        self.by_key.insert(key, slot);
        Some(slot)
    }

    fn give_back(&mut self, key: RequestKey) {
        self.free.extend(self.by_key.remove(&key));
    }
}

impl VulkanRunner {
    /// Opens the adapter, compiles, packs, uploads and allocates. `progress` is bumped, and
    /// `loading` called, after each weight.
    ///
    /// # Errors
    /// [`LoadError`], naming the key, tensor, setting or adapter that will not do.
    pub fn load(
        file: &GgufFile,
        config: &VulkanConfig,
        progress: &Progress,
        loading: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let index = choose(&list(), config.adapter).map_err(DeviceError::Vulkan)?;
        let gpu = Gpu::open(index)?;
        progress.fetch_add(1, Ordering::Relaxed);
        tracing::info!(adapter = index, name = gpu.offer.name, "adapter opened");
        Self::load_on(gpu, file, config, progress, loading)
    }

    fn load_on(
        gpu: Gpu,
        file: &GgufFile,
        config: &VulkanConfig,
        progress: &Progress,
        loading: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let plan = model::plan(file)?;
        let sizes = config.sizes(&plan, &gpu.offer)?;
        let total_bytes = plan.weights.iter().map(|weight| weight.data.len() as u64).sum();
        let mut done_bytes = 0;
        let device_config = VulkanDeviceConfig {
            attention: plan.attention,
            rope: plan.rope,
            tensors: plan.tensors,
            block_size: sizes.block_size as usize,
            num_blocks: sizes.num_blocks as usize,
            max_model_len: sizes.max_model_len as usize,
            slots: SLOTS,
        };
        let programs = Programs { body: &plan.body, head: &plan.head, logits: plan.logits };
        let device =
            VulkanDevice::load(gpu, &device_config, programs, &plan.weights, &mut |bytes| {
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
            name = device.offer().name,
            driver = device.offer().driver,
            kind = %device.offer().kind,
            path = %device.path(),
            dispatches = device.num_dispatches(),
            pipelines = device.num_pipelines(),
            weight_bytes = device.weight_bytes(),
            kv_tokens = u64::from(sizes.num_blocks - 1) * u64::from(sizes.block_size),
            max_model_len = sizes.max_model_len,
            "model loaded on a Vulkan device"
        );
        Ok(Self {
            device,
            spec,
            requests: Requests::new(spec),
            slots: Slots::new(),
            scratch: Scratch::new(Isa::best(), vocab_size as usize),
            rows: RowBuffers::default(),
            begun: VecDeque::new(),
            done: VecDeque::new(),
            last_result: Instant::now(),
            device_times: (Duration::ZERO, 0),
            kv_bytes_per_position: block_bytes(&plan.attention, 1, KvDtype::F16) as u64,
        })
    }

    /// The device, to look at.
    #[must_use]
    pub fn device(&self) -> &VulkanDevice {
        &self.device
    }

    /// What a step of `batch` requests of `context` positions each reads, if each of them samples.
    #[must_use]
    pub fn decode_reads(&self, batch: u32, context: u32) -> DecodeReads {
        let kv = u64::from(batch) * u64::from(context) * self.kv_bytes_per_position;
        let products = self.device.products();
        DecodeReads { bytes: products.bytes + kv, fewest: products.file_bytes + kv }
    }

    /// The device's own time of a submission that samples, on the average since this was last
    /// asked; nothing where it has no clock.
    pub fn take_device_time(&mut self) -> Option<Duration> {
        let (sum, count) = std::mem::take(&mut self.device_times);
        (count > 0).then(|| sum / count)
    }

    /// Whether `plan` can be submitted only once the host knows the tokens of the steps before.
    fn waits_for_tokens(&self, plan: &StepPlan) -> bool {
        let by_host = |key| {
            let sampling = self.begun.iter().flat_map(|begun| begun.runs.iter().flatten());
            sampling.into_iter().any(|sampling| sampling.key == key && !sampling.on_device)
        };
        let again = |scheduled: &ScheduledRequest| {
            matches!(scheduled.blocks, BlockTableUpdate::Replace(_))
                && self.requests.knows(scheduled.key)
                && self.requests.get(scheduled.key).tokens.contains(&UNREAD)
        };
        plan.scheduled.iter().any(|scheduled| by_host(scheduled.key) || again(scheduled))
    }

    /// Collects all steps that were begun.
    fn drain(&mut self, progress: &Progress) -> Result<(), RunnerError> {
        while !self.begun.is_empty() {
            let mut result = StepResult::default();
            if self.collect_oldest(WAIT, progress, &mut result)? {
                self.done.push_back(result);
            }
        }
        Ok(())
    }

    /// Adds rows of `scheduled`, from its `done`-th token on, until one of the device's limits;
    /// returns how many.
    fn add_rows(&mut self, scheduled: &ScheduledRequest, done: usize) -> usize {
        let rows = &mut self.rows;
        let room = self.device.tokens_max() - rows.tokens.len();
        let count = room.min(scheduled.num_tokens as usize - done);
        let request = self.requests.get(scheduled.key);
        let first_position = scheduled.first_position as usize + done;
        let blocks = (first_position + count).div_ceil(self.spec.block_size as usize);
        let samples = scheduled.samples && done + count == scheduled.num_tokens as usize;
        let full = rows.block_tables.len() + blocks > self.device.tables_max()
            || samples && rows.taken.len() == self.device.taken_max();
        if full || count == 0 {
            return 0;
        }
        let first_row = rows.tokens.len();
        rows.sequences.push(Sequence {
            first_row,
            num_rows: count,
            first_position,
            blocks_start: rows.block_tables.len(),
        });
        rows.block_tables.extend(request.blocks[..blocks].iter().map(|block| block.0));
        let slot = self.slots.by_key.get(&scheduled.key).copied().unwrap_or(0);
        let known = |&token: &u32| if token == UNREAD { IN_SLOT | slot } else { token };
        rows.tokens
            .extend(request.tokens[first_position..first_position + count].iter().map(known));
        if samples {
            let slot = sampler::is_largest_logit(&request.sampling)
                .then(|| self.slots.take(scheduled.key))
                .flatten();
            if slot.is_none() {
                rows.wanted.push(rows.taken.len());
            }
            rows.taken.push((first_row + count - 1) as u32);
            rows.slots.push(slot.unwrap_or(0));
            rows.sampling.push(Sampling { key: scheduled.key, on_device: slot.is_some() });
        }
        count
    }

    /// Submits the rows added, if any.
    fn submit_rows(&mut self, begun: &mut Begun) -> Result<(), RunnerError> {
        let rows = &mut self.rows;
        if rows.tokens.is_empty() {
            return Ok(());
        }
        let batch = Batch {
            tokens: &rows.tokens,
            sequences: &rows.sequences,
            block_tables: &rows.block_tables,
            taken: &rows.taken,
        };
        let submission = Submission { batch, slots: &rows.slots, wanted: &rows.wanted };
        self.device.submit(&submission).map_err(|error| failed(begun.step, &error))?;
        begun.runs.push_back(std::mem::take(&mut rows.sampling));
        rows.clear();
        Ok(())
    }

    fn collect_oldest(
        &mut self,
        wait: Duration,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<bool, RunnerError> {
        let Some(begun) = self.begun.front_mut() else { return Ok(false) };
        while let Some(sampling) = begun.runs.front() {
            let told = self.device.collect(wait).map_err(|error| failed(begun.step, &error))?;
            let Some(told) = told else { return Ok(false) };
            progress.fetch_add(1, Ordering::Relaxed);
            let Told { tokens, mut logits, device_time } = told;
            self.device_times.0 += device_time.unwrap_or_default();
            self.device_times.1 += u32::from(device_time.is_some());
            let mut logits = logits.chunks_exact_mut(self.spec.vocab_size as usize);
            for (sampling, (token, nans)) in sampling.iter().zip(tokens) {
                let key = sampling.key;
                let row = if sampling.on_device { None } else { logits.next() };
                let sampled = match row {
                    Some(row) if self.requests.knows(key) => {
                        let request = self.requests.get(key);
                        let (params, history) = (&request.sampling, request.history());
                        let seed = request.seed;
                        let choice = sampler::sample(row, params, history, seed, &mut self.scratch);
                        self.requests.push_token(key, choice.token);
                        let Choice { token, logprobs, num_nans } = choice;
                        Sampled { key, token, logprobs, num_nans }
                    }
                    // Of a request that is gone, no one reads the token.
                    _ => {
                        self.requests.fill_in(key, token);
                        Sampled { key, token, logprobs: None, num_nans: nans }
                    }
                };
                begun.sampled.push(sampled);
            }
            begun.runs.pop_front();
        }
        let Begun { step, started, sampled, .. } =
            self.begun.pop_front().expect("it was looked at");
        let now = Instant::now();
        let execute = now - started.max(self.last_result);
        self.last_result = now;
        *result = StepResult { step, sampled, execute };
        Ok(true)
    }
}

fn failed(step: u64, error: &DeviceError) -> RunnerError {
    RunnerError::Device { step, reason: error.to_string() }
}

impl Runner for VulkanRunner {
    fn spec(&self) -> RunnerSpec {
        self.spec
    }

    fn execute(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<(), RunnerError> {
        self.submit(plan, progress, result)?;
        while !self.collect(WAIT, progress, result)? {}
        Ok(())
    }

    fn submit(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        _result: &mut StepResult,
    ) -> Result<bool, RunnerError> {
        if self.waits_for_tokens(plan) {
            self.drain(progress)?;
        }
        for &key in &plan.finished {
            self.slots.give_back(key);
        }
        self.requests.apply(plan)?;
        let mut begun = Begun {
            step: plan.step,
            started: Instant::now(),
            runs: VecDeque::new(),
            sampled: Vec::new(),
        };
        self.rows.clear();
        for scheduled in &plan.scheduled {
            let mut done = 0;
            while done < scheduled.num_tokens as usize {
                let added = self.add_rows(scheduled, done);
                done += added;
                if added == 0 {
                    self.submit_rows(&mut begun)?;
                }
            }
        }
        self.submit_rows(&mut begun)?;
        for sampling in begun.runs.iter().flatten().filter(|sampling| sampling.on_device) {
            self.requests.push_token(sampling.key, UNREAD);
        }
        progress.fetch_add(1, Ordering::Relaxed);
        self.begun.push_back(begun);
        Ok(false)
    }

    fn collect(
        &mut self,
        wait: Duration,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<bool, RunnerError> {
        match self.done.pop_front() {
            Some(done) => {
                *result = done;
                Ok(true)
            }
            None => self.collect_oldest(wait, progress, result),
        }
    }

    fn num_begun(&self) -> usize {
        self.begun.len() + self.done.len()
    }
}

impl RowBuffers {
    fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.block_tables.clear();
        self.taken.clear();
        self.slots.clear();
        self.wanted.clear();
        self.sampling.clear();
    }
}
