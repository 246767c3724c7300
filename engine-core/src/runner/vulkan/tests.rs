use std::sync::Arc;

use pawl_shared::model_card::GgmlType;
use pawl_shared::protocol::SamplingParams;

use super::*;
use crate::device::vulkan::{AdapterKind, Wanted};
use crate::model::testing::TinyLlama;
use crate::runner::cpu::{CpuConfig, CpuRunner};
use crate::runner::testing::{
    Driver, OUTPUT, assert_same_texts, new_request, prompt, scheduled, table,
};
use crate::step::NewRequest;

fn config() -> VulkanConfig {
    VulkanConfig { num_blocks: Some(600), max_model_len: Some(512), ..VulkanConfig::default() }
}

/// A runner on the best adapter, if there is one; as a GPU of several segments, if `masked`.
fn runner(tiny: TinyLlama, masked: bool) -> Option<VulkanRunner> {
    let index = match choose(&list(), Wanted::Best) {
        Ok(index) => index,
        Err(reason) => {
            let may_skip = std::env::var_os("PAWL_TEST_NO_SKIP").is_none();
            assert!(may_skip, "{reason}: tests/run installs a driver in software");
            eprintln!("SKIPPED: {reason} (tests/run installs a driver in software)");
            return None;
        }
    };
    let mut gpu = Gpu::open(index).unwrap();
    if masked {
        gpu.offer.kind = AdapterKind::Unknown;
        gpu.offer.subgroup = None;
    }
    let (file, progress) = (tiny.file(), Progress::default());
    Some(VulkanRunner::load_on(gpu, &file, &config(), &progress, &mut |_| ()).unwrap())
}

#[test]
fn batch_chunks_and_blocks_do_not_change_a_bit() {
    let all: Vec<usize> = (0..8).collect();
    for masked in [false, true] {
        let Some(runner) = runner(TinyLlama::default(), masked) else { return };
        let mut driver = Driver::new(runner);
        let alone: Vec<_> =
            all.iter().flat_map(|&index| driver.texts(&[index], 1000, 1, 1)).collect();
        assert!(alone.iter().any(|text| text.tokens != alone[0].tokens), "requests differ");
        assert_same_texts(&driver.texts(&all, 1000, 1, 1), &alone, "in a batch of 8");
        assert_same_texts(&driver.texts(&all, 7, 1, 1), &alone, "chunked by 7");
        assert_same_texts(&driver.texts(&all, 64, 7, 200), &alone, "in other blocks");
    }
}

fn greedy(index: usize) -> NewRequest {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    NewRequest { sampling: Arc::new(sampling), ..new_request(index) }
}

/// The greedy tokens of each request; with `ahead`, each step is submitted before the one before it
/// is collected; with `host`, the host must see the rows of the last request.
fn greedy_texts(runner: &mut dyn Runner, count: usize, ahead: bool, host: bool) -> Vec<Vec<u32>> {
    let progress = Progress::default();
    let mut texts = vec![Vec::new(); count];
    let mut result = StepResult::default();
    let mut note = |result: &StepResult| {
        for sampled in &result.sampled {
            texts[sampled.key.0 as usize].push(sampled.token);
        }
    };
    for step in 0..OUTPUT {
        let mut plan = StepPlan { step: step as u64 + 1, ..StepPlan::default() };
        for index in 0..count {
            let len = prompt(index).len();
            if step == 0 {
                let mut new = greedy(index);
                if host && index + 1 == count {
                    // Of no effect on the tokens.
                    let mut params = SamplingParams::clone(&new.sampling);
                    params.logprobs = Some(0);
                    new.sampling = Arc::new(params);
                }
                plan.new_requests.push(new);
                let mut whole = scheduled(index, 0, len, true);
                whole.blocks = BlockTableUpdate::Replace(table(index, 1, 1));
                plan.scheduled.push(whole);
            } else {
                plan.scheduled.push(scheduled(index, len + step - 1, 1, true));
            }
        }
        if runner.submit(&plan, &progress, &mut result).unwrap() {
            note(&result);
        }
        while runner.num_begun() > usize::from(ahead) {
            if runner.collect(WAIT, &progress, &mut result).unwrap() {
                note(&result);
            }
        }
    }
    while runner.num_begun() > 0 {
        if runner.collect(WAIT, &progress, &mut result).unwrap() {
            note(&result);
        }
    }
    texts
}

/// Weights in full precision, so that the CPU rounds no activations either.
#[test]
fn greedy_tokens_are_the_cpus_also_with_a_step_ahead() {
    let tiny = TinyLlama { dtype: GgmlType::F32, tied: false, ..TinyLlama::default() };
    let cpu_config =
        CpuConfig { num_blocks: Some(600), max_model_len: Some(512), ..CpuConfig::default() };
    let progress = Progress::default();
    let mut cpu = CpuRunner::load(&tiny.file(), &cpu_config, &progress, &mut |_| ()).unwrap();
    let expected = greedy_texts(&mut cpu, 6, false, false);
    for (ahead, host) in [(false, false), (true, false), (true, true)] {
        let Some(mut runner) = runner(tiny, false) else { return };
        let found = greedy_texts(&mut runner, 6, ahead, host);
        assert_eq!(found, expected, "ahead: {ahead}, host: {host}");
    }
}

/// A step is in flight when the device goes: nobody waits for it for ever.
#[test]
fn a_lost_device_is_told_within_seconds() {
    let Some(mut runner) = runner(TinyLlama::default(), false) else { return };
    let progress = Progress::default();
    let plan = |step: u64, index: usize| {
        let mut whole = scheduled(index, 0, prompt(index).len(), true);
        whole.blocks = BlockTableUpdate::Replace(table(index, 1, 1));
        StepPlan {
            step,
            new_requests: vec![greedy(index)],
            scheduled: vec![whole],
            ..StepPlan::default()
        }
    };
    let mut result = StepResult::default();
    runner.execute(&plan(1, 0), &progress, &mut result).unwrap();
    runner.submit(&plan(2, 6), &progress, &mut result).unwrap();
    runner.device().lose();
    let lost = Instant::now();
    let error = loop {
        match runner.collect(WAIT, &progress, &mut result) {
            // What was in flight may still be done.
            Ok(true) => break runner.execute(&plan(3, 1), &progress, &mut result).unwrap_err(),
            Ok(false) => assert!(lost.elapsed() < Duration::from_secs(5), "it waits"),
            Err(error) => break error,
        }
    };
    assert!(lost.elapsed() < Duration::from_secs(5), "{:?}", lost.elapsed());
    assert!(error.to_string().contains("the device is lost"), "{error}");
}

/// Memory of this process in pages.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The device in software keeps its memory in this process, so one figure holds for both.
#[test]
fn memory_is_flat_over_many_steps() {
    let steps = if std::env::var_os("PAWL_TEST_SOAK").is_some() { 10_000 } else { 600 };
    let Some(mut runner) = runner(TinyLlama::default(), false) else { return };
    let (progress, mut step) = (Progress::default(), 0);
    let mut result = StepResult::default();
    let mut decode = |runner: &mut VulkanRunner, count: usize| {
        // One request after another: prompt of 15, then decodes.
        for round in 0..count.div_ceil(60) {
            let key = 8 * round + 1;
            for index in 0..60 {
                step += 1;
                let mut plan = StepPlan { step, ..StepPlan::default() };
                let len = prompt(key).len();
                if index == 0 {
                    let new = NewRequest { key: RequestKey(step), ..greedy(key) };
                    plan.new_requests.push(new);
                    let mut whole = scheduled(0, 0, len, true);
                    whole.key = RequestKey(step);
                    whole.blocks = BlockTableUpdate::Replace(table(0, 1, 1));
                    plan.scheduled.push(whole);
                } else {
                    let mut one = scheduled(0, len + index - 1, 1, true);
                    one.key = RequestKey(step - index as u64);
                    plan.scheduled.push(one);
                }
                runner.execute(&plan, &progress, &mut result).unwrap();
            }
            let finished = vec![RequestKey(step - 59)];
            step += 1;
            let plan = StepPlan { step, finished, ..StepPlan::default() };
            runner.execute(&plan, &progress, &mut result).unwrap();
        }
    };
    decode(&mut runner, 120);
    let before = resident();
    decode(&mut runner, steps);
    assert_eq!(runner.device().num_free_read_backs(), 1, "one step at a time needs one");
    let grown = resident().saturating_sub(before);
    assert!(grown < 512, "{grown} pages in {steps} steps");
}
