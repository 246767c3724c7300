//! A runner without a model: made-up tokens, settable step time, failures on order.
//!
//! A token is a pure function of the prompt, the seed and its position, so it does not depend on
//! batching, chunking or preemption: whatever the scheduler does, a request gets the same tokens.
//! Every plan is checked against what a real runner would need (positions, block tables, who
//! samples), so a test that uses this runner also tests the scheduler.

mod config;
mod tokens;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub use config::{Fault, Gate, GateKeeper, MockConfig, Script};

use crate::step::{
    BlockId, BlockTableUpdate, Progress, RequestKey, Runner, RunnerError, RunnerSpec, Sampled,
    ScheduledRequest, StepPlan, StepResult,
};
use tokens::TokenSource;
#[cfg(test)]
pub(crate) use tokens::first_tokens;
pub(crate) use tokens::mix;

/// While a long step sleeps, progress is bumped this often: well under the ten seconds after which
/// a core counts as hung.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// See the module.
pub struct MockRunner {
    config: MockConfig,
    requests: BTreeMap<RequestKey, Known>,
}

/// What a runner knows of a live request.
struct Known {
    source: TokenSource,
    /// Prompt and sampled tokens.
    tokens: u32,
    /// Tokens whose keys and values are in the cache.
    computed: u32,
    blocks: Vec<BlockId>,
}

impl MockRunner {
    /// A runner that behaves as `config` says.
    #[must_use]
    pub fn new(config: MockConfig) -> Self {
        Self { config, requests: BTreeMap::new() }
    }

    /// The step at once, whatever time it is said to take, which becomes that of the result.
    ///
    /// # Errors
    /// As those of [`Runner::execute`].
    pub fn execute_at_once(&mut self, plan: &StepPlan) -> Result<StepResult, RunnerError> {
        self.introduce(plan)?;
        let mut result = StepResult { step: plan.step, ..StepResult::default() };
        self.compute(plan, &mut result.sampled)?;
        result.execute = self.config.step_time(plan.num_tokens());
        Ok(result)
    }

    /// Forgets and learns requests.
    fn introduce(&mut self, plan: &StepPlan) -> Result<(), RunnerError> {
        for key in &plan.finished {
            self.requests.remove(key);
        }
        for new in &plan.new_requests {
            let known = Known {
                source: TokenSource::new(&self.config, new),
                tokens: new.prompt.len() as u32,
                computed: 0,
                blocks: Vec::new(),
            };
            if self.requests.insert(new.key, known).is_some() {
                return Err(RunnerError::Plan {
                    step: plan.step,
                    reason: format!("request {} was introduced twice", new.key.0),
                });
            }
        }
        Ok(())
    }

    fn compute(&mut self, plan: &StepPlan, sampled: &mut Vec<Sampled>) -> Result<(), RunnerError> {
        sampled.clear();
        for scheduled in &plan.scheduled {
            sampled.extend(self.run_one(plan.step, scheduled)?);
        }
        Ok(())
    }

    /// How many requests it knows.
    #[must_use]
    pub fn num_known(&self) -> usize {
        self.requests.len()
    }

    fn run_one(
        &mut self,
        step: u64,
        scheduled: &ScheduledRequest,
    ) -> Result<Option<Sampled>, RunnerError> {
        let key = scheduled.key;
        let contradiction = |reason: String| RunnerError::Plan {
            step,
            reason: format!("request {}: {reason}", key.0),
        };
        let Some(known) = self.requests.get_mut(&key) else {
            return Err(contradiction("was never introduced, or has finished".into()));
        };
        match &scheduled.blocks {
            BlockTableUpdate::Append(blocks) => {
                known.blocks.extend(blocks);
                if scheduled.first_position != known.computed {
                    return Err(contradiction(format!(
                        "runs from position {}, but {} tokens are computed",
                        scheduled.first_position, known.computed
                    )));
                }
            }
            // The positions before the first one come from the prefix cache.
            BlockTableUpdate::Replace(blocks) => known.blocks.clone_from(blocks),
        }
        if let Some(bad) =
            known.blocks.iter().find(|block| block.0 == 0 || block.0 >= self.config.num_blocks)
        {
            return Err(contradiction(format!(
                "has block {}; blocks 1 to {} exist",
                bad.0,
                self.config.num_blocks - 1
            )));
        }
        let end = scheduled.first_position + scheduled.num_tokens;
        let room = known.blocks.len() as u64 * u64::from(self.config.block_size);
        if scheduled.num_tokens == 0 || end > known.tokens || u64::from(end) > room {
            return Err(contradiction(format!(
                "runs {} tokens to position {end}, but {} are known and its blocks hold {room}",
                scheduled.num_tokens, known.tokens
            )));
        }
        if scheduled.samples != (end == known.tokens) {
            return Err(contradiction(format!(
                "samples = {} at position {end} of {}",
                scheduled.samples, known.tokens
            )));
        }
        known.computed = end;
        if !scheduled.samples {
            return Ok(None);
        }
        let token = known.source.token_at(known.tokens);
        known.tokens += 1;
        Ok(Some(Sampled { key, token, logprobs: known.source.logprobs(token), num_nans: 0 }))
    }

    /// Spends the step's time, showing progress as a device would after each operation.
    fn spend(&self, num_tokens: u32, progress: &Progress) {
        if let Some(gate) = &self.config.gate {
            gate.pass();
        }
        let until = Instant::now() + self.config.step_time(num_tokens);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(PROGRESS_EVERY));
            progress.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn fail_on_order(&self, step: u64) -> Result<(), RunnerError> {
        match self.config.fault {
            Some(Fault::FailAt(at)) if step >= at => {
                Err(RunnerError::Device { step, reason: "the mock was told to fail".into() })
            }
            Some(Fault::PanicAt(at)) if step >= at => {
                panic!("the mock was told to panic in step {step}")
            }
            Some(Fault::HangAt(at)) if step >= at => loop {
                std::thread::park();
            },
            _ => Ok(()),
        }
    }
}

impl Runner for MockRunner {
    fn spec(&self) -> RunnerSpec {
        RunnerSpec {
            vocab_size: self.config.vocab_size,
            max_model_len: self.config.max_model_len,
            num_blocks: self.config.num_blocks,
            block_size: self.config.block_size,
            overlaps: self.config.overlaps,
            dtype: "float32",
        }
    }

    fn execute(
        &mut self,
        plan: &StepPlan,
        progress: &Progress,
        result: &mut StepResult,
    ) -> Result<(), RunnerError> {
        let start = Instant::now();
        self.introduce(plan)?;
        self.fail_on_order(plan.step)?;
        self.spend(plan.num_tokens(), progress);
        self.compute(plan, &mut result.sampled)?;
        progress.fetch_add(1, Ordering::Relaxed);
        (result.step, result.execute) = (plan.step, start.elapsed());
        Ok(())
    }
}
