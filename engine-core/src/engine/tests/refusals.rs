//! What is not taken, and what is said of it.

use std::collections::BTreeMap;

use pawl_shared::protocol::{
    ClientMessage, EngineCoreRequest, LoraRequest, RequestId, SamplingParams, Tensor, Value,
};
use pawl_shared::transport::ClientId;

use super::super::Inbox;
use super::harness::{Harness, config, request};

/// Sends a request changed by `change` and gives what is said of it.
fn check(change: impl FnOnce(&mut EngineCoreRequest)) -> String {
    let mut harness = Harness::new(config(1), 1);
    harness.fill();
    harness.told();
    let mut request = request("r", &[1, 2, 3], 4);
    change(&mut request);
    harness.say(0, ClientMessage::Add(Box::new(request)));
    harness.fill();
    assert_eq!(harness.engine.num_in_flight(), 0, "a refused request does not run");
    harness.told()
}

fn check_sampling(change: impl FnOnce(&mut SamplingParams)) -> String {
    check(|request| change(request.sampling_params.as_mut().unwrap()))
}

fn something() -> Value {
    Value::Array(vec![Value::Integer(1)])
}

fn tensor() -> Tensor {
    Tensor { dtype: "float32".into(), shape: vec![1], data: vec![0; 4].into() }
}

#[test]
fn what_this_engine_does_not_do_is_refused_by_name() {
    let lora = LoraRequest {
        lora_name: "l".into(),
        lora_int_id: 1,
        lora_path: "p".into(),
        base_model_name: None,
        load_inplace: false,
        is_3d_lora_weight: false,
    };
    let said = [
        check(|r| r.mm_features = Some(something())),
        check(|r| r.pooling_params = Some(something())),
        check(|r| r.prompt_embeds = Some(tensor())),
        check(|r| r.prompt_is_token_ids = Some(vec![true, false])),
        check(|r| r.lora_request = Some(lora)),
        check(|r| r.resumable = true),
        check_sampling(|s| s.structured_outputs = Some(something())),
        check_sampling(|s| s.prompt_logprobs = Some(1)),
        check_sampling(|s| s.prompt_logprob_token_ids = Some(tensor())),
        check_sampling(|s| s.repetition_detection = Some(something())),
        check_sampling(|s| s.thinking_token_budget = Some(1)),
        check_sampling(|s| s.trace_decode_token_ids = Some(vec![1])),
    ];
    insta::assert_snapshot!(said.concat());
}

#[test]
fn what_makes_no_sense_is_refused_with_its_remedy() {
    let said = [
        check(|r| r.sampling_params = None),
        check(|r| r.prompt_token_ids = None),
        check(|r| r.prompt_token_ids = Some(vec![])),
        check(|r| r.prompt_token_ids = Some(vec![1; 256])),
        check(|r| r.prompt_token_ids = Some(vec![1, 512])),
        check_sampling(|s| s.temperature = f64::NAN),
        check_sampling(|s| s.temperature = -1.0),
        check_sampling(|s| s.top_p = 0.0),
        check_sampling(|s| s.min_p = 1.5),
        check_sampling(|s| s.presence_penalty = 3.0),
        check_sampling(|s| s.frequency_penalty = f64::INFINITY),
        check_sampling(|s| s.repetition_penalty = 0.0),
        check_sampling(|s| s.max_tokens = Some(0)),
        check_sampling(|s| s.min_tokens = 5),
        check_sampling(|s| s.logprobs = Some(-2)),
        check_sampling(|s| s.logprobs = Some(513)),
        check_sampling(|s| s.logit_bias = Some(BTreeMap::from([(512, 1.0)]))),
        check_sampling(|s| s.logit_bias = Some(BTreeMap::from([(1, f64::NAN)]))),
        check_sampling(|s| s.logprob_token_ids = Some(vec![512])),
        check_sampling(|s| s.allowed_token_ids = Some(vec![])),
        check_sampling(|s| s.allowed_token_ids = Some(vec![600])),
    ];
    insta::assert_snapshot!(said.concat());
}

#[test]
fn empty_fields_that_some_frontends_always_send_are_not_asked_for() {
    let mut harness = Harness::new(config(1), 1);
    let mut asked = request("r", &[1], 1);
    asked.mm_features = Some(Value::Array(vec![]));
    asked.reasoning_parser_kwargs = Some(Value::map([("chat_template_kwargs", Value::Nil)]));
    asked.prompt_is_token_ids = Some(vec![true]);
    asked.sampling_params.as_mut().unwrap().watermarking = Some(true);
    harness.say(0, ClientMessage::Add(Box::new(asked)));
    harness.run_until_idle();
    assert!(harness.told().contains("r [10] "));
}

#[test]
fn a_full_queue_is_a_retryable_error() {
    let mut full = config(1);
    full.scheduler.max_queued = 1;
    let mut harness = Harness::new(full, 1);
    harness.fill();
    harness.told();
    harness.add(0, "first", &[1], 1);
    harness.add(0, "second", &[1], 1);
    harness.engine.settle();
    harness.fill();
    insta::assert_snapshot!(harness.told(), @r#"
    to 0: at 1.000 step 0 running 0 waiting 1 blocks 0
        second [] finish error
          queue_full, retryable: 1 requests are already waiting; send the request again later
        finished ["second"]
    "#);
}

#[test]
fn a_live_id_sent_again_changes_nothing_for_the_older_request() {
    let mut harness = Harness::new(config(1), 2);
    harness.add(0, "a", &[1], 2);
    harness.fill();
    harness.add(0, "a", &[1, 2, 3], 1); // By the same client: dropped.
    harness.add(1, "a", &[4], 1); // By another: another request.
    harness.abort(1, &["a", "unknown"]); // And it can only abort its own.
    let nonsense = Inbox::Undecodable {
        client: ClientId(0),
        request_id: Some(RequestId::from("a")),
        kind: "type",
        message: "nonsense".into(),
    };
    harness.engine.handle(nonsense);
    harness.run_until_idle();
    insta::assert_snapshot!(harness.told(), @r"
    to 0: at 1.000 step 0 running 1 waiting 0 blocks 1 queries 1 hits 0
    to 1: at 1.000 step 0 running 1 waiting 0 blocks 1
    to 0: at 1.010 step 1 running 1 waiting 0 blocks 1 ran 1 in 10 ms
        a [10] Queued 1.000 Scheduled 1.000 prompt 1 cached 0
    to 0: at 1.020 step 2 running 0 waiting 0 blocks 0 ran 1 in 10 ms
        a [11] finish length
    to 1: at 1.020 step 2 running 0 waiting 0 blocks 0 ran 1 in 10 ms
    ");
    harness.call(0, "pawl_status", vec![]);
    harness.fill();
    let told = harness.told();
    for counted in [
        r#"(Text("requests_added"), Integer(2))"#,
        r#"(Text("requests_finished"), Map([(Text("abort"), Integer(1)), (Text("length"), Integer(1))]))"#,
        r#"(Text("duplicate_ids"), Integer(1))"#,
        r#"(Text("undecodable"), Map([(Text("type"), Integer(1))]))"#,
        r#"(Text("unexpected_messages"), Integer(0))"#,
    ] {
        assert!(told.contains(counted), "{counted} is not in {told}");
    }
}

#[test]
fn what_does_not_decode_is_answered_if_it_has_a_name() {
    let mut harness = Harness::new(config(1), 1);
    harness.fill();
    harness.told();
    for request_id in [Some(RequestId::from("broken")), None] {
        harness.engine.handle(Inbox::Undecodable {
            client: ClientId(0),
            request_id,
            kind: "truncated",
            message: "the bytes end inside a text".into(),
        });
    }
    harness.fill();
    insta::assert_snapshot!(harness.told(), @r#"
    to 0: at 1.000 step 0 running 0 waiting 0 blocks 0
        broken [] finish error
          validation_error: the request does not decode: the bytes end inside a text
        finished ["broken"]
    "#);
}

#[test]
fn an_abort_before_the_result_keeps_its_tokens_in() {
    let mut harness = Harness::new(config(2), 1);
    harness.add(0, "a", &[1], 9);
    harness.add(0, "b", &[2], 9);
    harness.fill();
    harness.told();
    harness.abort(0, &["a"]);
    harness.finish_step();
    insta::assert_snapshot!(harness.told(), @r"
    to 0: at 1.010 step 1 running 1 waiting 0 blocks 1 ran 2 in 10 ms
        b [10] Queued 1.000 Scheduled 1.000 prompt 1 cached 0
    ");
}
