//! What the clients ask for, and what each of them writes down of its request.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::harness::{Answer, Client};

/// One request as its client saw it.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// Which of [`ask`]'s kinds.
    pub kind: &'static str,
    /// As the log names it, with the prefix of its route; empty where the core was never asked.
    pub id: String,
    pub method: &'static str,
    pub route: &'static str,
    /// Of the answer's head; `None`: the client left before it came.
    pub status: Option<u16>,
    /// `error.code`
    pub refused: Option<String>,
    /// Whether the client left in the middle.
    pub left: bool,
    /// Whether the answer ended with an error in the middle.
    pub failed: bool,
    /// Whether its frontend was killed: it counted what the client saw, and will not count an end.
    pub died: bool,
    /// Over gRPC: method and code of the call. Such an entry has no route.
    pub call: Option<(&'static str, &'static str)>,
    pub n: u64,
    pub prompt_tokens: u64,
    pub max_tokens: u64,
    /// By index: what was seen of each choice.
    pub choices: BTreeMap<u64, Seen>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    pub tokens: u64,
    pub finish: Option<String>,
}

const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";

/// EOS of the mock model.
const EOS: u32 = 258;

/// Kinds of requests; [`ask`] goes round in them.
pub const KINDS: usize = 25;
/// The kind that asks for sixty choices.
pub const SIXTY: usize = 22;

/// Puts the `nth` request and reads its answer, or leaves.
pub fn ask(http: Client, nth: usize) -> Entry {
    let id = format!("r{nth}");
    // Prompts of different requests have no beginning in common, but for the last two kinds.
    let text = format!("{nth} bottles of beer on the wall");
    let ids = |count: usize| -> Vec<usize> {
        (0..count).map(|at| if at == 0 { 10 + nth % 200 } else { 10 + (at + nth) % 240 }).collect()
    };
    let seed = nth as u64;
    let max = 5 + nth % 20;
    // Never within the first tokens: a client that leaves early leaves something running.
    let long = 200;
    let body = |extra: Value| {
        let mut body = json!({"request_id": id, "return_token_ids": true, "ignore_eos": true,
                              "max_tokens": max, "temperature": 1.0, "seed": seed});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let entry = |kind, prompt_tokens: usize| Entry {
        kind,
        id: format!("cmpl-{id}"),
        method: "POST",
        route: COMPLETIONS,
        n: 1,
        prompt_tokens: prompt_tokens as u64,
        max_tokens: max as u64,
        ..Entry::default()
    };
    let whole = |entry: Entry, extra: Value| read_whole(http, entry, &body(extra));
    let stream = |entry: Entry, extra: Value| read_stream(http, entry, &body(extra), usize::MAX);
    let leave = |entry: Entry, extra: Value, after: usize| {
        let entry = Entry { max_tokens: long, left: true, ..entry };
        let mut body = body(extra);
        body["max_tokens"] = json!(long);
        read_stream(http, entry, &body, after)
    };
    let refused = |kind, method, route, body: &[u8]| {
        let entry = Entry { kind, method, route, ..Entry::default() };
        let path = if route == "none" { "/v1/nothing" } else { route };
        let answer = http.request(method, path, &[], Some(body)).unwrap();
        refusal(entry, &answer)
    };
    match nth % KINDS {
        0 => whole(entry("length, text", text.len()), json!({"prompt": text})),
        1 => {
            stream(entry("length, ids, stream", 40), json!({"prompt": ids(40), "max_tokens": max}))
        }
        2 => whole(
            entry("EOS", 12),
            json!({"prompt": ids(12), "ignore_eos": false,
                   "allowed_token_ids": [EOS, 300, 301, 302]}),
        ),
        3 => stream(
            entry("EOS at once, stream", 5),
            json!({"prompt": ids(5), "ignore_eos": false, "allowed_token_ids": [EOS]}),
        ),
        4 => whole(
            entry("stop token", 8),
            json!({"prompt": ids(8), "stop_token_ids": [303], "allowed_token_ids": [303, 304]}),
        ),
        5 => stream(
            entry("stop token, stream", 8),
            json!({"prompt": ids(8), "stop_token_ids": [303],
                   "allowed_token_ids": [303, 304, 305]}),
        ),
        6 => whole(
            entry("stop string", 9),
            json!({"prompt": ids(9), "stop": [" t310 t311"], "allowed_token_ids": [310, 311]}),
        ),
        7 => stream(
            entry("stop string, stream", 9),
            json!({"prompt": ids(9), "stop": ["310 t3", "zzz"], "allowed_token_ids": [310, 311]}),
        ),
        8 => whole(
            Entry { n: 2, ..entry("two choices", 20) },
            json!({"prompt": ids(20), "n": 2, "ignore_eos": false,
                   "allowed_token_ids": [EOS, 300, 301, 302, 303, 304]}),
        ),
        9 => stream(
            Entry { n: 3, ..entry("three choices, stream", 20) },
            json!({"prompt": ids(20), "n": 3, "logprobs": 1}),
        ),
        10 | 11 => {
            let said = format!("{nth} times?");
            // `<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n`, a token a byte.
            let rendered = 1 + "user\n".len() + said.len() + 2 + 1 + "assistant\n".len();
            let entry =
                Entry { id: format!("chatcmpl-{id}"), route: CHATS, ..entry("chat", rendered) };
            let messages = json!({"messages": [{"role": "user", "content": said}]});
            if nth % KINDS == 10 { whole(entry, messages) } else { stream(entry, messages) }
        }
        12 => leave(entry("left at the head, short prompt", 6), json!({"prompt": ids(6)}), 0),
        13 => leave(entry("left at the head, long prompt", 300), json!({"prompt": ids(300)}), 0),
        14 => leave(entry("left at its first token", 6), json!({"prompt": ids(6)}), 1),
        15 => leave(entry("left in the middle", 50), json!({"prompt": ids(50)}), 4 + nth % 9),
        16 => leave(
            Entry { n: 2, ..entry("left in the middle of two", 6) },
            json!({"prompt": ids(6), "n": 2, "ignore_eos": false,
                   "allowed_token_ids": [EOS, 300, 301, 302, 303, 304, 305, 306, 307]}),
            8,
        ),
        17 => {
            let entry =
                Entry { kind: "tokenize", method: "POST", route: "/tokenize", ..Entry::default() };
            let answer = http.post("/tokenize", &json!({"prompt": text}));
            assert_eq!(answer.json()["count"], text.len(), "{}", answer.text());
            Entry { status: Some(answer.status), ..entry }
        }
        18 => refused("bad value", "POST", COMPLETIONS, br#"{"prompt": "x", "temperature": -1}"#),
        19 => refused("no JSON", "POST", CHATS, b"{\"messages\": "),
        20 => match (nth / KINDS) % 4 {
            0 => refused("unknown model", "POST", COMPLETIONS, br#"{"prompt":"x","model":"no"}"#),
            1 => refused("unknown route", "POST", "none", b"{}"),
            2 => refused("wrong method", "DELETE", COMPLETIONS, b""),
            _ => refused("unknown method", "BREW", CHATS, b""),
        },
        21 => match (nth / KINDS) % 2 {
            0 => {
                let large = body(json!({"prompt": "x".repeat(50_000)}));
                refused("body too large", "POST", COMPLETIONS, large.to_string().as_bytes())
            }
            _ => {
                let long = body(json!({"prompt": ids(1300), "max_tokens": 8000}));
                refused("over the context", "POST", COMPLETIONS, long.to_string().as_bytes())
            }
        },
        SIXTY => {
            // Beside anything else these do not fit among the 60 that may be made at once.
            let n = 60;
            let entry = Entry { n, ..entry("perhaps too many at once", 6) };
            whole(entry, json!({"prompt": ids(6), "n": n}))
        }
        23 => {
            let entry = Entry {
                kind: "no generation",
                method: "GET",
                route: "/v1/models",
                ..Entry::default()
            };
            let answer = http.get("/v1/models");
            assert_eq!(answer.status, 200);
            Entry { status: Some(200), ..entry }
        }
        24 => {
            // A beginning that is soon in the prefix cache.
            let mut prompt = vec![77; 100];
            prompt.push(10 + nth);
            whole(entry("shared beginning", 101), json!({"prompt": prompt}))
        }
        _ => unreachable!(),
    }
}

/// Asks for a whole answer and leaves before it, once `begun` says that the core has begun. There
/// is no room for all its choices to run: some have no token by then.
pub fn leave_unanswered(http: Client, nth: usize, begun: impl FnOnce()) -> Entry {
    let id = format!("unanswered{nth}");
    let (n, max_tokens) = (50, 500);
    let body = json!({"request_id": id, "prompt": [nth, 2, 3], "n": n, "ignore_eos": true,
                      "max_tokens": max_tokens});
    let connection = http.open("POST", COMPLETIONS, &body);
    begun();
    drop(connection);
    Entry {
        kind: "left unanswered",
        id: format!("cmpl-{id}"),
        method: "POST",
        route: COMPLETIONS,
        left: true,
        n,
        prompt_tokens: 3,
        max_tokens,
        ..Entry::default()
    }
}

fn refusal(entry: Entry, answer: &Answer) -> Entry {
    let body = answer.json();
    assert!((400..600).contains(&answer.status), "{}: {body}", entry.kind);
    let code = body["error"]["code"].as_str().unwrap_or_else(|| panic!("no code: {body}"));
    Entry { status: Some(answer.status), refused: Some(code.into()), ..entry }
}

fn read_whole(http: Client, entry: Entry, body: &Value) -> Entry {
    let bytes = body.to_string();
    let answer = http.request("POST", entry.route, &[], Some(bytes.as_bytes())).unwrap();
    if answer.status != 200 {
        return refusal(entry, &answer);
    }
    let answer = answer.json();
    let mut entry = Entry { status: Some(200), ..entry };
    for choice in answer["choices"].as_array().unwrap() {
        entry.take_in(choice);
    }
    entry.assert_complete();
    let tokens: u64 = entry.choices.values().map(|choice| choice.tokens).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], entry.prompt_tokens, "{} {answer}", entry.kind);
    assert_eq!(answer["usage"]["completion_tokens"], tokens, "{} {answer}", entry.kind);
    entry
}

/// Reads a stream to its end, or leaves after `events` of them.
fn read_stream(http: Client, entry: Entry, body: &Value, events: usize) -> Entry {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let mut stream = http.stream(entry.route, &body);
    if stream.status != 200 {
        let (status, body) = (stream.status, stream.body().into_bytes());
        return refusal(entry, &Answer { status, headers: Vec::new(), body });
    }
    let mut entry = Entry { status: Some(200), ..entry };
    let mut usage = Value::Null;
    for _ in 0..events {
        let Some(event) = stream.next() else { break };
        if event.get("error").is_some() {
            assert_eq!(event["error"]["code"], "engine_unavailable", "{}: {event}", entry.kind);
            assert_eq!(stream.next(), None, "{}: something after an error", entry.kind);
            return Entry { left: false, failed: true, ..entry };
        }
        let choices = event["choices"].as_array().unwrap_or_else(|| panic!("{event}"));
        choices.iter().for_each(|choice| entry.take_in(choice));
        if choices.is_empty() {
            usage = event["usage"].clone();
        }
    }
    // Choices may have ended by themselves before the client left.
    entry.left &= !stream.is_done();
    if entry.left {
        stream.close();
        return entry;
    }
    assert!(stream.is_done(), "{}: the stream broke off", entry.kind);
    entry.assert_complete();
    let tokens: u64 = entry.choices.values().map(|choice| choice.tokens).sum();
    assert_eq!(usage["prompt_tokens"], entry.prompt_tokens, "{} {usage}", entry.kind);
    assert_eq!(usage["completion_tokens"], tokens, "{} {usage}", entry.kind);
    entry
}

impl Entry {
    pub fn take_in(&mut self, choice: &Value) {
        let index = choice["index"].as_u64().unwrap();
        let seen = self.choices.entry(index).or_default();
        assert_eq!(seen.finish, None, "{}: something after the end: {choice}", self.kind);
        seen.tokens += choice["token_ids"].as_array().map_or(0, Vec::len) as u64;
        seen.finish = choice["finish_reason"].as_str().map(Into::into);
    }

    pub fn assert_complete(&self) {
        let (kind, choices) = (self.kind, &self.choices);
        assert_eq!(choices.len() as u64, self.n, "{kind}: {choices:?}");
        assert!(choices.values().all(|choice| choice.finish.is_some()), "{kind}: {choices:?}");
    }
}
