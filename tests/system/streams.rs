//! What clients read, letter by letter: stop strings, characters, finish reasons, usage, and that a
//! stream says what a whole answer says.

use serde_json::{Value, json};

use crate::harness::{Client, Run};

const COMPLETIONS: &str = "/v1/completions";

/// What every answer of [`scripted`] says, over and over, a token a byte.
const SAID: &str = "red green blue violet amber\n🦀é漢 end. ";

/// A core whose answers all say [`SAID`] (byte b is token b), and a frontend.
fn scripted<T>(test: impl FnOnce(Client) -> T) -> T {
    let run = Run::new();
    let script: Vec<String> = SAID.bytes().map(|byte| byte.to_string()).collect();
    let _core = run.mock_core(&["--mock-script", &script.join(",")]);
    let frontend = run.frontend("api", &[]);
    test(frontend.http)
}

/// One choice, put together from a stream or read from a whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
struct Choice {
    text: String,
    tokens: Vec<u64>,
    logprobs: usize,
    finish: Option<String>,
    stop_reason: Value,
}

impl Choice {
    fn take_in(&mut self, piece: &Value) {
        assert_eq!(self.finish, None, "something after the end: {piece}");
        let text = [&piece["text"], &piece["message"]["content"], &piece["delta"]["content"]];
        self.text.extend(text.iter().filter_map(|text| text.as_str()));
        let ids = piece["token_ids"].as_array().into_iter().flatten();
        self.tokens.extend(ids.map(|id| id.as_u64().unwrap()));
        let logprobs = [&piece["logprobs"]["tokens"], &piece["logprobs"]["content"]];
        self.logprobs += logprobs.iter().filter_map(|l| l.as_array()).map(Vec::len).sum::<usize>();
        self.finish = piece["finish_reason"].as_str().map(Into::into);
        self.stop_reason = piece["stop_reason"].clone();
    }
}

/// What a request came to.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    choices: Vec<Choice>,
    usage: Value,
}

fn request(extra: &Value) -> Value {
    let mut body = json!({"prompt": [7, 8], "max_tokens": 60, "temperature": 0, "seed": 1,
                          "ignore_eos": true, "return_token_ids": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    if body.get("messages").is_some() {
        body.as_object_mut().unwrap().remove("prompt");
    }
    body
}

fn route(body: &Value) -> &'static str {
    if body.get("messages").is_some() { "/v1/chat/completions" } else { COMPLETIONS }
}

fn whole(http: Client, extra: &Value) -> Outcome {
    let body = request(extra);
    let answer = http.post(route(&body), &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let choices = answer["choices"].as_array().unwrap().iter();
    let choices = choices
        .map(|choice| {
            let mut all = Choice::default();
            all.take_in(choice);
            all
        })
        .collect();
    Outcome { choices, usage: answer["usage"].clone() }
}

/// The events of a stream, checked for their form.
fn events(http: Client, extra: &Value) -> Vec<Value> {
    let mut body = request(extra);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let mut stream = http.stream(route(&body), &body);
    assert_eq!(stream.status, 200);
    let events = stream.rest();
    assert!(stream.is_done(), "cut off: {events:?}");
    events
}

fn joined(events: &[Value]) -> Outcome {
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]), "the usage comes last");
    let mut choices: Vec<Choice> = Vec::new();
    for piece in pieces.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let index = usize::try_from(piece["index"].as_u64().unwrap()).unwrap();
        choices.resize(choices.len().max(index + 1), Choice::default());
        choices[index].take_in(piece);
    }
    for choice in &choices {
        assert!(choice.finish.is_some(), "no finish reason: {choice:?}");
    }
    Outcome { choices, usage: last["usage"].clone() }
}

/// A stream and a whole answer come to the same; that.
fn both(http: Client, extra: &Value) -> Outcome {
    let (streamed, whole) = (joined(&events(http, extra)), whole(http, extra));
    assert_eq!(streamed, whole, "{extra}");
    let tokens: usize = whole.choices.iter().map(|choice| choice.tokens.len()).sum();
    assert_eq!(whole.usage["completion_tokens"], tokens, "{extra}");
    whole
}

fn text(http: Client, extra: &Value) -> (String, String, Value, usize) {
    let mut outcome = both(http, extra);
    let choice = outcome.choices.remove(0);
    (choice.text, choice.finish.unwrap(), choice.stop_reason, choice.tokens.len())
}

#[test]
fn stop_strings_over_many_tokens() {
    scripted(|http| {
        let stop = " blue violet amber";
        let tokens = "red green".len() + stop.len();
        let stopped = |text: &str| (text.to_owned(), "stop".to_owned(), json!(stop), tokens);
        assert_eq!(text(http, &json!({"stop": [stop]})), stopped("red green"));
        let included = json!({"stop": stop, "include_stop_str_in_output": true});
        assert_eq!(text(http, &included), stopped("red green blue violet amber"));
        // The beginning of a stop string that comes to nothing is told after all.
        let (all, finish, ..) = text(http, &json!({"stop": [" blue vanish", "greet"]}));
        assert_eq!((all.as_str(), finish.as_str()), (&SAID.repeat(2)[..all.len()], "length"));
        // One that is complete earlier wins, wherever it stands in the list.
        let (first, _, reason, _) = text(http, &json!({"stop": ["violet", "lue", "blue"]}));
        assert_eq!((first.as_str(), reason), ("red green ", json!("blue")));
        // A stop string of characters of several bytes.
        let (crab, _, reason, tokens) = text(http, &json!({"stop": ["é漢"]}));
        assert_eq!((crab.as_str(), reason), ("red green blue violet amber\n🦀", json!("é漢")));
        assert_eq!(tokens, "red green blue violet amber\n🦀é漢".len());
    });
}

#[test]
fn what_may_be_a_stop_string_is_never_let_out() {
    scripted(|http| {
        let mut seen = String::new();
        for event in events(http, &json!({"stop": [" blue violet amber"]})) {
            seen.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
            assert!("red green".starts_with(&seen), "{seen:?}");
        }
        assert_eq!(seen, "red green");
    });
}

#[test]
fn stop_tokens_are_counted_and_told_only_when_wanted() {
    scripted(|http| {
        let newline = u64::from(b'\n');
        let line = "red green blue violet amber";
        let stopped =
            |text: &str| (text.to_owned(), "stop".to_owned(), json!(newline), line.len() + 1);
        assert_eq!(text(http, &json!({"stop_token_ids": [newline]})), stopped(line));
        let included = json!({"stop_token_ids": [newline], "include_stop_str_in_output": true});
        assert_eq!(text(http, &included), stopped(&format!("{line}\n")));
    });
}

#[test]
fn characters_are_never_split() {
    scripted(|http| {
        let events = events(http, &json!({}));
        let deltas: Vec<&str> =
            events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert!(deltas.iter().all(|delta| !delta.contains('\u{fffd}')), "{deltas:?}");
        for character in ["🦀", "é", "漢"] {
            assert!(deltas.contains(&character), "{character} in {deltas:?}");
        }
        let (all, ..) = text(http, &json!({"max_tokens": SAID.len()}));
        assert_eq!(all, SAID);
        // An answer that ends inside a character ends alike, streamed or not.
        let inside = "red green blue violet amber\n".len() + 2;
        let (cut, finish, _, tokens) = text(http, &json!({"max_tokens": inside}));
        assert_eq!(cut, "red green blue violet amber\n\u{fffd}");
        assert_eq!((finish.as_str(), tokens), ("length", inside));
    });
}

#[test]
fn min_tokens_holds_off_every_stop() {
    scripted(|http| {
        let (all, finish, reason, tokens) =
            text(http, &json!({"stop": ["e"], "min_tokens": 20, "max_tokens": 40}));
        // The first "e" after twenty tokens; the twentieth is one itself.
        let end = SAID[20..].find('e').unwrap() + 20;
        assert_eq!((all.as_str(), finish.as_str()), (&SAID[..end], "stop"));
        assert_eq!((reason, tokens), (json!("e"), end + 1));
    });
    let run = Run::new();
    let _core = run.mock_core(&["--mock-eos-at", "2"]);
    let frontend = run.frontend("api", &[]);
    let ends = |min_tokens: u64| {
        let body = json!({"ignore_eos": false, "min_tokens": min_tokens});
        let (_, finish, _, tokens) = text(frontend.http, &body);
        (finish, tokens)
    };
    assert_eq!(ends(0), ("stop".into(), 3));
    assert_eq!(ends(10), ("stop".into(), 11));
}

#[test]
fn three_choices_with_logprobs_lose_nothing() {
    scripted(|http| {
        let extra = json!({"n": 3, "logprobs": 1, "max_tokens": 3});
        let events = events(http, &extra);
        let outcome = joined(&events);
        let choice = |choice: &Choice| (choice.text.clone(), choice.tokens.len(), choice.logprobs);
        let expected = ("red".to_owned(), 3, 3);
        assert_eq!(outcome.choices.iter().map(choice).collect::<Vec<_>>(), vec![expected; 3]);
        assert_eq!(
            outcome.usage,
            json!({"prompt_tokens": 2, "total_tokens": 11, "completion_tokens": 9,
                   "prompt_tokens_details": null})
        );
        assert!(events[..events.len() - 1].iter().all(|e| e["usage"].is_null()), "{events:?}");
        assert_eq!(outcome, whole(http, &extra));
    });
}

#[test]
fn usage_in_every_chunk_grows_by_its_tokens() {
    scripted(|http| {
        let mut body = request(&json!({"max_tokens": 5}));
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
        let mut stream = http.stream(COMPLETIONS, &body);
        let told: Vec<(u64, u64)> = stream
            .rest()
            .iter()
            .map(|event| {
                let usage = |name: &str| event["usage"][name].as_u64().unwrap();
                (usage("prompt_tokens"), usage("completion_tokens"))
            })
            .collect();
        assert_eq!(told, [(2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 5)]);
    });
}

/// Streamed and whole answers are the same text, whatever the tokens: words, bytes that are no
/// characters, ends of every kind, chats and completions.
#[test]
fn streams_say_what_whole_answers_say() {
    let run = Run::new();
    let _core = run.mock_core(&[]);
    let http = run.frontend("api", &[]);
    let http = http.http;
    let bytes: Vec<u32> = (0..256).collect();
    let mut finishes = std::collections::BTreeSet::new();
    for nth in 0..20_u32 {
        for extra in [
            json!({}),
            json!({"allowed_token_ids": bytes, "max_tokens": 120}),
            json!({"allowed_token_ids": bytes, "stop": ["a", "\u{fffd}\u{fffd}", "1"]}),
            json!({"allowed_token_ids": [258, 300, 301, 302, 303, 304], "ignore_eos": false}),
            json!({"stop_token_ids": (300..340).collect::<Vec<u32>>(), "logprobs": 2, "n": 2}),
            json!({"messages": [{"role": "user", "content": format!("number {nth}")}], "n": 2,
                   "allowed_token_ids": [258, 300, 301, 240, 159, 166, 128], "seed": nth,
                   "temperature": 1, "ignore_eos": false}),
        ] {
            let mut extra = extra;
            if extra.get("messages").is_none() {
                extra["prompt"] = json!([nth, 2 * nth + 1]);
            }
            let outcome = both(http, &extra);
            finishes.extend(outcome.choices.into_iter().filter_map(|choice| choice.finish));
        }
    }
    assert_eq!(finishes.into_iter().collect::<Vec<_>>(), ["length", "stop"]);
}
