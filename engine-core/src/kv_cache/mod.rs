//! The paged KV cache, as the scheduler sees it: which blocks hold which tokens of whom.
//!
//! Three nouns. A [`BlockTable`] lists the blocks of one request. The [`pool`] knows of each block
//! whether it is free or used, how often, and under which hash its content may be found again. A
//! [`BlockHash`] names a full block by everything that its content depends on.
//!
//! Nothing here touches memory: a block is a number, and its content is what the runner wrote
//! there. A block may be handed on while a step that uses it is still in flight, because steps run
//! in order: whoever gets it writes after the last one has read.

mod hash;
mod pool;

pub use hash::{BlockHash, BlockHashes};

use crate::step::BlockId;
use pool::BlockPool;

/// How the KV cache is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Blocks in all, the null block 0 included.
    pub num_blocks: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// Whether full blocks are found again by what is in them.
    pub prefix_caching: bool,
}

/// The blocks of one request, in token order. Made by [`KvCache::admit`], given back by
/// [`KvCache::release`]; it cannot be copied, so no block is given back twice.
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    /// Blocks from the front that were offered to the prefix cache.
    offered: usize,
}

impl BlockTable {
    /// The blocks, in token order.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// All blocks, free and used.
#[derive(Debug)]
pub struct KvCache {
    config: CacheConfig,
    pool: BlockPool,
}

impl KvCache {
    /// A cache with every block free. `config` needs at least two blocks of at least one token.
    #[must_use]
    pub fn new(config: CacheConfig) -> Self {
        assert!(config.block_size > 0, "a block holds at least one token");
        Self { config, pool: BlockPool::new(config.num_blocks) }
    }

    /// Tokens that fit if one request had all blocks.
    #[must_use]
    pub fn capacity_tokens(&self) -> u32 {
        self.pool.usable().saturating_mul(self.config.block_size)
    }

    /// How the cache is cut.
    #[must_use]
    pub fn config(&self) -> CacheConfig {
        self.config
    }

    /// Blocks that requests may have, the null block left out.
    #[must_use]
    pub fn num_usable(&self) -> u32 {
        self.pool.usable()
    }

    /// Of those, how many requests hold.
    #[must_use]
    pub fn num_used(&self) -> u32 {
        self.pool.usable() - self.pool.num_free()
    }

    /// Share of blocks in use, 0 to 1.
    #[must_use]
    pub fn usage(&self) -> f64 {
        1.0 - f64::from(self.pool.num_free()) / f64::from(self.pool.usable())
    }

    /// The blocks that already hold the first tokens of a sequence of `num_tokens`, by its
    /// `hashes`. At least one token is left to compute, so that there is something to sample from.
    #[must_use]
    pub fn cached_prefix(&self, hashes: &BlockHashes, num_tokens: u32) -> Vec<BlockId> {
        let most = (num_tokens - 1) / self.config.block_size;
        let hashes = hashes.full_blocks().iter().take(most as usize);
        hashes.map_while(|hash| self.pool.find(hash)).collect()
    }

    /// Whether a request that starts on `hits` could hold `num_tokens` and leave `spare` blocks.
    #[must_use]
    pub fn can_admit(&self, hits: &[BlockId], num_tokens: u32, spare: u32) -> bool {
        // A hit that nobody uses is itself in the free list and leaves it on admission.
        let idle_hits = hits.iter().filter(|block| self.pool.is_free(**block)).count() as u32;
        let missing = self.blocks_for(num_tokens) - hits.len() as u32;
        missing + idle_hits + spare <= self.pool.num_free()
    }

    /// Starts a request's table on the blocks that [`Self::cached_prefix`] found.
    #[must_use]
    pub fn admit(&mut self, hits: Vec<BlockId>) -> BlockTable {
        for block in &hits {
            self.pool.share(*block);
        }
        BlockTable { offered: hits.len(), blocks: hits }
    }

    /// Whether `table` can come to hold `num_tokens`.
    #[must_use]
    pub fn can_grow(&self, table: &BlockTable, num_tokens: u32) -> bool {
        self.blocks_for(num_tokens).saturating_sub(table.blocks.len() as u32)
            <= self.pool.num_free()
    }

    /// Gives `table` the blocks that `num_tokens` need, after [`Self::can_grow`]. The new blocks
    /// are those behind the number it had.
    pub fn grow(&mut self, table: &mut BlockTable, num_tokens: u32) {
        while table.blocks.len() < self.blocks_for(num_tokens) as usize {
            table.blocks.push(self.pool.take());
        }
    }

    /// Lets others find the blocks of `table` whose tokens are known (they have a hash) and whose
    /// first `computed` tokens are in the cache once every step planned so far has run. Returns
    /// for each newly findable block the number of tokens up to its end.
    pub fn offer<'a>(
        &'a mut self,
        table: &'a mut BlockTable,
        hashes: &'a BlockHashes,
        computed: u32,
    ) -> impl Iterator<Item = u32> + 'a {
        let block_size = self.config.block_size;
        let full = (computed / block_size) as usize;
        let end = full.min(hashes.full_blocks().len()).max(table.offered);
        let range = table.offered..end;
        table.offered = end;
        range.filter_map(move |index| {
            let new = self.pool.register(table.blocks[index], hashes.full_blocks()[index]);
            new.then_some((index as u32 + 1) * block_size)
        })
    }

    /// Takes the blocks of a request back.
    pub fn release(&mut self, table: BlockTable) {
        // The tail first, so that it is also evicted first: a beginning that many requests share
        // is worth more than the end of any of them.
        for block in table.blocks.into_iter().rev() {
            self.pool.release(block);
        }
    }

    /// Takes the blocks back and makes sure that nobody finds their content again.
    pub fn release_spoilt(&mut self, table: BlockTable) {
        for block in &table.blocks {
            self.pool.forget(*block);
        }
        self.release(table);
    }

    /// Forgets all content. Refused, with `false`, while any block is in use.
    pub fn reset(&mut self) -> bool {
        self.pool.reset()
    }

    fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.config.block_size)
    }

    /// Panics with a sentence unless the books agree with `tables`, which must be all there are.
    pub fn check_invariants<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut refs = vec![0; self.config.num_blocks as usize];
        for block in tables.flat_map(|table| &table.blocks) {
            refs[block.0 as usize] += 1;
        }
        self.pool.check_invariants(&refs);
    }
}
