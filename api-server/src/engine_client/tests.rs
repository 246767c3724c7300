//! The client against a core made of channels.

use pawl_shared::protocol::{
    EngineCoreOutput, SamplingParams, SchedulerStats, StepFrame, testing::idle_stats,
};
use pawl_shared::transport::FrontendEvent;

use super::calls::CALLS_MAX;
use super::testing::{FakeCore, connect};
use super::wire_ids::shortened;
use super::*;
use crate::metrics::Format;

fn config() -> ClientConfig {
    ClientConfig::new(Arc::new(Metrics::default()))
}

async fn serving(config: ClientConfig) -> (EngineClient, FakeCore) {
    let (client, mut core) = connect(config);
    core.serve(&client, 0xe, &ModelCard::mock()).await;
    (client, core)
}

fn ask(params: SamplingParams) -> Submit {
    Submit::new("abc", [1u32, 2, 3], params, SystemClock.now())
}

fn stats() -> SchedulerStats {
    SchedulerStats { num_running_reqs: 1, kv_cache_usage: 0.5, ..idle_stats() }
}

async fn token(core: &FakeCore, id: &RequestId, finish_reason: Option<FinishReason>) {
    let output = EngineCoreOutput {
        new_token_ids: vec![97],
        finish_reason,
        ..EngineCoreOutput::new(id.clone())
    };
    let stamp = SystemClock.now();
    core.step(&StepFrame::new(stamp, stats(), 0, vec![output])).await;
}

fn sample(client: &EngineClient, name: &str) -> f64 {
    let (_, page) = client.inner.config.metrics.render(Format::Text004);
    let page = String::from_utf8(page).expect("the page is text");
    let found = page.lines().find(|line| line.rsplit_once(' ').is_some_and(|(n, _)| n == name));
    let line = found.unwrap_or_else(|| panic!("no sample {name} in\n{page}"));
    line.rsplit_once(' ').expect("a sample has a value").1.parse().expect("a number")
}

fn success(reason: &str) -> String {
    format!(
        "vllm:request_success_total{{engine=\"0\",finished_reason=\"{reason}\",\
         model_name=\"mock\"}}"
    )
}

#[tokio::test]
async fn a_request_goes_out_lowered_and_comes_back_as_text() {
    let (client, mut core) = serving(config()).await;
    let params = SamplingParams { max_tokens: None, ..SamplingParams::default() };
    let mut generation = client.submit(ask(params)).expect("the core serves");
    let added = core.added().await;
    assert_eq!(added.request_id.as_str(), "abc-e0000000001");
    assert_eq!((added.client_index, added.external_req_id.as_deref()), (3, Some("abc")));
    let sampling = added.sampling_params.expect("a text request");
    assert_eq!(sampling.max_tokens, Some(61));
    assert_eq!(sampling.eos_token_id, ModelCard::mock().eos_token_id);
    token(&core, &added.request_id, None).await;
    token(&core, &added.request_id, Some(FinishReason::Length)).await;
    let mut updates = Vec::new();
    while let Some(update) = generation.next().await {
        updates.push(update);
    }
    let ids: Vec<u32> = updates.iter().flat_map(|update| update.token_ids.clone()).collect();
    assert_eq!((updates.len(), ids), (2, vec![97, 97]));
    assert!(updates[1].finish.is_some() && updates[1].timing.is_some());
    assert_eq!(client.in_flight(), 0);
    drop(generation);
    assert!(core.messages.try_recv().is_err(), "nothing is left to abort");
}

#[tokio::test]
async fn choices_go_out_one_by_one_and_a_drop_aborts_the_open_ones() {
    let (client, mut core) = serving(config()).await;
    let params = SamplingParams { n: 3, seed: Some(7), ..SamplingParams::default() };
    let generation = client.submit(ask(params)).expect("the core serves");
    let mut added = Vec::new();
    for _ in 0..3 {
        added.push(core.added().await);
    }
    let told: Vec<_> = added
        .iter()
        .map(|request| {
            let sampling = request.sampling_params.as_ref().expect("a text request");
            (request.request_id.to_string(), sampling.n, sampling.seed)
        })
        .collect();
    insta::assert_debug_snapshot!(told);
    token(&core, &added[1].request_id, Some(FinishReason::Stop)).await;
    while client.in_flight() == 3 {
        tokio::task::yield_now().await;
    }
    drop(generation);
    let ids = [&added[0], &added[2]].map(|request| request.request_id.clone());
    assert_eq!(core.message().await, ClientMessage::Abort(ids.into()));
    client.idle().await;
    assert_eq!(sample(&client, &success("abort")), 2.0);
    assert_eq!(sample(&client, &success("stop")), 1.0);
}

#[tokio::test]
async fn the_same_client_id_twice_is_two_requests() {
    let (client, mut core) = serving(config()).await;
    let first = client.submit(ask(SamplingParams::default())).expect("the core serves");
    let second = client.submit(ask(SamplingParams::default())).expect("the core serves");
    let ids = [core.added().await.request_id, core.added().await.request_id];
    assert_ne!(ids[0], ids[1]);
    drop(first);
    assert_eq!(core.message().await, ClientMessage::Abort(vec![ids[0].clone()]));
    assert_eq!(client.in_flight(), 1);
    drop(second);
}

#[tokio::test]
async fn a_dead_core_ends_streams_at_once_and_the_next_one_serves() {
    let (client, mut core) = serving(config()).await;
    let mut open = client.submit(ask(SamplingParams::default())).expect("the core serves");
    let lost = core.added().await.request_id;
    let call = client.clone();
    let call = tokio::spawn(async move { call.utility("is_sleeping", Vec::new()).await });
    core.message().await;
    core.die().await;
    let update = open.next().await.expect("an end");
    assert_eq!(update.error.map(|error| error.code), Some("engine_down".to_string()));
    assert_eq!(open.next().await, None);
    assert!(matches!(call.await.expect("the call ends"), Err(UtilityError::Unavailable { .. })));
    assert_eq!(client.status(), EngineStatus::Down { reason: "killed".into() });
    assert!(matches!(
        client.submit(ask(SamplingParams::default())),
        Err(SubmitError::Unavailable { .. })
    ));
    assert_eq!(sample(&client, "pawl:core_up{engine=\"0\"}"), 0.0);
    assert_eq!(sample(&client, &success("error")), 1.0);

    core.join(0xf).await;
    // What the old epoch may have sent to the new core is aborted there.
    assert_eq!(core.message().await, ClientMessage::Abort(vec![lost.clone()]));
    core.answer("get_model_card", Ok(ModelCard::mock().to_value())).await;
    client.watch().wait_for(|status| *status == EngineStatus::Up).await.expect("it lives");
    let _again = client.submit(ask(SamplingParams::default())).expect("the core serves");
    let added = core.added().await;
    assert_eq!(added.request_id.as_str(), "abc-f0000000001");
    // Counters carry on; a token of the earlier life is dropped.
    token(&core, &lost, None).await;
    token(&core, &added.request_id, Some(FinishReason::Stop)).await;
    client.idle().await;
    assert_eq!(sample(&client, &success("error")), 1.0);
    assert_eq!(sample(&client, &success("stop")), 1.0);
    assert_eq!(sample(&client, "pawl:unknown_request_outputs_total{engine=\"0\"}"), 1.0);
    assert_eq!(sample(&client, "pawl:core_sessions_total{engine=\"0\"}"), 2.0);
}

#[tokio::test]
async fn a_hung_core_keeps_its_streams_and_gets_no_new_ones() {
    let (client, mut core) = serving(config()).await;
    let mut open = client.submit(ask(SamplingParams::default())).expect("the core serves");
    let id = core.added().await.request_id;
    let hung = FrontendEvent::Hung { silent_for: Duration::from_secs(10) };
    core.events.send(hung).await.expect("the client lives");
    let mut status = client.watch();
    status
        .wait_for(|status| matches!(status, EngineStatus::Hung { .. }))
        .await
        .expect("the client lives");
    assert!(client.submit(ask(SamplingParams::default())).is_err());
    core.events.send(FrontendEvent::Resumed).await.expect("the client lives");
    token(&core, &id, Some(FinishReason::Stop)).await;
    assert!(open.next().await.expect("it goes on").error.is_none());
    assert_eq!(client.status(), EngineStatus::Up);
}

/// An engine of vLLM's has no `get_model_card`.
#[tokio::test]
async fn a_core_that_tells_no_model_is_served_by_the_local_card() {
    let (client, mut core) = connect(ClientConfig {
        local_card: Some(ModelCard { max_model_len: 32, ..ModelCard::mock() }),
        served_model_names: vec!["given".into(), "also".into()],
        ..config()
    });
    assert_eq!(client.status(), EngineStatus::Connecting);
    core.join(1).await;
    core.answer("get_model_card", Err("no such method".into())).await;
    client.watch().wait_for(|status| *status == EngineStatus::Up).await.expect("it lives");
    let model = client.model().expect("it is known");
    assert_eq!((model.name(), model.names.len(), model.max_model_len), ("given", 2, 32));
}

#[tokio::test]
async fn a_core_that_tells_no_model_cannot_be_used_without_a_card() {
    let timeout = Duration::from_millis(20);
    let (client, mut core) = connect(ClientConfig { utility_timeout: timeout, ..config() });
    core.join(1).await;
    core.message().await;
    let mut watch = client.watch();
    let down = watch.wait_for(|status| matches!(status, EngineStatus::Down { .. })).await;
    insta::assert_debug_snapshot!(*down.expect("the client lives"));
}

#[tokio::test]
async fn calls_are_answered_by_their_ids() {
    let (client, mut core) = serving(config()).await;
    let call = |method: &'static str| {
        let client = client.clone();
        tokio::spawn(async move { client.utility(method, vec![Value::Integer(1)]).await })
    };
    let yes = call("reset_prefix_cache");
    core.answer("reset_prefix_cache", Ok(Value::Bool(true))).await;
    assert_eq!(yes.await.expect("answered"), Ok(Value::Bool(true)));
    let no = call("fly");
    core.answer("fly", Err("cannot".into())).await;
    assert_eq!(no.await.expect("answered"), Err(UtilityError::Failed("cannot".into())));
}

#[tokio::test]
async fn calls_beyond_the_bound_are_refused_and_those_given_up_make_room() {
    let (client, mut core) = serving(config()).await;
    let wait = || {
        let client = client.clone();
        tokio::spawn(async move { client.utility("wait", vec![]).await })
    };
    let waiting: Vec<_> = (0..CALLS_MAX).map(|_| wait()).collect();
    for _ in 0..CALLS_MAX {
        core.message().await;
    }
    let refused = client.utility("one_more", vec![]).await.expect_err("beyond the bound");
    let reason = "1024 calls wait for an answer already".to_string();
    assert_eq!(refused, UtilityError::Unavailable { reason });
    for given_up in waiting {
        given_up.abort();
        given_up.await.expect_err("it waited");
    }
    assert!(client.inner.state().calls.is_empty());
    assert!(core.messages.try_recv().is_err(), "a refused call sends nothing");
}

#[tokio::test]
async fn refusals_are_counted_and_send_nothing() {
    let (client, mut core) = serving(ClientConfig { open_max: 2, ..config() }).await;
    let three = SamplingParams { n: 3, ..SamplingParams::default() };
    let full = client.submit(ask(three)).expect_err("beyond the bound");
    assert!(matches!(full, SubmitError::QueueFull { .. }), "{full:?}");
    client.begin_drain();
    let draining = client.submit(ask(SamplingParams::default())).expect_err("it stops");
    assert_eq!(draining, SubmitError::Draining);
    assert!(core.messages.try_recv().is_err());
    for reason in ["queue_full", "draining"] {
        let name =
            format!("vllm:admission_rejections_total{{model_name=\"mock\",reason=\"{reason}\"}}");
        assert_eq!(sample(&client, &name), 1.0);
    }
}

#[tokio::test]
async fn a_shutdown_ends_what_is_open_and_tells_the_core() {
    let (client, mut core) = serving(config()).await;
    let mut open = client.submit(ask(SamplingParams::default())).expect("the core serves");
    let id = core.added().await.request_id;
    client.shutdown(Duration::from_secs(1)).await;
    let update = open.next().await.expect("an end");
    assert_eq!(update.finish.map(|finish| finish.reason), Some(FinishReason::Abort));
    assert_eq!(update.error.map(|error| error.code), Some("shutdown".to_string()));
    assert_eq!(core.message().await, ClientMessage::Abort(vec![id]));
    assert_eq!(sample(&client, &success("abort")), 1.0);
}

#[test]
fn long_ids_are_cut_at_a_character() {
    assert_eq!(shortened("short"), "short");
    assert_eq!(shortened(&"é".repeat(64)).len(), 64);
    assert_eq!(shortened(&format!("x{}", "é".repeat(64))).len(), 63);
}
