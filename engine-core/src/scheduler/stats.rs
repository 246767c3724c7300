//! What happened since a client last asked, each thing told to one client and once.

use std::collections::BTreeMap;

use pawl_shared::protocol::{PawlStats, PrefixCacheStats, SchedulerStats};

use super::request::Phase;
use super::{ClientIndex, Scheduler};
use crate::kv_cache::KvCache;
use crate::step::RequestKey;

/// What is owed to each client. An entry lives from the client's first request or question until
/// the client leaves.
#[derive(Debug, Default)]
pub(super) struct ClientDeltas(BTreeMap<ClientIndex, Deltas>);

#[derive(Debug, Default)]
struct Deltas {
    prefix: PrefixCacheStats,
    preemptions: u64,
}

impl ClientDeltas {
    pub fn join(&mut self, client: ClientIndex) {
        self.0.entry(client).or_default();
    }

    pub fn leave(&mut self, client: ClientIndex) {
        self.0.remove(&client);
    }

    /// A lookup for a request of `client`, in tokens. What a preempted request finds again is
    /// counted apart: it is no evidence that prompts share anything.
    pub fn looked_up(&mut self, client: ClientIndex, queries: u32, hits: u32, again: bool) {
        let stats = &mut self.0.entry(client).or_default().prefix;
        let (requests, all, found) = if again {
            (&mut stats.preempted_requests, &mut stats.preempted_queries, &mut stats.preempted_hits)
        } else {
            (&mut stats.requests, &mut stats.queries, &mut stats.hits)
        };
        *requests += 1;
        *all += u64::from(queries);
        *found += u64::from(hits);
    }

    /// A request of `client` was preempted.
    pub fn preempted(&mut self, client: ClientIndex) {
        self.0.entry(client).or_default().preemptions += 1;
    }

    /// The cache is one for all, so all are told.
    pub fn reset(&mut self) {
        self.0.values_mut().for_each(|deltas| deltas.prefix.reset = true);
    }
}

/// Where a request stands, to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestState {
    /// `waiting`, `preempted`, `prefill` or `decode`.
    pub name: &'static str,
    /// Tokens that are in the cache once every step planned so far has run.
    pub computed: u32,
    /// Blocks it holds.
    pub blocks: u32,
}

impl Scheduler {
    /// Where the request stands; `None` once it has ended.
    #[must_use]
    pub fn state_of(&self, key: RequestKey) -> Option<RequestState> {
        let request = self.requests.get(&key)?;
        let without_blocks = |name| RequestState { name, computed: 0, blocks: 0 };
        Some(match &request.phase {
            Phase::Waiting if request.introduced => without_blocks("preempted"),
            Phase::Waiting => without_blocks("waiting"),
            Phase::Deferred => without_blocks("preempted"),
            Phase::Running { table, computed } => RequestState {
                name: if *computed < request.prompt_len() { "prefill" } else { "decode" },
                computed: *computed,
                blocks: table.blocks().len() as u32,
            },
        })
    }

    /// Whether the request holds blocks.
    #[must_use]
    pub fn is_running(&self, key: RequestKey) -> bool {
        self.requests.get(&key).is_some_and(|r| matches!(r.phase, Phase::Running { .. }))
    }

    /// For how many clients there is an account of what they are owed.
    #[must_use]
    pub fn num_owed(&self) -> usize {
        self.deltas.0.len()
    }

    /// The cache, to look at.
    #[must_use]
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// The state now, and what `client`'s requests did since it was last asked for. State is the
    /// same for every client; what a client's requests did is told to it alone, and once.
    ///
    /// `schedule_seconds`, `execute_seconds` and `update_seconds` are left at 0 for the loop that
    /// measures them; `num_scheduled_tokens` is that of the step last folded by [`Self::update`].
    pub fn take_stats(&mut self, client: ClientIndex) -> SchedulerStats {
        let Deltas { prefix, preemptions } =
            std::mem::take(self.deltas.0.entry(client).or_default());
        SchedulerStats {
            num_running_reqs: self.running.len() as u64,
            num_waiting_reqs: self.waiting.len() as u64,
            num_skipped_waiting_reqs: self.deferred.len() as u64,
            num_kv_fetch_reqs_by_stage: [0; 3],
            step_counter: self.step,
            current_wave: 0,
            kv_cache_usage: self.kv.usage(),
            prefix_cache_stats: prefix,
            spec_decoding_stats: None,
            iteration_details: None,
            kv_cache_eviction_events: Vec::new(),
            waiting_lora_adapters: Vec::new(),
            running_lora_adapters: Vec::new(),
            pawl: Some(PawlStats {
                num_preemptions: preemptions,
                num_scheduled_tokens: u64::from(self.last_step_tokens),
                ..PawlStats::default()
            }),
        }
    }
}
