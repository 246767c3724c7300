//! From what a client asked for to what an engine is told.

use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{OutputKind, SamplingParams};

/// Below this a temperature means greedy.
const GREEDY_BELOW: f64 = 1e-5;
/// A temperature above that is raised to this: logits divided by less overflow.
const TEMPERATURE_MIN: f64 = 0.01;
const LOGIT_BIAS_MAX: f64 = 100.0;

/// The parameters of choice `choice` as they travel: what an engine depends on is filled in from
/// the model, what only a frontend reads is left out.
pub(super) fn lower(
    asked: &SamplingParams,
    choice: u32,
    card: &ModelCard,
    max_model_len: u32,
    prompt_tokens: u32,
) -> SamplingParams {
    let defaults = SamplingParams::default();
    let mut params = SamplingParams {
        n: 1,
        stop: Vec::new(),
        flat_logprobs: defaults.flat_logprobs,
        detokenize: defaults.detokenize,
        skip_special_tokens: defaults.skip_special_tokens,
        spaces_between_special_tokens: defaults.spaces_between_special_tokens,
        include_stop_str_in_output: false,
        output_kind: OutputKind::Delta,
        stream_interval: None,
        skip_clone: false,
        output_text_buffer_length: 0,
        max_tokens: Some(max_tokens(asked, max_model_len, prompt_tokens)),
        ..asked.clone()
    };
    // Each choice draws its own numbers; -1 asks for none in particular, as no seed does.
    params.seed = match asked.seed {
        None | Some(-1) => None,
        Some(seed) => Some(seed.wrapping_add(i64::from(choice))),
    };
    if params.temperature < GREEDY_BELOW {
        params.temperature = 0.0;
        params.top_p = 1.0;
        params.top_k = 0;
        params.min_p = 0.0;
    } else if params.temperature < TEMPERATURE_MIN {
        params.temperature = TEMPERATURE_MIN;
    }
    if let Some(bias) = &mut params.logit_bias {
        for value in bias.values_mut() {
            *value = value.clamp(-LOGIT_BIAS_MAX, LOGIT_BIAS_MAX);
        }
    }
    params.eos_token_id = card.eos_token_id.filter(|_| !asked.ignore_eos);
    if !asked.ignore_eos {
        for &id in &card.stop_token_ids {
            if Some(id) != card.eos_token_id && !params.stop_token_ids.contains(&id) {
                params.stop_token_ids.push(id);
            }
        }
    }
    // These are masked until min_tokens, whether they would end the text or not.
    params.all_stop_token_ids = params.stop_token_ids.iter().copied().collect();
    params.all_stop_token_ids.extend(card.eos_token_id);
    params.all_stop_token_ids.extend(&card.stop_token_ids);
    if params.skip_reading_prefix_cache.is_none() && params.prompt_logprobs.is_some() {
        // Logprobs of prompt tokens exist only for those that are run.
        params.skip_reading_prefix_cache = Some(true);
    }
    params
}

/// As asked for, or what the prompt leaves.
pub(super) fn max_tokens(asked: &SamplingParams, max_model_len: u32, prompt_tokens: u32) -> u32 {
    asked.max_tokens.unwrap_or_else(|| max_model_len.saturating_sub(prompt_tokens).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(asked: SamplingParams) -> SamplingParams {
        let card =
            ModelCard { eos_token_id: Some(2), stop_token_ids: vec![2, 5, 9], ..ModelCard::mock() };
        lower(&asked, 1, &card, 100, 40)
    }

    /// Only what differs from the defaults, as lines.
    fn told(params: &SamplingParams) -> String {
        let lines = |params: &SamplingParams| {
            let text = format!("{params:#?}").replace("\n        ", " ").replace(",\n    }", " }");
            let text = text.replace(",\n    )", ")").replace(",\n    ]", "]").replace("( ", "(");
            text.lines().map(str::to_string).collect::<Vec<_>>()
        };
        let defaults = lines(&SamplingParams::default());
        lines(params)
            .into_iter()
            .filter(|line| !defaults.contains(line))
            .map(|line| format!("{}\n", line.trim().trim_end_matches(',')))
            .collect()
    }

    #[test]
    fn defaults_come_from_the_model() {
        let asked = SamplingParams {
            n: 4,
            max_tokens: None,
            stop: vec!["x".into()],
            detokenize: false,
            include_stop_str_in_output: true,
            stop_token_ids: vec![7],
            seed: Some(41),
            ..SamplingParams::default()
        };
        insta::assert_snapshot!(told(&check(asked)));
    }

    #[test]
    fn ignoring_the_end_still_masks_it_until_min_tokens() {
        let asked = SamplingParams {
            ignore_eos: true,
            stop_token_ids: vec![7],
            max_tokens: Some(3),
            seed: Some(-1),
            ..SamplingParams::default()
        };
        insta::assert_snapshot!(told(&check(asked)));
    }

    #[test]
    fn tiny_temperatures_and_large_biases() {
        let at = |temperature| {
            let bias = [(1, -1e9), (2, 7.5)].into();
            let asked = SamplingParams {
                temperature,
                top_p: 0.5,
                top_k: 3,
                min_p: 0.25,
                logit_bias: Some(bias),
                ..SamplingParams::default()
            };
            told(&check(asked))
        };
        insta::assert_snapshot!(format!("1e-6:\n{}\n0.001:\n{}", at(1e-6), at(0.001)));
    }
}
