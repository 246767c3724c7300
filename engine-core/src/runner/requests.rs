//! What a runner keeps of each request, and the check of a plan against it: the same for every
//! device.

use std::collections::HashMap;
use std::sync::Arc;

use pawl_shared::protocol::SamplingParams;

use crate::runner::sampler::History;
use crate::step::{
    BlockId, BlockTableUpdate, RequestKey, RunnerError, RunnerSpec, ScheduledRequest, StepPlan,
};

/// Stands for a token that the device has sampled and the host has not read.
#[cfg(feature = "vulkan")]
pub const UNREAD: u32 = u32::MAX;

/// One request.
#[derive(Debug)]
pub struct Request {
    /// Prompt and what was sampled since.
    pub tokens: Vec<u32>,
    prompt_len: usize,
    /// How to sample.
    pub sampling: Arc<SamplingParams>,
    /// Of its random numbers.
    pub seed: u64,
    /// Its block table.
    pub blocks: Vec<BlockId>,
    /// Positions in the cache.
    computed: u32,
}

impl Request {
    /// Its tokens, as the sampler wants them.
    pub fn history(&self) -> History<'_> {
        let (prompt, output) = self.tokens.split_at(self.prompt_len);
        History { prompt, output }
    }
}

/// All requests that the runner was told of.
#[derive(Debug)]
pub struct Requests {
    spec: RunnerSpec,
    by_key: HashMap<RequestKey, Request>,
}

impl Requests {
    /// None yet.
    pub fn new(spec: RunnerSpec) -> Self {
        Self { spec, by_key: HashMap::new() }
    }

    /// A request of a plan that was applied.
    pub fn get(&self, key: RequestKey) -> &Request {
        self.by_key.get(&key).expect("the plan was checked")
    }

    /// Remembers a sampled token.
    pub fn push_token(&mut self, key: RequestKey, token: u32) {
        self.by_key.get_mut(&key).expect("the plan was checked").tokens.push(token);
    }

    /// Fills in the oldest token that was remembered as [`UNREAD`]; nothing, if the request is
    /// gone.
    #[cfg(feature = "vulkan")]
    pub fn fill_in(&mut self, key: RequestKey, token: u32) {
        let Some(request) = self.by_key.get_mut(&key) else { return };
        let unread = request.tokens.iter_mut().rev().take_while(|token| **token == UNREAD);
        if let Some(oldest) = unread.last() {
            *oldest = token;
        }
    }

    /// Whether the request is still known.
    #[cfg(feature = "vulkan")]
    pub fn knows(&self, key: RequestKey) -> bool {
        self.by_key.contains_key(&key)
    }

    /// Forgets, learns and updates as `plan` says, and checks all of it.
    ///
    /// # Errors
    /// [`RunnerError::Plan`]: scheduler and runner disagree, and going on would compute garbage.
    pub fn apply(&mut self, plan: &StepPlan) -> Result<(), RunnerError> {
        let contradiction = |reason: String| RunnerError::Plan { step: plan.step, reason };
        for key in &plan.finished {
            // One that was aborted while it waited was never told to the runner.
            self.by_key.remove(key);
        }
        for new in &plan.new_requests {
            let key = new.key;
            if new.prompt.is_empty() {
                return Err(contradiction(format!("new request {} has no tokens", key.0)));
            }
            if let Some(token) = new.prompt.iter().find(|token| **token >= self.spec.vocab_size) {
                return Err(contradiction(format!(
                    "new request {} has token {token}, the vocabulary {} tokens",
                    key.0, self.spec.vocab_size
                )));
            }
            // Room for the longest sequence, so that no step has to make it. The system gives the
            // memory as it is written.
            let most = self.spec.max_model_len;
            let mut tokens = Vec::with_capacity(most as usize);
            tokens.extend_from_slice(&new.prompt);
            let request = Request {
                tokens,
                prompt_len: new.prompt.len(),
                sampling: Arc::clone(&new.sampling),
                seed: new.seed,
                blocks: Vec::with_capacity(most.div_ceil(self.spec.block_size) as usize),
                computed: 0,
            };
            if self.by_key.insert(key, request).is_some() {
                return Err(contradiction(format!("request {} is not new", key.0)));
            }
        }
        for (index, scheduled) in plan.scheduled.iter().enumerate() {
            let key = scheduled.key;
            if plan.scheduled[..index].iter().any(|earlier| earlier.key == key) {
                return Err(contradiction(format!("request {} is scheduled twice", key.0)));
            }
            let Some(request) = self.by_key.get_mut(&key) else {
                return Err(contradiction(format!("request {} was never told", key.0)));
            };
            request
                .schedule(scheduled, &self.spec)
                .map_err(|reason| contradiction(format!("request {}: {reason}", key.0)))?;
        }
        Ok(())
    }
}

impl Request {
    fn schedule(&mut self, scheduled: &ScheduledRequest, spec: &RunnerSpec) -> Result<(), String> {
        let (first, count) = (scheduled.first_position, scheduled.num_tokens);
        match &scheduled.blocks {
            BlockTableUpdate::Append(blocks) => {
                if first != self.computed {
                    return Err(format!(
                        "runs from position {first}, but {} are computed",
                        self.computed
                    ));
                }
                self.blocks.extend(blocks);
            }
            // What lies before the first position is in blocks that others have computed.
            BlockTableUpdate::Replace(blocks) => self.blocks.clone_from(blocks),
        }
        let known = self.tokens.len() as u64;
        let end = u64::from(first) + u64::from(count);
        if count == 0 || end > known {
            return Err(format!("runs {first}..{end} of {known} known tokens"));
        }
        if scheduled.samples != (end == known) {
            return Err(format!(
                "samples = {}, but the step ends at {end} of {known} known tokens",
                scheduled.samples
            ));
        }
        if end > u64::from(spec.max_model_len) {
            return Err(format!("runs to {end}, the model's length is {}", spec.max_model_len));
        }
        let room = self.blocks.len() as u64 * u64::from(spec.block_size);
        if end > room {
            return Err(format!("runs to {end}, its blocks hold {room} tokens"));
        }
        let mine = match &scheduled.blocks {
            BlockTableUpdate::Append(blocks) | BlockTableUpdate::Replace(blocks) => blocks,
        };
        if let Some(block) = mine.iter().find(|id| id.0 == 0 || id.0 >= spec.num_blocks) {
            return Err(format!("block {} is none of 1..{}", block.0, spec.num_blocks));
        }
        self.computed = first + count;
        Ok(())
    }
}
