//! Masks, bias and penalties: what changes a row before a token is chosen.

use pawl_shared::protocol::SamplingParams;

use super::{History, Scratch};

/// Changes `row`; false if nothing in `params` does.
pub fn adjust(
    row: &mut [f32],
    params: &SamplingParams,
    history: History<'_>,
    scratch: &mut Scratch,
) -> bool {
    let mut changed = false;
    if let Some(allowed) = &params.allowed_token_ids {
        keep_only(row, allowed, scratch);
        changed = true;
    }
    for word in params.bad_words_token_ids.iter().flatten() {
        if let Some(token) = forbidden_next(word, history.output) {
            mask(row, token);
            changed = true;
        }
    }
    if history.output.len() < params.min_tokens as usize {
        for &token in &params.all_stop_token_ids {
            mask(row, token);
        }
        changed |= !params.all_stop_token_ids.is_empty();
    }
    for (&token, &bias) in params.logit_bias.iter().flatten() {
        if let Some(logit) = row.get_mut(token as usize) {
            *logit += bias as f32;
            changed = true;
        }
    }
    changed | penalise(row, params, history, scratch)
}

fn mask(row: &mut [f32], token: u32) {
    if let Some(logit) = row.get_mut(token as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

fn keep_only(row: &mut [f32], allowed: &[u32], scratch: &mut Scratch) {
    let kept = allowed.iter().filter_map(|&token| Some((*row.get(token as usize)?, token)));
    scratch.ranked.clear();
    scratch.ranked.extend(kept);
    row.fill(f32::NEG_INFINITY);
    for &(logit, token) in &scratch.ranked {
        row[token as usize] = logit;
    }
}

/// The last token of `word`, if the tokens before it are the last ones of the output.
fn forbidden_next(word: &[u32], output: &[u32]) -> Option<u32> {
    let (&last, before) = word.split_last()?;
    output.ends_with(before).then_some(last)
}

/// Repetition counts prompt and output, each token once: a positive logit is divided, another
/// multiplied. Frequency and presence count the output only.
fn penalise(
    row: &mut [f32],
    params: &SamplingParams,
    history: History<'_>,
    scratch: &mut Scratch,
) -> bool {
    let repetition = params.repetition_penalty as f32;
    let (frequency, presence) = (params.frequency_penalty as f32, params.presence_penalty as f32);
    let (repeats, counts) = (repetition != 1.0, frequency != 0.0 || presence != 0.0);
    let vocab_size = row.len();
    if !repeats && !counts {
        return false;
    }
    let known = |&token: &u32| Some(token as usize).filter(|&token| token < vocab_size);
    let output = history.output.iter().filter_map(known);
    if repeats {
        scratch.seen.resize(vocab_size, false);
        let all = history.prompt.iter().filter_map(known).chain(output.clone());
        for token in all.clone() {
            if !scratch.seen[token] {
                scratch.seen[token] = true;
                let logit = &mut row[token];
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
        }
        for token in all {
            scratch.seen[token] = false;
        }
    }
    if counts {
        scratch.counts.resize(vocab_size, 0);
        for token in output.clone() {
            scratch.counts[token] += 1;
        }
        for token in output {
            let count = std::mem::take(&mut scratch.counts[token]);
            if count > 0 {
                row[token] -= frequency * count as f32;
                row[token] -= presence;
            }
        }
    }
    true
}
