//! A whole core with its threads and real sockets, and frontends in the same process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use pawl_shared::protocol::{
    ClientMessage, EngineCoreRequest, EngineMessage, FinishReason, ReadyResponse, RequestId,
    SamplingParams, SchedulerStats, UtilityCall, UtilityReply, Value,
};
use pawl_shared::transport::{
    CoreAt, FrontendEndpoint, FrontendEndpointConfig, FrontendEvent, FrontendSender, SocketDir,
};
use tokio::task::JoinHandle;

use super::*;
use crate::config::Vitals;
use crate::runner::cpu::CpuConfig;
use crate::runner::mock::{Fault, Gate, MockConfig, Script};

/// Longer than anything here takes; a test that needs it has failed.
const PATIENCE: Duration = Duration::from_secs(20);

struct Core {
    dir: SocketDir,
    shutdown: Shutdown,
    outcome: JoinHandle<anyhow::Result<()>>,
}

impl Core {
    fn start(mock: MockConfig, change: impl FnOnce(&mut CoreConfig)) -> Self {
        let dir = SocketDir::create_default().unwrap();
        let mut config = CoreConfig::for_test(dir.address("core").unwrap(), mock);
        change(&mut config);
        let shutdown = Shutdown::default();
        let outcome = tokio::spawn(run(config, shutdown.clone()));
        Self { dir, shutdown, outcome }
    }

    async fn join(&self) -> Frontend {
        let at = CoreAt::Join(self.dir.address("core").unwrap());
        let config = FrontendEndpointConfig::new(at);
        let (endpoint, sender) = FrontendEndpoint::start(config).await.unwrap();
        let mut frontend = Frontend { endpoint, sender, last_stamp: 0.0 };
        match patiently(frontend.endpoint.next()).await {
            FrontendEvent::Up { .. } => frontend,
            other => panic!("not joined: {other:?}"),
        }
    }

    async fn end(self) -> Result<(), String> {
        let outcome = patiently(self.outcome).await.unwrap();
        outcome.map_err(|error| format!("{error:#}"))
    }

    async fn stop(self) {
        self.shutdown.request();
        self.end().await.unwrap();
    }
}

async fn patiently<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("this takes too long")
}

struct Frontend {
    endpoint: FrontendEndpoint,
    sender: FrontendSender,
    last_stamp: f64,
}

impl Frontend {
    fn send(&self, message: &ClientMessage) {
        self.sender.try_send(message.encode()).unwrap();
    }

    fn add(&self, id: &str, prompt: &[u32], max_tokens: u32) {
        let sampling = SamplingParams {
            temperature: 0.0,
            max_tokens: Some(max_tokens),
            ..SamplingParams::default()
        };
        let request = EngineCoreRequest::new(id.into(), prompt.to_vec(), sampling);
        self.send(&ClientMessage::Add(Box::new(request)));
    }

    fn abort(&self, id: &str) {
        self.send(&ClientMessage::Abort(vec![RequestId::from(id)]));
    }

    /// The next message; every step's frame must bring its stamp and its stats. That the core stops
    /// is told beside them.
    async fn next(&mut self) -> EngineMessage {
        let mut event = patiently(self.endpoint.next()).await;
        if matches!(event, FrontendEvent::Stopping) {
            event = patiently(self.endpoint.next()).await;
        }
        match event {
            FrontendEvent::Message { frames } => {
                let message = EngineMessage::decode(&frames).unwrap();
                if let EngineMessage::Step { timestamp, stats, outputs, .. } = &message {
                    assert!(stats.is_some(), "a frame without stats: {message:?}");
                    assert!(*timestamp > 0.0);
                    if !outputs.is_empty() {
                        assert!(*timestamp >= self.last_stamp, "outputs are stamped in order");
                        self.last_stamp = *timestamp;
                    }
                }
                message
            }
            other => panic!("not a message: {other:?}"),
        }
    }

    /// Reads until `id` has ended.
    async fn finish(&mut self, id: &str) -> (Vec<u32>, FinishReason) {
        let mut tokens = Vec::new();
        loop {
            let EngineMessage::Step { outputs, .. } = self.next().await else { continue };
            for output in outputs {
                if output.request_id.as_str() != id {
                    continue;
                }
                tokens.extend(output.new_token_ids);
                if let Some(reason) = output.finish_reason {
                    return (tokens, reason);
                }
            }
        }
    }

    async fn until_stats(&mut self, wanted: impl Fn(&SchedulerStats) -> bool) -> SchedulerStats {
        loop {
            if let EngineMessage::Step { stats: Some(stats), .. } = self.next().await
                && wanted(&stats)
            {
                return stats;
            }
        }
    }

    async fn until_dead(&mut self) {
        while self.next().await != EngineMessage::Dead {}
    }

    async fn call(&mut self, method: &str) -> UtilityReply {
        let call =
            UtilityCall { client_index: 0, call_id: 77, method: method.into(), args: vec![] };
        self.send(&ClientMessage::Utility(call));
        loop {
            if let EngineMessage::Utility { reply, .. } = self.next().await {
                return reply;
            }
        }
    }
}

fn running(count: u64) -> impl Fn(&SchedulerStats) -> bool {
    move |stats| stats.num_running_reqs == count
}

fn scripted() -> MockConfig {
    MockConfig { script: Some(Script(vec![300, 301, 302].into())), ..MockConfig::default() }
}

/// A core whose steps take long enough to be interfered with.
fn slow() -> MockConfig {
    MockConfig { step_base: Duration::from_millis(20), ..scripted() }
}

#[tokio::test]
async fn a_request_runs_to_its_end_at_both_depths() {
    for depth in [1, 2] {
        let core = Core::start(scripted(), |config| config.depth = Some(depth));
        let mut frontend = core.join().await;
        frontend.add("a", &[1, 2, 3], 4);
        let ended = frontend.finish("a").await;
        assert_eq!(ended, (vec![300, 301, 302, 300], FinishReason::Length), "at depth {depth}");
        frontend.until_stats(running(0)).await;
        core.stop().await;
    }
}

#[tokio::test]
async fn an_aborted_request_is_heard_of_no_more() {
    let core = Core::start(slow(), |_| ());
    let mut frontend = core.join().await;
    frontend.add("a", &[1], 5000);
    frontend.add("b", &[2], 20);
    frontend.until_stats(running(2)).await;
    frontend.abort("a");
    frontend.until_stats(running(1)).await;
    loop {
        let EngineMessage::Step { outputs, .. } = frontend.next().await else { continue };
        assert!(outputs.iter().all(|output| output.request_id.as_str() == "b"));
        if outputs.iter().any(|output| output.finish_reason.is_some()) {
            break;
        }
    }
    core.stop().await;
}

#[tokio::test]
async fn aborting_the_only_request_brings_the_gauges_to_zero_though_its_step_goes_on() {
    let (gate, keeper) = Gate::closed(1);
    let core = Core::start(MockConfig { gate: Some(gate), ..scripted() }, |_| ());
    let mut frontend = core.join().await;
    frontend.add("a", &[1; 100], 10);
    let busy = frontend.until_stats(running(1)).await;
    assert!(busy.kv_cache_usage > 0.0);
    frontend.abort("a");
    let idle = frontend.until_stats(running(0)).await;
    assert_eq!(idle.kv_cache_usage, 0.0);
    drop(keeper);
    core.stop().await;
}

#[tokio::test]
async fn gauges_stay_fresh_while_a_step_runs_long() {
    // The first step does not end while the test runs; progress is shown all the while.
    let mock = MockConfig { step_base: Duration::from_secs(3600), ..scripted() };
    let core = Core::start(mock, |_| ());
    let mut asking = core.join().await;
    let mut watching = core.join().await;
    asking.add("a", &[1; 100], 10);
    for frontend in [&mut asking, &mut watching] {
        let repeated = |stats: &SchedulerStats| stats.pawl.unwrap().resent && running(1)(stats);
        let first = frontend.until_stats(repeated).await;
        let second = frontend.until_stats(repeated).await;
        assert_eq!(first, second);
        assert_eq!(first.prefix_cache_stats.requests, 0, "what is repeated is not counted");
    }
    core.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_takes_its_requests_with_it() {
    for politely in [true, false] {
        let core = Core::start(slow(), |_| ());
        let mut stays = core.join().await;
        let goes = core.join().await;
        goes.add("a", &[1], 5000);
        goes.add("b", &[2], 5000);
        stays.until_stats(running(2)).await;
        if politely {
            goes.endpoint.leave(Duration::from_secs(1)).await;
        } else {
            drop(goes);
        }
        stays.until_stats(running(0)).await;
        core.stop().await;
    }
}

#[tokio::test]
async fn a_failed_step_ends_the_core_and_everyone_hears_of_it() {
    for (fault, cause) in [
        (Fault::FailAt(3), "device failed in step 3: the mock was told to fail"),
        (Fault::PanicAt(3), "panic while running a step: the mock was told to panic in step 3"),
    ] {
        let core = Core::start(MockConfig { fault: Some(fault), ..slow() }, |_| ());
        let mut asking = core.join().await;
        let mut idle = core.join().await;
        asking.add("a", &[1], 50);
        asking.until_dead().await;
        idle.until_dead().await;
        assert_eq!(core.end().await.unwrap_err(), cause);
    }
}

/// A core on `mock` that one frontend has joined, and asked if it is to `ask`.
async fn joined(mock: MockConfig, ask: bool) -> (Core, Frontend, Vitals) {
    let vitals = Vitals::default();
    let core = Core::start(mock, |config| config.vitals = vitals.clone());
    let at = CoreAt::Join(core.dir.address("core").unwrap());
    let mut config = FrontendEndpointConfig::new(at);
    config.heartbeat.silence = Duration::from_millis(2500);
    let (mut endpoint, sender) = FrontendEndpoint::start(config).await.unwrap();
    assert!(matches!(patiently(endpoint.next()).await, FrontendEvent::Up { .. }));
    let frontend = Frontend { endpoint, sender, last_stamp: 0.0 };
    if ask {
        frontend.add("a", &[1], 50);
    }
    (core, frontend, vitals)
}

#[tokio::test]
async fn a_core_whose_step_hangs_is_noticed() {
    let hanging = MockConfig { fault: Some(Fault::HangAt(2)), ..scripted() };
    let (_core, mut frontend, _) = joined(hanging, true).await;
    loop {
        match patiently(frontend.endpoint.next()).await {
            FrontendEvent::Message { .. } => {}
            FrontendEvent::Hung { .. } => return,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_slow_step_and_an_idle_core_make_progress() {
    let slow = MockConfig { step_base: Duration::from_secs(3600), ..scripted() };
    for (mock, ask) in [(slow, true), (scripted(), false)] {
        let (_core, _frontend, vitals) = joined(mock, ask).await;
        let progress = || vitals.progress.load(Ordering::Relaxed);
        let first = progress();
        patiently(async {
            while progress() < first + 4 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_model_that_does_not_load_ends_the_core_with_its_name() {
    for runner in [RunnerChoice::Mock(scripted()), RunnerChoice::Cpu(CpuConfig::default())] {
        let core = Core::start(scripted(), |config| {
            config.runner = runner;
            config.model = Some("/nowhere/model.gguf".into());
        });
        let error = core.end().await.unwrap_err();
        assert!(error.contains("/nowhere/model.gguf"), "{error}");
    }
}

#[tokio::test]
async fn a_real_runner_needs_a_model() {
    let core = Core::start(scripted(), |config| {
        config.runner = RunnerChoice::Cpu(CpuConfig::default());
    });
    let error = core.end().await.unwrap_err();
    assert_eq!(error, "no model: name a GGUF file, or choose --runner mock");
}

#[tokio::test]
async fn an_address_that_cannot_be_bound_ends_the_core_with_its_name() {
    let core = Core::start(scripted(), |config| {
        config.listen = vec!["ipc:///nowhere/at/all".parse().unwrap()];
    });
    let error = core.end().await.unwrap_err();
    assert!(error.contains("/nowhere/at"), "{error}");
}

#[tokio::test]
async fn shutting_down_at_once_tells_everyone_what_was_cut_off() {
    let core = Core::start(slow(), |_| ());
    let mut frontend = core.join().await;
    frontend.add("a", &[1], 5000);
    frontend.until_stats(running(1)).await;
    core.shutdown.request();
    let (_, reason) = frontend.finish("a").await;
    assert_eq!(reason, FinishReason::Abort);
    let asked = std::time::Instant::now();
    core.end().await.unwrap();
    assert!(asked.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn shutting_down_with_time_finishes_what_was_admitted() {
    let core = Core::start(slow(), |config| config.shutdown_timeout = PATIENCE);
    let mut frontend = core.join().await;
    frontend.add("admitted", &[1], 20);
    frontend.until_stats(running(1)).await;
    core.shutdown.request();
    // The core has been told in another way than by our socket: wait until it has heard.
    while frontend.call("is_sleeping").await.result.is_ok() {}
    frontend.add("late", &[1], 5);
    assert_eq!(frontend.finish("late").await, (vec![], FinishReason::Abort));
    assert_eq!(frontend.finish("admitted").await.1, FinishReason::Length);
    core.end().await.unwrap();
}

#[tokio::test]
async fn a_hurried_shutdown_does_not_wait_for_what_was_admitted() {
    let core = Core::start(slow(), |config| config.shutdown_timeout = Duration::from_secs(3600));
    let mut frontend = core.join().await;
    frontend.add("a", &[1], 5000);
    frontend.until_stats(running(1)).await;
    core.shutdown.request();
    while frontend.call("is_sleeping").await.result.is_ok() {}
    core.shutdown.hurry();
    assert_eq!(frontend.finish("a").await.1, FinishReason::Abort);
    core.end().await.unwrap();
}

#[tokio::test]
async fn the_model_card_and_the_ready_response_agree() {
    let core = Core::start(scripted(), |config| {
        config.served_model_names = vec!["ours".into()];
        config.max_model_len = Some(100);
    });
    let at = CoreAt::Join(core.dir.address("core").unwrap());
    let (mut endpoint, sender) =
        FrontendEndpoint::start(FrontendEndpointConfig::new(at)).await.unwrap();
    let FrontendEvent::Up { ready, .. } = patiently(endpoint.next()).await else {
        panic!("not joined");
    };
    let ready = ReadyResponse::decode(&ready).unwrap();
    let mut frontend = Frontend { endpoint, sender, last_stamp: 0.0 };
    let card = frontend.call("get_model_card").await.result.unwrap();
    let card = ModelCard::from_value(&card).unwrap();
    assert_eq!((ready.max_model_len, card.max_model_len), (100, 100));
    assert_eq!(card.names, ["ours"]);
    let tasks = frontend.call("get_supported_tasks").await.result;
    assert_eq!(tasks, Ok(Value::Array(vec![Value::Text("generate".into())])));
    core.stop().await;
}

/// All clients use the same ids at the same time, leave requests after the first token and start
/// the next at once: whatever comes under an id must be what that client's prompt leads to.
#[tokio::test]
async fn contended_aborts_and_reuse_never_mix_lives() {
    const CLIENTS: u32 = 40;
    const ROUNDS: u32 = 25;
    // Tokens depend on the prompt, and so tell whose life they are of.
    let mock = MockConfig::default();
    let expected = move |client: u32, round: u32| {
        let new = crate::step::NewRequest {
            key: crate::step::RequestKey(1),
            prompt: vec![client, round].into(),
            sampling: Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
            seed: 0,
        };
        crate::runner::mock::first_tokens(&MockConfig::default(), &new, 3)
    };
    let core = Core::start(mock, |_| ());
    let mut clients = Vec::new();
    for client in 0..CLIENTS {
        let mut frontend = core.join().await;
        clients.push(tokio::spawn(async move {
            for round in 0..ROUNDS {
                let (left, kept) = (format!("left-{round}"), format!("kept-{round}"));
                frontend.add(&left, &[client, round], 5000);
                let mut first = None;
                while first.is_none() {
                    let EngineMessage::Step { outputs, .. } = frontend.next().await else {
                        continue;
                    };
                    first = outputs
                        .iter()
                        .find(|output| output.request_id.as_str() == left)
                        .map(|output| output.new_token_ids[0]);
                }
                assert_eq!(first, Some(expected(client, round)[0]));
                frontend.abort(&left);
                frontend.add(&kept, &[client, round + 100], 3);
                let (tokens, reason) = frontend.finish(&kept).await;
                assert_eq!((tokens, reason), (expected(client, round + 100), FinishReason::Length));
            }
            frontend
        }));
    }
    let mut frontends = Vec::new();
    for client in clients {
        frontends.push(patiently(client).await.unwrap());
    }
    let mut one = frontends.pop().unwrap();
    one.until_stats(running(0)).await;
    core.stop().await;
}
