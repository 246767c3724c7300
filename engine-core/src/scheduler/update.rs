//! What a step brought each request.

use pawl_shared::protocol::{
    EngineCoreOutput, FinishReason, LogprobsLists, OutputError, StopReason,
};

use super::request::{Phase, Request};
use super::{Blocks, RequestOutput, Scheduler, StepResult};
use crate::step::Sampled;

type Finish = (FinishReason, Option<StopReason>);

impl Scheduler {
    /// Folds the result of the oldest plan that has none yet: one output for each request that
    /// sampled and has not been aborted meanwhile.
    ///
    /// # Panics
    /// If the result is not of that plan: the runner has lost count, and every token after would
    /// go astray.
    pub fn update(&mut self, result: &StepResult) -> Vec<RequestOutput> {
        let planned = self.planned.pop_front().expect("a result answers a plan");
        assert_eq!(planned.step, result.step, "results come in the order of their plans");
        assert_eq!(planned.num_samples, result.sampled.len(), "each sampling request is answered");
        self.speed.record(planned.num_tokens, result.execute);
        self.last_step_tokens = planned.num_tokens;
        let mut outputs = Vec::with_capacity(result.sampled.len());
        outputs.extend(result.sampled.iter().filter_map(|sampled| self.fold(sampled)));
        self.assert_invariants();
        outputs
    }

    /// `None` for a request that has ended since the plan was made.
    fn fold(&mut self, sampled: &Sampled) -> Option<RequestOutput> {
        let key = sampled.key;
        let request = self.requests.get_mut(&key)?;
        request.placeholders =
            request.placeholders.checked_sub(1).expect("a token comes for each placeholder");
        let mut output = EngineCoreOutput::new(request.id.clone());
        let finish = append(request, sampled, &mut output);
        output.events = std::mem::take(&mut request.events);
        output.prefill_stats = request.prefill.take();
        let client = request.client;
        match finish {
            Some((reason, stop_reason)) => {
                output.finish_reason = Some(reason);
                output.stop_reason = stop_reason;
                let spoilt = reason == FinishReason::Error;
                self.remove(key, if spoilt { Blocks::Spoilt } else { Blocks::Sound });
            }
            None => self.settle(key),
        }
        Some(RequestOutput { client, key, output })
    }

    /// After a token has come and more are to follow.
    fn settle(&mut self, key: crate::step::RequestKey) {
        let request = self.requests.get_mut(&key).expect("it has just been folded");
        if self.prefix_caching {
            request.hash_full_blocks();
        }
        if matches!(request.phase, Phase::Deferred) && request.placeholders == 0 {
            request.phase = Phase::Waiting;
            self.deferred.remove(&request.rank);
            self.waiting.insert(request.rank);
        }
        // A decode planned ahead may fill a block with the token that has just become known.
        self.offer_blocks_of(key);
    }
}

/// Appends what was sampled to the request and to its output.
fn append(
    request: &mut Request,
    sampled: &Sampled,
    output: &mut EngineCoreOutput,
) -> Option<Finish> {
    output.num_nans_in_logits = sampled.num_nans;
    if sampled.num_nans > 0 {
        output.error = Some(OutputError {
            code: "nan_in_logits".into(),
            message: format!(
                "the model computed {} values that are not numbers for this request: its file is \
                 damaged, or its weights do not suit this prompt; another prompt may do",
                sampled.num_nans
            ),
            retryable: false,
        });
        return Some((FinishReason::Error, None));
    }
    output.new_token_ids = vec![sampled.token];
    output.new_logprobs = sampled.logprobs.as_ref().map(|row| LogprobsLists {
        token_ids: vec![row.token_ids.clone()],
        logprobs: vec![row.logprobs.clone()],
        ranks: vec![row.sampled_rank],
    });
    request.append(sampled.token)
}
