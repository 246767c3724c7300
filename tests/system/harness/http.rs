//! A small blocking HTTP/1.1 client: one connection a request, streams read event by event.
//!
//! Written on plain sockets on purpose: a test can close in the middle of anything, and nothing
//! retries behind its back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use super::Scrape;

/// Where a server listens.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    port: u16,
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("not JSON ({e}): {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

impl Client {
    pub fn new(port: u16) -> Self {
        Self { port }
    }

    pub fn port(self) -> u16 {
        self.port
    }

    pub fn url(self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn get(self, path: &str) -> Answer {
        self.try_get(path).unwrap_or_else(|| panic!("no answer to GET {path}"))
    }

    /// `None` if nobody answers.
    pub fn try_get(self, path: &str) -> Option<Answer> {
        self.request("GET", path, &[], None).ok()
    }

    /// Whether it answers, and is ready to serve.
    pub fn is_ready(self) -> bool {
        self.try_get("/ready").is_some_and(|answer| answer.status == 200)
    }

    /// `/metrics`
    pub fn scrape(self) -> Scrape {
        let answer = self.get("/metrics");
        assert_eq!(answer.status, 200, "{}", answer.text());
        Scrape::parse(&answer.text())
    }

    pub fn post(self, path: &str, body: &Value) -> Answer {
        let body = serde_json::to_vec(body).unwrap();
        self.request("POST", path, &[], Some(&body))
            .unwrap_or_else(|e| panic!("no answer to POST {path}: {e}"))
    }

    pub fn request(
        self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
    ) -> std::io::Result<Answer> {
        let mut reader = self.send(method, path, headers, body)?;
        let (status, headers) = read_head(&mut reader)?;
        let mut bytes = Vec::new();
        BodyReader::new(reader, &headers).read_to_end(&mut bytes)?;
        Ok(Answer { status, headers, body: bytes })
    }

    /// A streaming POST: returns once the head is there.
    pub fn stream(self, path: &str, body: &Value) -> SseStream {
        self.stream_with(path, &[], body).unwrap()
    }

    pub fn stream_with(
        self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> std::io::Result<SseStream> {
        let body = serde_json::to_vec(body)?;
        let mut reader = self.send("POST", path, headers, Some(&body))?;
        let socket = reader.get_ref().try_clone()?;
        let (status, headers) = read_head(&mut reader)?;
        let lines = BufReader::new(BodyReader::new(reader, &headers));
        Ok(SseStream { status, socket, lines, done: false })
    }

    /// Sends a request and waits for nothing. Dropping the socket closes the connection.
    pub fn open(self, method: &str, path: &str, body: &Value) -> TcpStream {
        let body = serde_json::to_vec(body).unwrap();
        self.send(method, path, &[], Some(&body)).unwrap().into_inner()
    }

    fn send(
        self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
    ) -> std::io::Result<BufReader<TcpStream>> {
        let mut socket = TcpStream::connect(("127.0.0.1", self.port))?;
        socket.set_read_timeout(Some(super::PATIENCE))?;
        socket.set_write_timeout(Some(Duration::from_secs(20)))?;
        socket.set_nodelay(true)?;
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n");
        head.push_str("connection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(body) = body {
            head.push_str("content-type: application/json\r\n");
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let mut message = head.into_bytes();
        message.extend_from_slice(body.unwrap_or_default());
        socket.write_all(&message)?;
        Ok(BufReader::new(socket))
    }
}

type Head = (u16, Vec<(String, String)>);

fn read_head(reader: &mut BufReader<TcpStream>) -> std::io::Result<Head> {
    let bad = |what: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, what.to_owned());
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|s| s.parse().ok());
    let status = status.ok_or_else(|| bad(&format!("no status line: {line:?}")))?;
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let text = line.trim_end();
        if text.is_empty() {
            return Ok((status, headers));
        }
        let (name, value) = text.split_once(':').ok_or_else(|| bad("a header without a colon"))?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
}

/// A body, whether chunked, counted or ended by the connection.
struct BodyReader {
    reader: BufReader<TcpStream>,
    chunked: bool,
    /// Bytes left of the body or of the chunk; `None`: until the connection ends.
    left: Option<u64>,
    ended: bool,
}

impl BodyReader {
    fn new(reader: BufReader<TcpStream>, headers: &[(String, String)]) -> Self {
        let header = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
        let chunked = header("transfer-encoding").is_some_and(|v| v.contains("chunked"));
        let left =
            if chunked { Some(0) } else { header("content-length").and_then(|v| v.parse().ok()) };
        Self { reader, chunked, left, ended: left == Some(0) && !chunked }
    }

    fn next_chunk(&mut self) -> std::io::Result<()> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            // The line end that closes the chunk before.
            line.clear();
            self.reader.read_line(&mut line)?;
        }
        let size = u64::from_str_radix(line.trim(), 16).map_err(|_| {
            std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the body was cut off")
        })?;
        self.left = Some(size);
        self.ended = size == 0;
        Ok(())
    }
}

impl Read for BodyReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.chunked && self.left == Some(0) && !self.ended {
            self.next_chunk()?;
        }
        if self.ended {
            return Ok(0);
        }
        let want = self.left.map_or(buffer.len(), |left| buffer.len().min(left as usize));
        let got = self.reader.read(&mut buffer[..want])?;
        if let Some(left) = &mut self.left {
            *left -= got as u64;
            self.ended = *left == 0 && !self.chunked;
        }
        if got == 0 {
            self.ended = true;
        }
        Ok(got)
    }
}

/// A stream of server-sent events. Dropping it closes the connection.
pub struct SseStream {
    pub status: u16,
    socket: TcpStream,
    lines: BufReader<BodyReader>,
    done: bool,
}

impl SseStream {
    /// The next event's data as JSON; `None` after `[DONE]` or the end of the connection.
    pub fn next(&mut self) -> Option<Value> {
        while !self.done {
            let mut line = String::new();
            match self.lines.read_line(&mut line) {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
            match line.trim_end().strip_prefix("data:").map(str::trim_start) {
                Some("[DONE]") => self.done = true,
                Some(data) => return Some(serde_json::from_str(data).unwrap()),
                None => {}
            }
        }
        None
    }

    /// Everything that is still to come.
    pub fn rest(&mut self) -> Vec<Value> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// The body of an answer that is no stream of events.
    pub fn body(&mut self) -> String {
        let mut body = String::new();
        self.lines.read_to_string(&mut body).unwrap();
        body
    }

    /// Whether `[DONE]` was read.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Closes the connection now, as a client that dies does.
    pub fn close(self) {
        // Fails only if the server was faster.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}
