//! Text: stop strings, stop tokens, characters in several tokens, logprobs.

use pawl_shared::protocol::{LogprobsLists, StopReason};

use super::*;

/// Tokens of WORDS, one output for each but the last `together`, which share one.
fn run(params: &SamplingParams, tokens: &[u32], finish: FinishReason) -> Ran {
    let mut bench = Bench::new();
    let sent = bench.send(1, params);
    let id = &sent.ids[0];
    let mut aborted = Vec::new();
    for (index, &token) in tokens.iter().enumerate() {
        let end = index + 1 == tokens.len();
        let output = if end { last(id, &[token], finish) } else { output(id, &[token]) };
        aborted.extend(bench.frame(1.0 + index as f64, running(1, 0.1), vec![output]).abort);
    }
    let updates = read(&sent, &bench);
    let (text, tokens, mut ends) = answer(&updates, 0);
    let pieces = updates.iter().map(|update| update.text.clone()).collect();
    let end = ends.pop().expect("it has ended");
    Ran { text, pieces, tokens: tokens.len(), end, aborted: aborted.len() }
}

#[derive(Debug)]
#[allow(dead_code)] // Read by the snapshots.
struct Ran {
    text: String,
    pieces: Vec<String>,
    tokens: usize,
    end: Finish,
    aborted: usize,
}

fn stop(strings: &[&str]) -> SamplingParams {
    let stop = strings.iter().map(ToString::to_string).collect();
    SamplingParams { stop, ..max_tokens(64) }
}

const PHRASE: [u32; 5] = [256, 257, 258, 259, 260];

#[test]
fn a_stop_string_over_three_tokens() {
    let params = stop(&[" blue violet amber"]);
    insta::assert_debug_snapshot!(run(&params, &PHRASE, FinishReason::Length));
    let all = PHRASE.iter().chain(&[261, 261]).copied().collect::<Vec<_>>();
    let ran = run(&params, &all, FinishReason::Length);
    assert_eq!((ran.text.as_str(), ran.tokens, ran.aborted), (" red green", 5, 1));
}

#[test]
fn what_was_held_back_comes_out_at_the_end() {
    let ran = run(&stop(&[" violet amber!"]), &PHRASE, FinishReason::Length);
    assert_eq!(ran.text, " red green blue violet amber");
    assert_eq!(ran.pieces, [" red", " green", " blue", "", " violet amber"]);
    let ran = run(&stop(&[" violet amber!"]), &[256, 259, 261], FinishReason::Length);
    assert_eq!(ran.pieces, [" red", "", " violetplain"]);
}

#[test]
fn an_included_stop_string_is_part_of_the_answer() {
    let params = SamplingParams { include_stop_str_in_output: true, ..stop(&["vio"]) };
    let ran = run(&params, &PHRASE, FinishReason::Length);
    assert_eq!((ran.text.as_str(), ran.tokens), (" red green blue vio", 4));
    assert_eq!(ran.end.stop_reason, Some(StopReason::Text("vio".into())));
}

/// The text of a stop token that is an ordinary word.
#[test]
fn a_stop_token_has_no_text_unless_included() {
    let mut without = run(&max_tokens(64), &[256, 261], FinishReason::Stop);
    without.pieces.clear();
    let params = SamplingParams { include_stop_str_in_output: true, ..max_tokens(64) };
    let with = run(&params, &[256, 261], FinishReason::Stop);
    assert_eq!((without.text.as_str(), without.tokens), (" red", 2));
    assert_eq!((with.text.as_str(), with.tokens), (" redplain", 2));
    assert_eq!(run(&params, &[256, END], FinishReason::Stop).text, " red");
    // The last token of a request that is merely long enough is text.
    assert_eq!(run(&max_tokens(2), &[256, 261], FinishReason::Length).text, " redplain");
}

#[test]
fn a_stop_string_is_ignored_until_min_tokens() {
    let newline = u32::from(b'\n');
    let mut tokens = vec![97, newline];
    tokens.extend([98; 18]);
    tokens.extend([newline, 99, newline]);
    let params = SamplingParams { min_tokens: 20, ..stop(&["\n"]) };
    let ran = run(&params, &tokens, FinishReason::Length);
    assert_eq!((ran.tokens, ran.text.len(), ran.end.reason), (21, 20, FinishReason::Stop));
}

#[test]
fn a_character_in_four_tokens_is_one_delta() {
    let tokens: Vec<u32> = "a😀".bytes().map(u32::from).collect();
    let ran = run(&max_tokens(9), &tokens, FinishReason::Length);
    assert_eq!(ran.pieces, ["a", "", "", "", "😀"]);
    let ran = run(&max_tokens(9), &tokens[..3], FinishReason::Length);
    assert_eq!(ran.text, "a\u{FFFD}");
}

/// Whichever way a request ends, one choice has one end.
#[test]
fn each_way_to_end_ends_once() {
    use FinishReason::*;
    for reason in FinishReason::ALL {
        let ran = run(&max_tokens(9), &[256, 257], reason);
        assert_eq!(ran.end.reason, reason);
    }
    // A stop string in the very output that the engine ends: stop, and nothing to abort.
    let ran = run(&stop(&["reen"]), &[256, 257], Length);
    assert_eq!((ran.end.reason, ran.text.as_str(), ran.aborted), (Stop, " red g", 0));
}

#[test]
fn without_detokenising_there_is_no_text() {
    let params = SamplingParams { detokenize: false, ..max_tokens(9) };
    let ran = run(&params, &[256, 257], FinishReason::Length);
    assert_eq!((ran.text.as_str(), ran.tokens), ("", 2));
}

#[test]
fn logprobs_carry_each_tokens_own_text_and_end_with_the_stop_string() {
    let mut bench = Bench::new();
    let sent = bench.send(1, &SamplingParams { logprobs: Some(1), ..stop(&["green"]) });
    let mut both = output(&sent.ids[0], &[256, 257, 258]);
    both.new_logprobs = Some(LogprobsLists {
        token_ids: vec![vec![256, 0xF0, 97], vec![257, 257, 97], vec![258, 258, 97]],
        logprobs: vec![vec![-0.5, -0.25, -3.0]; 3],
        ranks: vec![2, 1, 1],
    });
    let folded = bench.frame(1.0, running(1, 0.1), vec![both]);
    assert_eq!(folded.abort, sent.ids);
    insta::assert_debug_snapshot!(read(&sent, &bench));
}
