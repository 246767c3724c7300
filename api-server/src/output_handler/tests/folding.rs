//! What is counted while requests run to their end.

use super::*;

/// Two prompts of one token, four tokens each, one step for both at a time.
fn two_requests(bench: &mut Bench) -> [Sent; 2] {
    let sent = [bench.send(1, &max_tokens(4)), bench.send(1, &max_tokens(4))];
    let ids = sent.each_ref().map(|sent| sent.ids[0].clone());
    for step in 0..4u32 {
        bench.pass(250);
        let at = 5.0 + 0.25 * f64::from(step);
        let outputs = ids.iter().map(|id| match step {
            0 => first(id, &[104], 4.875, 4.9375, (1, 0)),
            3 => last(id, &[105], FinishReason::Length),
            _ => output(id, &[105]),
        });
        let outputs = outputs.collect();
        let mut after = running(if step == 3 { 0 } else { 2 }, 0.0);
        after.step_counter = u64::from(step) + 1;
        after.pawl = Some(PawlStats {
            schedule_seconds: 0.001,
            execute_seconds: 0.2,
            update_seconds: 0.002,
            num_scheduled_tokens: 2,
            ..PawlStats::default()
        });
        let folded = bench.frame(at, after, outputs);
        assert!(folded.abort.is_empty());
    }
    sent
}

#[test]
fn two_one_token_prompts_of_four_tokens_each() {
    let mut bench = Bench::new();
    let sent = two_requests(&mut bench);
    assert_eq!(bench.handler.open(), 0);
    insta::assert_snapshot!(bench.moved());
    for sent in &sent {
        let updates = read(sent, &bench);
        let (text, tokens, ends) = answer(&updates, 0);
        assert_eq!((text.as_str(), tokens.len(), ends.len()), ("hiii", 4, 1));
        let timing = updates.last().and_then(|update| update.timing).expect("told at the end");
        let whole =
            Duration::from_millis(if sent.ids[0].as_str() == "0_r-1" { 1200 } else { 1100 });
        assert_eq!(timing.total(), whole);
        assert_eq!(timing.decode, Duration::from_millis(750));
    }
}

#[test]
fn the_page_before_anything_has_happened() {
    let bench = Bench::new();
    let (content_type, page) = bench.metrics.render(Format::Text004);
    assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
    insta::assert_snapshot!(String::from_utf8(page).expect("the page is text"));
}

#[test]
fn a_preempted_request_is_queued_once_and_starts_once() {
    let mut bench = Bench::new();
    let sent = bench.send(60, &max_tokens(3));
    let id = &sent.ids[0];
    bench.frame(10.0, running(1, 0.5), vec![first(id, &[97], 8.0, 9.0, (60, 16))]);
    let mut again = output(id, &[98]);
    again.events = [(EventKind::Preempted, 10.5), (EventKind::Scheduled, 14.0)]
        .map(|(kind, timestamp)| EngineCoreEvent { kind, timestamp })
        .into();
    // Told again after the recomputation: the first one counts.
    again.prefill_stats = Some(PrefillStats { num_prompt_tokens: 61, ..PrefillStats::default() });
    bench.frame(15.0, running(1, 0.5), vec![again]);
    let mut done = running(0, 0.0);
    done.prefix_cache_stats = PrefixCacheStats {
        requests: 1,
        queries: 60,
        hits: 16,
        preempted_requests: 1,
        preempted_queries: 61,
        preempted_hits: 48,
        ..PrefixCacheStats::default()
    };
    done.pawl = Some(PawlStats { num_preemptions: 1, ..PawlStats::default() });
    bench.frame(16.0, done, vec![last(id, &[99], FinishReason::Stop)]);
    insta::assert_snapshot!(bench.moved_briefly());
}

#[test]
fn three_choices_are_three_requests_of_one_parent() {
    let mut bench = Bench::new();
    let sent = bench.send(2, &SamplingParams { n: 3, ..max_tokens(9) });
    let ids = sent.ids.clone();
    let outputs = ids.iter().map(|id| first(id, &[97], 1.0, 2.0, (2, 0))).collect();
    bench.frame(3.0, running(3, 0.1), outputs);
    let outputs = vec![
        last(&ids[0], &[97], FinishReason::Stop),
        output(&ids[1], &[98]),
        last(&ids[2], &[], FinishReason::Length),
    ];
    bench.frame(4.0, running(1, 0.1), outputs);
    let halfway = bench.moved_briefly();
    assert!(!halfway.contains("request_params_n"), "{halfway}");
    bench.frame(5.0, running(0, 0.0), vec![last(&ids[1], &[98], FinishReason::Repetition)]);
    insta::assert_snapshot!(bench.moved_briefly());
    let updates = read(&sent, &bench);
    let answers: Vec<_> = (0..3).map(|choice| answer(&updates, choice)).collect();
    insta::assert_debug_snapshot!(answers);
}

#[test]
fn several_tokens_in_one_output_are_one_interval() {
    let mut bench = Bench::new();
    let sent = bench.send(2, &max_tokens(9));
    let id = &sent.ids[0];
    bench.frame(3.0, running(1, 0.1), vec![first(id, &[97, 98], 1.0, 2.0, (2, 0))]);
    bench.frame(4.0, running(0, 0.0), vec![last(id, &[97, 98, 99], FinishReason::Length)]);
    let moved = bench.moved_briefly();
    for line in [
        "vllm:generation_tokens_total 5",
        "vllm:inter_token_latency_seconds_count 1",
        "vllm:request_time_per_output_token_seconds_sum 0.25",
    ] {
        assert!(moved.lines().any(|moved| moved == line), "{line} is not in:\n{moved}");
    }
}

#[test]
fn stats_alone_set_gauges_and_copies_sent_again_count_nothing() {
    let mut bench = Bench::new();
    let mut busy = running(3, 0.75);
    busy.num_waiting_reqs = 4;
    busy.num_skipped_waiting_reqs = 1;
    busy.prefix_cache_stats.queries = 100;
    busy.prefix_cache_stats.hits = 32;
    busy.prefix_cache_stats.hits_by_source = vec![("host".into(), 16), ("tape".into(), 16)];
    busy.pawl = Some(PawlStats { num_preemptions: 2, ..PawlStats::default() });
    bench.frame(1.0, busy.clone(), vec![]);
    let once = bench.moved_briefly();
    bench.pass(5_000);
    busy.pawl = Some(PawlStats { num_preemptions: 2, resent: true, ..PawlStats::default() });
    busy.num_running_reqs = 5;
    bench.frame(2.0, busy, vec![]);
    bench.pass(1_500);
    insta::assert_snapshot!(format!("first:\n{once}\nthen:\n{}", bench.moved_briefly()));
}

/// vLLM's own frames may come without stats, events and prefill stats.
#[test]
fn an_engine_that_keeps_no_stats() {
    let mut bench = Bench::new();
    let sent = bench.send(7, &max_tokens(2));
    let id = sent.ids[0].as_str();
    for (stamp, tail) in [(2.0f64, vec![0xc0]), (3.5, vec![0x01])] {
        // [0, [[id, [97], nil, nil, nil, finish]], nil, stamp]
        let mut bytes = vec![0x94, 0x00, 0x91, 0x96, 0xa0 | id.len() as u8];
        bytes.extend_from_slice(id.as_bytes());
        bytes.extend([0x91, 97, 0xc0, 0xc0, 0xc0]);
        bytes.extend(tail);
        bytes.extend([0xc0, 0xcb]);
        bytes.extend(stamp.to_be_bytes());
        bench.pass(50);
        let now = bench.clock.now();
        bench.handler.fold(&[Bytes::from(bytes)], now);
    }
    assert_eq!(answer(&read(&sent, &bench), 0).0, "aa");
    insta::assert_snapshot!(bench.moved_briefly());
}

/// Intervals are monotonic time: the wall clock is not even asked.
#[test]
fn stamps_out_of_order_are_counted_and_never_negative() {
    let mut bench = Bench::new();
    let sent = bench.send(1, &max_tokens(2));
    let id = &sent.ids[0];
    bench.frame(10.0, running(1, 0.1), vec![first(id, &[97], 9.0, 8.0, (1, 0))]);
    bench.frame(9.5, running(0, 0.0), vec![last(id, &[97], FinishReason::Length)]);
    let moved = bench.moved_briefly();
    assert!(moved.contains("pawl:negative_intervals_total 3"), "{moved}");
    assert!(!moved.contains(" -"), "{moved}");
}

#[test]
fn with_recording_off_nothing_moves_and_the_text_is_the_same() {
    let mut on = Bench::new();
    let mut off = Bench::new();
    off.metrics.set_recording(false);
    let texts = [&mut on, &mut off].map(|bench| {
        let sent = two_requests(bench);
        sent.map(|sent| read(&sent, bench))
    });
    assert_eq!(texts[0], texts[1]);
    assert_eq!(off.moved(), "pawl:recording 0\n");
    off.metrics.set_recording(true);
    two_requests(&mut off);
    let success = "vllm:request_success_total{finished_reason=\"length\"} 2";
    let moved = off.moved();
    assert!(moved.contains(success), "{moved}");
}

#[test]
fn eight_scrapes_at_once_see_counters_that_only_grow() {
    let mut bench = Bench::new();
    let done = std::sync::atomic::AtomicBool::new(false);
    let metrics = bench.metrics.clone();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut before = BTreeMap::new();
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let page = samples(&metrics);
                    for (name, value) in &page {
                        let grows = ["_total", "_count", "_bucket"].iter().any(|kind| {
                            name.split('{').next().is_some_and(|name| name.ends_with(kind))
                        });
                        let was: f64 = before
                            .get(name)
                            .map_or(0.0, |text: &String| text.parse().expect("a number"));
                        let is: f64 = value.parse().expect("a number");
                        assert!(!grows || is >= was, "{name} fell from {was} to {is}");
                    }
                    before = page;
                }
            });
        }
        for _ in 0..300 {
            two_requests(&mut bench);
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let moved = bench.moved_briefly();
    assert!(moved.contains("vllm:generation_tokens_total 2400"), "{moved}");
    assert!(moved.contains("vllm:time_to_first_token_seconds_count 600"), "{moved}");
}
