//! `POST /v1/completions`

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
    Answer, CompletionChoice, CompletionLogprobs, Envelope, Null, Usage, finish_text,
};
use crate::openai::completion::CompletionRequest;
use crate::openai::error::ApiError;
use crate::openai::sampling::Bounds;
use crate::serving::Arrival;
use crate::serving::completion::{self, Begun};
use crate::serving::generate::{Piece, Running};
use crate::serving::prompts::ReadyPrompt;

/// What the ids of answers begin with.
const PREFIX: &str = "cmpl-";

/// Goes on with one or more prompts.
pub async fn completions(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let read = move |bounds: &Bounds| CompletionRequest::parse(&bytes, bounds);
    let begun = completion::begin(&app, arrival, &headers, PREFIX, read).await?;
    let Begun { id, model, request: CompletionRequest { common, .. }, prompts, running } = begun;
    let envelope = Envelope {
        id: format!("{PREFIX}{id}"),
        object: "text_completion",
        created: app.clock.wall().0 as u64,
        model,
    };
    let shape = Shape {
        choices_per_prompt: common.sampling.n,
        tokens_as_ids: common.tokens_as_ids,
        return_token_ids: common.return_token_ids,
        logprobs: common.sampling.logprobs.is_some(),
    };
    let choices = vec![ChoiceState::default(); prompts.len() * common.sampling.n as usize];
    let texts = Texts { envelope, shape, prompts, choices };
    let mut response = if common.stream {
        let told = UsageTold { at_end: common.include_usage, throughout: common.continuous_usage };
        sse::response(running, texts, told).await?
    } else {
        whole(running, texts).await?
    };
    tell_id(&app, &mut response, &id);
    Ok(response)
}

async fn whole(mut running: Running, mut texts: Texts) -> Result<Response, ApiError> {
    let mut choices: Vec<Option<CompletionChoice>> = texts.choices.iter().map(|_| None).collect();
    while let Some(piece) = running.next().await {
        let new = texts.choice(piece?);
        match &mut choices[new.index as usize] {
            Some(choice) => append(choice, new),
            unset => *unset = Some(new),
        }
    }
    let choices: Vec<_> = choices.into_iter().flatten().collect();
    let answer = Answer {
        envelope: &texts.envelope,
        choices: &choices,
        usage: Some(running.usage()),
        system_fingerprint: Some(Null),
        prompt_token_ids: None,
    };
    let mut response = Json(answer).into_response();
    if let Some(timing) = running.timing_told() {
        tell_timing(&mut response, &timing);
    }
    Ok(response)
}

fn append(choice: &mut CompletionChoice, new: CompletionChoice) {
    choice.text.push_str(&new.text);
    if let (Some(all), Some(new)) = (&mut choice.logprobs, new.logprobs) {
        all.append(new);
    }
    if let (Some(all), Some(new)) = (&mut choice.token_ids, new.token_ids) {
        all.extend(new);
    }
    choice.finish_reason = new.finish_reason;
    choice.stop_reason = new.stop_reason;
}

#[derive(Clone, Copy)]
struct Shape {
    choices_per_prompt: u32,
    tokens_as_ids: bool,
    return_token_ids: bool,
    logprobs: bool,
}

/// Turns pieces into texts, remembering what each choice has had so far.
struct Texts {
    envelope: Envelope,
    shape: Shape,
    prompts: Vec<ReadyPrompt>,
    choices: Vec<ChoiceState>,
}

#[derive(Clone, Copy, Default)]
struct ChoiceState {
    begun: bool,
    /// Characters of the tokens told with logprobs.
    offset: u64,
}

impl Texts {
    fn choice(&mut self, Piece { index, update }: Piece) -> CompletionChoice {
        let shape = self.shape;
        let prompt = &self.prompts[(index / shape.choices_per_prompt) as usize];
        let state = &mut self.choices[index as usize];
        let first = !std::mem::replace(&mut state.begun, true);
        let mut text = update.text;
        if let (true, Some(echo)) = (first, &prompt.echo) {
            text.insert_str(0, echo);
        }
        let logprobs = shape.logprobs.then(|| {
            let mut logprobs = CompletionLogprobs::default();
            logprobs.extend(&update.logprobs, shape.tokens_as_ids, &mut state.offset);
            logprobs
        });
        let finish = update.finish;
        CompletionChoice {
            index,
            text,
            logprobs,
            finish_reason: finish.as_ref().map(|finish| finish_text(finish.reason)),
            stop_reason: finish.and_then(|finish| finish.stop_reason).map(Into::into),
            token_ids: shape.return_token_ids.then_some(update.token_ids),
            prompt_token_ids: (first && shape.return_token_ids).then(|| prompt.tokens.to_vec()),
        }
    }
}

impl Chunks for Texts {
    fn piece(&mut self, piece: Piece, usage: Option<Usage>) -> Vec<String> {
        let choice = self.choice(piece);
        vec![json(&self.chunk(&[choice], usage))]
    }

    fn usage(&self, usage: Usage) -> String {
        json(&self.chunk(&[], Some(usage)))
    }
}

impl Texts {
    fn chunk<'a>(
        &'a self,
        choices: &'a [CompletionChoice],
        usage: Option<Usage>,
    ) -> Answer<'a, CompletionChoice> {
        let envelope = &self.envelope;
        Answer { envelope, choices, usage, system_fingerprint: None, prompt_token_ids: None }
    }
}
