//! What one seed does: sizes, speeds and which faults, drawn at the start of a run.

use std::sync::Arc;
use std::time::Duration;

use pawl_api_server::engine_client::DeliveryLimits;
use pawl_engine_core::runner::mock::MockConfig;
use pawl_engine_core::scheduler::{Policy, SchedulerConfig};
use pawl_engine_core::{CoreConfig, RunnerChoice, Vitals};
use pawl_shared::clock::ManualClock;

use crate::chance::Chance;

pub const FRONTENDS: usize = 3;
/// The longest prompt and the longest answer that are asked for.
pub const PROMPT_MAX: u64 = 24;
pub const ANSWER_MAX: u64 = 16;

/// How one seed's world is made.
pub struct Plan {
    pub num_blocks: u32,
    pub block_size: u32,
    pub scheduler: SchedulerConfig,
    pub depth: u32,
    pub prefix_caching: bool,
    pub step_base: Duration,
    pub step_per_token: Duration,
    /// Messages that wait for the engine.
    pub inbox_max: usize,
    /// Bytes on their way to one client, and bytes that wait behind them.
    pub window: u64,
    pub outbox_bytes: u64,
    pub limits: DeliveryLimits,
    pub open_max: usize,
    /// Between two submissions anywhere.
    pub submit_every: (u64, u64),
    /// Whether there are faults at all, and how far they lie apart, in ms.
    pub faults: Option<(u64, u64)>,
    pub lasts: Duration,
}

impl Plan {
    pub fn new(chance: &mut Chance, seed: u64) -> Self {
        let block_size = chance.pick(&[4, 8]);
        // One longest request fits at the least: (blocks - 1) x size >= prompt + answer.
        let least = (PROMPT_MAX + ANSWER_MAX).div_ceil(u64::from(block_size)) + 1;
        let max_num_seqs = chance.between(1, 8) as u32;
        let step_base = chance.millis(4, 60);
        let num_blocks = chance.between(least, 3 * least) as u32;
        let lasts = Duration::from_secs(chance.between(25, 40));
        let scheduler = SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs + chance.between(0, 24) as u32,
            max_model_len: 256,
            long_prefill_token_threshold: chance.pick(&[0, 0, 5]),
            chunked_prefill: true,
            policy: chance.pick(&[Policy::Fcfs, Policy::Priority]),
            watermark: chance.pick(&[0.0, 0.0, 0.1]),
            reserve_full_isl: chance.percent(50),
            max_step: chance.pick(&[None, Some(Duration::from_millis(500))]),
            max_shared_step: chance.pick(&[None, Some(Duration::from_millis(50))]),
            max_queued: chance.pick(&[3, 12, 65_536]),
        };
        Self {
            num_blocks,
            block_size,
            scheduler,
            depth: chance.between(1, 2) as u32,
            prefix_caching: chance.percent(80),
            step_base,
            step_per_token: chance.micros(0, 500),
            inbox_max: chance.pick(&[2, 1024]),
            window: chance.pick(&[4 << 10, 16 << 10, 4 << 20]),
            outbox_bytes: chance.pick(&[32 << 10, 64 << 20]),
            limits: DeliveryLimits {
                unread_bytes: chance.pick(&[3000, 4 << 20]),
                unread_time: Duration::from_secs(chance.pick(&[5, 30])),
            },
            open_max: chance.pick(&[8, 16_384]),
            submit_every: chance.pick(&[(20, 300), (100, 900), (500, 3000)]),
            // Each tenth seed has none: what breaks there is no matter of luck.
            faults: (!seed.is_multiple_of(10))
                .then(|| chance.pick(&[(500, 4000), (1000, 9000), (4000, 16_000)])),
            lasts,
        }
    }

    /// A core process of this world.
    pub fn core(&self, clock: &ManualClock) -> CoreConfig {
        let mock = MockConfig {
            step_base: self.step_base,
            step_per_token: self.step_per_token,
            max_model_len: 256,
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            ..MockConfig::default()
        };
        CoreConfig {
            runner: RunnerChoice::Mock(mock),
            scheduler: self.scheduler,
            prefix_caching: self.prefix_caching,
            depth: Some(self.depth),
            vitals: Vitals::default(),
            clock: Arc::new(clock.clone()),
            ..CoreConfig::default()
        }
    }
}
