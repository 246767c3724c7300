//! gRPC from outside: every method, what becomes of calls that are left, errors beside HTTP's, and
//! counters that equal what clients of both saw.

pub mod client;
mod counts;
mod errors;
mod lives;

use pawl_proto::candidate_tokens::Select;
use pawl_proto::finish_info::{FinishReason, StopReason};
use pawl_proto::generate_request::Prompt;
use pawl_proto::{
    CandidateTokens, DecodingParameters, FinishInfo, GenerateRequest, GenerateResponse,
    GetModelInfoRequest, GetServerInfoRequest, RandomSampling, ResponseOptions, StoppingCriteria,
    TokenIds,
};
use serde_json::json;
use tonic_health::pb::HealthCheckRequest;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use crate::harness::{Frontend, Run, wait_for};
use client::{Grpc, grpc_port};

/// A frontend of `run`'s core with a gRPC port, and a connection to it.
fn frontend(run: &Run, extra: &[&str]) -> (Frontend, Grpc) {
    let frontend = run.frontend("api", &[&["--grpc-port", "0"], extra].concat());
    let grpc = Grpc::connect(grpc_port(&run.path("api.ports")));
    // It is told by another task than /ready, a moment before or after.
    wait_for("SERVING", || {
        let status = grpc.wait(grpc.health().check(HealthCheckRequest::default())).unwrap();
        (status.into_inner().status == 1).then_some(())
    });
    (frontend, grpc)
}

/// Three tokens in, `tokens` out, ids and text told.
pub fn ask(tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![7, 8, 9] })),
        sampling: Some(RandomSampling { seed: Some(5), ..Default::default() }),
        stopping: Some(StoppingCriteria {
            max_new_tokens: tokens,
            ignore_eos: true,
            ..Default::default()
        }),
        response: Some(ResponseOptions { output_token_ids: true, ..Default::default() }),
        ..Default::default()
    }
}

/// One sequence, put together from messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sequence {
    pub text: String,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub ranks: Vec<u32>,
    pub candidates: Vec<Vec<u32>>,
    pub finish: Option<FinishInfo>,
}

/// Every sequence of an answer; nothing comes after a finish.
pub fn sequences(messages: &[GenerateResponse]) -> Vec<Sequence> {
    let mut all: Vec<Sequence> = Vec::new();
    for (at, message) in messages.iter().enumerate() {
        assert_eq!(message.prompt_info.is_some(), at == 0, "the first message tells the prompt");
        let piece = message.outputs.clone().expect("every message has an output");
        let index = piece.index as usize;
        all.resize(all.len().max(index + 1), Sequence::default());
        let sequence = &mut all[index];
        assert_eq!(sequence.finish, None, "something after the end: {piece:?}");
        assert_eq!(piece.num_tokens as usize, piece.token_ids.len());
        sequence.text.push_str(&piece.text);
        sequence.token_ids.extend(&piece.token_ids);
        sequence.logprobs.extend(&piece.logprobs);
        sequence.ranks.extend(&piece.ranks);
        let ids =
            |told: &pawl_proto::CandidateTokenInfo| told.tokens.iter().map(|t| t.id).collect();
        sequence.candidates.extend(piece.candidate_tokens.iter().map(ids));
        sequence.finish = piece.finish_info;
    }
    for sequence in &all {
        let finish = sequence.finish.as_ref().expect("every sequence ends");
        assert_eq!(finish.num_output_tokens as usize, sequence.token_ids.len());
    }
    all
}

pub fn reason(sequence: &Sequence) -> FinishReason {
    sequence.finish.as_ref().expect("it has ended").finish_reason()
}

#[test]
fn whole_answers_streams_and_http_say_the_same() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let (frontend, grpc) = frontend(&run, &[]);
    let whole = grpc.generate(ask(40)).unwrap();
    let (streamed, end) = grpc.stream(ask(40)).unwrap().rest();
    end.unwrap();
    assert!(streamed.len() > 1, "{streamed:?}");
    let whole = sequences(&[whole]);
    assert_eq!(whole, sequences(&streamed));
    let body = json!({"prompt": [7, 8, 9], "max_tokens": 40, "seed": 5, "ignore_eos": true,
                      "return_token_ids": true});
    let http = frontend.http.post("/v1/completions", &body).json();
    assert_eq!(http["choices"][0]["text"], whole[0].text);
    assert_eq!(http["choices"][0]["token_ids"], json!(whole[0].token_ids));
    assert_eq!(reason(&whole[0]), FinishReason::Length);

    // Several sequences, each with its own end.
    let two = GenerateRequest {
        sampling: Some(RandomSampling { num_sequences: 2, seed: Some(5), ..Default::default() }),
        ..ask(30)
    };
    let (messages, end) = grpc.stream(two).unwrap().rest();
    end.unwrap();
    let two = sequences(&messages);
    assert_eq!(two.len(), 2);
    assert!(two.iter().all(|sequence| sequence.token_ids.len() == 30));
    let body = json!({"prompt": [7, 8, 9], "max_tokens": 30, "seed": 5, "ignore_eos": true, "n": 2,
                      "return_token_ids": true});
    let http = frontend.http.post("/v1/completions", &body).json();
    for (index, sequence) in two.iter().enumerate() {
        assert_eq!(http["choices"][index]["token_ids"], json!(sequence.token_ids));
    }
}

#[test]
fn answers_tell_what_was_asked_for_and_how_they_ended() {
    const SAID: &str = "red green blue. ";
    let run = Run::new();
    let script: Vec<String> = SAID.bytes().map(|byte| byte.to_string()).collect();
    let _core = run.mock_core(&["--mock-script", &script.join(",")]);
    let (_frontend, grpc) = frontend(&run, &["--enable-prompt-tokens-details"]);

    let text = GenerateRequest { prompt: Some(Prompt::Text("Say".into())), ..ask(10) };
    let told = ResponseOptions {
        prompt_token_ids: true,
        output_logprobs: true,
        output_candidates: Some(CandidateTokens { select: Some(Select::TopN(3)) }),
        ..ask(0).response.unwrap()
    };
    let answer = grpc.generate(GenerateRequest { response: Some(told), ..text.clone() }).unwrap();
    let prompt = answer.prompt_info.clone().unwrap();
    assert_eq!((prompt.num_prompt_tokens, prompt.num_cached_tokens), (3, Some(0)));
    assert_eq!(prompt.token_ids, [83, 97, 121]);
    let sequence = &sequences(&[answer])[0];
    assert_eq!(sequence.text, "red green ");
    assert_eq!((sequence.logprobs.len(), sequence.ranks.len()), (10, 10));
    assert!(sequence.candidates.iter().all(|ids| ids.len() == 3), "{:?}", sequence.candidates);
    assert!(sequence.logprobs.iter().all(|logprob| *logprob <= 0.0));

    // Without the text, and without anything else.
    let told = ResponseOptions { output_text: Some(false), ..Default::default() };
    let answer = grpc.generate(GenerateRequest { response: Some(told), ..text.clone() }).unwrap();
    let output = answer.outputs.unwrap();
    assert_eq!((output.text.as_str(), output.num_tokens), ("", 10));
    assert!(output.token_ids.is_empty() && output.logprobs.is_empty());

    let stopping = |stopping| GenerateRequest { stopping: Some(stopping), ..text.clone() };
    let at = |request| sequences(&[grpc.generate(request).unwrap()]).remove(0);
    let string = at(stopping(StoppingCriteria {
        max_new_tokens: 60,
        stop_strings: vec!["blue".into()],
        ..Default::default()
    }));
    let told = string.finish.clone().unwrap().stop_reason;
    assert_eq!((string.text.as_str(), reason(&string)), ("red green ", FinishReason::Stop));
    assert_eq!(told, Some(StopReason::StopString("blue".into())));
    let token = at(stopping(StoppingCriteria {
        max_new_tokens: 60,
        stop_token_ids: vec![u32::from(b'.')],
        ..Default::default()
    }));
    let told = token.finish.clone().unwrap().stop_reason;
    assert_eq!((token.text.as_str(), told), ("red green blue", Some(StopReason::StopTokenId(46))));
}

#[test]
fn the_models_own_end_is_told_by_its_token() {
    const EOS: u32 = 258;
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let (_frontend, grpc) = frontend(&run, &[]);
    let request = GenerateRequest {
        decoding: Some(DecodingParameters { allowed_token_ids: vec![EOS], ..Default::default() }),
        stopping: Some(StoppingCriteria { max_new_tokens: 9, ..Default::default() }),
        ..ask(9)
    };
    let sequence = sequences(&[grpc.generate(request).unwrap()]).remove(0);
    let finish = sequence.finish.unwrap();
    assert_eq!(finish.finish_reason(), FinishReason::Stop);
    assert_eq!(finish.stop_reason, Some(StopReason::EosTokenId(EOS)));
}

#[test]
fn a_server_tells_of_itself() {
    let run = Run::new();
    let _core = run.mock_core(&["--max-num-seqs", "17", "--max-num-batched-tokens", "333"]);
    let (_frontend, grpc) = frontend(&run, &["--served-model-name", "first", "second"]);
    let info = grpc.wait(grpc.control().get_server_info(GetServerInfoRequest {})).unwrap();
    let info = info.into_inner();
    assert_eq!(info.engine_version, env!("CARGO_PKG_VERSION"));
    assert_eq!((info.max_running_requests, info.max_batched_tokens), (17, 333));
    assert!(info.max_model_len > 0 && info.kv_block_size > 0 && info.total_kv_blocks > 0);
    assert_eq!(info.parallelism.unwrap().data_parallel_size, 1);
    assert_eq!(info.instance_id.len(), 32);

    let model = grpc.wait(grpc.control().get_model_info(GetModelInfoRequest {})).unwrap();
    let model = model.into_inner();
    assert_eq!((model.model_id.as_str(), model.served_model_name.as_str()), ("first", "first"));
    assert_eq!(model.served_model_aliases, ["second"]);
    assert!(model.supports_text_input && model.supports_token_ids_input);
    assert_eq!((model.vocab_size, model.eos_token_ids.contains(&258)), (512, true));

    for service in ["", "pawl.Inference", "pawl.Control", "vllm.Inference"] {
        let request = HealthCheckRequest { service: service.into() };
        let status = grpc.wait(grpc.health().check(request)).unwrap().into_inner();
        assert_eq!(status.status, 1, "{service:?} is SERVING");
    }
    let unknown = HealthCheckRequest { service: "pawl.Nothing".into() };
    let unknown = grpc.wait(grpc.health().check(unknown)).unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound);

    for version in ["v1", "v1alpha"] {
        let names = services(&grpc, version);
        for name in ["pawl.Inference", "pawl.Control", "grpc.health.v1.Health"] {
            assert!(names.iter().any(|told| told == name), "{name} in {names:?}");
        }
    }
}

/// What reflection says is served.
fn services(grpc: &Grpc, version: &str) -> Vec<String> {
    let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answer = grpc.wait(async {
        let mut raw = grpc.raw();
        raw.ready().await.unwrap();
        let asked = tonic::Request::new(futures::stream::iter([question]));
        let codec = tonic_prost::ProstCodec::<_, ServerReflectionResponse>::default();
        let path = path.parse().unwrap();
        let mut answers = raw.streaming(asked, path, codec).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap()
    });
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("no list: {answer:?}")
    };
    list.service.into_iter().map(|service| service.name).collect()
}

/// Messages have vLLM's numbers, so a client made for it needs nothing but our address.
#[test]
fn vllms_names_reach_the_same_methods() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let (_frontend, grpc) = frontend(&run, &[]);
    let theirs = grpc.wait(async {
        let mut raw = grpc.raw();
        raw.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<GenerateRequest, GenerateResponse>::default();
        let path = "/vllm.Inference/Generate".parse().unwrap();
        raw.unary(tonic::Request::new(ask(5)), path, codec).await.unwrap().into_inner()
    });
    assert_eq!(Ok(theirs), grpc.generate(ask(5)).map_err(|status| status.to_string()));
}
