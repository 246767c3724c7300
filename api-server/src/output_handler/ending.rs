//! The ways in which a request ends before or beside its last token, and what each of them says.
//! Whatever ends a choice comes through `end`: there it leaves the table and is counted.

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{EngineCoreOutput, FinishReason, RequestId};

use super::{FinishedParent, Frame, OutputHandler};
use crate::engine_client::{EngineFailure, FailureKind, Finish, Update};

impl OutputHandler {
    /// Where the core did not take one choice, the others of the same request end with it: an
    /// answer is whole or it is none. Returns those that the core must forget.
    pub(super) fn refuse_rest(&mut self, now: Stamp, frame: &mut Frame) -> Vec<RequestId> {
        let mut ended = Vec::new();
        for (group, failure) in std::mem::take(&mut frame.refused).into_values() {
            frame.sums.refused.extend(failure.refusal());
            for parent in group {
                let ids = self.parents.get(&parent).map(|parent| parent.ids.clone());
                for id in ids.into_iter().flatten() {
                    if let Some(update) = self.failed(&id, Some(&failure), FinishReason::Abort) {
                        self.end(&id, update, now, frame);
                        ended.push(id);
                    }
                }
            }
        }
        ended
    }

    pub(super) fn ended_by_core(&mut self, id: &RequestId) -> Option<Update> {
        self.failed(id, Some(&aborted_by_core()), FinishReason::Abort)
    }

    /// The last update of a request that does not end by itself; `None` when it is not open.
    pub(super) fn failed(
        &mut self,
        id: &RequestId,
        failure: Option<&EngineFailure>,
        reason: FinishReason,
    ) -> Option<Update> {
        let open = self.requests.get_mut(id)?;
        let mut update = Update { choice: open.choice, ..Update::default() };
        open.text.end_text(&mut update.text);
        update.finish = Some(Finish { reason, stop_reason: None });
        update.error = failure.cloned();
        Some(update)
    }

    pub(super) fn end_parent(
        &mut self,
        parent: u64,
        reason: FinishReason,
        failure: Option<&EngineFailure>,
        now: Stamp,
    ) -> Vec<RequestId> {
        let Some(ids) = self.parents.get(&parent).map(|parent| parent.ids.clone()) else {
            return Vec::new();
        };
        let mut frame = Frame::default();
        let mut ended = Vec::new();
        for id in ids {
            if let Some(update) = self.failed(&id, failure, reason) {
                self.end(&id, update, now, &mut frame);
                ended.push(id);
            }
        }
        ended.extend(self.settle(frame, None, now));
        ended
    }

    /// A choice ends, with `update` as its last word: it leaves the table and is counted.
    pub(super) fn end(
        &mut self,
        id: &RequestId,
        mut update: Update,
        now: Stamp,
        frame: &mut Frame,
    ) {
        let open = self.requests.remove(id).expect("the caller found it in the table");
        let finish = update.finish.as_ref().expect("a last update says how it ended");
        let reason = finish.reason;
        // Refused before it had a token, it was never admitted: counted as such, once for all.
        let refused = update.error.as_ref().is_some_and(|error| error.refusal().is_some())
            && open.life.generation_tokens == 0;
        let completed = !refused && open.life.finish(reason, now, &mut frame.sums);
        let timing = open.life.timing(now);
        update.timing = Some(timing);
        if self.log_timing {
            tracing::info!(
                target: "pawl::request",
                request = %open.external_id,
                wire_id = %id,
                finish = reason.as_str(),
                prompt_tokens = open.life.prompt_tokens,
                cached_tokens = open.life.cached_tokens(),
                generation_tokens = open.life.generation_tokens,
                preemptions = open.life.preemptions,
                intake_ms = milliseconds(timing.intake),
                queue_ms = milliseconds(timing.queue),
                prefill_ms = milliseconds(timing.prefill),
                decode_ms = milliseconds(timing.decode),
                deliver_ms = milliseconds(timing.deliver),
                "choice ended"
            );
        }
        let parent = self.parents.get_mut(&open.parent).expect("a choice outlives no parent");
        parent.open -= 1;
        parent.max_generation_tokens =
            parent.max_generation_tokens.max(open.life.generation_tokens);
        parent.all_completed &= completed;
        if parent.open == 0 {
            if parent.all_completed {
                frame.sums.finished_parents.push(FinishedParent {
                    n: parent.n,
                    max_generation_tokens: parent.max_generation_tokens,
                });
            }
            self.parents.remove(&open.parent);
        }
        frame.updates.push((open.parent, open.mailbox, update));
    }

    pub(super) fn too_slow(&mut self, parent: u64, why: &str, now: Stamp) -> Vec<RequestId> {
        let failure = EngineFailure {
            kind: FailureKind::SlowReader,
            code: "slow_reader".to_string(),
            message: format!("the client does not keep up: {why}"),
            retryable: false,
        };
        let ended = self.end_parent(parent, FinishReason::Abort, Some(&failure), now);
        if !ended.is_empty() {
            self.metrics.slow_reader();
            tracing::info!(requests = ?ended, why, "aborted: the client does not keep up");
        }
        ended
    }
}

/// Why `output` is no normal end, whatever it says of tokens.
pub(super) fn failure_of(
    output: &EngineCoreOutput,
    finish: Option<&Finish>,
) -> Option<EngineFailure> {
    if let Some(error) = &output.error {
        return Some(EngineFailure {
            kind: FailureKind::Engine,
            code: error.code.clone(),
            message: error.message.clone(),
            retryable: error.retryable,
        });
    }
    match finish?.reason {
        FinishReason::Abort => Some(aborted_by_core()),
        FinishReason::Error => Some(EngineFailure {
            kind: FailureKind::Engine,
            code: "engine_error".to_string(),
            message: "the engine failed this request and does not say why".to_string(),
            retryable: true,
        }),
        FinishReason::Stop | FinishReason::Length | FinishReason::Repetition => None,
    }
}

fn aborted_by_core() -> EngineFailure {
    EngineFailure {
        kind: FailureKind::Engine,
        code: "engine_aborted".to_string(),
        message: "the engine ended this request by itself and does not say why; send it again"
            .to_string(),
        retryable: true,
    }
}

fn milliseconds(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
