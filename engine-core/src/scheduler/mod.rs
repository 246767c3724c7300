//! Which requests run in the next step, and what came of the last.
//!
//! [`Scheduler`] is a state machine: requests and step results go in, [`StepPlan`]s and outputs
//! come out, time is a parameter. It knows token values only to hash full blocks and to see when a
//! request stops; logits, weights and memory are the runner's.
//!
//! **There is no prefill phase and no decode phase.** A request has tokens (prompt and sampled),
//! of which the first `computed` are in the KV cache; each step computes some of the rest, as far
//! as the token budget goes, and a step that reaches the last token samples the next.
//!
//! **Plans run ahead of results.** `schedule` may be called again before `update` has seen the
//! result of the plan before: a token that is planned but not sampled yet counts as a placeholder.
//! The runner knows its value in time, because steps run in order.
//!
//! **Policy is one ordering.** Every request has a rank: by arrival, or by priority and then
//! arrival. The best of those that wait is admitted first, the worst of those that run is preempted
//! first, and nothing else decides. `schedule.rs` holds that policy; `kv_cache/` is mechanism.

mod config;
mod invariants;
mod request;
mod schedule;
mod speed;
mod stats;
mod update;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{EngineCoreOutput, EventKind, OutputError, RequestId, SamplingParams};

#[cfg(test)]
mod tests;

pub use config::{ConfigError, Policy, SchedulerConfig};

use crate::kv_cache::{CacheConfig, KvCache};
use crate::step::{RequestKey, StepPlan, StepResult};
use request::{Phase, Rank, Request};
use speed::StepSpeed;
use stats::ClientDeltas;

/// A client of the core, as the transport counts them; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientIndex(pub u32);

/// A request whose parameters have been checked.
#[derive(Clone, Debug)]
pub struct AdmittedRequest {
    /// Larger than that of every request before.
    pub key: RequestKey,
    /// Its name on the wire, put on every output.
    pub id: RequestId,
    /// Whose it is.
    pub client: ClientIndex,
    /// Token ids.
    pub prompt: Arc<[u32]>,
    /// How to sample and when to stop.
    pub sampling: Arc<SamplingParams>,
    /// Seeds the sampler.
    pub seed: u64,
    /// Lower runs earlier, under the priority policy.
    pub priority: i64,
    /// Requests with different salts share no cached blocks.
    pub cache_salt: Option<Arc<str>>,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Rejected {
    #[error("a request with this id is already being served; send another id")]
    Duplicate,
    #[error("prompt_token_ids is empty; send at least one token")]
    EmptyPrompt,
    #[error(
        "prompt_token_ids has {prompt} tokens, but max_model_len is {limit} and one more token \
         must fit; shorten the prompt to at most {} tokens", limit - 1
    )]
    PromptTooLong { prompt: usize, limit: u32 },
    #[error(
        "prompt_token_ids has {prompt} tokens, but the KV cache holds {limit} and one more token \
         must fit; shorten the prompt to at most {} tokens, or start the engine with a larger KV \
         cache", limit - 1
    )]
    PromptBeyondCache { prompt: usize, limit: u32 },
    #[error("{waiting} requests are already waiting; send the request again later")]
    QueueFull { waiting: u32 },
}

impl Rejected {
    /// As an output tells it.
    #[must_use]
    pub fn to_output_error(&self) -> OutputError {
        let retryable = matches!(self, Self::QueueFull { .. });
        let code = if retryable { "queue_full" } else { "validation_error" };
        OutputError { code: code.into(), message: self.to_string(), retryable }
    }
}

/// What a step brought one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    /// Whose it is.
    pub client: ClientIndex,
    /// Which request.
    pub key: RequestKey,
    /// What to tell. The request is gone once this has a `finish_reason`.
    pub output: EngineCoreOutput,
}

/// A step that was planned and whose result has not come yet.
#[derive(Clone, Copy, Debug)]
struct Planned {
    step: u64,
    num_tokens: u32,
    num_samples: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    /// Longest sequence: what the model knows, or what the cache holds.
    max_len: u32,
    block_size: u32,
    prefix_caching: bool,
    kv: KvCache,
    requests: BTreeMap<RequestKey, Request>,
    /// For capacity. Bounded by `max_queued`, beyond which `add` refuses, plus the preempted ones.
    waiting: BTreeSet<Rank>,
    /// Preempted with outputs still on their way.
    deferred: BTreeSet<Rank>,
    /// Sorted. Bounded by `max_num_seqs`.
    running: Vec<Rank>,
    /// Oldest first. The loop that calls bounds it by its depth.
    planned: VecDeque<Planned>,
    /// Gone, and the runner does not know yet. Bounded by the requests that the runner knows.
    finished: Vec<RequestKey>,
    step: u64,
    last_step_tokens: u32,
    speed: StepSpeed,
    deltas: ClientDeltas,
}

impl Scheduler {
    /// A scheduler without requests.
    ///
    /// # Errors
    /// Settings that cannot serve any request, or not together.
    pub fn new(config: SchedulerConfig, cache: CacheConfig) -> Result<Self, ConfigError> {
        config.check(&cache)?;
        let kv = KvCache::new(cache);
        Ok(Self {
            // At the cache's capacity a lone request could get no further block. It ends there, as
            // it would at the model's length, instead of waiting for blocks that do not exist.
            max_len: config.max_model_len.min(kv.capacity_tokens()),
            block_size: cache.block_size,
            prefix_caching: cache.prefix_caching,
            config,
            kv,
            requests: BTreeMap::new(),
            waiting: BTreeSet::new(),
            deferred: BTreeSet::new(),
            running: Vec::new(),
            planned: VecDeque::new(),
            finished: Vec::new(),
            step: 0,
            last_step_tokens: 0,
            speed: StepSpeed::default(),
            deltas: ClientDeltas::default(),
        })
    }

    /// The longest sequence, prompt and output, that can be served.
    #[must_use]
    pub fn max_model_len(&self) -> u32 {
        self.max_len
    }

    /// Queues a request.
    ///
    /// # Errors
    /// A request that can never run, or that must be sent again later. Nothing has changed then.
    pub fn add(&mut self, new: AdmittedRequest, now: Stamp) -> Result<(), Rejected> {
        let (key, client, prompt) = (new.key, new.client, new.prompt.len());
        if self.requests.contains_key(&key) {
            return Err(Rejected::Duplicate);
        }
        if prompt == 0 {
            return Err(Rejected::EmptyPrompt);
        }
        if prompt >= self.config.max_model_len as usize {
            return Err(Rejected::PromptTooLong { prompt, limit: self.config.max_model_len });
        }
        if prompt >= self.max_len as usize {
            return Err(Rejected::PromptBeyondCache { prompt, limit: self.max_len });
        }
        let waiting = self.waiting.len() as u32;
        if waiting >= self.config.max_queued {
            return Err(Rejected::QueueFull { waiting });
        }
        let priority = match self.config.policy {
            Policy::Fcfs => 0,
            Policy::Priority => new.priority,
        };
        let rank = Rank { priority, key };
        let mut request = Request::new(new, rank, self.block_size, self.max_len);
        request.record(EventKind::Queued, now);
        self.requests.insert(key, request);
        self.waiting.insert(rank);
        self.deltas.join(client);
        self.assert_invariants();
        Ok(())
    }

    /// Forgets a request, wherever it is; no output of it will come any more. `false` if there is
    /// none: it may have ended just now.
    pub fn abort(&mut self, key: RequestKey) -> bool {
        let known = self.requests.contains_key(&key);
        if known {
            self.remove(key, Blocks::Sound);
            self.assert_invariants();
        }
        known
    }

    /// Forgets a client that has left, with its requests. Returns how many there were.
    pub fn abort_client(&mut self, client: ClientIndex) -> usize {
        let of_client =
            |(key, request): (&RequestKey, &Request)| (request.client == client).then_some(*key);
        let keys: Vec<_> = self.requests.iter().filter_map(of_client).collect();
        for key in &keys {
            self.remove(*key, Blocks::Sound);
        }
        self.deltas.leave(client);
        self.assert_invariants();
        keys.len()
    }

    /// Whether any request has not ended.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty()
    }

    /// The requests that have not ended, by arrival.
    pub fn requests(&self) -> impl Iterator<Item = (RequestKey, ClientIndex, &RequestId)> {
        self.requests.iter().map(|(key, request)| (*key, request.client, &request.id))
    }

    /// Forgets what the blocks hold. Refused, with `false`, while a request holds any.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let done = self.kv.reset();
        if done {
            self.deltas.reset();
        }
        self.assert_invariants();
        done
    }

    /// Takes the blocks of every running request, as if they had run out: each waits and computes
    /// everything again. What steps in flight sample for them still counts.
    pub fn preempt_running(&mut self, now: Stamp) {
        while let Some(worst) = self.running.last().copied() {
            self.take_blocks(worst, now);
        }
        self.assert_invariants();
    }

    /// Takes a request out of the tables, and its blocks back.
    fn remove(&mut self, key: RequestKey, blocks: Blocks) {
        let request = self.requests.remove(&key).expect("whoever removes a request has seen it");
        match request.phase {
            Phase::Waiting => {
                self.waiting.remove(&request.rank);
            }
            Phase::Deferred => {
                self.deferred.remove(&request.rank);
            }
            Phase::Running { table, .. } => {
                let place = self.running.binary_search(&request.rank);
                self.running.remove(place.expect("a running request is in the running list"));
                match blocks {
                    Blocks::Sound => self.kv.release(table),
                    Blocks::Spoilt => self.kv.release_spoilt(table),
                }
            }
        }
        if request.introduced {
            self.finished.push(key);
        }
    }
}

/// Whether what a request leaves in its blocks may be used by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    Sound,
    /// The logits computed from them were not numbers.
    Spoilt,
}
