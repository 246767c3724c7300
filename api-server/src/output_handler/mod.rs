//! Folds the frames of the core: the state of every open request, and what is counted.
//!
//! A state machine without sockets: frames and the time go in, aborts to send come out, updates lie
//! in the mailboxes of the requests. Per frame: decode, one [`IterationStats`] under one reading of
//! the clock, the state and text of each request that moved, the registry, the mailboxes. The
//! registry comes before the mailboxes, so that whoever has seen a token finds it counted.
//!
//! Which fate of a request counts where is told in `docs/metrics.md`; it is decided here, in
//! `iteration`. Every open request leaves the table exactly once, and with that it is counted.

mod ending;
mod iteration;
mod mailbox;
mod request;
mod stats_log;
mod stop;

pub use iteration::{
    CompletedRequest, FinishedParent, FinishedRequest, IterationStats, PromptTokens,
};
pub use mailbox::DeliveryLimits;
pub(crate) use mailbox::Mailbox;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{
    EngineCoreOutput, EngineMessage, FinishReason, RequestId, SamplingParams, SchedulerStats,
    UtilityReply, dump,
};

use self::ending::failure_of;
use self::iteration::{Lifetime, Told};
use self::request::{OpenRequest, TextState};
use self::stats_log::StatsLog;
use crate::detokenizer::TokenText;
use crate::engine_client::{EngineFailure, FailureKind, Update, epoch_of};
use crate::metrics::{EngineHandles, FrameKind, Metrics};

/// A submission that has been handed to the core.
pub(crate) struct NewRequest<'a> {
    pub external_id: Arc<str>,
    /// Wire ids, one for each choice.
    pub ids: Vec<RequestId>,
    pub prompt_tokens: u64,
    /// As lowered, for the texts' side.
    pub params: &'a SamplingParams,
    pub max_tokens: u32,
    pub vocabulary: Arc<dyn TokenText>,
    pub arrival: Stamp,
    pub sent: Stamp,
    pub mailbox: Arc<Mailbox>,
}

/// What is left to do after a frame.
#[derive(Debug, Default)]
pub(crate) struct Folded {
    /// Requests the core must forget.
    pub abort: Vec<RequestId>,
    /// The answer to a call.
    pub reply: Option<UtilityReply>,
    /// The core says it is dead.
    pub dead: bool,
}

/// A submission whose choices have not all ended.
struct Parent {
    /// The submissions of the same client's request, itself included.
    group: Range<u64>,
    n: u32,
    ids: Vec<RequestId>,
    open: u32,
    all_completed: bool,
    max_generation_tokens: u64,
}

/// Every open request of one frontend, and the way of its outputs into text and numbers.
pub(crate) struct OutputHandler {
    metrics: Arc<Metrics>,
    engine: Option<Arc<EngineHandles>>,
    limits: DeliveryLimits,
    /// Whether each request's end is logged with its timing.
    log_timing: bool,
    requests: HashMap<RequestId, OpenRequest>,
    parents: HashMap<u64, Parent>,
    /// Messages that could not be read.
    unreadable: u64,
    next_parent: u64,
    /// Where outputs for a process that was here before ours may come: our epoch, by which its
    /// requests are told apart.
    only_epoch: Option<u64>,
    log: StatsLog,
}

impl OutputHandler {
    pub fn new(
        metrics: Arc<Metrics>,
        limits: DeliveryLimits,
        log_timing: bool,
        now: Stamp,
    ) -> Self {
        Self {
            metrics,
            engine: None,
            limits,
            log_timing,
            requests: HashMap::new(),
            parents: HashMap::new(),
            unreadable: 0,
            next_parent: 0,
            only_epoch: None,
            log: StatsLog::new(now),
        }
    }

    /// The series to fold into from now on.
    pub fn set_engine(&mut self, engine: Arc<EngineHandles>, engine_index: u32) {
        self.engine = Some(engine);
        self.log.set_engine(engine_index);
    }

    /// From now on outputs of another epoch than this are taken for requests of a process that was
    /// here before ours and is gone: the core must forget them.
    pub fn forget_all_but(&mut self, epoch: u64) {
        self.only_epoch = Some(epoch);
    }

    /// Choices that have not ended.
    pub fn open(&self) -> usize {
        self.requests.len()
    }

    /// Submissions that have a choice that has not ended.
    pub fn open_parents(&self) -> usize {
        self.parents.len()
    }

    /// Takes in the submissions of one client's request, one for each prompt; returns their keys
    /// for [`OutputHandler::abort`].
    pub fn add(&mut self, news: Vec<NewRequest<'_>>) -> Range<u64> {
        let group = self.next_parent..self.next_parent + news.len() as u64;
        self.next_parent = group.end;
        for (parent, new) in group.clone().zip(news) {
            self.add_one(parent, &group, new);
        }
        self.metrics.open_requests(self.requests.len());
        group
    }

    fn add_one(&mut self, parent: u64, group: &Range<u64>, new: NewRequest<'_>) {
        for (choice, id) in (0..).zip(&new.ids) {
            let life = Lifetime::new(new.arrival, new.sent, new.prompt_tokens, new.max_tokens);
            let open = OpenRequest {
                parent,
                choice,
                external_id: new.external_id.clone(),
                life,
                text: TextState::new(new.params, new.vocabulary.clone()),
                mailbox: new.mailbox.clone(),
                cached_told: false,
            };
            let before = self.requests.insert(id.clone(), open);
            assert!(before.is_none(), "wire id {id} was used twice");
        }
        let n = u32::try_from(new.ids.len()).expect("n is a u32");
        self.parents.insert(
            parent,
            Parent {
                group: group.clone(),
                n,
                ids: new.ids,
                open: n,
                all_completed: true,
                max_generation_tokens: 0,
            },
        );
    }

    /// Submissions that never reached the core after all: forgets them, uncounted.
    pub fn take_back(&mut self, group: Range<u64>) {
        for parent in group.filter_map(|key| self.parents.remove(&key)) {
            for id in &parent.ids {
                self.requests.remove(id);
            }
        }
        self.metrics.open_requests(self.requests.len());
    }

    /// The reader of a submission went away: what of it has not ended ends as an abort. Returns
    /// what the core must forget. What was folded until now is what counts.
    pub fn abort(&mut self, parent: u64, now: Stamp) -> Vec<RequestId> {
        self.end_parent(parent, FinishReason::Abort, None, now)
    }

    /// Ends the submissions whose clients know them by one of `names`, as an abort that is no
    /// failure: their readers are told. Returns how many there were, and what the core must forget.
    pub fn abort_named(&mut self, names: &HashSet<&str>, now: Stamp) -> (usize, Vec<RequestId>) {
        let named = self.requests.values().filter(|open| names.contains(&*open.external_id));
        let parents: BTreeSet<u64> = named.map(|open| open.parent).collect();
        let end = |parent: &u64| self.end_parent(*parent, FinishReason::Abort, None, now);
        let ended = parents.iter().flat_map(end).collect();
        (parents.len(), ended)
    }

    /// Ends every open request with `reason` and `failure`, at once. Returns their ids.
    pub fn end_all(
        &mut self,
        reason: FinishReason,
        failure: &EngineFailure,
        now: Stamp,
    ) -> Vec<RequestId> {
        let mut parents: Vec<u64> = self.parents.keys().copied().collect();
        parents.sort_unstable();
        let mut ended = Vec::new();
        for parent in parents {
            ended.extend(self.end_parent(parent, reason, Some(failure), now));
        }
        ended
    }

    /// The core is gone: its gauges go to zero.
    pub fn engine_gone(&mut self) {
        if let Some(engine) = &self.engine {
            self.metrics.engine_gone(engine);
        }
    }

    /// Takes in one message of the core.
    pub fn fold(&mut self, frames: &[Bytes], now: Stamp) -> Folded {
        let bytes = frames.iter().map(|frame| frame.len() as u64).sum();
        match EngineMessage::decode(frames) {
            Ok(EngineMessage::Step { timestamp, stats, outputs, finished_requests, .. }) => {
                let idle = outputs.is_empty() && finished_requests.is_empty();
                let kind = if idle { FrameKind::Stats } else { FrameKind::Step };
                self.metrics.frame(kind, bytes);
                let abort = self.step(timestamp, stats, outputs, finished_requests, now);
                Folded { abort, ..Folded::default() }
            }
            Ok(EngineMessage::Utility { reply, .. }) => {
                self.metrics.frame(FrameKind::Utility, bytes);
                Folded { reply: Some(reply), ..Folded::default() }
            }
            Ok(EngineMessage::Dead) => {
                self.metrics.frame(FrameKind::Dead, bytes);
                Folded { dead: true, ..Folded::default() }
            }
            Err(error) => {
                self.metrics.frame(FrameKind::Undecodable, bytes);
                self.metrics.decode_error(error.kind);
                self.unreadable += 1;
                // A core that says nothing else must not fill the log.
                if self.unreadable.is_power_of_two() {
                    let count = self.unreadable;
                    tracing::warn!(%error, bytes, count, "a message of the core cannot be read");
                }
                Folded { abort: self.unreadable(frames, now), ..Folded::default() }
            }
        }
    }

    /// Ends the requests that an unreadable message names: with a part of their tokens lost, what
    /// they would go on to say is not what the model said. A message that names none costs nobody.
    fn unreadable(&mut self, frames: &[Bytes], now: Stamp) -> Vec<RequestId> {
        let Some(Ok(dumped)) = frames.first().map(|payload| dump(payload)) else {
            return Vec::new();
        };
        let outputs = dumped.as_array().and_then(|items| items.get(1)?.as_array());
        let named = outputs.into_iter().flatten();
        let ids = named.filter_map(|output| output.as_array()?.first()?.as_str());
        let failure = EngineFailure {
            kind: FailureKind::Engine,
            code: "unreadable_frame".to_string(),
            message: "the engine sent tokens of this request that cannot be read".to_string(),
            retryable: true,
        };
        let mut frame = Frame::default();
        let mut abort = Vec::new();
        for id in ids.map(RequestId::from) {
            if let Some(update) = self.failed(&id, Some(&failure), FinishReason::Error) {
                self.end(&id, update, now, &mut frame);
                abort.push(id);
            }
        }
        abort.extend(self.settle(frame, None, now));
        abort
    }

    fn step(
        &mut self,
        timestamp: f64,
        stats: Option<SchedulerStats>,
        outputs: Vec<EngineCoreOutput>,
        finished: Vec<RequestId>,
        now: Stamp,
    ) -> Vec<RequestId> {
        let mut frame = Frame::default();
        let mut abort = Vec::new();
        for output in &outputs {
            let Some(open) = self.requests.get_mut(&output.request_id) else {
                frame.sums.unknown_outputs += 1;
                if output.finish_reason.is_none() && self.is_of_the_dead(&output.request_id) {
                    abort.push(output.request_id.clone());
                }
                continue;
            };
            let mut update = open.text.take_in(output);
            update.choice = open.choice;
            let told = Told {
                new_tokens: update.token_ids.len() as u64,
                events: &output.events,
                prefill: output.prefill_stats.as_ref(),
                timestamp,
                now,
            };
            open.life.observe(&told, &mut frame.sums);
            if !update.token_ids.is_empty() && !open.cached_told {
                open.cached_told = true;
                update.cached_tokens = Some(open.life.cached_tokens());
            }
            update.error = failure_of(output, update.finish.as_ref());
            // One that has a token was let in: an engine that stops or pauses ends it.
            if let Some(failure) = update.error.as_ref().filter(|e| e.refusal().is_some())
                && open.life.generation_tokens == 0
            {
                let group = self.parents[&open.parent].group.clone();
                frame.refused.entry(group.start).or_insert_with(|| (group, failure.clone()));
            }
            if update.finish.is_some() {
                // A stop string is seen here only: the core has to be told.
                if output.finish_reason.is_none() {
                    abort.push(output.request_id.clone());
                }
                self.end(&output.request_id, update, now, &mut frame);
            } else if update != (Update { choice: update.choice, ..Update::default() }) {
                frame.updates.push((open.parent, open.mailbox.clone(), update));
            }
        }
        for id in &finished {
            // Usually its last output has ended it just above; if not, this is all that comes.
            if let Some(update) = self.ended_by_core(id) {
                self.end(id, update, now, &mut frame);
            }
        }
        abort.extend(self.refuse_rest(now, &mut frame));
        abort.extend(self.settle(frame, stats.as_ref(), now));
        abort
    }

    fn is_of_the_dead(&self, id: &RequestId) -> bool {
        self.only_epoch.is_some_and(|epoch| epoch_of(id) != Some(epoch))
    }

    /// Counts a frame, then delivers it. Returns the requests whose reader is too far behind:
    /// they have ended with that.
    fn settle(
        &mut self,
        frame: Frame,
        stats: Option<&SchedulerStats>,
        now: Stamp,
    ) -> Vec<RequestId> {
        for reason in &frame.sums.refused {
            self.metrics.admission_rejected(*reason);
        }
        if let Some(engine) = &self.engine {
            self.metrics.record_iteration(engine, &frame.sums);
            if let Some(stats) = stats {
                self.metrics.record_scheduler(engine, stats, frame.sums.outputs > 0, now);
            }
        }
        self.metrics.open_requests(self.requests.len());
        self.log.add(&frame.sums, stats);
        let mut full = Vec::new();
        for (parent, mailbox, update) in frame.updates {
            let unread = mailbox.put(update, now);
            if unread > self.limits.unread_bytes && self.parents.contains_key(&parent) {
                full.push(parent);
            }
        }
        full.dedup();
        let mut ended = Vec::new();
        for parent in full {
            let why = format!("{} bytes lie unread", self.limits.unread_bytes);
            ended.extend(self.too_slow(parent, &why, now));
        }
        ended
    }

    /// To be called about once a second: ends requests whose reader has stopped reading, and
    /// writes the periodic log line.
    pub fn tick(&mut self, now: Stamp) -> Vec<RequestId> {
        let limit = self.limits.unread_time;
        let mut stuck: Vec<u64> = self
            .requests
            .values()
            .filter(|open| open.mailbox.unread_for(now) > limit)
            .map(|open| open.parent)
            .collect();
        stuck.sort_unstable();
        stuck.dedup();
        let why = format!("nothing was read for {} s", limit.as_secs());
        let ended: Vec<RequestId> =
            stuck.into_iter().flat_map(|parent| self.too_slow(parent, &why, now)).collect();
        if self.metrics.recording() {
            self.log.tick(now);
        }
        ended
    }
}

/// One frame on its way through the handler.
#[derive(Default)]
struct Frame {
    sums: IterationStats,
    /// Groups of submissions of which the core has not taken a choice, by their first key.
    refused: BTreeMap<u64, (Range<u64>, EngineFailure)>,
    updates: Vec<(u64, Arc<Mailbox>, Update)>,
}

#[cfg(test)]
pub(crate) mod tests;
