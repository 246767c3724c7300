//! A runner driven as the scheduler would, for tests of all devices.

use std::sync::Arc;

use pawl_shared::protocol::SamplingParams;

use crate::device::cpu::testing::assert_same_bits;
use crate::step::{
    BlockId, BlockTableUpdate, NewRequest, Progress, RequestKey, Runner, RunnerError, Sampled,
    ScheduledRequest, StepPlan, StepResult,
};

/// Tokens that each request samples.
pub const OUTPUT: usize = 12;

/// A runner, and the blocks it has handed out.
pub struct Driver<R> {
    /// Of any device.
    pub runner: R,
    /// That it bumps.
    pub progress: Progress,
    step: u64,
}

/// What a request sampled, with the logprobs of the five best at each step.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// Of the output.
    pub tokens: Vec<u32>,
    /// Of each, the five best.
    pub logprobs: Vec<f32>,
}

/// With everything that the sampler does most often.
pub fn sampling() -> Arc<SamplingParams> {
    Arc::new(SamplingParams {
        temperature: 0.8,
        top_p: 0.95,
        logprobs: Some(5),
        ..SamplingParams::default()
    })
}

/// Of a length that differs from its neighbours'.
pub fn prompt(index: usize) -> Arc<[u32]> {
    let len = [1, 15, 16, 17, 33, 64, 100, 300][index % 8];
    (0..len).map(|i| ((i * 37 + index * 11 + i * i) % 203) as u32).collect()
}

/// Request `index`, sampled.
pub fn new_request(index: usize) -> NewRequest {
    let (key, seed) = (RequestKey(index as u64), index as u64);
    NewRequest { key, prompt: prompt(index), sampling: sampling(), seed }
}

/// Where a request's blocks lie: every way gives it room for prompt and output.
pub fn table(index: usize, stride: usize, first: usize) -> Vec<BlockId> {
    (0..20).map(|i| BlockId((first + index * 20 + (i * stride) % 20) as u32)).collect()
}

/// A part of it, in the blocks that it has.
pub fn scheduled(index: usize, first: usize, count: usize, samples: bool) -> ScheduledRequest {
    ScheduledRequest {
        key: RequestKey(index as u64),
        first_position: first as u32,
        num_tokens: count as u32,
        blocks: BlockTableUpdate::Append(Vec::new()),
        samples,
    }
}

impl<R: Runner> Driver<R> {
    /// That has run nothing.
    pub fn new(runner: R) -> Self {
        Self { runner, progress: Progress::default(), step: 0 }
    }

    /// Runs a plan as the next step.
    pub fn execute(&mut self, mut plan: StepPlan) -> Result<Vec<Sampled>, RunnerError> {
        self.step += 1;
        plan.step = self.step;
        let mut result = StepResult::default();
        self.runner.execute(&plan, &self.progress, &mut result)?;
        assert_eq!(result.step, self.step);
        Ok(result.sampled)
    }

    /// Runs requests together: prompts in chunks of `chunk`, all rows of a step in one plan.
    pub fn texts(
        &mut self,
        indices: &[usize],
        chunk: usize,
        stride: usize,
        first: usize,
    ) -> Vec<Text> {
        let mut texts = vec![Text { tokens: Vec::new(), logprobs: Vec::new() }; indices.len()];
        let mut computed = vec![0; indices.len()];
        let mut plan = StepPlan {
            new_requests: indices.iter().map(|&index| new_request(index)).collect(),
            ..StepPlan::default()
        };
        while texts.iter().any(|text| text.tokens.len() < OUTPUT) {
            for (slot, &index) in indices.iter().enumerate() {
                if texts[slot].tokens.len() == OUTPUT {
                    continue;
                }
                let known = prompt(index).len() + texts[slot].tokens.len();
                let count = chunk.min(known - computed[slot]);
                let end = computed[slot] + count;
                let mut entry = scheduled(index, computed[slot], count, end == known);
                if computed[slot] == 0 {
                    entry.blocks = BlockTableUpdate::Replace(table(index, stride, first));
                }
                plan.scheduled.push(entry);
                computed[slot] = end;
            }
            let sampled = self.execute(std::mem::take(&mut plan)).unwrap();
            note(&mut texts, indices, sampled);
        }
        plan.finished = indices.iter().map(|&index| RequestKey(index as u64)).collect();
        self.execute(plan).unwrap();
        texts
    }
}

/// Adds what a step sampled to the texts of the requests.
pub fn note(texts: &mut [Text], indices: &[usize], sampled: Vec<Sampled>) {
    for sampled in sampled {
        let slot = indices.iter().position(|&index| index as u64 == sampled.key.0).unwrap();
        texts[slot].tokens.push(sampled.token);
        texts[slot].logprobs.extend(sampled.logprobs.unwrap().logprobs);
    }
}

/// Equal to the last bit.
pub fn assert_same_texts(found: &[Text], expected: &[Text], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let what = format!("{what}, request {index}");
        assert_eq!(found.tokens, expected.tokens, "{what}");
        assert_same_bits(&found.logprobs, &expected.logprobs, &what);
    }
}
