use super::*;

fn message(bytes: usize) -> Vec<Bytes> {
    vec![Bytes::from(vec![0; bytes])]
}

/// Pops all that may go, and says how many messages went and what waits.
fn drain(outbox: &mut Outbox) -> (usize, u64) {
    let mut popped = 0;
    while outbox.pop().is_some() {
        popped += 1;
    }
    (popped, outbox.waiting_bytes())
}

#[test]
fn at_most_a_window_is_on_its_way_and_acknowledging_opens_it() {
    // Ten messages of 1,000 bytes each, with what is charged on top; the window fits four.
    let mut outbox = Outbox::new(1 << 20, Some(4000));
    for _ in 0..10 {
        outbox.push(message(872)).unwrap();
    }
    assert_eq!(drain(&mut outbox), (4, 6000));
    outbox.acknowledge(1000);
    assert_eq!(drain(&mut outbox), (1, 5000));
    // An old total, and one that was never sent, change nothing.
    outbox.acknowledge(500);
    outbox.acknowledge(1 << 40);
    assert_eq!(drain(&mut outbox), (0, 5000));
    outbox.acknowledge(5000);
    assert_eq!(drain(&mut outbox), (4, 1000));
    outbox.finish();
    assert_eq!(drain(&mut outbox), (1, 0));
    assert!(outbox.is_finished());
}

#[test]
fn a_full_outbox_refuses_but_one_message_always_passes() {
    let mut outbox = Outbox::new(3000, Some(1000));
    // Larger than outbox and window: it passes when nothing waits and nothing is on its way.
    outbox.push(message(5000)).unwrap();
    let refused = outbox.push(message(0));
    assert_eq!(refused, Err(OutboxFull { waiting_bytes: 5128, limit_bytes: 3000 }));
    assert_eq!(drain(&mut outbox), (1, 0));
    outbox.push(message(0)).unwrap();
    assert_eq!(drain(&mut outbox), (0, 128));
    // Empty messages are bounded too.
    let mut taken = 1;
    while outbox.push(Vec::new()).is_ok() {
        taken += 1;
    }
    assert_eq!(taken, 3000 / 128);
}

#[test]
fn a_peer_without_credit_gets_all() {
    let mut outbox = Outbox::new(1 << 20, None);
    for _ in 0..100 {
        outbox.push(message(1000)).unwrap();
    }
    assert_eq!(drain(&mut outbox), (100, 0));
}

#[test]
fn a_reader_acknowledges_each_quarter_window_and_a_rest_after_a_while() {
    let clock = ManualClock::at(1);
    let mut policy = AckPolicy::default();
    let quarter = WINDOW_BYTES / 4;
    assert_eq!(policy.on_taken(clock.now(), 0), None);
    assert_eq!(policy.due(), None);
    assert_eq!(policy.on_taken(clock.now(), quarter - 1), None);
    assert_eq!(policy.on_taken(clock.now(), quarter), Some(quarter));
    assert_eq!(policy.due(), None);
    assert_eq!(policy.on_taken(clock.now(), quarter + 1), None);
    let due = policy.due().unwrap();
    assert_eq!(due.since(clock.now()), ACK_INTERVAL);
    clock.advance(ACK_INTERVAL);
    assert_eq!(policy.on_taken(clock.now(), quarter + 2), Some(quarter + 2));
    assert_eq!(policy.on_taken(clock.now(), quarter + 2), None);
}
