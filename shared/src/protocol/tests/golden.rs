//! Bytes that vLLM 0.32 and 0.33 wrote, Python and Rust. msgspec chooses wider map heads than it
//! must, so what is compared is the value, and what comes of writing it again.

use super::{samples, unhex};
use crate::protocol::*;

fn step(payload: &str) -> EngineMessage {
    EngineMessage::decode(&[unhex(payload)]).unwrap()
}

/// The frame that Pawl would send for a decoded step, decoded again.
fn again(message: &EngineMessage) -> EngineMessage {
    let frames = match message.clone() {
        EngineMessage::Step { engine_index, timestamp, stats, outputs, finished_requests } => {
            let stamp = crate::clock::Stamp::from_nanos((timestamp * 1e9) as u64);
            let stats = stats.unwrap_or_else(samples::idle_stats);
            StepFrame::new(stamp, stats, engine_index, outputs)
                .with_finished(finished_requests)
                .encode()
        }
        EngineMessage::Utility { engine_index, timestamp, reply } => {
            let stamp = crate::clock::Stamp::from_nanos((timestamp * 1e9) as u64);
            UtilityFrame::new(stamp, reply, engine_index).encode()
        }
        EngineMessage::Dead => vec![bytes::Bytes::from_static(ENGINE_CORE_DEAD)],
    };
    EngineMessage::decode(&frames).unwrap()
}

fn check_step(payload: &str, outputs: Vec<EngineCoreOutput>, finished: &[&str]) {
    let message = step(payload);
    let finished_requests: Vec<RequestId> =
        finished.iter().map(|id| RequestId::from(*id)).collect();
    let expected = |stats| EngineMessage::Step {
        engine_index: 0,
        timestamp: 2.0,
        stats,
        outputs: outputs.clone(),
        finished_requests: finished_requests.clone(),
    };
    assert_eq!(message, expected(None));
    assert_eq!(again(&message), expected(Some(samples::idle_stats())));
}

fn check_utility(payload: &str, result: Result<Value, String>) {
    let message = step(payload);
    let reply = UtilityReply { call_id: 5, result };
    assert_eq!(message, EngineMessage::Utility { engine_index: 0, timestamp: 2.0, reply });
    assert_eq!(again(&message), message);
}

fn check_request(type_byte: u8, payload: &str, expected: ClientMessage) {
    let frames = [vec![type_byte].into(), unhex(payload)];
    assert_eq!(ClientMessage::decode(&frames).unwrap(), expected);
    assert_eq!(ClientMessage::decode(&expected.encode()).unwrap(), expected);
}

#[test]
fn hello_and_ready() {
    let hello = "83a6737461747573a548454c4c4fa56c6f63616cc2a8686561646c657373c3";
    let ready = "83a6737461747573a55245414459a56c6f63616cc2a8686561646c657373c3";
    let expected = |status| EngineHello { status, local: false, headless: true };
    assert_eq!(EngineHello::decode(&unhex(hello)).unwrap(), expected(HelloStatus::Hello));
    assert_eq!(EngineHello::decode(&unhex(ready)).unwrap(), expected(HelloStatus::Ready));
    assert_eq!(expected(HelloStatus::Hello).encode(), unhex(hello));
    assert_eq!(expected(HelloStatus::Ready).encode(), unhex(ready));
}

#[test]
fn utility_calls() {
    let call = |call_id, method: &str, args| {
        let method = method.to_owned();
        ClientMessage::Utility(UtilityCall { client_index: 0, call_id, method, args })
    };
    check_request(
        3,
        "9400cf5deced14ecce11f1ae72657365745f6d6d5f636163686590",
        call(0x5dec_ed14_ecce_11f1, "reset_mm_cache", vec![]),
    );
    check_request(
        3,
        "9400cf687fbc8eecce11f1b070617573655f67656e65726174696f6e92a561626f7274c3",
        call(0x687f_bc8e_ecce_11f1, "pause_generation", vec!["abort".into(), true.into()]),
    );
}

#[test]
fn an_empty_frame() {
    check_step("990090c0cb4000000000000000c0c0c0c0c0", vec![], &[]);
}

#[test]
fn utility_replies() {
    check_utility(
        "990090c0cb40000000000000009305c092c091a867656e6572617465c0c0c0c0",
        Ok(Value::Array(vec!["generate".into()])),
    );
    check_utility("990090c0cb40000000000000009305c092c0c0c0c0c0c0", Ok(Value::Nil));
    check_utility("990090c0cb40000000000000009305a4626f6f6dc0c0c0c0c0", Err("boom".to_owned()));
}

#[test]
fn a_first_output_with_event_and_prefill() {
    let payload = concat!(
        "990091dc0013a27231920506c0c0c0c0c09182a47479706501a974696d657374616d70cb3ff000000000",
        "0000c0c0c086b16e756d5f70726f6d70745f746f6b656e7304b36e756d5f636f6d70757465645f746f6b",
        "656e7303b16e756d5f6361636865645f746f6b656e7301b76e756d5f6c6f63616c5f6361636865645f74",
        "6f6b656e7301ba6e756d5f65787465726e616c5f6361636865645f746f6b656e7300b96e756d5f636163",
        "68655f6372656174696f6e5f746f6b656e7302c000c0c0c0c0c0c0cb4000000000000000c0c0c0c0c0",
    );
    let prefill = PrefillStats {
        num_prompt_tokens: 4,
        num_computed_tokens: 3,
        num_cached_tokens: 1,
        num_local_cached_tokens: 1,
        num_external_cached_tokens: 0,
        num_cache_creation_tokens: 2,
    };
    let output = EngineCoreOutput {
        new_token_ids: vec![5, 6],
        events: vec![EngineCoreEvent { kind: EventKind::Queued, timestamp: 1.0 }],
        prefill_stats: Some(prefill),
        ..EngineCoreOutput::new("r1".into())
    };
    check_step(payload, vec![output], &[]);
}

#[test]
fn a_forced_error_finish() {
    let payload = concat!(
        "990091dc0013a2723190c0c0c003c0c0c0c0c0c0c000c0c0c0c0c0c0cb4000000000000000c091a27231",
        "c0c0c0",
    );
    let output = EngineCoreOutput {
        finish_reason: Some(FinishReason::Error),
        ..EngineCoreOutput::new("r1".into())
    };
    check_step(payload, vec![output], &["r1"]);
}

#[test]
fn logprobs_inline() {
    let payload = concat!(
        "990091dc0013a2723191079493a33c6934920102d703070000000800000093a33c6634920102d7030000",
        "00bf000080bf93a33c69389101d7030100000000000000c0c0c0c0c0c0c0c0c0c0c000c0c0c0c0c0c0cb",
        "4000000000000000c0c0c0c0c0",
    );
    let logprobs = LogprobsLists {
        token_ids: vec![vec![7, 8]],
        logprobs: vec![vec![-0.5, -1.0]],
        ranks: vec![1],
    };
    let output = EngineCoreOutput {
        new_token_ids: vec![7],
        new_logprobs: Some(logprobs),
        ..EngineCoreOutput::new("r1".into())
    };
    check_step(payload, vec![output], &[]);
}

/// An ADD whose fourth element is Python's map for `SamplingParams()`.
#[test]
fn default_sampling_params_from_python() {
    let params = concat!(
        "de0004a473746f7090ae73746f705f746f6b656e5f69647390a96261645f776f72647390",
        "b9736b69705f72656164696e675f7072656669785f6361636865c2",
    );
    let payload = format!("99a272319101c0{params}c0cb3ff0000000000000c0c0c0");
    let sampling =
        SamplingParams { skip_reading_prefix_cache: Some(false), ..SamplingParams::default() };
    let mut request = EngineCoreRequest::new("r1".into(), vec![1], sampling);
    request.arrival_time = 1.0;
    check_request(0, &payload, ClientMessage::Add(Box::new(request)));
}

#[test]
fn an_add_from_the_rust_frontend() {
    let payload = concat!(
        "dc0016b6636d706c2d36633662636130322d663062313537393993010203c08eab74656d706572617475",
        "7265ca3f333333ac77617465726d61726b696e67c3a5746f705f70ca3f4ccccda5746f705f6b00aa6d61",
        "785f746f6b656e7305aa6d696e5f746f6b656e7300a86c6f6770726f627300a56d696e5f70ca00000000",
        "b16672657175656e63795f70656e616c7479ca00000000b070726573656e63655f70656e616c7479ca00",
        "000000b272657065746974696f6e5f70656e616c7479ca3f800000ae73746f705f746f6b656e5f696473",
        "90b35f616c6c5f73746f705f746f6b656e5f696473920002bb726f757465645f657870657274735f7072",
        "6f6d70745f737461727400c0cb41dac3633c16af2dc0c0c0c0c0000000c0c2ad636d706c2d3663366263",
        "613032c081b4636861745f74656d706c6174655f6b776172677380c2c0c0",
    );
    let sampling = SamplingParams {
        temperature: 0.7_f32.into(),
        watermarking: Some(true),
        top_p: 0.8_f32.into(),
        max_tokens: Some(5),
        logprobs: Some(0),
        all_stop_token_ids: [0, 2].into(),
        ..SamplingParams::default()
    };
    let id = "cmpl-6c6bca02-f0b15799";
    let mut request = EngineCoreRequest::new(id.into(), vec![1, 2, 3], sampling);
    request.arrival_time = f64::from_bits(0x41da_c363_3c16_af2d);
    request.external_req_id = Some("cmpl-6c6bca02".to_owned());
    request.reasoning_parser_kwargs =
        Some(Value::map([("chat_template_kwargs", Value::Map(vec![]))]));
    check_request(0, payload, ClientMessage::Add(Box::new(request)));
}

/// Messages that msgspec wrote, from `tests/peers/vllm_wire.py samples`: a line is the kind of
/// socket and the frames.
#[test]
fn frames_that_msgspec_wrote() {
    let decoded: Vec<String> = include_str!("msgspec_frames.txt")
        .lines()
        .map(|line| {
            let (kind, frames) = line.split_once(' ').unwrap();
            let frames: Vec<_> = frames.split(' ').map(unhex).collect();
            match kind {
                "client" => format!("{:#?}", ClientMessage::decode(&frames).unwrap()),
                "engine" => format!("{:#?}", EngineMessage::decode(&frames).unwrap()),
                "hello" => format!("{:#?}", EngineHello::decode(&frames[0]).unwrap()),
                "init" => format!("{:#?}", HandshakeInit::decode(&frames[0]).unwrap()),
                "ready_response" => format!("{:#?}", ReadyResponse::decode(&frames[0]).unwrap()),
                other => panic!("{other}"),
            }
        })
        .collect();
    insta::assert_snapshot!("msgspec_frames", decoded.join("\n"));
}
