//! The plan of a step: who computes how many tokens.

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{EventKind, PrefillStats};

use super::request::{Phase, Rank, Request};
use super::speed::CHUNK_MIN;
use super::{Planned, Scheduler, StepPlan};
use crate::step::{BlockId, BlockTableUpdate, RequestKey, ScheduledRequest};

/// A plan being made.
struct Step {
    now: Stamp,
    /// Tokens that may still be planned.
    budget: u32,
    /// Whether anybody lost its blocks to it.
    preempted: bool,
    plan: StepPlan,
}

/// Which of the running requests are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// One token is left to compute, as in every decode.
    Last,
    /// More are left.
    Chunk,
}

impl Scheduler {
    /// Plans the next step. A plan with nothing `scheduled` is not to be run: all wait for results
    /// that are still to come, or there is nothing to do.
    pub fn schedule(&mut self, now: Stamp) -> StepPlan {
        let budget = self.token_budget();
        let scheduled = Vec::with_capacity(self.running.len());
        let plan = StepPlan { scheduled, ..StepPlan::default() };
        let mut step = Step { now, budget, preempted: false, plan };
        // Decodes come first, so that no long prompt of somebody better ranked can hold up a
        // stream for longer than the one step whose size is bounded.
        self.continue_running(Turn::Last, &mut step);
        self.continue_running(Turn::Chunk, &mut step);
        self.offer_blocks(&step);
        // Whoever was preempted is owed the space before anybody new.
        if !step.preempted && self.deferred.is_empty() {
            self.admit_waiting(&mut step);
        }
        let plan = self.seal(step.plan, budget);
        self.assert_invariants();
        plan
    }

    /// Tokens of the next step: as many as are allowed, and as fit into the time allowed.
    fn token_budget(&self) -> u32 {
        let most = self.config.max_num_batched_tokens;
        let (lone, shared) = (self.config.max_step, self.config.max_shared_step);
        let time = if self.requests.len() > 1 { shared.or(lone) } else { lone };
        match time {
            // A prompt that may not be cut cannot be fitted to a time either.
            Some(time) if self.config.chunked_prefill => {
                let running = self.running.len() as u32;
                self.speed.tokens_within(time, running).max(running + CHUNK_MIN).min(most)
            }
            _ => most,
        }
    }

    /// Gives the running requests their tokens, best first. Where blocks run out, the worst loses
    /// its own.
    fn continue_running(&mut self, turn: Turn, step: &mut Step) {
        let mut place = 0;
        while place < self.running.len() && step.budget > 0 {
            let rank = self.running[place];
            let left = self.requests[&rank.key].tokens_to_compute();
            if left == 0 || (left == 1) != (turn == Turn::Last) {
                place += 1;
                continue;
            }
            let num_tokens = self.cut(left).min(step.budget);
            while !self.can_run(rank.key, num_tokens) {
                let worst = *self.running.last().expect("at least this one runs");
                self.preempt(worst, step);
                if worst == rank {
                    return;
                }
            }
            self.run(rank.key, num_tokens, Table::Growth, step);
            place += 1;
        }
    }

    /// Starts the waiting requests, best first, as long as the next one fits.
    fn admit_waiting(&mut self, step: &mut Step) {
        while step.budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(rank) = self.waiting.first().copied() else { break };
            let length = self.requests[&rank.key].num_tokens();
            let hits = self.cached_prefix(rank.key);
            let found = hits.len() as u32 * self.block_size;
            let left = length - found;
            let num_tokens = self.cut(left).min(step.budget);
            if num_tokens < left && !self.config.chunked_prefill {
                break;
            }
            let to_hold = if self.config.reserve_full_isl { length } else { found + num_tokens };
            if !self.kv.can_admit(&hits, to_hold, self.spare_blocks()) {
                break;
            }
            self.count_lookup(rank.key, found);
            let table = self.kv.admit(hits);
            self.start(rank, Phase::Running { table, computed: found }, step);
            self.run(rank.key, num_tokens, Table::Whole, step);
            self.offer_blocks_of(rank.key);
        }
    }

    /// The blocks that hold the beginning of a waiting request already.
    fn cached_prefix(&mut self, key: RequestKey) -> Vec<BlockId> {
        let request = self.requests.get_mut(&key).expect("a waiting request is known");
        if !self.prefix_caching {
            return Vec::new();
        }
        request.hash_full_blocks();
        if !request.may_read_prefix_cache() {
            return Vec::new();
        }
        self.kv.cached_prefix(&request.hashes, request.num_tokens())
    }

    /// A lookup counts once, when its request is admitted.
    fn count_lookup(&mut self, key: RequestKey, found: u32) {
        let request = &self.requests[&key];
        if self.prefix_caching && request.may_read_prefix_cache() {
            let (queries, again) = (request.num_tokens(), request.introduced);
            self.deltas.looked_up(request.client, queries, found, again);
        }
    }

    /// Blocks that an admission leaves free: the watermark, if there is anybody to grow into it.
    fn spare_blocks(&self) -> u32 {
        if self.running.is_empty() {
            return 0;
        }
        (self.config.watermark * f64::from(self.kv.config().num_blocks - 1)) as u32
    }

    /// What of `left` tokens one request may compute in one step.
    fn cut(&self, left: u32) -> u32 {
        let threshold = self.config.long_prefill_token_threshold;
        let whole = threshold == 0 || self.requests.len() == 1 || !self.config.chunked_prefill;
        if whole { left } else { left.min(threshold) }
    }

    fn can_run(&self, key: RequestKey, num_tokens: u32) -> bool {
        let Phase::Running { table, computed } = &self.requests[&key].phase else { return false };
        self.kv.can_grow(table, computed + num_tokens)
    }

    /// Puts a running request into the plan, after [`Self::can_run`].
    fn run(&mut self, key: RequestKey, num_tokens: u32, told: Table, step: &mut Step) {
        let request = self.requests.get_mut(&key).expect("a running request is known");
        let known = request.num_tokens() + request.placeholders;
        let Phase::Running { table, computed } = &mut request.phase else {
            panic!("{key:?} is planned, but does not run");
        };
        let first_position = *computed;
        *computed += num_tokens;
        assert!(*computed <= known, "{key:?} is to compute more than its {known} tokens");
        let samples = *computed == known;
        let had = table.blocks().len();
        self.kv.grow(table, *computed);
        let blocks = match told {
            Table::Whole => BlockTableUpdate::Replace(table.blocks().to_vec()),
            Table::Growth => BlockTableUpdate::Append(table.blocks()[had..].to_vec()),
        };
        request.placeholders += u32::from(samples);
        step.budget -= num_tokens;
        step.plan.scheduled.push(ScheduledRequest {
            key,
            first_position,
            num_tokens,
            blocks,
            samples,
        });
    }

    /// Moves the best of the waiting requests to those that run.
    fn start(&mut self, rank: Rank, phase: Phase, step: &mut Step) {
        self.waiting.remove(&rank);
        let place = self.running.partition_point(|other| *other < rank);
        self.running.insert(place, rank);
        let request = self.requests.get_mut(&rank.key).expect("a waiting request is known");
        request.record(EventKind::Scheduled, step.now);
        if !request.introduced {
            request.introduced = true;
            step.plan.new_requests.push(request.introduction());
            if let Phase::Running { computed, .. } = phase {
                request.prefill = Some(prefill_stats(request, computed));
            }
        }
        request.phase = phase;
    }

    /// Makes room in a plan: the worst running request loses its blocks.
    fn preempt(&mut self, worst: Rank, step: &mut Step) {
        // It may have its place in this very plan already, which it then leaves.
        let planned = step.plan.scheduled.iter().rposition(|other| other.key == worst.key);
        if let Some(place) = planned {
            let undone = step.plan.scheduled.remove(place);
            step.budget += undone.num_tokens;
            let request = self.requests.get_mut(&worst.key).expect("a running request is known");
            request.placeholders -= u32::from(undone.samples);
        }
        self.take_blocks(worst, step.now);
        step.preempted = true;
    }

    /// Takes the blocks of the last of the running requests, which is `worst`. It will compute
    /// everything again.
    pub(super) fn take_blocks(&mut self, worst: Rank, now: Stamp) {
        let last = self.running.pop();
        assert_eq!(last, Some(worst), "the worst of those that run goes first");
        let request = self.requests.get_mut(&worst.key).expect("a running request is known");
        let next = if request.placeholders > 0 {
            self.deferred.insert(worst);
            Phase::Deferred
        } else {
            self.waiting.insert(worst);
            Phase::Waiting
        };
        if let Phase::Running { table, .. } = std::mem::replace(&mut request.phase, next) {
            self.kv.release(table);
        }
        request.record(EventKind::Preempted, now);
        self.deltas.preempted(request.client);
    }

    /// From here on the plan is a promise. The blocks it fills can be found by later plans, and by
    /// the requests admitted to this one, because steps run in order, and in a step the cache is
    /// written before it is read.
    fn offer_blocks(&mut self, step: &Step) {
        for scheduled in &step.plan.scheduled {
            self.offer_blocks_of(scheduled.key);
        }
    }

    pub(super) fn offer_blocks_of(&mut self, key: RequestKey) {
        let request = self.requests.get_mut(&key).expect("a planned request is known");
        let prompt_len = request.prompt_len();
        let Phase::Running { table, computed } = &mut request.phase else { return };
        for end in self.kv.offer(table, &request.hashes, *computed) {
            if let Some(prefill) = request.prefill.as_mut().filter(|_| end <= prompt_len) {
                prefill.num_cache_creation_tokens += u64::from(self.block_size);
            }
        }
    }

    /// Numbers the plan and remembers that its result is owed.
    fn seal(&mut self, mut plan: StepPlan, budget: u32) -> StepPlan {
        if plan.scheduled.is_empty() {
            // It will not be run, so what it would tell the runner is kept for the next.
            assert!(plan.new_requests.is_empty(), "a request started without a token");
            return plan;
        }
        let num_tokens = plan.num_tokens();
        let num_samples = plan.scheduled.iter().filter(|request| request.samples).count();
        assert!(num_tokens <= budget, "{num_tokens} tokens are planned, {budget} were allowed");
        assert!(plan.scheduled.len() <= self.running.len(), "more are planned than run");
        self.step += 1;
        self.planned.push_back(Planned { step: self.step, num_tokens, num_samples });
        plan.step = self.step;
        plan.finished = std::mem::take(&mut self.finished);
        plan
    }
}

/// What the runner is told of a block table.
#[derive(Clone, Copy)]
enum Table {
    Whole,
    Growth,
}

fn prefill_stats(request: &Request, found: u32) -> PrefillStats {
    let (prompt, found) = (u64::from(request.prompt_len()), u64::from(found));
    PrefillStats {
        num_prompt_tokens: prompt,
        num_computed_tokens: prompt - found,
        num_cached_tokens: found,
        num_local_cached_tokens: found,
        num_external_cached_tokens: 0,
        // Counted when the blocks are put into the cache.
        num_cache_creation_tokens: 0,
    }
}
