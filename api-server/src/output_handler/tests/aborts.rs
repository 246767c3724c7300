//! Requests that are cut short: by their reader, by the core, by a reader that does not read.

use pawl_shared::protocol::OutputError;

use super::*;

fn failure() -> EngineFailure {
    EngineFailure {
        kind: FailureKind::CoreDown,
        code: "engine_down".to_string(),
        message: "the core has died".to_string(),
        retryable: true,
    }
}

/// Aborted after `frames` frames, the rest of which comes too late.
fn aborted_after(frames: usize) -> String {
    let mut bench = Bench::new();
    let sent = bench.send(4, &max_tokens(8));
    let id = sent.ids[0].clone();
    let outputs = [
        first(&id, &[97], 1.0, 2.0, (4, 0)),
        output(&id, &[97]),
        last(&id, &[97], FinishReason::Length),
    ];
    let (before, after) = outputs.split_at(frames);
    for (at, output) in (3..).zip(before) {
        bench.frame(f64::from(at), running(1, 0.1), vec![output.clone()]);
    }
    let now = bench.clock.now();
    let told = bench.handler.abort(sent.key, now);
    assert_eq!(told, if frames == 3 { vec![] } else { vec![id] });
    assert_eq!(bench.handler.abort(sent.key, now), []);
    for (at, output) in (6..).zip(after) {
        bench.frame(f64::from(at), running(1, 0.1), vec![output.clone()]);
    }
    bench.frame(9.0, running(0, 0.0), vec![]);
    assert_eq!(bench.handler.open(), 0);
    let ours = |line: &&str| !line.contains("frames_total") && !line.contains("iteration_tokens");
    bench.moved_briefly().lines().filter(ours).map(|line| format!("{line}\n")).collect()
}

#[test]
fn aborted_while_queued() {
    insta::assert_snapshot!(aborted_after(0));
}

#[test]
fn aborted_after_the_first_token() {
    insta::assert_snapshot!(aborted_after(1));
}

#[test]
fn aborted_while_decoding() {
    insta::assert_snapshot!(aborted_after(2));
}

#[test]
fn dropped_after_the_end_is_no_abort() {
    assert!(!aborted_after(3).contains("abort"));
}

#[test]
fn a_dead_core_ends_every_request_with_an_error_at_once() {
    let mut bench = Bench::new();
    let waiting = bench.send(4, &max_tokens(8));
    let decoding = bench.send(4, &SamplingParams { n: 2, ..max_tokens(8) });
    let id = &decoding.ids[0];
    bench.frame(3.0, running(3, 0.5), vec![first(id, &[104, 0xC3], 1.0, 2.0, (4, 0))]);
    let now = bench.clock.now();
    bench.handler.end_all(FinishReason::Error, &failure(), now);
    bench.handler.engine_gone();
    assert_eq!(bench.handler.open(), 0);
    insta::assert_snapshot!(bench.moved_briefly());
    let mut updates = read(&waiting, &bench);
    updates.extend(read(&decoding, &bench));
    for update in &mut updates {
        update.timing = None;
    }
    insta::assert_debug_snapshot!(updates);
}

#[test]
fn a_choice_that_is_cut_short_keeps_its_parent_out_of_the_histograms() {
    let mut bench = Bench::new();
    let sent = bench.send(4, &SamplingParams { n: 2, ..max_tokens(8) });
    let ended = last(&sent.ids[0], &[97], FinishReason::Stop);
    bench.frame(3.0, running(1, 0.1), vec![ended]);
    let now = bench.clock.now();
    assert_eq!(bench.handler.abort(sent.key, now), [sent.ids[1].clone()]);
    let moved = bench.moved_briefly();
    assert!(!moved.contains("request_params_n"), "{moved}");
    assert!(moved.contains("finished_reason=\"stop\"} 1"), "{moved}");
    assert!(moved.contains("finished_reason=\"abort\"} 1"), "{moved}");
}

#[test]
fn the_core_ends_requests_by_itself() {
    let mut bench = Bench::new();
    let sent = [bench.send(1, &max_tokens(8)), bench.send(1, &max_tokens(8))];
    let ids = sent.each_ref().map(|sent| sent.ids[0].clone());
    let frame = StepFrame::new(
        Stamp::from_nanos(1),
        idle_stats(),
        0,
        vec![last(&ids[0], &[], FinishReason::Abort)],
    );
    let frames = frame.with_finished(ids.to_vec()).encode();
    let now = bench.clock.now();
    let folded = bench.handler.fold(&frames, now);
    assert_eq!(folded.abort, []);
    for sent in &sent {
        let updates = read(sent, &bench);
        assert_eq!(updates.len(), 1);
        let code = updates[0].error.as_ref().map(|error| error.code.as_str());
        assert_eq!(code, Some("engine_aborted"));
    }
    let moved = bench.moved();
    assert!(moved.contains("finished_reason=\"abort\"} 2"), "{moved}");
}

/// What had no token was never let in: it is refused, once for all its choices. What had some is
/// aborted.
#[test]
fn a_core_that_stops_refuses_what_has_no_token_yet() {
    let mut bench = Bench::new();
    let queued = bench.send(1, &SamplingParams { n: 2, ..max_tokens(8) });
    let running = bench.send(1, &max_tokens(8));
    bench.frame(1.0, idle_stats(), vec![first(&running.ids[0], &[97], 0.5, 0.6, (1, 0))]);
    bench.moved();
    let error = OutputError {
        code: "engine_stopping".into(),
        message: "the engine core is stopping".into(),
        retryable: true,
    };
    let all: Vec<_> = queued.ids.iter().chain(&running.ids).cloned().collect();
    let ended =
        |id| EngineCoreOutput { error: Some(error.clone()), ..last(id, &[], FinishReason::Abort) };
    let frame =
        StepFrame::new(Stamp::from_nanos(2), idle_stats(), 0, all.iter().map(ended).collect());
    let now = bench.clock.now();
    bench.handler.fold(&frame.with_finished(all).encode(), now);
    for (sent, choices) in [(&queued, 2), (&running, 1)] {
        let updates = read(sent, &bench);
        let told = updates.iter().filter_map(|update| update.error.as_ref());
        let codes: Vec<_> = told.map(|error| error.code.as_str()).collect();
        assert_eq!(codes, vec!["engine_stopping"; choices]);
    }
    let moved = bench.moved();
    assert!(moved.contains("reason=\"engine_unavailable\"} 1"), "{moved}");
    assert!(moved.contains("finished_reason=\"abort\"} 1"), "{moved}");
    assert_eq!(bench.handler.open(), 0);
}

#[test]
fn a_reader_behind_by_too_many_bytes_is_aborted() {
    let limits = DeliveryLimits { unread_bytes: 4000, ..DeliveryLimits::default() };
    let mut bench = Bench::with_limits(limits);
    let slow = bench.send(1, &SamplingParams { n: 2, ..max_tokens(900) });
    let quick = bench.send(1, &max_tokens(900));
    let mut aborted = Vec::new();
    for step in 0..100u32 {
        let outputs = [&slow.ids[0], &slow.ids[1], &quick.ids[0]].map(|id| output(id, &[97]));
        let folded = bench.frame(f64::from(step) + 1.0, running(3, 0.1), outputs.into());
        aborted.extend(folded.abort);
        assert_eq!(read(&quick, &bench).len(), 1);
    }
    assert_eq!(aborted, slow.ids);
    let updates = read(&slow, &bench);
    let bytes: usize = updates.len() * std::mem::size_of::<Update>();
    assert!(bytes < 8000, "{bytes} bytes were kept");
    for choice in 0..2 {
        let (_, _, ends) = answer(&updates, choice);
        assert_eq!(ends, [Finish { reason: FinishReason::Abort, stop_reason: None }]);
    }
    let moved = bench.moved();
    assert!(moved.contains("pawl:slow_reader_aborts_total 1"), "{moved}");
}

#[test]
fn a_reader_that_stops_reading_is_aborted_in_time() {
    let mut bench = Bench::new();
    let stuck = bench.send(1, &max_tokens(9));
    let quick = bench.send(1, &max_tokens(9));
    for _ in 0..31 {
        bench.pass(1_000);
        let outputs = [&stuck.ids[0], &quick.ids[0]].map(|id| output(id, &[97]));
        bench.frame(1.0, running(2, 0.1), outputs.into());
        assert_eq!(read(&quick, &bench).len(), 1);
        let now = bench.clock.now();
        assert_eq!(bench.handler.tick(now), []);
    }
    bench.pass(1_000);
    let now = bench.clock.now();
    assert_eq!(bench.handler.tick(now), stuck.ids);
    assert_eq!(bench.handler.open(), 1);
}

fn no_room(id: &RequestId) -> EngineCoreOutput {
    let error = pawl_shared::protocol::OutputError {
        code: "queue_full".to_string(),
        message: "6 requests are already waiting".to_string(),
        retryable: true,
    };
    EngineCoreOutput { error: Some(error), ..last(id, &[], FinishReason::Error) }
}

/// The codes that each choice of these submissions ended with.
fn ends(sent: &[Sent], bench: &Bench) -> Vec<Vec<String>> {
    let codes = |sent| {
        let ends = read(sent, bench).into_iter().filter(|update| update.finish.is_some());
        ends.map(|update| update.error.expect("no normal end").code).collect()
    };
    sent.iter().map(codes).collect()
}

/// Two of the six choices of three prompts find no room: none of the six is left, another client's
/// request is, and one refusal is counted.
#[test]
fn where_one_choice_finds_no_room_the_whole_request_is_refused_once() {
    let mut bench = Bench::new();
    let other = bench.send(4, &max_tokens(8));
    let sent = bench.send_prompts(&[4, 4, 4], &SamplingParams { n: 2, ..max_tokens(8) });
    let full = vec![no_room(&sent[1].ids[1]), no_room(&sent[2].ids[0])];
    let folded = bench.frame(3.0, running(5, 0.1), full);
    let mut aborted = folded.abort;
    aborted.sort();
    let mut open: Vec<_> = sent.iter().flat_map(|sent| sent.ids.clone()).collect();
    open.retain(|id| *id != sent[1].ids[1] && *id != sent[2].ids[0]);
    open.sort();
    assert_eq!(aborted, open, "what the core refused it has forgotten already");
    assert_eq!(bench.handler.open(), 1);
    assert_eq!(ends(&sent, &bench), vec![vec!["queue_full"; 2]; 3]);
    assert!(read(&other, &bench).is_empty());
    let moved = bench.moved_briefly();
    let counted: Vec<_> = moved
        .lines()
        .filter(|line| line.contains("admission") || line.contains("success"))
        .collect();
    assert_eq!(counted, ["vllm:admission_rejections_total{reason=\"queue_full\"} 1"]);
}

/// A sibling that has tokens already ends as an abort: its tokens are counted, and stay so.
#[test]
fn a_choice_with_tokens_ends_as_an_abort_when_another_finds_no_room() {
    let mut bench = Bench::new();
    let sent = bench.send(4, &SamplingParams { n: 3, ..max_tokens(8) });
    bench.frame(3.0, running(1, 0.1), vec![first(&sent.ids[0], &[97], 1.0, 2.0, (4, 0))]);
    let folded = bench.frame(4.0, running(1, 0.1), vec![no_room(&sent.ids[2])]);
    assert_eq!(folded.abort, sent.ids[..2]);
    assert_eq!(bench.handler.open(), 0);
    let moved = bench.moved_briefly();
    for line in [
        "vllm:admission_rejections_total{reason=\"queue_full\"} 1",
        "vllm:request_success_total{finished_reason=\"abort\"} 1",
        "vllm:prompt_tokens_total 4",
        "vllm:generation_tokens_total 1",
    ] {
        assert!(moved.lines().any(|moved| moved == line), "{line} is not in\n{moved}");
    }
    assert!(!moved.contains("finished_reason=\"error\""), "{moved}");
}

/// Where we have taken the place of a process that died, its requests still run in the core.
#[test]
fn what_a_process_before_ours_had_asked_for_is_aborted() {
    let mut bench = Bench::new();
    let ids = ["r-10000000001", "r-1-f0000000001", "0_r-f0000000001", "nobody's"];
    let [dead, of_choice, ours, other] = ids.map(RequestId::from);
    let outputs = [&dead, &of_choice, &ours, &other].map(|id| output(id, &[97]));
    // Elsewhere nothing is known of whose they are.
    assert_eq!(bench.frame(1.0, running(4, 0.1), outputs.to_vec()).abort, []);
    bench.handler.forget_all_but(0xf);
    let abort = bench.frame(2.0, running(4, 0.1), outputs.to_vec()).abort;
    assert_eq!(abort, [dead.clone(), other]);
    // It has ended by itself.
    let ended = vec![last(&dead, &[97], FinishReason::Stop)];
    assert_eq!(bench.frame(3.0, running(0, 0.0), ended).abort, []);
}
