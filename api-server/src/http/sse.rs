//! A running request as a stream of server-sent events: one event per piece, comments while nothing
//! flows, `[DONE]` at the end. A failure is an event of its own and the end of the stream: a client
//! can never take it for a normal finish. One that comes before anything was sent is an answer with
//! a status of its own.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::openai::answer::Usage;
use crate::openai::error::ApiError;
use crate::serving::generate::{Piece, Running};

/// Turns pieces into the chunks of one kind of answer.
pub trait Chunks: Send + 'static {
    /// The chunks of a piece, usually one, as JSON texts. `usage` goes into each of them.
    fn piece(&mut self, piece: Piece, usage: Option<Usage>) -> Vec<String>;

    /// The chunk that tells the usage and nothing else.
    fn usage(&self, usage: Usage) -> String;
}

/// Which usage a stream tells.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageTold {
    /// In a last chunk.
    pub at_end: bool,
    /// In every chunk.
    pub throughout: bool,
}

/// How long the head waits for the first piece. What the engine refuses it refuses at once, and
/// until the head is sent that can be told by a status, which clients know how to deal with.
const HEAD_WAIT: Duration = Duration::from_millis(500);

/// The answer that streams `running`.
///
/// # Errors
/// When it failed before anything was sent.
pub async fn response<C: Chunks>(
    mut running: Running,
    mut chunks: C,
    told: UsageTold,
) -> Result<Response, ApiError> {
    let wait = HEAD_WAIT.min(running.keep_alive());
    let mut ready = VecDeque::new();
    if let Ok(Some(first)) = tokio::time::timeout(wait, running.next()).await {
        ready.extend(events_of(&running, &mut chunks, told, first?));
    }
    let stream = EventStream { running, chunks, told, ready, ended: false };
    let events = futures::stream::unfold(stream, |mut stream| async move {
        let event = stream.next().await?;
        Some((Ok::<_, Infallible>(event), stream))
    });
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Some reverse proxies would otherwise collect events before they pass them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// The events of one piece.
fn events_of<C: Chunks>(
    running: &Running,
    chunks: &mut C,
    told: UsageTold,
    piece: Piece,
) -> impl Iterator<Item = Bytes> {
    let usage = told.throughout.then(|| running.usage_at(piece.index));
    chunks.piece(piece, usage).into_iter().map(|chunk| event(&chunk))
}

struct EventStream<C> {
    running: Running,
    chunks: C,
    told: UsageTold,
    /// Events made and not yet taken: those of one piece.
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl<C: Chunks> EventStream<C> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            let quiet = self.running.keep_alive();
            match tokio::time::timeout(quiet, self.running.next()).await {
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
                Ok(Some(Ok(piece))) => {
                    let events = events_of(&self.running, &mut self.chunks, self.told, piece);
                    self.ready.extend(events);
                }
                Ok(Some(Err(error))) => {
                    self.ended = true;
                    return Some(event(&error.json()));
                }
                Ok(None) => {
                    self.ended = true;
                    if self.told.at_end {
                        let chunk = self.chunks.usage(self.running.usage());
                        self.ready.push_back(event(&chunk));
                    }
                    if let Some(timing) = self.running.timing_told() {
                        self.ready.push_back(format!(": pawl-timing {timing}\n\n").into());
                    }
                    self.ready.push_back(event("[DONE]"));
                }
            }
        }
    }
}

fn event(data: &str) -> Bytes {
    // JSON has no line breaks of its own, so one `data:` line is enough.
    format!("data: {data}\n\n").into()
}

/// A chunk as JSON text.
pub fn json(chunk: &impl Serialize) -> String {
    serde_json::to_string(chunk).expect("chunks are texts, numbers, lists and text-keyed maps")
}
