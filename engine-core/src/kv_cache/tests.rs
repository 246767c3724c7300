use super::*;

fn cache(num_blocks: u32) -> KvCache {
    KvCache::new(CacheConfig { num_blocks, block_size: 4, prefix_caching: true })
}
