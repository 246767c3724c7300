//! Submissions: what the host tells, the dispatches, and what it reads back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::buffers::Ready;
use super::kernels::{Kernel, PRODUCT_ROWS};
use super::program::Groups;
use super::{Failure, Gpu, VulkanDevice};
use crate::device::{Batch, DeviceError};

/// Marks a token that is still in a slot of the device.
pub const IN_SLOT: u32 = 1 << 31;

/// What one submission runs over.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// Its rows. A token with [`IN_SLOT`] is the one in that slot.
    pub batch: Batch<'a>,
    /// Where the token of each row taken goes.
    pub slots: &'a [u32],
    /// Of the rows taken, those whose logits the host wants.
    pub wanted: &'a [usize],
}

/// What came of one.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// For each row taken: the token of the largest logit, and how many are NaN.
    pub tokens: Vec<(u32, u32)>,
    /// The rows of logits that were wanted, one after another.
    pub logits: Vec<f32>,
    /// Time that the device took, by its own clock, where it has one and a row was taken.
    pub device_time: Option<Duration>,
}

/// Time stamps of a submission's beginning and end.
pub struct Timing {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    /// Nanoseconds of a tick.
    period: f32,
}

impl Timing {
    /// Nothing, where the adapter has no such clock.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] in the driver's words.
    pub fn new(gpu: &Gpu) -> Result<Option<Self>, DeviceError> {
        if !gpu.offer.timestamps {
            return Ok(None);
        }
        let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        let resolved = gpu.buffer("time stamps", TIME_BYTES, usage)?;
        let set = gpu.scoped("cannot take times", || {
            gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            })
        })?;
        Ok(Some(Self { set, resolved, period: gpu.queue.get_timestamp_period() }))
    }
}

/// Bytes of two time stamps.
const TIME_BYTES: u64 = 16;

/// A buffer that the host can map, large enough for what a submission tells.
struct ReadBack {
    buffer: wgpu::Buffer,
    bytes: u64,
}

struct InFlight {
    index: wgpu::SubmissionIndex,
    done: Arc<AtomicBool>,
    taken: usize,
    wanted: usize,
    read_back: Option<ReadBack>,
}

/// Submissions that are not read yet, and buffers for the next. There are as many buffers as
/// submissions were ever in flight at once, which the runner bounds.
#[derive(Default)]
pub struct Steps {
    in_flight: VecDeque<InFlight>,
    free: Vec<ReadBack>,
    words: Vec<u32>,
}

impl VulkanDevice {
    /// Submits; what comes of it is told by [`VulkanDevice::collect`], in order.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] in the driver's words.
    pub fn submit(&mut self, submission: &Submission<'_>) -> Result<(), DeviceError> {
        let Submission { batch, slots, wanted } = submission;
        let (rows, taken) = (batch.tokens.len(), batch.taken.len());
        assert!(rows <= self.tokens_max, "a submission has at most tokens_max rows");
        assert!(taken <= self.taken_max, "a submission takes at most taken_max rows");
        assert_eq!(taken, slots.len(), "every row taken has a slot");
        let read_back =
            if taken == 0 { None } else { Some(self.read_back(8 * taken, wanted.len())?) };
        self.tell(batch, slots);
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        {
            let timing = self.timing.as_ref();
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: None,
                timestamp_writes: timing.map(|timing| wgpu::ComputePassTimestampWrites {
                    query_set: &timing.set,
                    beginning_of_pass_write_index: Some(0),
                    end_of_pass_write_index: Some(1),
                }),
            });
            self.encode(&mut pass, &self.resident.body, rows as u32);
            if taken > 0 {
                self.encode(&mut pass, &self.resident.head, taken as u32);
            }
        }
        if let Some(ReadBack { buffer, .. }) = &read_back {
            if let Some(Timing { set, resolved, .. }) = &self.timing {
                encoder.resolve_query_set(set, 0..2, resolved, 0);
                encoder.copy_buffer_to_buffer(resolved, 0, buffer, 0, TIME_BYTES);
            }
            let told = &self.resident.told;
            encoder.copy_buffer_to_buffer(told, 0, buffer, TIME_BYTES, 8 * taken as u64);
            let row_bytes = 4 * self.vocab_size as u64;
            for (to, &from) in wanted.iter().enumerate() {
                encoder.copy_buffer_to_buffer(
                    &self.resident.logits,
                    from as u64 * row_bytes,
                    buffer,
                    logits_at(taken) + to as u64 * row_bytes,
                    row_bytes,
                );
            }
        }
        let index = self.gpu.queue.submit([encoder.finish()]);
        let done = Arc::new(AtomicBool::new(false));
        let is_done = Arc::clone(&done);
        match &read_back {
            Some(ReadBack { buffer, .. }) => {
                let failure: Failure = self.gpu.failure.clone();
                buffer.map_async(wgpu::MapMode::Read, .., move |mapped| {
                    if let Err(error) = mapped {
                        failure.set(format!("what was computed cannot be read: {error}"));
                    }
                    is_done.store(true, Ordering::Release);
                });
            }
            None => self.gpu.queue.on_submitted_work_done(move || {
                is_done.store(true, Ordering::Release);
            }),
        }
        let in_flight = InFlight { index, done, taken, wanted: wanted.len(), read_back };
        self.steps.in_flight.push_back(in_flight);
        self.gpu.failure.check()
    }

    /// What came of the oldest submission, if it is done within `wait`.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] if the device failed, or is lost.
    pub fn collect(&mut self, wait: Duration) -> Result<Option<Told>, DeviceError> {
        let Some(oldest) = self.steps.in_flight.front() else { return Ok(None) };
        let poll = if wait.is_zero() {
            wgpu::PollType::Poll
        } else {
            wgpu::PollType::Wait {
                submission_index: Some(oldest.index.clone()),
                timeout: Some(wait),
            }
        };
        match self.gpu.device.poll(poll) {
            Ok(_) | Err(wgpu::PollError::Timeout) => {}
            Err(error) => return Err(DeviceError::Vulkan(error.to_string())),
        }
        // A lost device may never call back: that is looked at first.
        self.gpu.failure.check()?;
        if !oldest.done.load(Ordering::Acquire) {
            return Ok(None);
        }
        let oldest = self.steps.in_flight.pop_front().expect("it was there");
        let Some(read_back) = oldest.read_back else { return Ok(Some(Told::default())) };
        let told = {
            let view = read_back.buffer.get_mapped_range(..);
            let view = view.map_err(|error| DeviceError::Vulkan(error.to_string()))?;
            let (times, rest) = view.split_at(TIME_BYTES as usize);
            let pairs: &[u32] = bytemuck::cast_slice(&rest[..8 * oldest.taken]);
            let from = logits_at(oldest.taken) as usize;
            let logits = &view[from..from + 4 * oldest.wanted * self.vocab_size];
            Told {
                tokens: pairs.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
                logits: bytemuck::cast_slice(logits).to_vec(),
                device_time: self.timing.as_ref().map(|timing| {
                    let ticks: &[u64] = bytemuck::cast_slice(times);
                    let ticks = ticks[1].saturating_sub(ticks[0]);
                    Duration::from_nanos((ticks as f64 * f64::from(timing.period)) as u64)
                }),
            }
        };
        read_back.buffer.unmap();
        self.steps.free.push(read_back);
        Ok(Some(told))
    }

    /// Submissions that are not collected.
    #[must_use]
    pub fn num_in_flight(&self) -> usize {
        self.steps.in_flight.len()
    }

    /// Buffers that the host reads and that wait to be used again.
    #[cfg(test)]
    pub(crate) fn num_free_read_backs(&self) -> usize {
        self.steps.free.len()
    }

    /// A buffer for `tokens` bytes and `rows` rows of logits: one that is free, or a new one.
    fn read_back(&mut self, tokens: usize, rows: usize) -> Result<ReadBack, DeviceError> {
        let bytes = logits_at(tokens / 8) + (4 * rows * self.vocab_size) as u64;
        let fits = self.steps.free.iter().position(|free| free.bytes >= bytes);
        if let Some(index) = fits {
            return Ok(self.steps.free.swap_remove(index));
        }
        // One that is too small goes, so that there are never more than were in flight.
        self.steps.free.pop();
        let bytes = bytes.next_power_of_two();
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        Ok(ReadBack { buffer: self.gpu.buffer("what the host reads", bytes, usage)?, bytes })
    }

    /// `[rows, taken, where the taken are, where the tables are]`, then four words for each row
    /// (token, position, start of its table, nothing), two for each taken (row, slot), the tables.
    fn tell(&mut self, batch: &Batch<'_>, slots: &[u32]) {
        let words = &mut self.steps.words;
        words.clear();
        let (rows, taken) = (batch.tokens.len(), batch.taken.len());
        let taken_at = 4 + 4 * rows;
        words.extend([rows, taken, taken_at, taken_at + 2 * taken].map(|word| word as u32));
        for sequence in batch.sequences {
            for row in 0..sequence.num_rows {
                words.extend([
                    batch.tokens[sequence.first_row + row],
                    (sequence.first_position + row) as u32,
                    sequence.blocks_start as u32,
                    0,
                ]);
            }
        }
        assert_eq!(words.len(), taken_at, "the sequences cover the rows");
        for (&row, &slot) in batch.taken.iter().zip(slots) {
            words.extend([row, slot]);
        }
        words.extend(batch.block_tables);
        self.gpu.queue.write_buffer(&self.resident.step, 0, bytemuck::cast_slice(words));
    }

    fn encode(&self, pass: &mut wgpu::ComputePass<'_>, dispatches: &[Ready], rows: u32) {
        for Ready { kernel, groups, bind_group } in dispatches {
            let mut kernel = *kernel;
            let (x, y) = match *groups {
                Groups::Product { x } => {
                    let most = PRODUCT_ROWS.into_iter().find(|most| rows <= *most);
                    let most = most.unwrap_or(PRODUCT_ROWS[PRODUCT_ROWS.len() - 1]);
                    if let Kernel::Product { rows, .. } = &mut kernel {
                        *rows = most;
                    }
                    (x, rows.div_ceil(most))
                }
                Groups::Rows { x } => (x, rows),
                Groups::EachRow => (rows, 1),
            };
            pass.set_pipeline(self.resident.pipelines.get(kernel));
            pass.set_bind_group(0, bind_group, &[]);
            pass.dispatch_workgroups(x, y, 1);
        }
    }
}

/// Where the rows of logits start in what the host reads: behind the times and the tokens.
fn logits_at(taken: usize) -> u64 {
    TIME_BYTES + (8 * taken as u64).next_multiple_of(16)
}
