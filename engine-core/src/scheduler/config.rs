//! What can be set, and what cannot go together.

use std::time::Duration;

use crate::kv_cache::CacheConfig;

/// Who goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// By arrival.
    #[default]
    Fcfs,
    /// By `priority`, lower first; by arrival among equals.
    Priority,
}

/// Named as vLLM's flags.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Requests that run at once.
    pub max_num_seqs: u32,
    /// Tokens a step.
    pub max_num_batched_tokens: u32,
    /// Tokens of a sequence, prompt and output. The scheduler lowers it to what the cache holds.
    pub max_model_len: u32,
    /// Tokens of one prompt in one step while others want their turn; 0 is no limit.
    pub long_prefill_token_threshold: u32,
    /// Whether a prompt may be spread over steps.
    pub chunked_prefill: bool,
    /// Who goes first.
    pub policy: Policy,
    /// Share of the blocks that stays free when a request is admitted beside others, 0 to 1.
    pub watermark: f64,
    /// Admit a request only if its whole prompt fits, not just its first chunk.
    pub reserve_full_isl: bool,
    /// How long a step should take at most, by the speed measured so far. `None`: no limit.
    pub max_step: Option<Duration>,
    /// The same for a step while more than one request is there: a stream waits for no longer for
    /// its next token, however long the prompts beside it; nor does a short prompt behind a long
    /// one for its turn.
    pub max_shared_step: Option<Duration>,
    /// Requests that may wait. One more is refused, to be sent again later.
    pub max_queued: u32,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 128,
            max_num_batched_tokens: 2048,
            max_model_len: 2048,
            long_prefill_token_threshold: 0,
            chunked_prefill: true,
            policy: Policy::Fcfs,
            watermark: 0.0,
            reserve_full_isl: true,
            max_step: Some(Duration::from_millis(500)),
            max_shared_step: Some(Duration::from_millis(50)),
            max_queued: 65_536,
        }
    }
}

/// Settings that cannot work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum ConfigError {
    #[error("--max-num-seqs is 0; at least one request must be able to run")]
    NoSeqs,
    #[error("--max-model-len is {max_model_len}; one prompt token and one new token need 2")]
    NoLength { max_model_len: u32 },
    #[error(
        "--max-num-batched-tokens is {tokens}, below --max-num-seqs {seqs}: not every running \
         request would get its token in a step; raise the first or lower the second"
    )]
    BudgetBelowSeqs { tokens: u32, seqs: u32 },
    #[error(
        "--max-num-batched-tokens is {tokens}, below the longest sequence of {length}: without \
         chunked prefill such a prompt could never run; raise it to {length}, lower \
         --max-model-len, or allow chunks with --enable-chunked-prefill"
    )]
    BudgetBelowLength { tokens: u32, length: u32 },
    #[error("--watermark is {0}; it is a share of the cache, from 0 to below 1")]
    Watermark(f64),
    #[error(
        "the KV cache has {num_blocks} blocks of {block_size} tokens; at least 2 blocks (one is \
         never used) of 1 token are needed: give it more memory"
    )]
    NoBlocks { num_blocks: u32, block_size: u32 },
}

impl SchedulerConfig {
    /// Whether these settings and this cache can serve at all.
    pub(super) fn check(&self, cache: &CacheConfig) -> Result<(), ConfigError> {
        if cache.num_blocks < 2 || cache.block_size < 1 {
            let CacheConfig { num_blocks, block_size, .. } = *cache;
            return Err(ConfigError::NoBlocks { num_blocks, block_size });
        }
        if self.max_num_seqs == 0 {
            return Err(ConfigError::NoSeqs);
        }
        if self.max_model_len < 2 {
            return Err(ConfigError::NoLength { max_model_len: self.max_model_len });
        }
        let (tokens, seqs) = (self.max_num_batched_tokens, self.max_num_seqs);
        if tokens < seqs {
            return Err(ConfigError::BudgetBelowSeqs { tokens, seqs });
        }
        if !self.chunked_prefill && tokens < self.max_model_len {
            return Err(ConfigError::BudgetBelowLength { tokens, length: self.max_model_len });
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(ConfigError::Watermark(self.watermark));
        }
        Ok(())
    }
}
