//! What is told at the start, and what becomes of a start that fails.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// A core that has served has started: what it dies of later is no fault of its start, however
/// soon that is, and it is started again as often as others are.
#[test]
fn a_core_that_has_served_is_started_again_until_it_died_too_often() {
    let run = Run::new();
    let mut served = Served::start(&run, 1, &["--mock-fail-at", "20"]);
    for death in 1..=4 {
        wait_for("a core", || served.http.is_ready().then_some(()));
        let mut stream = served.http.stream("/v1/completions", &long_request(5000));
        let last = stream.rest().pop().expect("an error event");
        assert_eq!(last["error"]["code"], "engine_unavailable", "{last}");
        wait_for("its absence", || match served.http.try_get("/ready") {
            Some(answer) => (answer.status == 503 || death < 4).then_some(()),
            None => Some(()),
        });
        wait_for("the supervisor's word", || {
            let log = served.process.log();
            let told = log.matches("engine-core ended").count();
            (told >= death).then_some(())
        });
    }
    assert_eq!(served.process.wait().code(), Some(1));
    let log = served.process.log();
    assert_eq!(log.matches("starting it again").count(), 3, "{log}");
    assert!(log.contains("giving up") && !log.contains("could not start"), "{log}");
    // Once for each of them, not once more by the way.
    assert_eq!(log.matches("the mock was told to fail").count(), 4, "{log}");
    served.assert_gone(&run, Duration::ZERO);
}

/// Runs `pawl ARGS` to its end, which is a failure.
fn failure(run: &Run, args: &[&str]) -> String {
    let mut process = run.pawl("failing", args);
    let status = process.wait();
    let log = process.log();
    assert!(!status.success(), "{args:?}: {log}");
    std::fs::remove_file(run.path("failing.log")).unwrap();
    log
}

#[test]
fn a_cause_is_told_once() {
    let run = Run::new();
    let nowhere = format!("ipc://{}/a/b/core", run.path("missing").display());
    let log = failure(&run, &["engine-core", "--runner", "mock", "--listen", &nowhere]);
    assert_eq!(log.matches("No such file or directory").count(), 1, "{log}");
    let missing = run.path("missing.gguf").display().to_string();
    std::fs::create_dir(run.path("cache")).unwrap();
    std::fs::write(&missing, "").unwrap();
    std::fs::set_permissions(&missing, std::fs::Permissions::from_mode(0o000)).unwrap();
    let log = failure(&run, &["frames", "decode", &missing]);
    assert_eq!(log.matches("ERROR").count(), 1, "{log}");
}

#[test]
fn a_mock_runner_refuses_a_size_in_bytes() {
    let run = Run::new();
    let args = ["serve", "--runner", "mock", "--port", "0", "--kv-cache-memory-bytes", "1GiB"];
    let log = failure(&run, &args);
    assert!(log.contains("--num-gpu-blocks-override"), "{log}");
}

#[test]
fn what_has_no_effect_is_told_once() {
    let run = Run::new();
    let mut command = run.serve_command(&["--runner", "mock", "--enforce-eager"]);
    command.env("PAWL_MAX_NUM_SEQ", "4").env("VLLM_API_KEY", "secret");
    let process = run.start("serve", command);
    let frontend = Frontend::once_ready(process, &run.path("serve.ports"));
    let log = frontend.process.log();
    assert_eq!(log.matches("--enforce-eager has no effect").count(), 1, "{log}");
    assert_eq!(log.matches("did you mean PAWL_MAX_NUM_SEQS?").count(), 1, "{log}");
    assert_eq!(log.matches("PAWL_API_KEY").count(), 1, "{log}");
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn a_tap_says_that_it_waits_and_may_give_up() {
    let run = Run::new();
    let address = run.core_address();
    let tap = run.pawl("tap", &["frames", "tap", &address]);
    wait_for("its word", || tap.log().contains("waiting").then_some(()));
    let _core = run.mock_core(&[]);
    wait_for("the tap to join", || tap.log().contains("tapping").then_some(()));
    assert_eq!(tap.log().matches("waiting").count(), 1, "{}", tap.log());

    let nowhere = format!("ipc://{}", run.path("nowhere").display());
    let log = failure(&run, &["frames", "tap", &nowhere, "--timeout", "0.2"]);
    assert!(log.contains("--timeout") && log.contains(&nowhere), "{log}");
}

/// Starts a core that listens in a folder with `mode`; its log once it listens or has ended.
fn listening_in(run: &Run, mode: u32) -> String {
    let folder = run.path(&format!("folder-{mode:o}"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode)).unwrap();
    let address = format!("ipc://{}/core", folder.display());
    let name = format!("core-{mode:o}");
    let args = ["engine-core", "--runner", "mock", "--listen", &address];
    let mut core = run.pawl(&name, &args);
    wait_for("the core", || {
        (core.ended().is_some() || core.log().contains("the engine is ready")).then_some(())
    });
    core.log()
}

#[test]
fn folders_that_others_can_enter_are_told_or_refused() {
    let run = Run::new();
    let private = listening_in(&run, 0o700);
    assert!(!private.contains("WARN") && !private.contains("ERROR"), "{private}");
    let entered = listening_in(&run, 0o755);
    assert!(entered.contains("WARN") && entered.contains("0700"), "{entered}");
    let sticky = listening_in(&run, 0o1777);
    assert!(sticky.contains("WARN") && sticky.contains("ready"), "{sticky}");
    for open in [0o770, 0o777] {
        let refused = listening_in(&run, open);
        assert!(refused.contains("ERROR") && refused.contains("chmod 700"), "{refused}");
    }
}

/// The folder that is missing is made, so that no other can be there first.
#[test]
fn a_missing_folder_is_made_for_its_owner_alone() {
    let run = Run::new();
    let folder = run.path("made");
    let address = format!("ipc://{}/core", folder.display());
    let mut core = run.pawl("core", &["engine-core", "--runner", "mock", "--listen", &address]);
    wait_for("the core", || core.log().contains("the engine is ready").then_some(()));
    let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);
    assert!(core.stop().success(), "{}", core.log());
}
