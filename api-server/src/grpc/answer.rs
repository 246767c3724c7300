//! From the pieces of a running request to messages.

use pawl_proto::candidate_token_info::TokenInfo;
use pawl_proto::finish_info::{FinishReason as Reason, StopReason as Stop};
use pawl_proto::{CandidateTokenInfo, FinishInfo, GenerateResponse, PromptInfo, SequenceOutput};
use pawl_shared::protocol::{FinishReason, StopReason};

use super::request::Told;
use crate::engine_client::{Finish, TokenLogprob};
use crate::serving::generate::{Piece, Running};
use crate::serving::prompts::ReadyPrompt;

/// Turns the pieces of one request into messages.
pub struct Messages {
    told: Told,
    prompt: ReadyPrompt,
    begun: bool,
}

impl Messages {
    /// For the request of `prompt`.
    pub fn new(told: Told, prompt: ReadyPrompt) -> Self {
        Self { told, prompt, begun: false }
    }

    /// The message of a piece that `running` has just given.
    pub fn message(
        &mut self,
        Piece { index, update }: Piece,
        running: &Running,
    ) -> GenerateResponse {
        let told = self.told;
        let usage = running.usage_at(index);
        let last = update.token_ids.last().copied();
        let finish = |finish: Finish| finish_info(finish, last, usage.completion_tokens);
        let logprobs = if told.logprobs { &update.logprobs[..] } else { &[] };
        let candidates = if told.candidates { logprobs } else { &[] };
        let outputs = SequenceOutput {
            index,
            num_tokens: u32::try_from(update.token_ids.len()).unwrap_or(u32::MAX),
            logprobs: logprobs.iter().map(|token| token.logprob).collect(),
            ranks: logprobs.iter().map(|token| token.rank).collect(),
            candidate_tokens: candidates.iter().map(candidates_of).collect(),
            finish_info: update.finish.map(finish),
            text: if told.text { update.text } else { String::new() },
            token_ids: if told.token_ids { update.token_ids } else { Vec::new() },
        };
        let first = !std::mem::replace(&mut self.begun, true);
        let cached = usage.prompt_tokens_details.map(|details| details.cached_tokens);
        let prompt_info = first.then(|| self.prompt_info(cached));
        GenerateResponse { prompt_info, outputs: Some(outputs) }
    }

    fn prompt_info(&self, cached: Option<u64>) -> PromptInfo {
        let tokens = &self.prompt.tokens;
        let count = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        PromptInfo {
            num_prompt_tokens: count(tokens.len() as u64),
            token_ids: if self.told.prompt_token_ids { tokens.to_vec() } else { Vec::new() },
            num_cached_tokens: cached.map(count),
        }
    }
}

/// Adds a later message of the same sequence to `whole`.
pub fn append(whole: &mut GenerateResponse, later: GenerateResponse) {
    let (Some(whole), Some(later)) = (&mut whole.outputs, later.outputs) else { return };
    whole.text.push_str(&later.text);
    whole.num_tokens += later.num_tokens;
    whole.token_ids.extend(later.token_ids);
    whole.logprobs.extend(later.logprobs);
    whole.ranks.extend(later.ranks);
    whole.candidate_tokens.extend(later.candidate_tokens);
    whole.finish_info = later.finish_info;
}

fn candidates_of(token: &TokenLogprob) -> CandidateTokenInfo {
    let info = |(rank, top): (u32, &crate::engine_client::TopLogprob)| TokenInfo {
        id: top.token_id,
        logprob: top.logprob,
        rank,
    };
    CandidateTokenInfo { tokens: (1..).zip(&token.top).map(info).collect() }
}

/// `last` is the sequence's last token: where the model ended by itself, its end token.
fn finish_info(finish: Finish, last: Option<u32>, tokens: u64) -> FinishInfo {
    let reason = match finish.reason {
        FinishReason::Stop => Reason::Stop,
        FinishReason::Length => Reason::Length,
        FinishReason::Repetition => Reason::Repetition,
        // A failure is a status, never a finish.
        FinishReason::Abort | FinishReason::Error => Reason::Aborted,
    };
    let stop_reason = match finish.stop_reason {
        Some(StopReason::Token(id)) => Some(Stop::StopTokenId(id)),
        Some(StopReason::Text(text)) => Some(Stop::StopString(text)),
        None if reason == Reason::Stop => last.map(Stop::EosTokenId),
        None => None,
    };
    FinishInfo {
        num_output_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        finish_reason: reason.into(),
        stop_reason,
    }
}
