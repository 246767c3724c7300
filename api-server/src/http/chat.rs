//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::App;
use super::body::JsonBytes;
use super::ids::{tell_id, tell_timing};
use super::sse::{self, Chunks, UsageTold, json};
use crate::openai::answer::{
    Answer, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, Envelope, Null,
    Usage, finish_text,
};
use crate::openai::chat::ChatRequest;
use crate::openai::error::ApiError;
use crate::serving::Arrival;
use crate::serving::generate::{Piece, Running, request_id};
use crate::serving::prompts;

/// Answers a conversation.
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    Extension(Arrival(arrival)): Extension<Arrival>,
    headers: HeaderMap,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let model = app.accepting_model()?;
    let bytes_max = model.prompt_bytes_max(&app.config);
    let trust = app.config.trust_request_chat_template;
    let prepare = move || {
        let request = ChatRequest::parse(&bytes, &model.bounds, trust)?;
        let name = model.check_name(request.common.model.as_deref())?;
        let prompt = prompts::of_chat(&model, &request, bytes_max)?;
        Ok((request, name, prompt))
    };
    let (request, model, prompt) = app.off_reactor(prepare).await?;
    let common = &request.common;
    let id = request_id(&headers, common)?;
    let envelope = Envelope {
        id: format!("chatcmpl-{id}"),
        object: if common.stream { "chat.completion.chunk" } else { "chat.completion" },
        created: app.clock.wall().0 as u64,
        model,
    };
    let prompts = std::slice::from_ref(&prompt);
    let running = Running::start(&app, &envelope.id, common, prompts, arrival)?;
    let shape = Shape {
        envelope,
        // Going on with a message of another role keeps that role.
        role: role_of(&request).unwrap_or_else(|| app.config.response_role.clone()),
        echo: prompt.echo.unwrap_or_default(),
        prompt_token_ids: common.return_token_ids.then(|| prompt.tokens.to_vec()),
        tokens_as_ids: common.tokens_as_ids,
        logprobs: common.sampling.logprobs.is_some(),
    };
    let choices = common.sampling.n as usize;
    let mut response = if common.stream {
        let told = UsageTold { at_end: common.include_usage, throughout: common.continuous_usage };
        let deltas = Deltas { shape, begun: vec![false; choices], any: false };
        sse::response(running, deltas, told).await?
    } else {
        whole(running, shape, choices).await?
    };
    tell_id(&app, &mut response, &id);
    Ok(response)
}

fn role_of(request: &ChatRequest) -> Option<String> {
    let last = request.conversation.messages.last()?;
    let open = !request.conversation.add_generation_prompt;
    open.then(|| last.get("role")?.as_str().map(str::to_owned)).flatten()
}

/// What is the same in every piece of an answer.
struct Shape {
    envelope: Envelope,
    role: String,
    echo: String,
    prompt_token_ids: Option<Vec<u32>>,
    tokens_as_ids: bool,
    logprobs: bool,
}

impl Shape {
    fn no_logprobs(&self) -> Option<ChatLogprobs> {
        self.logprobs.then(ChatLogprobs::default)
    }
}

async fn whole(mut running: Running, shape: Shape, choices: usize) -> Result<Response, ApiError> {
    let mut choices: Vec<_> = (0..choices)
        .map(|index| ChatChoice {
            index: u32::try_from(index).expect("the number of choices is bounded"),
            message: ChatMessage {
                role: shape.role.clone(),
                content: shape.echo.clone(),
                refusal: None,
            },
            logprobs: shape.no_logprobs(),
            finish_reason: None,
            stop_reason: None,
            token_ids: shape.prompt_token_ids.is_some().then(Vec::new),
        })
        .collect();
    while let Some(piece) = running.next().await {
        let Piece { index, update } = piece?;
        let choice = &mut choices[index as usize];
        choice.message.content.push_str(&update.text);
        if let Some(logprobs) = &mut choice.logprobs {
            logprobs.extend(&update.logprobs, shape.tokens_as_ids);
        }
        if let Some(ids) = &mut choice.token_ids {
            ids.extend(update.token_ids);
        }
        if let Some(finish) = update.finish {
            choice.finish_reason = Some(finish_text(finish.reason));
            choice.stop_reason = finish.stop_reason.map(Into::into);
        }
    }
    let answer = Answer {
        envelope: &shape.envelope,
        choices: &choices,
        usage: Some(running.usage()),
        system_fingerprint: Some(Null),
        prompt_token_ids: shape.prompt_token_ids.as_deref(),
    };
    let mut response = Json(answer).into_response();
    if let Some(timing) = running.timing_told() {
        tell_timing(&mut response, &timing);
    }
    Ok(response)
}

/// Turns pieces into chunks. A choice's first chunk tells its role, as OpenAI's does.
struct Deltas {
    shape: Shape,
    begun: Vec<bool>,
    /// Whether any chunk was made.
    any: bool,
}

impl Deltas {
    fn chunk(
        &mut self,
        index: u32,
        delta: ChatDelta,
        usage: Option<Usage>,
        fill: impl FnOnce(&mut ChatChunkChoice),
    ) -> String {
        let mut choice = ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        };
        fill(&mut choice);
        let first = !std::mem::replace(&mut self.any, true);
        json(&Answer {
            envelope: &self.shape.envelope,
            choices: &[choice],
            usage,
            system_fingerprint: None,
            prompt_token_ids: self.shape.prompt_token_ids.as_deref().filter(|_| first),
        })
    }
}

impl Chunks for Deltas {
    fn piece(&mut self, Piece { index, update }: Piece, usage: Option<Usage>) -> Vec<String> {
        let mut chunks = Vec::with_capacity(1);
        if !std::mem::replace(&mut self.begun[index as usize], true) {
            let role = Some(self.shape.role.clone());
            // Echoed text is no new token: it goes with the role.
            let content = Some(self.shape.echo.clone());
            chunks.push(self.chunk(index, ChatDelta { role, content }, usage, |_| {}));
        }
        let logprobs = self.shape.no_logprobs().map(|mut logprobs| {
            logprobs.extend(&update.logprobs, self.shape.tokens_as_ids);
            logprobs
        });
        let token_ids = self.shape.prompt_token_ids.is_some().then_some(update.token_ids);
        let finish = update.finish;
        let delta = ChatDelta { role: None, content: Some(update.text) };
        chunks.push(self.chunk(index, delta, usage, |choice| {
            choice.logprobs = logprobs;
            choice.token_ids = token_ids;
            choice.finish_reason = finish.as_ref().map(|finish| finish_text(finish.reason));
            choice.stop_reason = finish.and_then(|finish| finish.stop_reason).map(Into::into);
        }));
        chunks
    }

    fn usage(&self, usage: Usage) -> String {
        json(&Answer::<ChatChunkChoice> {
            envelope: &self.shape.envelope,
            choices: &[],
            usage: Some(usage),
            system_fingerprint: None,
            prompt_token_ids: None,
        })
    }
}
