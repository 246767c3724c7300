use std::collections::{BTreeMap, BTreeSet};

use super::*;

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

/// Samples from `row` after `prompt` and `output`, with seed 1.
fn run(row: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Choice {
    let mut scratch = Scratch::new(Isa::best(), 0);
    let mut row = row.to_vec();
    sample(&mut row, params, History { prompt, output }, 1, &mut scratch)
}

/// How often each token is drawn, by 4,000 seeds.
fn frequencies(row: &[f32], params: &SamplingParams) -> Vec<f64> {
    const DRAWS: u64 = 4_000;
    let mut scratch = Scratch::new(Isa::best(), 0);
    let mut counts = vec![0_u32; row.len()];
    for seed in 0..DRAWS {
        let history = History { prompt: &[0, 1], output: &[] };
        let choice = sample(&mut row.to_vec(), params, history, seed, &mut scratch);
        counts[choice.token as usize] += 1;
    }
    counts.into_iter().map(|count| f64::from(count) / DRAWS as f64).collect()
}

fn assert_near(found: &[f64], expected: &[f64]) {
    // Five standard deviations of a frequency among 4,000 draws.
    const TOLERANCE: f64 = 0.04;
    let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < TOLERANCE);
    assert!(near && found.len() == expected.len(), "{found:?}, expected {expected:?}");
}

/// Logits of these probabilities.
fn logits_of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32 + 1.5).collect()
}

const FOUR: [f64; 4] = [0.1, 0.4, 0.3, 0.2];

#[test]
fn greedy_takes_the_first_of_the_largest() {
    assert_eq!(run(&[1.0, 3.0, 3.0, 2.0], &greedy(), &[0], &[]).token, 1);
}

#[test]
fn draws_follow_the_probabilities() {
    assert_near(&frequencies(&logits_of(&FOUR), &SamplingParams::default()), &FOUR);
}

#[test]
fn temperature_sharpens() {
    let params = SamplingParams { temperature: 0.5, ..SamplingParams::default() };
    let squares = FOUR.map(|p| p * p);
    let total: f64 = squares.iter().sum();
    assert_near(&frequencies(&logits_of(&FOUR), &params), &squares.map(|p| p / total));
}

#[test]
fn top_k_top_p_and_min_p_cut_the_tail() {
    let base = SamplingParams::default;
    let check = |params: SamplingParams, kept: &[usize]| {
        let total: f64 = kept.iter().map(|&i| FOUR[i]).sum();
        let expected: Vec<f64> =
            (0..4).map(|i| if kept.contains(&i) { FOUR[i] / total } else { 0.0 }).collect();
        let found = frequencies(&logits_of(&FOUR), &params);
        assert_near(&found, &expected);
        for (i, found) in found.iter().enumerate() {
            assert_eq!(*found == 0.0, !kept.contains(&i), "{params:?}: token {i}");
        }
    };
    check(SamplingParams { top_k: 2, ..base() }, &[1, 2]);
    check(SamplingParams { top_k: 1, ..base() }, &[1]);
    check(SamplingParams { top_k: 9, ..base() }, &[0, 1, 2, 3]);
    // 0.4 alone does not reach 0.5, 0.4 + 0.3 does.
    check(SamplingParams { top_p: 0.5, ..base() }, &[1, 2]);
    check(SamplingParams { top_p: 0.05, ..base() }, &[1]);
    check(SamplingParams { top_p: 0.75, ..base() }, &[1, 2, 3]);
    // A bound of 0.24.
    check(SamplingParams { min_p: 0.6, ..base() }, &[1, 2]);
    // Of the three best, renormalised to 4/9, 3/9, 2/9, two reach 0.7.
    check(SamplingParams { top_k: 3, top_p: 0.7, ..base() }, &[1, 2]);
    check(SamplingParams { min_p: 0.4, top_p: 0.7, ..base() }, &[1, 2]);
}

#[test]
fn top_k_keeps_what_equals_the_last() {
    let params = SamplingParams { top_k: 1, ..SamplingParams::default() };
    assert_near(&frequencies(&[2.0, 5.0, 5.0], &params), &[0.0, 0.5, 0.5]);
}

/// A row as long as a real one, cut in every way, against a plain sort.
#[test]
fn long_rows_are_cut_like_short_ones() {
    let mut random = crate::device::cpu::testing::Random(9);
    let row: Vec<f32> = random.units(5_000).iter().map(|v| v * 6.0).collect();
    let largest = row.iter().copied().fold(f32::MIN, f32::max);
    let mut sorted: Vec<(f32, usize)> = row.iter().copied().zip(0..).collect();
    sorted.sort_by(|a, b| b.0.total_cmp(&a.0));
    let weight = |value: f32| f64::from(value - largest).exp();
    let total: f64 = row.iter().map(|v| weight(*v)).sum();
    for top_p in [0.1, 0.5, 0.9, 0.99] {
        let params = SamplingParams { top_p, ..SamplingParams::default() };
        let mut before = 0.0;
        let kept: BTreeSet<u32> = sorted
            .iter()
            .take_while(|(value, _)| {
                let stays = before < top_p * total;
                before += weight(*value);
                stays
            })
            .map(|(_, token)| *token as u32)
            .collect();
        let mut scratch = Scratch::new(Isa::best(), 0);
        let mut drawn = BTreeSet::new();
        for seed in 0..500 {
            let history = History { prompt: &[0], output: &[] };
            drawn.insert(sample(&mut row.clone(), &params, history, seed, &mut scratch).token);
        }
        assert!(drawn.is_subset(&kept), "top_p {top_p}");
    }
}

#[test]
fn a_draw_is_a_function_of_seed_and_position() {
    let row = logits_of(&[0.05; 20]);
    let params = SamplingParams::default();
    let draw = |seed, output: &[u32]| {
        let history = History { prompt: &[1, 2], output };
        sample(&mut row.clone(), &params, history, seed, &mut Scratch::new(Isa::best(), 0)).token
    };
    let texts: Vec<Vec<u32>> =
        (0..3).map(|seed| (0..12).map(|len| draw(seed, &vec![7; len])).collect()).collect();
    assert_eq!(texts[0], (0..12).map(|len| draw(0, &vec![9; len])).collect::<Vec<_>>());
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    assert!(texts[0].iter().collect::<BTreeSet<_>>().len() > 3, "{texts:?}");
}

#[test]
fn penalties_are_exact() {
    // The row after penalties shows in the greedy choice; a bias just around the exact value tells
    // it to 0.001.
    let check = |params: SamplingParams, token: u32, value: f32| {
        let row = [2.0, -1.0, 0.5, -9.0];
        for (offset, wins) in [(-0.001, true), (0.001, false)] {
            let mut row = row.to_vec();
            row[3] = value + offset;
            let mut params = params.clone();
            // The others are out of the way.
            params.allowed_token_ids = Some(vec![token, 3]);
            let choice = run(&row, &params, &[0, 1], &[1, 2, 2]);
            assert_eq!(choice.token == token, wins, "{token} {value}");
        }
    };
    let repetition = SamplingParams { repetition_penalty: 2.0, ..greedy() };
    check(repetition.clone(), 0, 1.0);
    check(repetition.clone(), 1, -2.0);
    check(repetition, 2, 0.25);
    let frequency = SamplingParams { frequency_penalty: 0.3, ..greedy() };
    check(frequency.clone(), 0, 2.0);
    check(frequency.clone(), 1, -1.3);
    check(frequency, 2, -0.1);
    let presence = SamplingParams { presence_penalty: 0.3, ..greedy() };
    check(presence.clone(), 0, 2.0);
    check(presence.clone(), 1, -1.3);
    check(presence, 2, 0.2);
}

#[test]
fn masks_and_bias() {
    let row = [1.0, 4.0, 3.0, 2.0];
    let token = |params: SamplingParams, output: &[u32]| run(&row, &params, &[3], output).token;
    let allowed = SamplingParams { allowed_token_ids: Some(vec![0, 3]), ..greedy() };
    assert_eq!(token(allowed, &[]), 3);
    let stops = BTreeSet::from([1]);
    let minimum = SamplingParams { min_tokens: 2, all_stop_token_ids: stops, ..greedy() };
    assert_eq!((token(minimum.clone(), &[0]), token(minimum, &[0, 0])), (2, 1));
    let biased =
        SamplingParams { logit_bias: Some(BTreeMap::from([(0, 5.0), (99, 1.0)])), ..greedy() };
    assert_eq!(token(biased, &[]), 0);
    let words = Some(vec![vec![1], vec![5, 6, 2], vec![9; 4]]);
    let bad = SamplingParams { bad_words_token_ids: words, ..greedy() };
    assert_eq!((token(bad.clone(), &[6]), token(bad, &[5, 6])), (2, 3));
}

#[test]
fn logprobs_are_those_of_the_raw_row() {
    let params = SamplingParams {
        logprobs: Some(2),
        logit_bias: Some(BTreeMap::from([(0, 50.0)])),
        temperature: 0.3,
        ..SamplingParams::default()
    };
    let choice = run(&logits_of(&FOUR), &params, &[0], &[]);
    let logprobs = choice.logprobs.unwrap();
    assert_eq!((choice.token, logprobs.sampled_rank), (0, 4));
    assert_eq!(logprobs.token_ids, [0, 1, 2]);
    for (found, exact) in logprobs.logprobs.iter().zip([0.1_f64, 0.4, 0.3]) {
        assert!((f64::from(*found) - exact.ln()).abs() < 1e-5);
    }
    let all = SamplingParams { logprobs: Some(-1), ..greedy() };
    let all = run(&logits_of(&FOUR), &all, &[0], &[]).logprobs.unwrap();
    assert_eq!(all.token_ids, [1, 1, 2, 3, 0]);
    let named = Some(vec![3, 0]);
    let named = SamplingParams { logprobs: Some(0), logprob_token_ids: named, ..greedy() };
    let named = run(&logits_of(&FOUR), &named, &[0], &[]).logprobs.unwrap();
    assert_eq!(named.token_ids, [1, 3, 0]);
}

#[test]
fn rows_without_sense_do_no_harm() {
    let nan = f32::NAN;
    for params in [greedy(), SamplingParams::default(), SamplingParams { top_p: 0.5, ..greedy() }] {
        assert_eq!(run(&[1.0, nan, 2.0, nan], &params, &[0], &[]).num_nans, 2);
        assert_eq!(run(&[nan; 4], &params, &[0], &[]).num_nans, 4);
        let masked = SamplingParams { allowed_token_ids: Some(Vec::new()), ..params };
        assert_eq!(run(&[1.0; 4], &masked, &[0], &[]).token, 0);
    }
}
