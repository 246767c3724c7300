//! What the scheduler asks of a runner in one step, and what the runner answers.
//!
//! These types are the whole seam between the two: the scheduler speaks of keys, token counts and
//! block ids; the runner owns token values, logits and device memory. The runner keeps each
//! request's tokens (prompt and sampled), so a step may be planned before the token it will read
//! has been sampled: that is what lets two steps be in flight.

use std::sync::Arc;
use std::time::Duration;

use pawl_shared::protocol::SamplingParams;

/// A request inside one core: never reused, cheap, ordered by arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey(pub u64);

/// A block of the paged KV cache. Block 0 is never handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// A request the runner has not seen before.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Its key.
    pub key: RequestKey,
    /// Prompt token ids.
    pub prompt: Arc<[u32]>,
    /// How to sample. `seed` is always set by the core, so that a request replays after preemption.
    pub sampling: Arc<SamplingParams>,
    /// Seeds the counter-based generator together with a token's position.
    pub seed: u64,
}

/// How a request's block table changes before it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockTableUpdate {
    /// These blocks follow those it has.
    Append(Vec<BlockId>),
    /// First schedule, or again after preemption: this is the whole table.
    Replace(Vec<BlockId>),
}

/// One request's part of a step: tokens `[first_position, first_position + num_tokens)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledRequest {
    /// Which request.
    pub key: RequestKey,
    /// Position of its first token in this step; everything before is in the KV cache.
    pub first_position: u32,
    /// At least 1.
    pub num_tokens: u32,
    /// Its block table.
    pub blocks: BlockTableUpdate,
    /// Whether the step reaches the last known token, so that a token is sampled.
    pub samples: bool,
}

/// One step's work. The runner first forgets `finished`, then learns `new_requests`, then runs
/// `scheduled` in order.
///
/// A request may start on blocks that one before it in `scheduled` fills in this same step (they
/// share a prefix): a layer writes the keys and values of the whole step before any request's
/// attention reads them, or the requests run one after another.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Counts up from 1.
    pub step: u64,
    /// Never seen before.
    pub new_requests: Vec<NewRequest>,
    /// What runs.
    pub scheduled: Vec<ScheduledRequest>,
    /// Gone since the last plan.
    pub finished: Vec<RequestKey>,
}

impl StepPlan {
    /// Tokens that run in the step.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.scheduled.iter().map(|r| r.num_tokens).sum()
    }
}

/// Logprobs of one sampled token.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TokenLogprobs {
    /// Column 0 is the sampled token, then the top-k in order.
    pub token_ids: Vec<u32>,
    /// Natural logarithms, same columns.
    pub logprobs: Vec<f32>,
    /// 1-based rank of the sampled token in the whole vocabulary.
    pub sampled_rank: u32,
}

/// What a request sampled in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Which request.
    pub key: RequestKey,
    /// The token.
    pub token: u32,
    /// If the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
    /// NaNs in the row of logits; such a request is ended with an error.
    pub num_nans: u32,
}

/// What came of a [`StepPlan`].
#[derive(Clone, Debug, Default)]
pub struct StepResult {
    /// The plan's number.
    pub step: u64,
    /// One for each scheduled request with `samples`, in plan order.
    pub sampled: Vec<Sampled>,
    /// Time the device took, from start to result.
    pub execute: Duration,
}

/// What a runner can hold, told after loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerSpec {
    /// Rows of the logits.
    pub vocab_size: u32,
    /// Longest sequence the model knows.
    pub max_model_len: u32,
    /// KV blocks allocated, block 0 included.
    pub num_blocks: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// Whether a step may be submitted while another runs.
    pub overlaps: bool,
    /// `float32`, `float16`, `bfloat16`: the type activations are computed in.
    pub dtype: &'static str,
}

/// Bumped by whatever makes progress (the loader, each finished operation), read by the io thread
/// to tell a slow step from a hang.
pub type Progress = Arc<std::sync::atomic::AtomicU64>;

/// A model on a device. Runs on a thread of its own, one step at a time, in order.
pub trait Runner: Send {
    /// Sizes, known once loaded.
    fn spec(&self) -> RunnerSpec;

    /// Runs one step to its end, and overwrites `result`: that of an earlier step, whose memory is
    /// used again, or an empty one.
    ///
    /// # Errors
    /// A failure of the device or of an invariant: the core dies of it, loudly.
    fn execute(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<(), RunnerError>;

    /// Begins one step. A runner whose device works on its own returns before the step is done;
    /// any other runs it to its end. Whether `result` is what came of it.
    ///
    /// # Errors
    /// As [`Runner::execute`].
    fn submit(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<bool, RunnerError> {
        self.execute(plan, progress, result).map(|()| true)
    }

    /// Whether the oldest step that was begun is done within `wait`, and `result` what came of it.
    ///
    /// # Errors
    /// As [`Runner::execute`].
    fn collect(
        &mut self,
        _wait: Duration,
        _progress: &Progress,
        _result: &mut StepResult,
    ) -> Result<bool, RunnerError> {
        Ok(false)
    }

    /// Steps that were begun and not collected.
    fn num_begun(&self) -> usize {
        0
    }
}

/// Why a runner could not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// The device failed.
    #[error("device failed in step {step}: {reason}")]
    Device {
        /// In which step.
        step: u64,
        /// In the device's words.
        reason: String,
    },
    /// The plan contradicts what the runner knows.
    #[error("step {step} contradicts the runner's state: {reason}")]
    Plan {
        /// Which step.
        step: u64,
        /// What contradicts.
        reason: String,
    },
}
