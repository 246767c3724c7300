//! One request's stamps and counts, frame by frame.

use pawl_shared::protocol::EngineCoreEvent;

use super::*;

const SECOND: u64 = 1_000_000_000;

/// One output: engine seconds, tokens, events.
type Frame<'a> = (f64, u64, &'a [(EventKind, f64)]);

/// Arrival at 10 s of this process, sent at 10.5 s, each frame 1 s later, ended with the last.
fn check(frames: &[Frame<'_>], prefill: Option<PrefillStats>, reason: FinishReason) -> String {
    let at = |seconds: f64| Stamp::from_nanos((seconds * SECOND as f64) as u64);
    let mut life = Lifetime::new(at(10.0), at(10.5), 8, 16);
    let mut text = String::new();
    let mut now = at(10.5);
    for (index, &(timestamp, new_tokens, events)) in frames.iter().enumerate() {
        now = at(11.5 + index as f64);
        let events: Vec<EngineCoreEvent> =
            events.iter().map(|&(kind, timestamp)| EngineCoreEvent { kind, timestamp }).collect();
        let prefill = prefill.as_ref().filter(|_| index == 0);
        let mut frame = IterationStats::default();
        let told = Told { new_tokens, events: &events, prefill, timestamp, now };
        life.observe(&told, &mut frame);
        if index + 1 == frames.len() {
            life.finish(reason, now, &mut frame);
        }
        text.push_str(&format!("{frame:#?}\n"));
    }
    text.push_str(&format!("{:#?}\n", life.timing(now)));
    text
}

#[test]
fn a_request_with_a_preemption() {
    use EventKind::{Preempted, Queued, Scheduled};
    let prefill = PrefillStats {
        num_prompt_tokens: 8,
        num_computed_tokens: 5,
        num_cached_tokens: 3,
        num_local_cached_tokens: 2,
        num_external_cached_tokens: 1,
        num_cache_creation_tokens: 5,
    };
    insta::assert_snapshot!(check(
        &[
            (100.0, 1, &[(Queued, 99.0), (Scheduled, 99.5)]),
            (100.5, 2, &[]),
            (102.0, 1, &[(Preempted, 101.0), (Scheduled, 101.5)]),
        ],
        Some(prefill),
        FinishReason::Length,
    ));
}

#[test]
fn cut_short_after_an_output_without_tokens() {
    insta::assert_snapshot!(check(
        &[(100.0, 0, &[(EventKind::Queued, 99.0)])],
        None,
        FinishReason::Error,
    ));
}

#[test]
fn a_single_token() {
    insta::assert_snapshot!(check(&[(100.0, 1, &[])], None, FinishReason::Stop));
}
