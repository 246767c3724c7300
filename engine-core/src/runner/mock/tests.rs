use std::sync::Arc;

use pawl_shared::protocol::{SamplingParams, Value};

use super::*;
use crate::step::NewRequest;

fn new_request(key: u64, prompt: &[u32], sampling: SamplingParams) -> NewRequest {
    NewRequest {
        key: RequestKey(key),
        prompt: prompt.into(),
        sampling: Arc::new(sampling),
        seed: 7,
    }
}

fn scheduled(key: u64, first: u32, num: u32, samples: bool) -> ScheduledRequest {
    let blocks = if first == 0 {
        BlockTableUpdate::Replace(vec![BlockId(key as u32 + 1)])
    } else {
        BlockTableUpdate::Append(vec![])
    };
    ScheduledRequest {
        key: RequestKey(key),
        first_position: first,
        num_tokens: num,
        blocks,
        samples,
    }
}

/// Runs the plans and gives what each step sampled, or the first error.
fn check(config: MockConfig, plans: Vec<StepPlan>) -> Result<Vec<Vec<Sampled>>, String> {
    let mut runner = MockRunner::new(config);
    let progress = Progress::default();
    plans
        .into_iter()
        .map(|plan| {
            let mut result = StepResult::default();
            let ran = runner.execute(&plan, &progress, &mut result);
            ran.map(|()| result.sampled).map_err(|e| e.to_string())
        })
        .collect()
}

fn tokens(steps: &[Vec<Sampled>], key: u64) -> Vec<u32> {
    steps.iter().flatten().filter(|s| s.key.0 == key).map(|s| s.token).collect()
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

#[test]
fn tokens_do_not_depend_on_batching_or_chunking() {
    let alone = vec![
        StepPlan {
            step: 1,
            new_requests: vec![new_request(1, &[5, 6, 7], greedy())],
            scheduled: vec![scheduled(1, 0, 3, true)],
            finished: vec![],
        },
        StepPlan { step: 2, scheduled: vec![scheduled(1, 3, 1, true)], ..StepPlan::default() },
    ];
    let batched = vec![
        StepPlan {
            step: 1,
            new_requests: vec![
                new_request(1, &[5, 6, 7], greedy()),
                new_request(2, &[9], greedy()),
            ],
            scheduled: vec![scheduled(2, 0, 1, true), scheduled(1, 0, 2, false)],
            finished: vec![],
        },
        StepPlan {
            step: 2,
            scheduled: vec![scheduled(1, 2, 1, true), scheduled(2, 1, 1, true)],
            ..StepPlan::default()
        },
        StepPlan { step: 3, scheduled: vec![scheduled(1, 3, 1, true)], ..StepPlan::default() },
    ];
    let alone = check(MockConfig::default(), alone).unwrap();
    let batched = check(MockConfig::default(), batched).unwrap();
    assert_eq!(tokens(&alone, 1), tokens(&batched, 1));
    assert_eq!(tokens(&alone, 1).len(), 2);
    assert_ne!(tokens(&batched, 1), tokens(&batched, 2));
}

#[test]
fn a_script_runs_in_a_circle_and_min_tokens_masks_the_end() {
    let config = MockConfig { script: Some(Script(vec![3, 4].into())), ..MockConfig::default() };
    let sampling = SamplingParams { eos_token_id: Some(3), min_tokens: 1, ..greedy() };
    let mut plans = vec![StepPlan {
        step: 1,
        new_requests: vec![new_request(1, &[8], sampling)],
        scheduled: vec![scheduled(1, 0, 1, true)],
        finished: vec![],
    }];
    plans.extend((2..5).map(|step| StepPlan {
        step,
        scheduled: vec![scheduled(1, step as u32 - 1, 1, true)],
        ..StepPlan::default()
    }));
    let steps = check(config, plans).unwrap();
    assert_eq!(tokens(&steps, 1), [4, 4, 3, 4]);
}

#[test]
fn a_request_may_bring_its_own_script() {
    let config = MockConfig { script: Some(Script(vec![3].into())), ..MockConfig::default() };
    let tokens = |ids: &[i128]| {
        let ids = ids.iter().map(|&id| Value::Integer(id)).collect();
        let extra_args = Some(Value::map([("mock_tokens", Value::Array(ids))]));
        let request = new_request(1, &[8], SamplingParams { extra_args, ..greedy() });
        first_tokens(&config, &request, 3)
    };
    assert_eq!(tokens(&[70, 71]), [70, 71, 70]);
    // Not in the vocabulary, so no script.
    assert_eq!(tokens(&[70, 512]), [3, 3, 3]);
}

#[test]
fn logprobs_have_the_sampled_token_first() {
    let config = MockConfig { script: Some(Script(vec![510].into())), ..MockConfig::default() };
    let sampling = SamplingParams { logprobs: Some(3), ..greedy() };
    let plan = StepPlan {
        step: 1,
        new_requests: vec![new_request(1, &[8], sampling)],
        scheduled: vec![scheduled(1, 0, 1, true)],
        finished: vec![],
    };
    let steps = check(config, vec![plan]).unwrap();
    insta::assert_debug_snapshot!(steps[0][0].logprobs);
}

#[test]
fn plans_that_contradict_what_ran_are_refused() {
    let first = || StepPlan {
        step: 1,
        new_requests: vec![new_request(1, &[5, 6, 7], greedy())],
        scheduled: vec![scheduled(1, 0, 2, false)],
        finished: vec![],
    };
    let second =
        |scheduled| StepPlan { step: 2, scheduled: vec![scheduled], ..StepPlan::default() };
    let mut finished = second(scheduled(1, 2, 1, true));
    finished.finished = vec![RequestKey(1)];
    let mut twice = second(scheduled(1, 2, 1, true));
    twice.new_requests = vec![new_request(1, &[5], greedy())];
    let null_block = ScheduledRequest {
        blocks: BlockTableUpdate::Append(vec![BlockId(0)]),
        ..scheduled(1, 2, 1, true)
    };
    let errors: Vec<String> = [
        second(scheduled(9, 2, 1, true)),
        second(scheduled(1, 1, 2, true)),
        second(scheduled(1, 2, 1, false)),
        second(scheduled(1, 2, 2, true)),
        second(null_block),
        finished,
        twice,
    ]
    .into_iter()
    .map(|plan| check(MockConfig::default(), vec![first(), plan]).unwrap_err())
    .collect();
    insta::assert_debug_snapshot!(errors);
}

#[test]
fn a_long_step_shows_progress() {
    let progress = Progress::default();
    let config = MockConfig { step_base: PROGRESS_EVERY * 3, ..MockConfig::default() };
    let mut runner = MockRunner::new(config);
    runner
        .execute(
            &StepPlan { step: 1, ..StepPlan::default() },
            &progress,
            &mut StepResult::default(),
        )
        .unwrap();
    assert!(progress.load(Ordering::Relaxed) >= 3);
}
