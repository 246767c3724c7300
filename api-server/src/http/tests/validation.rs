//! What is refused, and in which words. Every refusal names its field and the remedy.

use super::*;

/// Each case is one line: a path, a body, and what came back; the snapshot is the whole table.
async fn check(name: &str, cases: &[(&str, String)]) {
    let stage = Stage::new(|submit| {
        let script = ended(words(&["x"]), FinishReason::Stop, None);
        (0..submit.params.n).map(|choice| Update { choice, ..script[0].clone() }).collect()
    });
    let mut table = String::new();
    for (path, body) in cases {
        let shown: String = body.chars().take(100).collect();
        let answer = stage.post(path, body).await;
        let (status, rest) = answer.split_once('\n').unwrap_or((&answer, ""));
        table += &format!("{path} {shown}\n    {status}");
        if status != "200 OK" {
            table += &format!(" {rest}");
        }
        table.push('\n');
    }
    insta::assert_snapshot!(name, table);
}

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn completion(fields: &[&str]) -> Vec<(&'static str, String)> {
    fields.iter().map(|fields| (TEXT, format!(r#"{{"prompt":"Hi",{fields}}}"#))).collect()
}

fn chat(fields: &[&str]) -> Vec<(&'static str, String)> {
    let messages = r#""messages":[{"role":"user","content":"Hi"}]"#;
    fields.iter().map(|fields| (CHAT, format!("{{{messages},{fields}}}"))).collect()
}

fn bodies(path: &'static str, bodies: &[&str]) -> Vec<(&'static str, String)> {
    bodies.iter().map(|body| (path, (*body).to_owned())).collect()
}

#[tokio::test]
async fn prompts() {
    let ids = |count: usize| format!("[{}]", vec!["1"; count].join(","));
    let mut cases = bodies(
        TEXT,
        &[
            "",
            "{",
            "[]",
            "7",
            "\"text\"",
            "{\"prompt\":\"a\"} x",
            "{}",
            r#"{"prompt":null}"#,
            r#"{"prompt":""}"#,
            r#"{"prompt":[""]}"#,
            r#"{"prompt":[]}"#,
            r#"{"prompt":[[]]}"#,
            r#"{"prompt":["a",""]}"#,
            r#"{"prompt":[-1]}"#,
            r#"{"prompt":[9007199254740993]}"#,
            r#"{"prompt":[99999999999999999999]}"#,
            r#"{"prompt":[1.5]}"#,
            r#"{"prompt":["a",1]}"#,
            r#"{"prompt":[[1],"a"]}"#,
            r#"{"prompt":[[1,"a"]]}"#,
            r#"{"prompt":[[[1]]]}"#,
            r#"{"prompt":[512]}"#,
            r#"{"prompt":[511]}"#,
            r#"{"prompt":7}"#,
            r#"{"prompt":true}"#,
            r#"{"prompt":{}}"#,
            r#"{"prompt":[null]}"#,
            r#"{"prompt":[1e999]}"#,
        ],
    );
    // The context is 64 tokens.
    for (count, max_tokens) in [(65, "1"), (64, "1"), (63, "1"), (63, "2"), (63, "null"), (60, "5")]
    {
        cases.push((TEXT, format!(r#"{{"max_tokens":{max_tokens},"prompt":{}}}"#, ids(count))));
    }
    cases.push((TEXT, format!(r#"{{"prompt":"{}"}}"#, "a".repeat(65))));
    cases.push((TEXT, format!(r#"{{"prompt":"{}"}}"#, "a".repeat(100_000))));
    cases.push((TEXT, format!(r#"{{"truncate_prompt_tokens":-1,"prompt":{}}}"#, ids(99))));
    cases.push((TEXT, format!(r#"{{"truncate_prompt_tokens":10,"prompt":{}}}"#, ids(99))));
    let many = vec!["\"a\""; 1_025].join(",");
    cases.push((TEXT, format!(r#"{{"prompt":[{many}]}}"#)));
    let many = vec!["\"a\""; 1_000].join(",");
    cases.push((TEXT, format!(r#"{{"n":128,"prompt":[{many}]}}"#)));
    cases.push((TEXT, format!(r#"{{"prompt":"a","stop":[{}]}}"#, vec!["[]"; 300_000].join(","))));
    cases.push((TEXT, "[".repeat(100_000)));
    check("prompts", &cases).await;
}

#[tokio::test]
async fn counts_and_seeds() {
    let mut cases = completion(&[
        r#""n":0"#,
        r#""n":-1"#,
        r#""n":129"#,
        r#""n":1000000"#,
        r#""n":2147483648"#,
        r#""n":9223372036854775808"#,
        r#""n":1.5"#,
        r#""n":"2""#,
        r#""n":2.0,"best_of":2"#,
        r#""best_of":2"#,
        r#""best_of":1"#,
        r#""seed":9223372036854775807"#,
        r#""seed":9223372036854775808"#,
        r#""seed":18446744073709551616"#,
        r#""seed":-1"#,
        r#""seed":-9223372036854775808"#,
        r#""seed":1.5"#,
        r#""seed":"7""#,
        r#""seed":null"#,
        r#""max_tokens":0"#,
        r#""max_tokens":-1"#,
        r#""max_tokens":4294967296"#,
        r#""min_tokens":17"#,
        r#""min_tokens":20,"max_tokens":40"#,
        r#""logprobs":0"#,
        r#""logprobs":5"#,
        r#""logprobs":20"#,
        r#""logprobs":21"#,
        r#""logprobs":-1"#,
        r#""logprobs":true"#,
        r#""logprobs":1,"echo":true"#,
        r#""stream":"yes""#,
        r#""stream_options":{"include_usage":true}"#,
        r#""stream":true,"stream_options":7"#,
        r#""stream":true,"stream_options":{"include_usage":7}"#,
        r#""truncate_prompt_tokens":0"#,
        r#""truncate_prompt_tokens":65"#,
        r#""priority":1"#,
        r#""priority":0"#,
        r#""cache_salt":"""#,
        r#""model":"other""#,
        r#""model":7"#,
        r#""model":"""#,
    ]);
    cases.extend(chat(&[
        r#""logprobs":true"#,
        r#""logprobs":true,"top_logprobs":0"#,
        r#""logprobs":true,"top_logprobs":20"#,
        r#""logprobs":true,"top_logprobs":21"#,
        r#""logprobs":true,"top_logprobs":-1"#,
        r#""top_logprobs":5"#,
        r#""top_logprobs":0"#,
        r#""logprobs":5"#,
        r#""max_completion_tokens":0"#,
        r#""max_tokens":3,"max_completion_tokens":2"#,
        r#""min_tokens":5,"max_tokens":4"#,
    ]));
    check("counts_and_seeds", &cases).await;
}

#[tokio::test]
async fn sampling_values() {
    check(
        "sampling_values",
        &completion(&[
            r#""temperature":1000000"#,
            r#""temperature":-1"#,
            r#""temperature":0"#,
            r#""temperature":"hot""#,
            r#""temperature":1e400"#,
            r#""top_p":-1"#,
            r#""top_p":0"#,
            r#""top_p":1.01"#,
            r#""top_p":1"#,
            r#""top_k":-2"#,
            r#""top_k":-1"#,
            r#""top_k":0"#,
            r#""min_p":2"#,
            r#""min_p":-0.1"#,
            r#""repetition_penalty":0"#,
            r#""repetition_penalty":-1"#,
            r#""presence_penalty":1e30"#,
            r#""frequency_penalty":-2.5"#,
            r#""frequency_penalty":-2"#,
        ]),
    )
    .await;
}

#[tokio::test]
async fn lists() {
    let texts = |count: usize| vec!["\"a\""; count].join(",");
    let bias: Vec<String> = (0..100_000).map(|id| format!("\"{id}\":1")).collect();
    let ids = |count: usize| vec!["1"; count].join(",");
    let mut cases = completion(&[
        r#""stop":"x""#,
        r#""stop":["x","y"]"#,
        r#""stop":"""#,
        r#""stop":[""]"#,
        r#""stop":[1]"#,
        r#""stop":{}"#,
        r#""stop":[]"#,
        r#""bad_words":[""]"#,
        r#""bad_words":["  "]"#,
        r#""stop_token_ids":[512]"#,
        r#""stop_token_ids":[-1]"#,
        r#""stop_token_ids":7"#,
        r#""allowed_token_ids":[]"#,
        r#""allowed_token_ids":[1.5]"#,
        r#""logit_bias":{"x":1}"#,
        r#""logit_bias":{"512":1}"#,
        r#""logit_bias":{"1":101}"#,
        r#""logit_bias":{"1":"x"}"#,
        r#""logit_bias":{"1":-100}"#,
        r#""logit_bias":[]"#,
    ]);
    for fields in [
        format!(r#""stop":[{}]"#, texts(16)),
        format!(r#""stop":[{}]"#, texts(17)),
        format!(r#""stop":[{}]"#, texts(200_000)),
        format!(r#""stop":"{}""#, "a".repeat(1 << 20)),
        format!(r#""bad_words":[{}]"#, texts(50_000)),
        format!(r#""logit_bias":{{{}}}"#, bias.join(",")),
        format!(r#""allowed_token_ids":[{}]"#, ids(16_385)),
        format!(r#""stop_token_ids":[{}]"#, ids(129)),
    ] {
        cases.extend(completion(&[&fields]));
    }
    check("lists", &cases).await;
}

#[tokio::test]
async fn what_is_not_offered() {
    let mut cases = completion(&[
        r#""suffix":"x""#,
        r#""suffix":"""#,
        r#""suffix":null"#,
        r#""prompt_embeds":"AA==""#,
        r#""use_beam_search":true"#,
        r#""use_beam_search":false"#,
        r#""length_penalty":2"#,
        r#""length_penalty":1.0"#,
        r#""prompt_logprobs":0"#,
        r#""guided_json":{}"#,
        r#""structured_outputs":{"json":{}}"#,
        r#""response_format":{"type":"json_object"}"#,
        r#""response_format":{"type":"text"}"#,
        r#""response_format":{}"#,
        r#""kv_transfer_params":{}"#,
        r#""truncation_side":"right""#,
        r#""stream_interval":2"#,
        r#""spaces_between_special_tokens":false"#,
        r#""unknown_field":1"#,
        r#""user":"me""#,
    ]);
    cases.extend(chat(&[
        r#""tools":[{"type":"function","function":{"name":"f"}}]"#,
        r#""tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none""#,
        r#""tools":[{}]"#,
        r#""tools":[]"#,
        r#""tool_choice":"required""#,
        r#""tool_choice":{"type":"function","function":{"name":"f"}}"#,
        r#""response_format":{"type":"json_schema","json_schema":{}}"#,
        r#""chat_template":"{{ 1 }}""#,
        r#""functions":[]"#,
        r#""modalities":["audio"]"#,
        r#""modalities":["text"]"#,
        r#""prompt":"x""#,
        r#""add_generation_prompt":true,"continue_final_message":true"#,
    ]));
    check("what_is_not_offered", &cases).await;
}

#[tokio::test]
async fn messages() {
    let message = |fields: &str| format!(r#"{{"messages":[{fields}]}}"#);
    let cases: Vec<_> = [
        "",
        r#"{"role":"user","content":""}"#,
        r#"{"role":"user"}"#,
        r#"{"content":"x"}"#,
        r#"{"role":"","content":"x"}"#,
        r#"{"role":7,"content":"x"}"#,
        r#""x""#,
        r#"{"role":"user","content":7}"#,
        r#"{"role":"user","content":[]}"#,
        r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}"#,
        r#"{"role":"user","content":[{"text":"a"}]}"#,
        r#"{"role":"user","content":[7]}"#,
        r#"{"role":"assistant","content":null,"tool_calls":[]}"#,
        r#"{"role":"user","content":"x"},{"role":"user"}"#,
    ]
    .iter()
    .map(|fields| (CHAT, message(fields)))
    .chain(bodies(CHAT, &["{}", r#"{"messages":"x"}"#, r#"{"messages":null}"#]))
    .chain([(CHAT, message(&format!(r#"{{"role":"user","content":"{}"}}"#, "a".repeat(70))))])
    .chain([(CHAT, message(&format!(r#"{{"role":"user","content":"{}"}}"#, "a".repeat(9_000))))])
    .collect();
    check("messages", &cases).await;
}

#[tokio::test]
async fn tokens() {
    let mut cases = bodies(
        "/tokenize",
        &[
            "{}",
            r#"{"prompt":["a"]}"#,
            r#"{"prompt":""}"#,
            r#"{"prompt":"a","model":"x"}"#,
            r#"{"messages":[]}"#,
            r#"{"prompt":"a","add_special_tokens":1}"#,
        ],
    );
    cases.extend(bodies(
        "/detokenize",
        &["{}", r#"{"tokens":[512]}"#, r#"{"tokens":"a"}"#, r#"{"tokens":[[1]]}"#],
    ));
    check("tokens", &cases).await;
}

/// One wording, wherever a token id stands.
#[tokio::test]
async fn ids_beyond_the_vocabulary_are_refused_in_the_same_words_everywhere() {
    let stage = Stage::new(|_| Vec::new());
    for (path, body, field, shown) in [
        (TEXT, r#"{"prompt":[5,600]}"#, "prompt", "600"),
        (TEXT, r#"{"prompt":[[5],[600]]}"#, "prompt", "600"),
        (TEXT, r#"{"prompt":[-1]}"#, "prompt", "-1"),
        (TEXT, r#"{"prompt":[4294967296]}"#, "prompt", "4294967296"),
        (TEXT, r#"{"prompt":[1.5]}"#, "prompt", "1.5"),
        (TEXT, r#"{"prompt":"a","logit_bias":{"600":1}}"#, "logit_bias", r#""600""#),
        (TEXT, r#"{"prompt":"a","logit_bias":{"x":1}}"#, "logit_bias", r#""x""#),
        (TEXT, r#"{"prompt":"a","stop_token_ids":[600]}"#, "stop_token_ids", "600"),
        (TEXT, r#"{"prompt":"a","stop_token_ids":[-1]}"#, "stop_token_ids", "-1"),
        (TEXT, r#"{"prompt":"a","allowed_token_ids":["x"]}"#, "allowed_token_ids", r#""x""#),
        ("/detokenize", r#"{"tokens":[600]}"#, "tokens", "600"),
        ("/detokenize", r#"{"tokens":[-1]}"#, "tokens", "-1"),
    ] {
        let answer = stage.post(path, body).await;
        let (status, error) = answer.split_once('\n').unwrap();
        assert_eq!(status, "400 Bad Request", "{body}: {answer}");
        let error: serde_json::Value = serde_json::from_str(error).unwrap();
        let words = "is no token id of this model; they are whole numbers from 0 to 511";
        assert_eq!(error["error"]["message"], format!("{field}: {shown} {words}"), "{body}");
        assert_eq!(error["error"]["param"], field, "{body}");
    }
}

#[tokio::test]
async fn routes_methods_and_kinds() {
    let stage = Stage::new(|_| Vec::new());
    let mut shown = String::new();
    for (method, path, kind) in [
        ("GET", "/v1/completions", None),
        ("GET", "/nothing", None),
        ("POST", "/v1/models", None),
        ("DELETE", "/health", None),
        ("BREW", "/v1/completions", None),
        ("POST", "/v1/completions", Some("text/plain")),
        ("POST", "/v1/completions", Some("application/x-www-form-urlencoded")),
        ("POST", "/v1/completions", Some("application/json; charset=utf-8")),
    ] {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        let answer = stage.send(request.body(Body::from("{}")).unwrap()).await;
        shown += &format!("{method} {path} {}\n{answer}\n\n", kind.unwrap_or("-"));
    }
    for id in ["", "a b", "é", &"x".repeat(129)] {
        let request = Request::post("/v1/completions").header("x-request-id", id.as_bytes());
        let request = request.body(Body::from(r#"{"prompt":"Hi"}"#)).unwrap();
        shown += &format!("X-Request-Id {:.8}\n{}\n\n", id, stage.send(request).await);
    }
    insta::assert_snapshot!(shown);
}
