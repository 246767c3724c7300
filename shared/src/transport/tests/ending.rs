//! How links end: a peer that dies, a core that comes back, a reader that stops, a close.

use std::time::Instant;

use super::*;

#[tokio::test]
async fn a_frontend_that_vanishes_has_left_within_a_second() {
    let (_dir, address) = ipc();
    for address in [address, tcp()] {
        let mut core = TestCore::ready(&address).await;
        let (mut frontend, _sender) = join(&core.address).await;
        up(&mut frontend).await;
        let client = core.joined().await;
        let before = Instant::now();
        drop(frontend);
        let reason = LeaveReason::Disconnected;
        assert_eq!(core.next().await, CoreEvent::Left { client, reason });
        assert!(before.elapsed() < Duration::from_secs(1), "took {:?}", before.elapsed());
        assert_eq!(core.send(client, "late").await, Err(SendRefused::Down));
    }
}

#[tokio::test]
async fn a_core_that_vanishes_is_down_and_its_successor_is_joined_at_the_same_path() {
    let (_dir, address) = ipc();
    let mut core = TestCore::ready(&address).await;
    let (mut frontend, sender) = join(&address).await;
    let (_, first) = up(&mut frontend).await;
    let client = core.joined().await;
    core.send(client, "last words").await.unwrap();
    assert_eq!(message(&mut frontend).await, "last words");

    let before = Instant::now();
    drop(core.endpoint().await);
    let down = next(&mut frontend).await;
    assert!(matches!(down, FrontendEvent::Down { .. }), "{down:?}");
    assert!(before.elapsed() < Duration::from_secs(1), "took {:?}", before.elapsed());
    assert_eq!(sender.try_send(frames("ADD late")), Err(SendRefused::Down));

    // What a killed core leaves: a socket file that nobody listens at.
    let Address::Ipc(path) = &address else { unreachable!() };
    drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    let mut core = TestCore::ready(&address).await;
    let (_, second) = up(&mut frontend).await;
    assert!(second > first, "epoch {second:x} follows {first:x}");
    let client = core.joined().await;
    sender.try_send(frames("ADD again")).unwrap();
    assert_eq!(core.next().await, CoreEvent::Message { client, frames: frames("ADD again") });
}

#[tokio::test]
async fn a_reader_that_stops_is_cut_off_with_bounded_memory() {
    let (_dir, address) = ipc();
    let mut core = TestCore::ready(&address).await;
    let (mut slow, _slow_sender) = join(&address).await;
    up(&mut slow).await;
    let slow_client = core.joined().await;
    let (mut other, _other_sender) = join(&address).await;
    up(&mut other).await;
    let other_client = core.joined().await;

    let payload = Bytes::from(vec![7_u8; 64 << 10]);
    let sent = core
        .tell(move |core| {
            let mut sent = 0_u64;
            while core.send(slow_client, vec![payload.clone()]).is_ok() {
                sent += payload.len() as u64;
                assert!(sent < 1 << 30, "nothing bounds the outbox");
            }
            sent
        })
        .await;
    let bound = crate::rendezvous::OUTBOX_BYTES_MAX + crate::rendezvous::WINDOW_BYTES;
    assert!(sent <= bound, "{sent} bytes were taken for a reader that reads none");
    let reason = LeaveReason::CutOff;
    assert_eq!(core.next().await, CoreEvent::Left { client: slow_client, reason });
    core.send(other_client, "undisturbed").await.unwrap();
    assert_eq!(message(&mut other).await, "undisturbed");

    // It is told, after what it had been sent within its window, and joins again.
    let reason = loop {
        match next(&mut slow).await {
            FrontendEvent::Message { .. } => {}
            FrontendEvent::Down { reason } => break reason,
            other => panic!("{other:?}"),
        }
    };
    insta::assert_snapshot!(reason, @"the core closed the link: it did not read its outputs");
    up(&mut slow).await;
    core.joined().await;
}

#[tokio::test]
async fn credit_comes_back_as_the_reader_takes_messages() {
    let (_dir, address) = ipc();
    let mut core = TestCore::ready(&address).await;
    let (mut frontend, _sender) = join(&address).await;
    up(&mut frontend).await;
    let client = core.joined().await;
    // Twelve windows, in messages of which one alone is most of a window.
    for round in 0..12 {
        let payload = Bytes::from(vec![round; 3900 << 10]);
        core.tell(move |core| core.send(client, vec![payload])).await.unwrap();
    }
    for round in 0..12 {
        let FrontendEvent::Message { frames } = next(&mut frontend).await else { panic!() };
        assert_eq!((frames[0].len(), frames[0][0]), (3900 << 10, round));
    }
}

#[tokio::test]
async fn what_was_sent_just_before_a_close_arrives_with_the_death_notice() {
    let (_dir, address) = ipc();
    for address in [address, tcp()] {
        let mut core = TestCore::ready(&address).await;
        let (mut frontend, _sender) = join(&core.address).await;
        up(&mut frontend).await;
        let client = core.joined().await;
        let mut endpoint = core.endpoint().await;
        // More than one window, so that some of it goes without credit.
        for i in 0..2000 {
            let frames = vec![Bytes::from(format!("{i}")), Bytes::from(vec![0; 4 << 10])];
            endpoint.send(client, frames).unwrap();
        }
        endpoint.broadcast_dead();
        let reader = tokio::spawn(async move {
            for i in 0..2000 {
                let FrontendEvent::Message { frames } = next(&mut frontend).await else {
                    panic!("message {i} is missing");
                };
                assert_eq!(text(&frames[..1]), i.to_string());
            }
            assert_eq!(message(&mut frontend).await, "ENGINE_CORE_DEAD");
            let down = next(&mut frontend).await;
            assert!(matches!(down, FrontendEvent::Down { .. }), "{down:?}");
        });
        endpoint.close(DEADLINE).await;
        reader.await.unwrap();
        if let Address::Ipc(path) = &address {
            assert!(!path.exists(), "the core leaves its socket behind");
        }
    }
}

#[tokio::test]
async fn a_core_that_does_not_answer_hangs_and_resumes_without_a_loss() {
    let (_dir, address) = ipc();
    let heartbeat = HeartbeatConfig {
        interval: Duration::from_millis(50),
        silence: Duration::from_millis(500),
        ..HeartbeatConfig::default()
    };
    let config = CoreEndpointConfig { heartbeat, ..CoreEndpointConfig::new(vec![address.clone()]) };
    let mut core = TestCore::start(config).await;
    core.tell(|core| core.set_ready(frames("ready"))).await;
    let config = FrontendEndpointConfig {
        heartbeat,
        ..FrontendEndpointConfig::new(CoreAt::Join(address.clone()))
    };
    let (mut frontend, sender) = FrontendEndpoint::start(config).await.unwrap();
    up(&mut frontend).await;
    let client = core.joined().await;

    // Nobody polls the endpoint: that is what a stuck io thread looks like.
    let mut endpoint = core.endpoint().await;
    let hung = next(&mut frontend).await;
    assert!(matches!(hung, FrontendEvent::Hung { .. }), "{hung:?}");
    sender.try_send(frames("ADD meanwhile")).unwrap();
    endpoint.send(client, frames("meanwhile")).unwrap();
    assert_eq!(message(&mut frontend).await, "meanwhile");

    let (told, event) = tokio::sync::oneshot::channel();
    let _polled = tokio::spawn(async move {
        told.send(endpoint.next().await).unwrap();
        // Goes on answering pings until the test is over.
        endpoint.next().await
    });
    assert_eq!(next(&mut frontend).await, FrontendEvent::Resumed);
    let event = tokio::time::timeout(DEADLINE, event).await.expect("an event").unwrap();
    assert_eq!(event, CoreEvent::Message { client, frames: frames("ADD meanwhile") });
}

/// Descriptors and threads of this process.
fn resources() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

async fn settles(what: &str, reached: impl Fn() -> bool) {
    let settled = async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, settled).await.unwrap_or_else(|_| {
        panic!("{what} is not reached: {:?} descriptors and threads", resources());
    });
}

/// Runs itself in a process of its own: what other tests of this one hold would be counted.
#[test]
fn two_hundred_joins_and_leaves_leave_nothing_behind() {
    const NAME: &str =
        "transport::tests::ending::two_hundred_joins_and_leaves_leave_nothing_behind";
    const ALONE: &str = "PAWL_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(join_and_leave_two_hundred_times());
    }
    let test = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    assert!(test.status.success(), "{}", String::from_utf8_lossy(&test.stderr));
    assert!(String::from_utf8_lossy(&test.stdout).contains("1 passed"), "it did not run");
}

async fn join_and_leave_two_hundred_times() {
    let (_dir, address) = ipc();
    let mut core = TestCore::ready(&address).await;
    let (mut warm_up, _sender) = join(&address).await;
    up(&mut warm_up).await;
    core.joined().await;
    warm_up.leave(DEADLINE).await;
    core.next().await;
    let (descriptors, threads) = resources();

    let mut resident = 0;
    for round in 0..200 {
        let (mut frontend, sender) = join(&address).await;
        up(&mut frontend).await;
        let client = core.joined().await;
        sender.try_send(frames("ADD x")).unwrap();
        assert!(matches!(core.next().await, CoreEvent::Message { .. }));
        core.send(client, "y").await.unwrap();
        assert_eq!(message(&mut frontend).await, "y");
        // Half of them go without a word.
        if round % 2 == 0 {
            frontend.leave(DEADLINE).await;
        } else {
            drop(frontend);
        }
        let left = core.next().await;
        assert!(matches!(left, CoreEvent::Left { .. }), "{left:?}");
        if round == 50 {
            resident = resident_bytes();
        }
    }
    settles("the first count", || {
        let (now_descriptors, now_threads) = resources();
        now_descriptors <= descriptors && now_threads <= threads
    })
    .await;
    let grown = resident_bytes().saturating_sub(resident);
    assert!(grown < 5 << 20, "{grown} bytes more after 150 rounds");
}
