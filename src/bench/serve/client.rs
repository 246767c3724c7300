//! A client of the OpenAI API that notes when each token came.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::client::legacy::Client as Pooled;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// Bytes of an answer that is no stream, and of one event of a stream.
const ANSWER_MAX: usize = 16 << 20;
/// What is kept of an error's text.
const ERROR_CHARS: usize = 300;

/// How the server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Completions,
    Chat,
}

/// What came of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Sent so long after the bench began.
    pub sent: Duration,
    /// As the server counted, or else as was sent.
    pub input_len: u32,
    /// As the server counted, or else the chunks that came.
    pub output_len: u32,
    /// From sending to the first token.
    pub ttft: Duration,
    /// Between tokens.
    pub itls: Vec<Duration>,
    /// From sending to the end.
    pub latency: Duration,
    pub text: String,
    /// What went wrong; then nothing else counts.
    pub error: Option<String>,
}

/// Keeps its connections alive.
#[derive(Clone, Debug)]
pub struct Client {
    pooled: Pooled<HttpConnector, Full<Bytes>>,
    base: String,
    headers: HeaderMap,
}

impl Client {
    /// For the server at `base`, as `http://127.0.0.1:8000`; `headers` go with every request.
    ///
    /// # Errors
    /// When these are no address and no headers.
    pub fn new(
        base: &str,
        headers: &[(String, String)],
        api_key: Option<&str>,
    ) -> anyhow::Result<Self> {
        let base = base.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().with_context(|| format!("--base-url {base}"))?;
        ensure!(
            uri.scheme_str() == Some("http") && uri.host().is_some(),
            "--base-url {base}: write http://HOST:PORT; for https put a proxy before it"
        );
        let mut map = HeaderMap::new();
        map.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = api_key {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            map.insert(AUTHORIZATION, value.context("--api-key is no text for a header")?);
        }
        for (name, value) in headers {
            let named = || format!("--header {name}");
            let name: HeaderName = name.parse().with_context(named)?;
            map.insert(name, HeaderValue::from_str(value).with_context(named)?);
        }
        let mut connector = HttpConnector::new();
        // A token's arrival is what is measured.
        connector.set_nodelay(true);
        let pooled = Pooled::builder(TokioExecutor::new()).build(connector);
        Ok(Self { pooled, base, headers: map })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = format!("{}{path}", self.base).parse()?;
        request.headers_mut().extend(self.headers.clone());
        self.pooled.request(request).await.map_err(|error| {
            match std::error::Error::source(&error) {
                Some(cause) => anyhow::anyhow!("{error}: {cause}"),
                None => error.into(),
            }
        })
    }

    async fn json(&self, method: Method, path: &str, body: &Value) -> anyhow::Result<Value> {
        let body = if method == Method::GET { String::new() } else { body.to_string() };
        let answer = self.send(method, path, body.into()).await?;
        let status = answer.status();
        let bytes = whole(answer).await?;
        ensure!(status.is_success(), "{path} answered {status}: {}", shortened(&bytes));
        serde_json::from_slice(&bytes).with_context(|| format!("{path} answered no JSON"))
    }

    /// The first model that the server names.
    ///
    /// # Errors
    /// When it cannot be reached, or names none.
    pub async fn first_model(&self) -> anyhow::Result<String> {
        let models = self.json(Method::GET, "/v1/models", &Value::Null).await?;
        let id = models.pointer("/data/0/id").and_then(Value::as_str);
        id.map(ToOwned::to_owned).context("/v1/models names no model: give --model")
    }

    /// Token ids of `text`.
    ///
    /// # Errors
    /// The server's.
    pub async fn tokenize(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        // Servers call the text either way.
        let body = json!({"prompt": text, "content": text, "add_special_tokens": false});
        let answer = match self.json(Method::POST, "/tokenize", &body).await {
            Ok(answer) => answer,
            // One that knows its own fields alone.
            Err(_) => {
                let body = json!({"prompt": text, "add_special_tokens": false});
                self.json(Method::POST, "/tokenize", &body).await?
            }
        };
        let tokens = answer.get("tokens").cloned().context("/tokenize answered no tokens")?;
        serde_json::from_value(tokens).context("/tokenize answered tokens that are no ids")
    }

    /// The text of token ids.
    ///
    /// # Errors
    /// The server's.
    pub async fn detokenize(&self, tokens: &[u32]) -> anyhow::Result<String> {
        let answer = self.json(Method::POST, "/detokenize", &json!({"tokens": tokens})).await?;
        let text = ["prompt", "content"].iter().find_map(|name| answer.get(name)?.as_str());
        text.map(ToOwned::to_owned).context("/detokenize answered no text")
    }

    /// Sends `body` to `path` and reads the stream; `sent` and `input_len` go into the outcome.
    pub async fn stream(
        &self,
        kind: Kind,
        path: &str,
        body: Bytes,
        sent: Duration,
        input_len: Option<u32>,
    ) -> Outcome {
        let mut reading = Reading::new(kind, Instant::now());
        let error = self.read_stream(path, body, &mut reading).await.err();
        let latency = reading.started.elapsed();
        Outcome {
            sent,
            input_len: reading.prompt_tokens.or(input_len).unwrap_or(0),
            output_len: reading.completion_tokens.unwrap_or(reading.chunks),
            ttft: reading.ttft.unwrap_or_default(),
            itls: reading.itls,
            latency,
            text: reading.text,
            error: error.map(|error| format!("{error:#}")),
        }
    }

    async fn read_stream(
        &self,
        path: &str,
        body: Bytes,
        reading: &mut Reading,
    ) -> anyhow::Result<()> {
        let mut answer = self.send(Method::POST, path, body).await?;
        let status = answer.status();
        if !status.is_success() {
            bail!("{status}: {}", shortened(&whole(answer).await?));
        }
        let mut line = Vec::new();
        while let Some(frame) = answer.body_mut().frame().await {
            let frame = frame.context("the stream broke off")?;
            let now = Instant::now();
            let Some(data) = frame.data_ref() else { continue };
            for &byte in data {
                if byte != b'\n' {
                    ensure!(line.len() < ANSWER_MAX, "an event has more than {ANSWER_MAX} bytes");
                    line.push(byte);
                } else {
                    reading.line(&line, now)?;
                    line.clear();
                }
            }
        }
        ensure!(reading.done, "the stream ended without [DONE]");
        ensure!(reading.chunks > 0, "the stream had no token");
        Ok(())
    }
}

async fn whole(answer: Response<Incoming>) -> anyhow::Result<Bytes> {
    let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await;
    Ok(body.map_err(|error| anyhow::anyhow!("the answer cannot be read: {error}"))?.to_bytes())
}

fn shortened(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().take(ERROR_CHARS).collect()
}

/// What a stream has said so far.
#[derive(Debug)]
struct Reading {
    kind: Kind,
    started: Instant,
    ttft: Option<Duration>,
    last: Instant,
    itls: Vec<Duration>,
    chunks: u32,
    text: String,
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    done: bool,
}

impl Reading {
    fn new(kind: Kind, started: Instant) -> Self {
        Self {
            kind,
            started,
            ttft: None,
            last: started,
            itls: Vec::new(),
            chunks: 0,
            text: String::new(),
            prompt_tokens: None,
            completion_tokens: None,
            done: false,
        }
    }

    /// A line of the stream, which came at `now`.
    fn line(&mut self, line: &[u8], now: Instant) -> anyhow::Result<()> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_slice(data).context("an event is not JSON")?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            bail!("the stream said: {error}");
        }
        let count = |name: &str| event.pointer(name).and_then(Value::as_u64).map(|n| n as u32);
        self.prompt_tokens = count("/usage/prompt_tokens").or(self.prompt_tokens);
        self.completion_tokens = count("/usage/completion_tokens").or(self.completion_tokens);
        if let Some(text) = event.pointer("/choices/0").and_then(|choice| self.token(choice)) {
            self.text.push_str(text);
            self.chunks += 1;
            match self.ttft {
                None => self.ttft = Some(now - self.started),
                Some(_) => self.itls.push(now - self.last),
            }
            self.last = now;
        }
        Ok(())
    }

    /// The text of a choice, if a token came with it. Its text may be empty (a part of a character
    /// is held back), but then it neither ends the choice nor opens a message.
    fn token<'a>(&self, choice: &'a Value) -> Option<&'a str> {
        let opens = choice.pointer("/delta/role").is_some_and(|role| !role.is_null());
        let ends = choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        let text = match self.kind {
            Kind::Completions => choice.get("text")?.as_str()?,
            Kind::Chat => {
                let delta = choice.get("delta")?;
                let of = |name: &str| delta.get(name).and_then(Value::as_str);
                of("content").or_else(|| of("reasoning_content")).or_else(|| of("reasoning"))?
            }
        };
        (!text.is_empty() || !(opens || ends)).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines a millisecond apart.
    fn read(kind: Kind, lines: &[&str]) -> (Reading, Vec<String>) {
        let started = Instant::now();
        let mut reading = Reading::new(kind, started);
        let mut errors = Vec::new();
        for (index, line) in lines.iter().enumerate() {
            let now = started + Duration::from_millis(index as u64 + 1);
            errors.extend(reading.line(line.as_bytes(), now).err().map(|e| format!("{e:#}")));
        }
        (reading, errors)
    }

    fn figures(reading: &Reading) -> (Option<u128>, Vec<u128>, &str, Option<u32>, bool) {
        let ms = |time: &Duration| time.as_millis();
        let itls = reading.itls.iter().map(ms).collect();
        (
            reading.ttft.as_ref().map(ms),
            itls,
            &reading.text,
            reading.completion_tokens,
            reading.done,
        )
    }

    #[test]
    fn tokens_of_a_completion() {
        let lines = [
            r#"data: {"choices":[{"text":"a","finish_reason":null}]}"#,
            ": a comment",
            r#"data: {"choices":[{"text":"","finish_reason":null}]}"#,
            r#"data: {"choices":[{"text":"b","finish_reason":"length"}]}"#,
            r#"data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}"#,
            "data: [DONE]",
        ];
        let (reading, errors) = read(Kind::Completions, &lines);
        assert_eq!(figures(&reading), (Some(1), vec![2, 1], "ab", Some(3), true));
        assert_eq!((reading.prompt_tokens, reading.chunks, errors), (Some(5), 3, vec![]));
    }

    #[test]
    fn the_opening_and_the_end_of_a_message_are_no_tokens() {
        let lines = [
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}"#,
            r#"data: {"choices":[{"delta":{"content":"b"},"finish_reason":null}]}"#,
            r#"data: {"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}"#,
            r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
        ];
        let (reading, _) = read(Kind::Chat, &lines);
        assert_eq!(figures(&reading), (Some(2), vec![1], "ab", None, false));
    }

    #[test]
    fn errors_in_a_stream() {
        let lines = [r#"data: {"error":{"message":"the core is gone"}}"#, "data: {"];
        let (_, errors) = read(Kind::Chat, &lines);
        assert!(errors[0].contains("the core is gone"), "{errors:?}");
        assert!(errors[1].contains("not JSON"), "{errors:?}");
    }
}
