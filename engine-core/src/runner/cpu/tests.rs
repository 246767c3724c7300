use std::sync::Arc;

use pawl_shared::model_card::GgmlType;
use pawl_shared::protocol::SamplingParams;

use super::*;
use crate::device::cpu::testing::{allocations_counted, fast_isas};
use crate::model::testing::TinyLlama;
use crate::runner::testing::{
    Driver, OUTPUT, Text, assert_same_texts, new_request, note, prompt, scheduled, table,
};
use crate::step::{BlockId, BlockTableUpdate, NewRequest, RequestKey};

fn driver(tiny: TinyLlama, config: CpuConfig) -> Driver<CpuRunner> {
    let progress = Progress::default();
    let runner = CpuRunner::load(&tiny.file(), &config, &progress, &mut |_| ()).unwrap();
    Driver::new(runner)
}

fn config(isa: Isa, threads: usize) -> CpuConfig {
    CpuConfig {
        threads: Some(threads),
        isa: Some(isa.as_str().to_owned()),
        num_blocks: Some(600),
        max_model_len: Some(512),
        ..CpuConfig::default()
    }
}

#[test]
fn batch_chunks_blocks_and_threads_do_not_change_a_bit() {
    let all: Vec<usize> = (0..16).collect();
    for isa in [Isa::Scalar, Isa::best()] {
        let mut driver = driver(TinyLlama::default(), config(isa, 2));
        let alone: Vec<Text> =
            all.iter().flat_map(|&index| driver.texts(&[index], 1000, 1, 1)).collect();
        assert!(alone.iter().any(|text| text.tokens != alone[0].tokens), "requests differ");
        let together = driver.texts(&all, 1000, 1, 1);
        assert_same_texts(&together, &alone, "in a batch of 16");
        assert_same_texts(&driver.texts(&all, 7, 1, 1), &alone, "chunked by 7");
        assert_same_texts(&driver.texts(&all, 64, 7, 200), &alone, "in other blocks");
        let mut other = self::driver(TinyLlama::default(), config(isa, 3));
        assert_same_texts(&other.texts(&all, 1000, 1, 1), &alone, "on three threads");
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let all: Vec<usize> = (0..8).collect();
    let small = [GgmlType::Q4_0, GgmlType::Q5_1, GgmlType::Q8_0, GgmlType::F16, GgmlType::BF16];
    let super_blocks = [GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K];
    for dtype in small.into_iter().chain(super_blocks) {
        let mut tiny = TinyLlama { dtype, tied: false, ..TinyLlama::default() };
        if super_blocks.contains(&dtype) {
            (tiny.hidden, tiny.heads, tiny.feed_forward) = (256, 8, 512);
        }
        let expected = driver(tiny, config(Isa::Scalar, 1)).texts(&all, 50, 1, 1);
        for isa in fast_isas() {
            let found = driver(tiny, config(isa, 2)).texts(&all, 50, 1, 1);
            assert_same_texts(&found, &expected, &format!("{isa:?} {dtype}"));
        }
    }
}

#[test]
fn a_preempted_request_resumes_with_the_same_bits() {
    let mut driver = driver(TinyLlama::default(), config(Isa::best(), 2));
    let expected = driver.texts(&[6], 1000, 1, 1);
    let mut text = Text { tokens: Vec::new(), logprobs: Vec::new() };
    let prompt_len = prompt(6).len();
    let mut plan = StepPlan { new_requests: vec![new_request(6)], ..StepPlan::default() };
    for step in 0..OUTPUT {
        let known = prompt_len + step;
        let mut entry = scheduled(6, known - 1, 1, true);
        // Preempted before the first and the sixth step: its blocks are others' now, and all its
        // tokens run again, in one go.
        if step == 0 || step == 5 {
            entry = scheduled(6, 0, known, true);
            entry.blocks = BlockTableUpdate::Replace(table(6, 3, 100 + step * 40));
        }
        plan.scheduled.push(entry);
        let sampled = driver.execute(std::mem::take(&mut plan)).unwrap();
        note(std::slice::from_mut(&mut text), &[6], sampled);
    }
    assert_same_texts(&[text], &expected, "preempted");
}

#[test]
fn a_cached_prefix_gives_the_same_bits() {
    let mut driver = driver(TinyLlama::default(), config(Isa::best(), 2));
    let expected = driver.texts(&[7], 1000, 1, 1);
    // The first 256 tokens are still in the blocks of the request above.
    let mut text = Text { tokens: Vec::new(), logprobs: Vec::new() };
    let prompt_len = prompt(7).len();
    let mut entry = scheduled(7, 256, prompt_len - 256, true);
    let mut blocks = table(7, 1, 1);
    blocks[16..].copy_from_slice(&[500, 501, 502, 503].map(BlockId));
    entry.blocks = BlockTableUpdate::Replace(blocks);
    let mut plan = StepPlan { new_requests: vec![new_request(7)], ..StepPlan::default() };
    plan.scheduled.push(entry);
    for step in 0..OUTPUT {
        let sampled = driver.execute(std::mem::take(&mut plan)).unwrap();
        note(std::slice::from_mut(&mut text), &[7], sampled);
        plan.scheduled.push(scheduled(7, prompt_len + step, 1, true));
    }
    assert_same_texts(&[text], &expected, "with a cached prefix");
}

/// Plans of `count` decode steps of `requests`, whose blocks they have, from position `first` on.
fn decodes(requests: usize, first: usize, count: usize) -> Vec<StepPlan> {
    let plan = |step| StepPlan {
        scheduled: (0..requests).map(|index| scheduled(index, first + step, 1, true)).collect(),
        ..StepPlan::default()
    };
    (0..count).map(plan).collect()
}

#[test]
fn a_decode_step_allocates_nothing_on_any_thread() {
    const PROMPT: usize = 100;
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let sampled = SamplingParams { top_p: 0.9, min_p: 0.01, ..SamplingParams::default() };
    let penalised = SamplingParams {
        top_k: 40,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        min_tokens: 1000,
        all_stop_token_ids: [7].into(),
        ..SamplingParams::default()
    };
    for (way, sampling) in [("greedy", greedy), ("sampled", sampled), ("penalised", penalised)] {
        for requests in [1, 32] {
            let config = CpuConfig { num_blocks: Some(700), ..config(Isa::best(), 2) };
            let mut driver = driver(TinyLlama::default(), config);
            driver.runner.device.count_allocations_of_all_threads(driver.runner.logits);
            let sampling = Arc::new(sampling.clone());
            let new = |index| NewRequest {
                key: RequestKey(index as u64),
                prompt: (0..PROMPT).map(|i| (i * 7 + index) as u32 % 203).collect(),
                sampling: Arc::clone(&sampling),
                seed: index as u64,
            };
            let prefill = |index| ScheduledRequest {
                blocks: BlockTableUpdate::Replace(table(index, 1, 1)[..18].to_vec()),
                ..scheduled(index, 0, PROMPT, true)
            };
            let plan = StepPlan {
                new_requests: (0..requests).map(new).collect(),
                scheduled: (0..requests).map(prefill).collect(),
                ..StepPlan::default()
            };
            driver.execute(plan).unwrap();
            let plans = decodes(requests, PROMPT, 150);
            let mut result = StepResult::default();
            let (warm_up, counted) = plans.split_at(2);
            for plan in warm_up {
                driver.runner.execute(plan, &driver.progress, &mut result).unwrap();
            }
            // Past the end of a block, of a page and of a group of 128 positions.
            let before = allocations_counted();
            for plan in counted {
                driver.runner.execute(plan, &driver.progress, &mut result).unwrap();
            }
            let allocated = allocations_counted() - before;
            assert_eq!(allocated, 0, "in {} steps of {requests}, {way}", counted.len());
            assert_eq!(result.sampled.len(), requests);
        }
    }
}

#[test]
fn a_plan_that_contradicts_is_refused() {
    let refuse = |change: &dyn Fn(&mut StepPlan)| {
        let mut driver = driver(TinyLlama::default(), config(Isa::Scalar, 1));
        let mut first = scheduled(1, 0, 10, false);
        first.blocks = BlockTableUpdate::Replace(vec![BlockId(3)]);
        let plan = StepPlan {
            new_requests: vec![new_request(1)],
            scheduled: vec![first],
            ..StepPlan::default()
        };
        driver.execute(plan).unwrap();
        let mut plan =
            StepPlan { scheduled: vec![scheduled(1, 10, 5, true)], ..StepPlan::default() };
        change(&mut plan);
        driver.execute(plan).map_or_else(|error| error.to_string(), |_| "accepted".to_owned())
    };
    let append = |plan: &mut StepPlan, block| {
        plan.scheduled[0].blocks = BlockTableUpdate::Append(vec![BlockId(block)]);
    };
    let told = [
        refuse(&|_| ()),
        refuse(&|plan| plan.scheduled[0].key = RequestKey(2)),
        refuse(&|plan| plan.finished = vec![RequestKey(1)]),
        refuse(&|plan| plan.new_requests = vec![new_request(1)]),
        refuse(&|plan| plan.scheduled.push(plan.scheduled[0].clone())),
        refuse(&|plan| plan.scheduled[0].first_position = 9),
        refuse(&|plan| plan.scheduled[0].num_tokens = 6),
        refuse(&|plan| plan.scheduled[0].num_tokens = 0),
        refuse(&|plan| plan.scheduled[0].samples = false),
        refuse(&|plan| plan.scheduled[0].num_tokens = 4),
        refuse(&|plan| append(plan, 0)),
        refuse(&|plan| append(plan, 600)),
        refuse(&|plan| plan.scheduled[0].blocks = BlockTableUpdate::Replace(Vec::new())),
    ];
    let told = told.join("\n").replace("step 2 contradicts the runner's state: ", "");
    insta::assert_snapshot!(told, @r#"
    accepted
    request 2 was never told
    request 1 was never told
    request 1 is not new
    request 1 is scheduled twice
    request 1: runs from position 9, but 10 are computed
    request 1: runs 10..16 of 15 known tokens
    request 1: runs 10..10 of 15 known tokens
    request 1: samples = false, but the step ends at 15 of 15 known tokens
    request 1: samples = true, but the step ends at 14 of 15 known tokens
    request 1: block 0 is none of 1..600
    request 1: block 600 is none of 1..600
    request 1: runs to 15, its blocks hold 0 tokens
    "#);
}

#[test]
fn settings_that_will_not_do_are_refused() {
    let refuse = |config: CpuConfig| {
        let file = TinyLlama::default().file();
        let loaded = CpuRunner::load(&file, &config, &Progress::default(), &mut |_| ());
        loaded.map_or_else(|error| error.to_string(), |_| "accepted".to_owned())
    };
    let base = config(Isa::Scalar, 1);
    let told = [
        refuse(CpuConfig { max_model_len: Some(2000), ..base.clone() }),
        refuse(CpuConfig { num_blocks: Some(32), ..base.clone() }),
        refuse(CpuConfig { num_blocks: None, kv_cache_bytes: Some(100_000), ..base.clone() }),
        refuse(CpuConfig { num_blocks: None, kv_cache_bytes: Some(10 << 40), ..base.clone() }),
        refuse(CpuConfig { num_blocks: Some(u32::MAX), ..base.clone() }),
        refuse(CpuConfig { block_size: 8, ..base.clone() }),
        refuse(CpuConfig { isa: Some("mmx".to_owned()), ..base }),
    ];
    // Some lines name what this machine offers.
    let filters =
        vec![("choose one of .*", "choose one of […]"), (r"\S+ GiB are free", "[…] are free")];
    insta::with_settings!({ filters => filters }, {
        let told = told.join("\n").replace(", but ", ",\n  but ").replace("; ", ";\n  ");
        insta::assert_snapshot!(told, @r#"
        --max-model-len is 2000,
          but the model was made for up to 1024 tokens;
          choose 1 to 1024
        the KV cache has 32 blocks of 16 tokens (8192 bytes each),
          but one sequence of --max-model-len 512 needs 33;
          give it more memory or lower --max-model-len
        the KV cache has 12 blocks of 16 tokens (8192 bytes each),
          but one sequence of --max-model-len 512 needs 33;
          give it more memory or lower --max-model-len
        --kv-cache-memory-bytes asks for 10240.0 GiB of memory for the KV cache,
          but […] are free here;
          lower it, or leave it out
        --num-gpu-blocks-override asks for 32768.0 GiB of memory for the KV cache,
          but […] are free here;
          lower it, or leave it out
        --block-size is 8,
          but the CPU device needs a multiple of 16
        CPU instruction set "mmx" is not available here;
          choose one of […]
        "#);
    });
}

#[test]
fn loading_tells_how_far_it_is() {
    let progress = Progress::default();
    let mut told = Vec::new();
    let config = config(Isa::best(), 2);
    let file = TinyLlama::default().file();
    CpuRunner::load(&file, &config, &progress, &mut |now| told.push(now)).unwrap();
    assert!(told.is_sorted_by_key(|now| now.done_bytes));
    let last = told.last().unwrap();
    assert_eq!(last.done_bytes, last.total_bytes);
    assert_eq!(progress.load(Ordering::Relaxed), told.len() as u64);
}
