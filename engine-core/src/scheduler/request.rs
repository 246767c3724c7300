//! One request, from QUEUED to its end.

use std::sync::Arc;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{
    EngineCoreEvent, EventKind, FinishReason, PrefillStats, RequestId, SamplingParams, StopReason,
};

use super::{AdmittedRequest, ClientIndex};
use crate::kv_cache::{BlockHashes, BlockTable};
use crate::step::{NewRequest, RequestKey};

/// Events kept until the next output. Full, later ones are dropped: QUEUED and the first SCHEDULED
/// are what intervals are computed from, and preemptions are counted in the stats too.
const EVENTS_MAX: usize = 64;

/// A request's place in the order in which all of them are served: the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// 0 for everybody under FCFS.
    pub priority: i64,
    /// Keys count up, so this is the order of arrival. It keeps its value through preemptions:
    /// whoever was preempted comes back before all that came later.
    pub key: RequestKey,
}

#[derive(Debug)]
pub(super) enum Phase {
    /// For capacity.
    Waiting,
    /// Preempted while tokens it had sampled were still on their way. It waits for them first,
    /// because they may end it, and because a prefix lookup needs to know them.
    Deferred,
    /// It holds blocks, and the first `computed` tokens are in them once every step planned so far
    /// has run.
    Running { table: BlockTable, computed: u32 },
}

#[derive(Debug)]
pub(super) struct Request {
    pub id: RequestId,
    pub client: ClientIndex,
    pub rank: Rank,
    pub phase: Phase,
    /// Tokens that planned steps will sample and that have not come back yet.
    pub placeholders: u32,
    pub hashes: BlockHashes,
    /// Whether the runner has been told of it.
    pub introduced: bool,
    /// Set on first admission, gone with the first output.
    pub prefill: Option<PrefillStats>,
    /// Told with the next output.
    pub events: Vec<EngineCoreEvent>,
    prompt: Arc<[u32]>,
    outputs: Vec<u32>,
    sampling: Arc<SamplingParams>,
    seed: u64,
    /// Tokens after which it ends whatever they are.
    max_outputs: u32,
}

impl Request {
    /// `max_len`: the longest sequence, prompt and output; the prompt is shorter.
    pub fn new(from: AdmittedRequest, rank: Rank, block_size: u32, max_len: u32) -> Self {
        let room = max_len - from.prompt.len() as u32;
        Self {
            id: from.id,
            client: from.client,
            rank,
            phase: Phase::Waiting,
            placeholders: 0,
            hashes: BlockHashes::new(block_size, from.cache_salt.as_deref()),
            introduced: false,
            prefill: None,
            events: Vec::new(),
            // A request that may say nothing cannot exist: it would wait for its end for ever.
            max_outputs: from.sampling.max_tokens.unwrap_or(room).min(room).max(1),
            prompt: from.prompt,
            outputs: Vec::new(),
            sampling: from.sampling,
            seed: from.seed,
        }
    }

    pub fn introduction(&self) -> NewRequest {
        NewRequest {
            key: self.rank.key,
            prompt: self.prompt.clone(),
            sampling: self.sampling.clone(),
            seed: self.seed,
        }
    }

    pub fn prompt_len(&self) -> u32 {
        self.prompt.len() as u32
    }

    /// Tokens whose values are known: the prompt and what was sampled and came back.
    pub fn num_tokens(&self) -> u32 {
        (self.prompt.len() + self.outputs.len()) as u32
    }

    /// Tokens of a running request that no planned step computes yet, those counted that planned
    /// steps will sample. 0 also if it is certain to end with them.
    pub fn tokens_to_compute(&self) -> u32 {
        let Phase::Running { computed, .. } = self.phase else { return 0 };
        if self.outputs.len() as u32 + self.placeholders >= self.max_outputs {
            return 0;
        }
        self.num_tokens() + self.placeholders - computed
    }

    pub fn may_read_prefix_cache(&self) -> bool {
        // Prompt logprobs come from the rows of logits that a hit leaves out.
        self.sampling.skip_reading_prefix_cache != Some(true)
            && self.sampling.prompt_logprobs.is_none()
    }

    /// Hashes the blocks that have become full of known tokens.
    pub fn hash_full_blocks(&mut self) {
        self.hashes.extend(&self.prompt, &self.outputs);
    }

    pub fn record(&mut self, kind: EventKind, at: Stamp) {
        if self.events.len() < EVENTS_MAX {
            self.events.push(EngineCoreEvent { kind, timestamp: at.seconds() });
        }
    }

    /// Appends a sampled token. `Some` if it is the last one.
    pub fn append(&mut self, token: u32) -> Option<(FinishReason, Option<StopReason>)> {
        self.outputs.push(token);
        let num_outputs = self.outputs.len() as u32;
        // A sampler masks these tokens until `min_tokens` are out; one that does not (a scripted
        // runner) must not cut the promise short either.
        if num_outputs >= self.sampling.min_tokens {
            if self.sampling.eos_token_id == Some(token) {
                return Some((FinishReason::Stop, None));
            }
            if self.sampling.stop_token_ids.contains(&token) {
                return Some((FinishReason::Stop, Some(StopReason::Token(token))));
            }
        }
        (num_outputs >= self.max_outputs).then_some((FinishReason::Length, None))
    }
}
