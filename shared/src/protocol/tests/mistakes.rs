//! What is refused, and with which words; and what vLLM tolerates, so we do.

use bytes::Bytes;

use super::unhex;
use crate::protocol::*;

fn bytes(value: &Value) -> Bytes {
    encode_value(value)
}

/// A nine-element ADD whose sampling parameters are `params`.
fn add(params: Value) -> Result<ClientMessage, DecodeError> {
    let mut fields = vec![Value::Nil; 9];
    fields[0] = "r1".into();
    fields[1] = Value::Array(vec![1_u32.into()]);
    fields[3] = params;
    fields[5] = 1.0.into();
    ClientMessage::decode(&[Bytes::from_static(&[0]), bytes(&Value::Array(fields))])
}

fn sampling(key: &str, value: Value) -> Result<SamplingParams, DecodeError> {
    match add(Value::map([(key, value)]))? {
        ClientMessage::Add(request) => Ok(request.sampling_params.expect("just set")),
        other => panic!("{other:?}"),
    }
}

/// A frame with one output, whose element `index` is `value`.
fn output(index: usize, value: Value) -> Result<EngineMessage, DecodeError> {
    let mut fields = vec![Value::Nil; 19];
    fields[0] = "r1".into();
    fields[1] = Value::Array(vec![]);
    fields[13] = 0_u32.into();
    fields[index] = value;
    frame(1, Value::Array(vec![Value::Array(fields)]))
}

/// A frame whose element `index` is `value`.
fn frame(index: usize, value: Value) -> Result<EngineMessage, DecodeError> {
    let mut fields = vec![Value::Nil; 9];
    fields[0] = 0_u32.into();
    fields[1] = Value::Array(vec![]);
    fields[3] = 2.0.into();
    fields[index] = value;
    EngineMessage::decode(&[bytes(&Value::Array(fields))])
}

fn tensor(dtype: &str, shape: &[usize], data: Value) -> Value {
    Value::Array(vec![dtype.into(), Value::from(shape), data])
}

fn told<T: std::fmt::Debug>(result: Result<T, DecodeError>) -> String {
    let error = result.expect_err("a mistake");
    format!("{}: {}", error.kind.as_str(), error.message)
}

#[test]
fn every_mistake_is_told_with_its_place() {
    let ranks = tensor("<i8", &[1], Value::Ext(3, vec![0; 8]));
    let logprobs = |ids: Value| Value::Array(vec![ids.clone(), ids, ranks.clone(), Value::Nil]);
    let long = "x".repeat(2000);
    let mistakes = [
        told(sampling("temperature", "hot".into())),
        told(sampling("max_tokens", 1.0.into())),
        told(sampling("max_tokens", (-1_i32).into())),
        told(sampling("top_k", (-2_i32).into())),
        told(sampling("stop_token_ids", Value::Array(vec![5_u32.into(), (1_u64 << 40).into()]))),
        told(sampling("logit_bias", Value::map([("5", Value::from(1.0))]))),
        told(sampling("output_kind", 3_u32.into())),
        told(sampling("extra_args", Value::Ext(2, vec![1, 2, 3]))),
        told(sampling("structured_outputs", Value::map([("a", Value::Ext(1, vec![0]))]))),
        told(add(Value::Array(vec![long.as_str().into(); 3]))),
        told(ClientMessage::decode(&[Bytes::from_static(&[0]), unhex("92a2723191 01")])),
        told(ClientMessage::decode(&[Bytes::from_static(&[9]), unhex("90")])),
        told(ClientMessage::decode(&[Bytes::from_static(&[0])])),
        told(ClientMessage::decode(&[
            Bytes::from_static(&[1]),
            bytes(&[long.as_str()][..].into()),
        ])),
        told(ClientMessage::decode(&[Bytes::from_static(&[1]), unhex("91a2c328")])),
        told(output(5, 5_u32.into())),
        told(output(5, "stop".into())),
        told(output(6, Value::Bool(true))),
        told(output(7, Value::Array(vec![Value::map([("type", Value::from(1_u32))])]))),
        told(output(1, Value::Array(vec![1_u32.into(), (-1_i32).into()]))),
        told(output(4, tensor("<f4", &[2], Value::Ext(3, vec![0; 4])))),
        told(output(4, tensor("<f4", &[usize::MAX, 2], Value::Ext(3, vec![])))),
        told(output(4, tensor("<f4", &[2], 1_u32.into()))),
        told(output(4, tensor("<f4", &[2], 0_u32.into()))),
        told(output(4, tensor("<f4", &[1], Value::Ext(1, vec![0; 4])))),
        told(output(4, tensor("<f4", &[1], Value::map([("handle", Value::Nil)])))),
        told(output(2, logprobs(tensor("<f4", &[1, 1], Value::Ext(3, vec![0; 4]))))),
        told(output(2, logprobs(tensor("<i4", &[1 << 40, 0], Value::Ext(3, vec![]))))),
        told(output(2, Value::Array(vec![Value::Nil; 5]))),
        told(frame(0, 0.0.into())),
        told(frame(2, Value::map([("kv_cache_usage", Value::from("full"))]))),
        told(frame(4, Value::Array(vec![5_u32.into(), Value::Nil, true.into()]))),
        told(EngineMessage::decode(&[unhex("9a00c1")])),
        told(EngineMessage::decode(&[])),
        told(EngineMessage::decode(&[unhex(
            "990091 92a2723190 c0cb4000000000000000 9305c092c0c0 c0c0c0c0",
        )])),
        told(EngineHello::decode(&bytes(&Value::map([("status", Value::from("BYE"))])))),
        told(EngineHello::decode(&bytes(&Value::map([("local", Value::from(true))])))),
        told(HandshakeInit::decode(&bytes(&Value::map([("addresses", Value::Map(vec![]))])))),
        told(ReadyResponse::decode(&bytes(&Value::map([("dtype", Value::from("float32"))])))),
    ];
    insta::assert_snapshot!("mistakes", mistakes.join("\n"));
}

#[test]
fn numbers_of_any_width_are_floats() {
    for number in ["07", "cc07", "cd0007", "d007", "d30000000000000007", "ca40e00000"] {
        let payload = unhex(&format!("990090c0{number}c0c0c0c0c0"));
        match EngineMessage::decode(&[payload]).unwrap() {
            EngineMessage::Step { timestamp, .. } => assert_eq!(timestamp, 7.0, "{number}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_vllm_tolerates() {
    let ok = |result: Result<SamplingParams, DecodeError>| result.unwrap();
    assert_eq!(ok(sampling("unknown", Value::Array(vec![]))), SamplingParams::default());
    assert_eq!(ok(sampling("top_k", (-1_i32).into())).top_k, 0);
    assert_eq!(ok(sampling("seed", (-1_i32).into())).seed, None);
    assert_eq!(ok(sampling("stop", "END".into())).stop, ["END"]);
    assert_eq!(ok(sampling("stop", Value::Nil)).stop, [""; 0]);
    assert_eq!(ok(sampling("temperature", 0_u32.into())).temperature, 0.0);

    // The shortest frame that both of vLLM's frontends take, and one with elements to come.
    let short = unhex("940091 96a2723191 05c0c0c001 c0cb4000000000000000");
    let long = unhex(
        "9b0091 dc0014a272319105c0c0c001c0c0c0c0c0c0c000c0c0c0c0c0c3
         c0cb4000000000000000 c0c0c0c0c0c3c3",
    );
    let expected = EngineMessage::Step {
        engine_index: 0,
        timestamp: 2.0,
        stats: None,
        outputs: vec![EngineCoreOutput {
            new_token_ids: vec![5],
            finish_reason: Some(FinishReason::Length),
            ..EngineCoreOutput::new("r1".into())
        }],
        finished_requests: vec![],
    };
    assert_eq!(EngineMessage::decode(&[short]).unwrap(), expected);
    assert_eq!(EngineMessage::decode(&[long]).unwrap(), expected);
}

/// The notices that an engine sends of its own accord match no call.
#[test]
fn notices_of_an_engine() {
    for (notice, call_id) in [(-1_i64, u64::MAX), (-2, u64::MAX - 1)] {
        let reply = Value::Array(vec![notice.into(), Value::Nil, Value::Nil]);
        match frame(4, reply).unwrap() {
            EngineMessage::Utility { reply, .. } => {
                assert_eq!(reply, UtilityReply { call_id, result: Ok(Value::Nil) });
            }
            other => panic!("{other:?}"),
        }
    }
}

/// `dump` shows what decoding refuses.
#[test]
fn a_dump_shows_pickled_bytes() {
    let value = Value::Array(vec![Value::Ext(1, vec![0x80, 4])]);
    assert_eq!(decode_value(&bytes(&value)).unwrap_err().kind, DecodeErrorKind::Refused);
    assert_eq!(dump(&bytes(&value)).unwrap().to_json(), r#"[{"ext":1,"bytes":"8004"}]"#);
}
