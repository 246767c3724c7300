//! The default model's weights, by the perplexity of a text: one number that any fault of a kernel,
//! a layout or the cache moves.

use std::sync::Arc;

use pawl_shared::model_card::testing::default_model;
use pawl_shared::protocol::SamplingParams;

use super::*;
use crate::step::{BlockId, BlockTableUpdate, NewRequest, RequestKey};

/// Relative difference of the perplexity from the reference's, which rounds no activation to 8 bits.
const TOLERANCE: f64 = 0.005;
/// Difference of one token, in nats: a fault that only few positions show is not averaged away.
const TOKEN_TOLERANCE: f64 = 0.6;

/// What other software says of the text (`tests/goldens/README.md`): token ids, and how unexpected
/// each but the first is, in nats.
fn golden() -> (Vec<u32>, Vec<f64>) {
    let text = include_str!("../../../../tests/goldens/perplexity.json");
    let lines: Vec<(u32, Option<f64>)> = serde_json::from_str(text).unwrap();
    (lines.iter().map(|line| line.0).collect(), lines.iter().filter_map(|line| line.1).collect())
}

/// A plan that takes the logprob of every token of `ids` but the first, in one step: for each token
/// a request of its own, whose prompt is all before it and whose only allowed token it is. They
/// share one block table, as requests with the same prefix do, and each computes one row of it.
fn plan(ids: &[u32], block_size: usize) -> StepPlan {
    let blocks: Vec<_> =
        (1..=ids.len().div_ceil(block_size)).map(|id| BlockId(id as u32)).collect();
    let mut plan = StepPlan { step: 1, ..StepPlan::default() };
    for (at, &token) in ids.iter().enumerate().skip(1) {
        let sampling = SamplingParams {
            temperature: 0.0,
            allowed_token_ids: Some(vec![token]),
            logprobs: Some(0),
            ..SamplingParams::default()
        };
        let (key, prompt) = (RequestKey(at as u64), ids[..at].into());
        plan.new_requests.push(NewRequest { key, prompt, sampling: Arc::new(sampling), seed: 0 });
        plan.scheduled.push(ScheduledRequest {
            key,
            first_position: at as u32 - 1,
            num_tokens: 1,
            blocks: BlockTableUpdate::Replace(blocks[..at.div_ceil(block_size)].to_vec()),
            samples: true,
        });
    }
    plan
}

fn perplexity(nats: &[f64]) -> f64 {
    (nats.iter().sum::<f64>() / nats.len() as f64).exp()
}

/// With a cache of `dtype`.
fn check(dtype: KvCacheDtype) {
    let Some(path) = default_model() else { return };
    let file = GgufFile::open(&path).unwrap();
    let (ids, reference) = golden();
    let expected = perplexity(&reference);
    let config = CpuConfig {
        kv_cache_dtype: dtype,
        num_blocks: Some(129),
        max_model_len: Some(2048),
        ..CpuConfig::default()
    };
    let progress = Progress::default();
    let mut runner = CpuRunner::load(&file, &config, &progress, &mut |_| ()).unwrap();
    let plan = plan(&ids, runner.spec().block_size as usize);
    let mut result = StepResult::default();
    runner.execute(&plan, &progress, &mut result).unwrap();
    let logprob = |sampled: &Sampled| f64::from(sampled.logprobs.as_ref().unwrap().logprobs[0]);
    let nats: Vec<f64> = result.sampled.iter().map(|sampled| -logprob(sampled)).collect();
    let found = perplexity(&nats);
    let off = found / expected - 1.0;
    let differences = nats.iter().zip(&reference).map(|(found, expected)| (found - expected).abs());
    let worst = differences.fold(0.0, f64::max);
    eprintln!("perplexity {found:.4}, the reference's {expected:.4}: {:+.3} %", 100.0 * off);
    eprintln!("a token differs by up to {worst:.2} nats");
    assert!(off.abs() < TOLERANCE, "perplexity {found}, the reference's {expected}");
    assert!(worst < TOKEN_TOLERANCE, "a token differs by {worst} nats");
}

#[test]
fn weights_have_the_perplexity_of_a_float_reference() {
    check(KvCacheDtype::Auto);
}

#[test]
fn weights_have_the_perplexity_of_a_float_reference_with_keys_and_values_in_eight_bits() {
    check(KvCacheDtype::Int8);
}
