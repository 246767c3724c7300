//! Lines of requests: read one by one, however large the file, and checked before anything runs.

use std::collections::HashSet;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufRead, AsyncBufReadExt};

/// Where a line may go.
const URLS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];
/// Bytes of a `custom_id`.
const CUSTOM_ID_BYTES_MAX: usize = 512;
/// Names remembered, 16 bytes each, to notice one that comes twice. In a longer file a name that
/// comes again after these is not noticed.
const NAMES_MAX: usize = 1_000_000;

/// A line as read; blank ones are passed over.
#[derive(Debug)]
pub struct Line {
    /// From 1.
    pub number: u64,
    /// In the file, its end included.
    pub bytes: u64,
    /// As far as it could be read.
    pub custom_id: Option<String>,
    /// What it asks for, or what is wrong with it.
    pub asks: Result<Ask, BadLine>,
}

/// One request.
#[derive(Debug, PartialEq, Eq)]
pub struct Ask {
    /// One of the two routes.
    pub url: &'static str,
    /// If the body names one.
    pub request_id: Option<String>,
    /// As JSON.
    pub body: Vec<u8>,
}

/// Why a line cannot be a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// For programs.
    pub code: &'static str,
    /// For people, without the line's number.
    pub message: String,
}

impl BadLine {
    fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Reads lines of at most `bytes_max` bytes.
pub struct Lines<R> {
    reader: R,
    bytes_max: usize,
    number: u64,
    /// The beginnings of their SHA-256. Bounded by [`NAMES_MAX`].
    names: HashSet<[u8; 16]>,
}

impl<R: AsyncBufRead + Unpin> Lines<R> {
    pub fn new(reader: R, bytes_max: usize) -> Self {
        Self { reader, bytes_max, number: 0, names: HashSet::new() }
    }

    /// The next line that is not blank.
    ///
    /// # Errors
    /// When the input cannot be read.
    pub async fn next(&mut self) -> std::io::Result<Option<Line>> {
        loop {
            let Some((text, bytes)) = self.read_line().await? else { return Ok(None) };
            self.number += 1;
            let number = self.number;
            if text.len() > self.bytes_max {
                let problem = format!("is longer than --max-body-bytes {}", self.bytes_max);
                let asks = Err(BadLine::new("line_too_long", problem));
                return Ok(Some(Line { number, bytes, custom_id: None, asks }));
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            let (custom_id, asks) = match read(&text) {
                Ok((custom_id, asks)) => (Some(custom_id), asks),
                Err(bad) => (None, Err(bad)),
            };
            let asks = match &custom_id {
                Some(name) if !self.is_new(name) => {
                    let problem = format!("custom_id {name:?} has come before; make each its own");
                    Err(BadLine::new("duplicate_custom_id", problem))
                }
                _ => asks,
            };
            return Ok(Some(Line { number, bytes, custom_id, asks }));
        }
    }

    /// One line without its end, and its bytes in the file. Of a line that is too long only so much
    /// is kept that this can be seen.
    async fn read_line(&mut self) -> std::io::Result<Option<(Vec<u8>, u64)>> {
        let (mut text, mut bytes) = (Vec::new(), 0);
        loop {
            let read = self.reader.fill_buf().await?;
            if read.is_empty() {
                return Ok((bytes > 0).then_some((text, bytes)));
            }
            let end = read.iter().position(|&byte| byte == b'\n');
            let used = end.map_or(read.len(), |end| end + 1);
            let room = (self.bytes_max + 1).saturating_sub(text.len());
            let line = &read[..end.unwrap_or(read.len())];
            text.extend_from_slice(&line[..line.len().min(room)]);
            bytes += used as u64;
            self.reader.consume(used);
            if end.is_some() {
                return Ok(Some((text, bytes)));
            }
        }
    }

    fn is_new(&mut self, name: &str) -> bool {
        let digest = Sha256::digest(name.as_bytes());
        let short: [u8; 16] = std::array::from_fn(|at| digest[at]);
        if self.names.contains(&short) {
            return false;
        }
        if self.names.len() < NAMES_MAX {
            self.names.insert(short);
        }
        true
    }
}

/// What a line says: its name, and then what it asks for.
fn read(text: &[u8]) -> Result<(String, Result<Ask, BadLine>), BadLine> {
    let value: Value = serde_json::from_slice(text)
        .map_err(|error| BadLine::new("invalid_json", format!("is not JSON: {error}")))?;
    let Value::Object(mut fields) = value else {
        return Err(BadLine::new("invalid_json", "is JSON but no object"));
    };
    let custom_id = match fields.remove("custom_id") {
        Some(Value::String(name)) if (1..=CUSTOM_ID_BYTES_MAX).contains(&name.len()) => name,
        _ => {
            let problem =
                format!("has no custom_id; give each line a text of 1 to {CUSTOM_ID_BYTES_MAX} B");
            return Err(BadLine::new("invalid_line", problem));
        }
    };
    Ok((custom_id, ask(fields)))
}

fn ask(mut fields: serde_json::Map<String, Value>) -> Result<Ask, BadLine> {
    let bad = |message: String| Err(BadLine::new("invalid_line", message));
    match fields.get("method").and_then(Value::as_str) {
        Some("POST") => {}
        Some(other) => return bad(format!("has method {other:?}; write \"POST\"")),
        None => return bad("has no method; write \"POST\"".into()),
    }
    let named = fields.get("url").and_then(Value::as_str);
    let Some(url) = URLS.into_iter().find(|url| named == Some(url)) else {
        return bad(format!(
            "has url {}; write one of {}",
            fields.get("url").unwrap_or(&Value::Null),
            URLS.join(", ")
        ));
    };
    let Some(Value::Object(body)) = fields.remove("body") else {
        return bad("has no body; give a request as an object".into());
    };
    if !matches!(body.get("stream"), None | Some(Value::Null | Value::Bool(false))) {
        return bad("asks for a stream; leave out body.stream".into());
    }
    let request_id = body.get("request_id").and_then(Value::as_str).map(Into::into);
    let body = Value::Object(body).to_string().into_bytes();
    Ok(Ask { url, request_id, body })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn check(input: &str, bytes_max: usize) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // A small buffer, so that lines are read in pieces.
        let reader = tokio::io::BufReader::with_capacity(7, input.as_bytes());
        let mut lines = Lines::new(reader, bytes_max);
        let mut shown = String::new();
        let mut bytes = 0;
        while let Some(line) = runtime.block_on(lines.next()).unwrap() {
            bytes += line.bytes;
            let name = line.custom_id.as_deref().unwrap_or("-");
            let _ = match line.asks {
                Ok(ask) => writeln!(
                    shown,
                    "{} {name} {} {} {}",
                    line.number,
                    ask.url,
                    ask.request_id.as_deref().unwrap_or("-"),
                    String::from_utf8(ask.body).unwrap()
                ),
                Err(bad) => writeln!(shown, "{} {name} {}: {}", line.number, bad.code, bad.message),
            };
        }
        assert!(bytes <= input.len() as u64);
        shown
    }

    #[test]
    fn lines_are_read_and_checked() {
        let good =
            r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"p":[1.50]}}"#;
        let input = [
            good,
            "",
            "  \r",
            "{\"custom_id\": ",
            "[1]",
            "{}",
            r#"{"custom_id": 7}"#,
            r#"{"custom_id": ""}"#,
            good,
            r#"{"custom_id":"b"}"#,
            r#"{"custom_id":"c","method":"GET"}"#,
            r#"{"custom_id":"d","method":"POST","url":"/v1/embeddings"}"#,
            r#"{"custom_id":"e","method":"POST"}"#,
            r#"{"custom_id":"f","method":"POST","url":"/v1/completions","body":[]}"#,
            r#"{"custom_id":"g","method":"POST","url":"/v1/completions","body":{"stream":true}}"#,
            r#"{"custom_id":"h","method":"POST","url":"/v1/chat/completions",
                "body":{"stream":false,"request_id":"mine"}}"#,
        ]
        .map(|line| line.replace('\n', " "))
        .join("\n");
        insta::assert_snapshot!(check(&input, 1000));
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over_whole() {
        let input = format!("{}\n{{}}\n{}", "x".repeat(51), "y".repeat(50));
        insta::assert_snapshot!(check(&input, 50), @r"
        1 - line_too_long: is longer than --max-body-bytes 50
        2 - invalid_line: has no custom_id; give each line a text of 1 to 512 B
        3 - invalid_json: is not JSON: expected value at line 1 column 1
        ");
    }
}
