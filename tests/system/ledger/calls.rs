//! Requests over gRPC, and what their clients write down.

use pawl_proto::finish_info::FinishReason;
use pawl_proto::generate_request::Prompt;
use pawl_proto::{GenerateRequest, GenerateResponse, RandomSampling, TokenIds};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::clients::{Entry, Seen};
use crate::grpc::client::Grpc;

/// Kinds of calls; [`call`] goes round in them.
const KINDS: usize = 6;

pub const PROMPT: usize = 9;

/// A call with a prompt that has no beginning in common with another.
pub fn request(id: &str, nth: usize, tokens: usize) -> GenerateRequest {
    let ids = (0..PROMPT).map(|at| if at == 0 { 10 + nth % 240 } else { 10 + (at * nth) % 240 });
    let ids = ids.map(|id| id as u32).collect();
    GenerateRequest {
        request_id: id.into(),
        prompt: Some(Prompt::TokenIds(TokenIds { ids })),
        ..crate::grpc::ask(tokens as u32)
    }
}

/// The entry of a call that is answered.
pub fn entry(kind: &'static str, id: &str, method: &'static str, max_tokens: usize) -> Entry {
    Entry {
        kind,
        id: id.into(),
        n: 1,
        prompt_tokens: PROMPT as u64,
        max_tokens: max_tokens as u64,
        call: Some((method, "OK")),
        ..Entry::default()
    }
}

/// Makes the `nth` call and reads its answer, or leaves.
pub fn call(grpc: &Grpc, nth: usize) -> Entry {
    let id = format!("g{nth}");
    let tokens = 4 + nth % 25;
    // Never within the first tokens: a client that leaves early leaves something running.
    let long = 200;
    let streamed = |kind, tokens| entry(kind, &id, "GenerateStream", tokens);
    match nth % KINDS {
        0 => {
            let mut entry = entry("call", &id, "Generate", tokens);
            match grpc.generate(request(&id, nth, tokens)) {
                Ok(answer) => entry.take_in_message(&answer),
                Err(status) => return entry.end_with(&status),
            }
            entry.assert_complete();
            entry
        }
        1 => stream(grpc, streamed("call, stream", tokens), request(&id, nth, tokens), usize::MAX),
        2 => {
            let three = RandomSampling { num_sequences: 3, ..Default::default() };
            let request = GenerateRequest { sampling: Some(three), ..request(&id, nth, tokens) };
            stream(grpc, Entry { n: 3, ..streamed("call for three", tokens) }, request, usize::MAX)
        }
        3 => stream(grpc, streamed("call left at once", long), request(&id, nth, long), 0),
        4 => stream(
            grpc,
            streamed("call left in the middle", long),
            request(&id, nth, long),
            3 + nth % 7,
        ),
        _ => {
            let refused = GenerateRequest { temperature: Some(-1.0), ..request(&id, nth, tokens) };
            let status = grpc.generate(refused).unwrap_err();
            entry("refused call", &id, "Generate", tokens).end_with(&status)
        }
    }
}

/// Reads a stream to its end, or leaves after so many messages.
fn stream(grpc: &Grpc, mut entry: Entry, request: GenerateRequest, messages: usize) -> Entry {
    let mut stream = match grpc.stream(request) {
        Ok(stream) => stream,
        Err(status) => return entry.end_with(&status),
    };
    for _ in 0..messages {
        match stream.next() {
            Ok(Some(message)) => entry.take_in_message(&message),
            Ok(None) => {
                entry.assert_complete();
                return entry;
            }
            Err(status) => return entry.end_with(&status),
        }
    }
    Entry { left: true, call: entry.call.map(|(method, _)| (method, "Canceled")), ..entry }
}

impl Entry {
    pub fn take_in_message(&mut self, message: &GenerateResponse) {
        let piece = message.outputs.as_ref().expect("every message has an output");
        let seen: &mut Seen = self.choices.entry(u64::from(piece.index)).or_default();
        assert_eq!(seen.finish, None, "{}: something after the end: {piece:?}", self.kind);
        seen.tokens += piece.token_ids.len() as u64;
        seen.finish = piece.finish_info.as_ref().map(|finish| {
            let reason = match finish.finish_reason() {
                FinishReason::Length => "length",
                FinishReason::Stop => "stop",
                other => panic!("{other:?}"),
            };
            reason.to_owned()
        });
    }

    /// The call ended with this status: refused, or broken off. A frontend that dies says nothing.
    pub fn end_with(self, status: &Status) -> Self {
        let Some(info) = status.get_error_details().error_info().cloned() else {
            return Self { died: true, ..self };
        };
        let code = match status.code() {
            Code::InvalidArgument => "InvalidArgument",
            Code::ResourceExhausted => "ResourceExhausted",
            Code::Unavailable => "Unavailable",
            other => panic!("{}: {other:?} {info:?}", self.kind),
        };
        let begun = !self.choices.is_empty();
        Self {
            call: self.call.map(|(method, _)| (method, code)),
            failed: begun,
            refused: (!begun).then_some(info.reason),
            ..self
        }
    }
}
