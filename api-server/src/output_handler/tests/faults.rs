//! Messages that are not what they should be, and outputs that nobody waits for.

use super::*;

#[test]
fn outputs_for_requests_that_are_not_open_are_dropped_and_counted() {
    let mut bench = Bench::new();
    let sent = bench.send(1, &max_tokens(8));
    let stranger = RequestId::from("somebody-else");
    let outputs = vec![output(&stranger, &[97, 97]), output(&sent.ids[0], &[98])];
    bench.frame(1.0, running(1, 0.1), outputs);
    let moved = bench.moved_briefly();
    assert!(moved.contains("pawl:unknown_request_outputs_total 1"), "{moved}");
    assert!(moved.contains("vllm:generation_tokens_total 1"), "{moved}");
}

#[test]
fn a_message_that_cannot_be_read_ends_the_requests_it_names_and_no_other() {
    let mut bench = Bench::new();
    let named = bench.send(1, &max_tokens(8));
    let other = bench.send(1, &max_tokens(8));
    let now = bench.clock.now();
    assert_eq!(bench.handler.fold(&[Bytes::from_static(b"\xc1 no msgpack")], now).abort, []);
    assert_eq!(bench.handler.fold(&[], now).abort, []);
    assert_eq!(bench.handler.open(), 2);
    // A finish reason that is none: [0, [[id, [97], nil, nil, nil, 9]], nil, 1]
    let id = named.ids[0].as_str();
    let mut bytes = vec![0x94, 0x00, 0x91, 0x96, 0xa0 | id.len() as u8];
    bytes.extend_from_slice(id.as_bytes());
    bytes.extend([0x91, 97, 0xc0, 0xc0, 0xc0, 0x09, 0xc0, 0x01]);
    assert_eq!(bench.handler.fold(&[Bytes::from(bytes)], now).abort, named.ids);
    let error = read(&named, &bench).pop().and_then(|update| update.error).expect("an error");
    assert_eq!(error.code, "unreadable_frame");
    bench.frame(2.0, running(1, 0.1), vec![last(&other.ids[0], &[97], FinishReason::Stop)]);
    assert_eq!(answer(&read(&other, &bench), 0).0, "");
    insta::assert_snapshot!(bench.moved_briefly());
}

#[test]
fn replies_and_the_death_notice_are_passed_on() {
    let mut bench = Bench::new();
    let now = bench.clock.now();
    let reply = UtilityReply { call_id: 7, result: Ok(pawl_shared::protocol::Value::Bool(true)) };
    let frames = pawl_shared::protocol::UtilityFrame::new(now, reply.clone(), 0).encode();
    assert_eq!(bench.handler.fold(&frames, now).reply, Some(reply));
    let dead = Bytes::from_static(pawl_shared::protocol::ENGINE_CORE_DEAD);
    assert!(bench.handler.fold(&[dead], now).dead);
}

#[test]
fn an_error_of_the_engine_reaches_the_reader() {
    let mut bench = Bench::new();
    let sent = bench.send(1, &max_tokens(8));
    let mut failed = last(&sent.ids[0], &[], FinishReason::Error);
    failed.error = Some(pawl_shared::protocol::OutputError {
        code: "validation_error".into(),
        message: "no such grammar".into(),
        retryable: false,
    });
    bench.frame(1.0, running(0, 0.0), vec![failed]);
    let updates = read(&sent, &bench);
    let error = updates[0].error.as_ref().expect("an error");
    assert_eq!((error.code.as_str(), updates.len()), ("validation_error", 1));
    let moved = bench.moved_briefly();
    assert!(moved.contains("error\"} 1"), "{moved}");
    assert!(!moved.contains("e2e"), "{moved}");
}
