use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

fn child(line: OwnedFd) -> (Lifeline, Arc<AtomicBool>) {
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    let lifeline = Lifeline::start(line, move || flag.store(true, Ordering::SeqCst)).unwrap();
    (lifeline, ended)
}

#[tokio::test]
async fn a_report_is_asked_for_and_a_sum_comes_back() {
    let (sender, mut heard) = mpsc::channel(16);
    let (line, end) = Line::open("a", sender).unwrap();
    let (lifeline, ended) = child(end);
    lifeline.report_with(|| Bytes::from_static(b"seven"));

    let health = Health { ready: true, awaits_core: false, progress: 3 };
    lifeline.health(health);
    assert_eq!(heard.recv().await.unwrap(), ("a", Heard::Message(FromChild::Health(health))));

    line.send(&ToChild::AskReport { seq: 5 });
    let report = FromChild::Report { seq: 5, snapshot: Bytes::from_static(b"seven") };
    assert_eq!(heard.recv().await.unwrap(), ("a", Heard::Message(report)));

    let asking = tokio::spawn(async move { (lifeline.sum(PATIENCE).await, lifeline) });
    let (_, Heard::Message(FromChild::SumWanted { seq })) = heard.recv().await.unwrap() else {
        panic!("not asked for a sum");
    };
    // The sum of another question is not taken for this one.
    line.send(&ToChild::Sum { seq: seq + 1, sum: Bytes::from_static(b"wrong") });
    line.send(&ToChild::Sum { seq, sum: Bytes::from_static(b"all") });
    let (sum, lifeline) = asking.await.unwrap();
    assert_eq!(sum.unwrap(), "all");

    assert!(!ended.load(Ordering::SeqCst));
    let unanswered = tokio::spawn(async move { lifeline.sum(PATIENCE).await });
    assert!(matches!(heard.recv().await, Some((_, Heard::Message(FromChild::SumWanted { .. })))));
    drop((line, heard));
    assert_eq!(unanswered.await.unwrap(), None, "a sum came of nobody");
}

#[tokio::test]
async fn each_end_notices_the_end_of_the_other() {
    let (sender, mut heard) = mpsc::channel(16);
    let (line, end) = Line::open(1, sender).unwrap();
    drop(end);
    assert_eq!(heard.recv().await.unwrap(), (1, Heard::End));
    drop(line);

    let (sender, heard) = mpsc::channel(16);
    let (line, end) = Line::open(2, sender).unwrap();
    let (_lifeline, ended) = child(end);
    // As when the process ends: all of its descriptors are closed.
    drop((line, heard));
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !ended.load(Ordering::SeqCst) {
        assert!(tokio::time::Instant::now() < deadline, "the child did not notice");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn one_that_is_not_read_is_not_held_up() {
    let (sender, _heard) = mpsc::channel(1);
    let (_line, end) = Line::open((), sender).unwrap();
    let (lifeline, _) = child(end);
    lifeline.report_with(|| Bytes::from(vec![0; 1024 * 1024]));
    // Far more than the sockets and the queues hold.
    for _ in 0..200 {
        lifeline.report();
    }
    let waits = (0..100).map(|_| lifeline.sum(Duration::from_millis(1)));
    assert!(futures::future::join_all(waits).await.iter().all(Option::is_none));
}
