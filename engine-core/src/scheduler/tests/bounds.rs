//! Figures that no single trace shows.

use std::collections::BTreeMap;

use pawl_shared::protocol::{EventKind, SamplingParams};

use super::world::{Ask, World};
use crate::kv_cache::CacheConfig;
use crate::scheduler::{ClientIndex, SchedulerConfig};

/// What a load of `count` requests without a common prefix, one arriving every other turn, meets
/// in a pool of `num_blocks` blocks of 4.
struct Load {
    /// Preemptions of the request that had most.
    preemptions_max: usize,
    preemptions: u64,
    queries: u64,
    hits: u64,
    queries_again: u64,
}

fn load(count: u64, prompt: u32, new_tokens: u32, num_blocks: u32) -> Load {
    let cache = CacheConfig { num_blocks, block_size: 4, prefix_caching: true };
    let mut world = World::new(SchedulerConfig::default(), cache, 2);
    let mut preempted = BTreeMap::<u64, usize>::new();
    let (mut key, mut turns) = (0, 0);
    while key < count || !world.idle() {
        if key < count && turns % 2 == 0 {
            key += 1;
            let ask = Ask {
                key,
                client: 0,
                prompt: (0..prompt).map(|i| 1000 * key as u32 + i).collect(),
                sampling: SamplingParams {
                    max_tokens: Some(new_tokens),
                    ..SamplingParams::default()
                },
                priority: 0,
                salt: None,
            };
            world.add(ask).expect("it fits");
        }
        let submitted = world.submit();
        for output in world.collect(submitted).map(|(_, outputs)| outputs).unwrap_or_default() {
            let events = output.output.events.iter();
            *preempted.entry(output.key.0).or_default() +=
                events.filter(|event| event.kind == EventKind::Preempted).count();
        }
        turns += 1;
        assert!(turns < 100_000, "the work does not end");
    }
    assert!(world.fates.values().all(|fate| fate.delivered.len() == new_tokens as usize));
    let stats = world.scheduler.take_stats(ClientIndex(0));
    let prefix = stats.prefix_cache_stats;
    Load {
        preemptions_max: preempted.into_values().max().unwrap_or(0),
        preemptions: stats.pawl.expect("our own stats").num_preemptions,
        queries: prefix.queries,
        hits: prefix.hits,
        queries_again: prefix.preempted_queries,
    }
}

/// Among equals a preempted request comes back first, so it does not lose its blocks over and over.
#[test]
fn nobody_is_preempted_again_and_again() {
    let load = load(60, 20, 30, 60);
    assert!(load.preemptions > 0, "the pool is not tight enough to show anything");
    assert!(load.preemptions_max <= 3, "{} preemptions of one request", load.preemptions_max);
}

/// What is computed again after a preemption is no evidence of shared prefixes.
#[test]
fn unrelated_prompts_hit_nothing_however_often_they_are_preempted() {
    let load = load(200, 20, 30, 30);
    assert!(load.queries_again > 0, "the pool is not tight enough to show anything");
    assert_eq!((load.queries, load.hits), (200 * 20, 0));
}
