//! Random requests, aborts and pools, by seed. After each call every invariant is checked (by the
//! scheduler itself, debug assertions being on), after each step every promise.

use std::time::Duration;

use pawl_shared::protocol::SamplingParams;

use super::world::{Ask, World, expected};
use crate::kv_cache::CacheConfig;
use crate::scheduler::{ClientIndex, Policy, SchedulerConfig};

const SEEDS: u64 = 10_000;
/// Turns without any progress that no schedule needs: the pipeline is empty after as many as it is
/// deep, and then something must be planned.
const STALL_MAX: u32 = 4;

#[test]
fn every_request_gets_its_tokens_and_one_end() {
    let first = std::env::var("PAWL_SIM_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = first.map_or(0..SEEDS, |seed: u64| seed..seed + 1);
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| simulate(seed));
        if let Err(panic) = outcome {
            println!("seed {seed} fails; PAWL_SIM_SEED={seed} runs it alone");
            std::panic::resume_unwind(panic);
        }
    }
}

/// A small generator that the seed alone decides.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// From `low` to `high`, both included.
    fn pick(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.pick(1, 100) <= percent
    }
}

/// What the clients count, to be compared with the stats.
#[derive(Default)]
struct Totals {
    queries: u64,
    hits: u64,
    requests: u64,
    preemptions: u64,
}

fn simulate(seed: u64) {
    let random = &mut Random(seed);
    let cache = CacheConfig {
        num_blocks: random.pick(3, 24),
        block_size: random.pick(1, 6),
        prefix_caching: random.chance(70),
    };
    let max_model_len = random.pick(4, 60);
    let max_num_seqs = random.pick(1, 8);
    let chunked_prefill = random.chance(80);
    let least = if chunked_prefill { max_num_seqs } else { max_num_seqs.max(max_model_len) };
    let config = SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: least + random.pick(0, 20),
        max_model_len,
        long_prefill_token_threshold: if random.chance(30) { random.pick(1, 8) } else { 0 },
        chunked_prefill,
        policy: if random.chance(50) { Policy::Fcfs } else { Policy::Priority },
        watermark: if random.chance(30) { 0.2 } else { 0.0 },
        reserve_full_isl: random.chance(70),
        max_step: random.chance(30).then_some(Duration::from_millis(50)),
        max_shared_step: random.chance(30).then_some(Duration::from_millis(20)),
        max_queued: 10,
    };
    let depth = random.pick(1, 3) as usize;
    let mut world = World::new(config, cache, depth);
    let (mut next_key, last_key) = (1, u64::from(random.pick(1, 16)));
    let (mut turns, mut stalled) = (0_u32, 0);
    let mut totals = Totals::default();
    while next_key <= last_key || !world.idle() {
        if next_key <= last_key && random.chance(40) {
            let ask = ask(random, next_key, max_model_len);
            let fits = ask.prompt.len() < world.scheduler.max_model_len() as usize;
            // A full queue is a reason too, but never with so few requests.
            assert_eq!(world.add(ask).is_ok() || next_key > 10, fits || next_key > 10);
            next_key += 1;
        }
        if random.chance(4) {
            world.abort(u64::from(random.pick(1, last_key as u32)));
        }
        if random.chance(1) {
            world.abort_client(random.pick(0, 2));
        }
        if random.chance(3) {
            world.scheduler.reset_prefix_cache();
        }
        if random.chance(1) {
            world.scheduler.preempt_running(world.now);
            assert!(world.scheduler.reset_prefix_cache(), "nobody holds a block any more");
        }
        world.per_step = Duration::from_millis(u64::from(random.pick(0, 100)));
        let had_work = world.scheduler.has_work();
        let submitted = world.submit();
        let collected = world.collect(submitted).is_some();
        let plan = &world.last_plan;
        assert!(plan.num_tokens() <= config.max_num_batched_tokens);
        assert!(plan.scheduled.len() <= max_num_seqs as usize);
        stalled = if submitted || collected || !had_work { 0 } else { stalled + 1 };
        assert!(stalled < STALL_MAX, "requests wait and nothing is planned");
        turns += 1;
        assert!(turns < 20_000, "the work does not end");
        if random.chance(20) {
            gather(&mut world, random.pick(0, 2), &mut totals);
        }
    }
    (0..3).for_each(|client| gather(&mut world, client, &mut totals));
    judge(&world, &totals);
}

fn ask(random: &mut Random, key: u64, max_model_len: u32) -> Ask {
    // Few different beginnings, so that prefixes are shared.
    let family = random.pick(0, 2);
    let prompt = random.pick(1, max_model_len + 2);
    let shared = random.pick(0, prompt);
    let token = |index| if index < shared { family * 100 + index } else { 500 + key as u32 };
    Ask {
        key,
        client: random.pick(0, 2),
        prompt: (0..prompt).map(token).collect(),
        priority: i64::from(random.pick(0, 2)),
        salt: random.chance(20).then(|| "salt".to_owned()),
        sampling: SamplingParams {
            max_tokens: random.chance(90).then(|| random.pick(1, 20)),
            min_tokens: random.pick(0, 4),
            eos_token_id: random.chance(50).then_some(3),
            stop_token_ids: (0..random.pick(0, 12)).collect(),
            skip_reading_prefix_cache: random.chance(10).then_some(true),
            ..SamplingParams::default()
        },
    }
}

/// Gauges are those of the tables, whoever asks.
fn gather(world: &mut World, client: u32, totals: &mut Totals) {
    let stats = world.scheduler.take_stats(ClientIndex(client));
    let scheduler = &world.scheduler;
    assert_eq!(stats.num_running_reqs, scheduler.running.len() as u64);
    let waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs;
    assert_eq!(waiting + stats.num_running_reqs, scheduler.requests().count() as u64);
    let prefix = stats.prefix_cache_stats;
    assert!(prefix.hits <= prefix.queries && prefix.preempted_hits <= prefix.preempted_queries);
    totals.queries += prefix.queries;
    totals.hits += prefix.hits;
    totals.requests += prefix.requests;
    totals.preemptions += stats.pawl.expect("our own stats").num_preemptions;
    let again = scheduler_deltas(world, client);
    assert_eq!(again, (0, 0), "a delta is told twice");
}

fn scheduler_deltas(world: &mut World, client: u32) -> (u64, u64) {
    let stats = world.scheduler.take_stats(ClientIndex(client));
    (stats.prefix_cache_stats.queries, stats.pawl.expect("our own stats").num_preemptions)
}

fn judge(world: &World, totals: &Totals) {
    let longest = world.scheduler.max_model_len();
    for (key, fate) in &world.fates {
        let (tokens, finish) = expected(&fate.ask, longest);
        if fate.aborted {
            assert!(tokens.starts_with(&fate.delivered), "tokens of aborted request {key}");
            assert_eq!(fate.finish, None, "request {key} ended after its abort");
        } else {
            assert_eq!(fate.delivered, tokens, "tokens of request {key}");
            assert_eq!(fate.finish, Some(finish), "end of request {key}");
        }
    }
    assert_eq!(world.scheduler.kv.usage(), 0.0, "blocks are left behind");
    assert!(totals.requests <= world.fates.len() as u64, "a request is looked up first only once");
    assert!(totals.hits <= totals.queries);
}
