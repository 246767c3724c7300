//! One open choice: its text as it grows, and its stamps.

use std::sync::Arc;

use pawl_shared::protocol::{
    EngineCoreOutput, FinishReason, LogprobsTensors, SamplingParams, StopReason,
};

use super::iteration::Lifetime;
use super::mailbox::Mailbox;
use super::stop::StopWatch;
use crate::detokenizer::{Detokenizer, TokenText};
use crate::engine_client::{Finish, TokenLogprob, TopLogprob, Update};

/// What the handler knows of a choice that has not ended.
pub(super) struct OpenRequest {
    pub parent: u64,
    pub choice: u32,
    pub external_id: Arc<str>,
    pub life: Lifetime,
    pub text: TextState,
    pub mailbox: Arc<Mailbox>,
    /// Whether [`Update::cached_tokens`] has been told.
    pub cached_told: bool,
}

/// The text side of a choice.
pub(super) struct TextState {
    vocabulary: Arc<dyn TokenText>,
    /// `None` when the caller wants no text.
    detokenizer: Option<Detokenizer>,
    stops: StopWatch,
    include_stop: bool,
    min_tokens: u64,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    tokens: u64,
}

impl TextState {
    pub fn new(params: &SamplingParams, vocabulary: Arc<dyn TokenText>) -> Self {
        let columns =
            |asked: Option<i32>| asked.map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        Self {
            vocabulary,
            detokenizer: params.detokenize.then(|| Detokenizer::new(params.skip_special_tokens)),
            stops: StopWatch::new(params.stop.clone(), params.include_stop_str_in_output),
            include_stop: params.include_stop_str_in_output,
            min_tokens: u64::from(params.min_tokens),
            logprobs: columns(params.logprobs),
            prompt_logprobs: columns(params.prompt_logprobs),
            tokens: 0,
        }
    }

    /// Adds the tokens of `output` to the text. The update says what is new, and how the choice
    /// ended if it did: by the engine's word, or by a stop string seen here.
    pub fn take_in(&mut self, output: &EngineCoreOutput) -> Update {
        let mut update = Update::default();
        let mut stopped = None;
        let last = output.new_token_ids.len().saturating_sub(1);
        for (index, &token) in output.new_token_ids.iter().enumerate() {
            update.token_ids.push(token);
            self.tokens += 1;
            // A token that ends the text is no part of it, whether it is special or a plain word.
            let ends = index == last && output.finish_reason == Some(FinishReason::Stop);
            let mut piece = String::new();
            if let Some(detokenizer) = &mut self.detokenizer
                && (self.include_stop || !ends)
            {
                detokenizer.push(&*self.vocabulary, token, &mut piece);
            }
            let watched = self.stops.push(&piece, self.tokens > self.min_tokens);
            update.text.push_str(&watched.text);
            stopped = watched.stopped;
            if stopped.is_some() {
                break;
            }
        }
        if let Some(lists) = &output.new_logprobs {
            let most = self.logprobs.unwrap_or(0);
            update.logprobs = self.rows(
                (&lists.token_ids, &lists.logprobs, &lists.ranks),
                update.token_ids.len(),
                most,
            );
        }
        if let Some(LogprobsTensors { token_ids, logprobs, ranks }) = &output.new_prompt_logprobs {
            let most = self.prompt_logprobs.unwrap_or(0);
            let rows = self.rows((token_ids, logprobs, ranks), usize::MAX, most);
            update.prompt_logprobs = Some(rows);
        }
        if let Some(stop) = stopped {
            let stop_reason = Some(StopReason::Text(stop));
            update.finish = Some(Finish { reason: FinishReason::Stop, stop_reason });
        } else if let Some(reason) = output.finish_reason {
            self.end_text(&mut update.text);
            let stop_reason = output.stop_reason.clone();
            update.finish = Some(Finish { reason, stop_reason });
        }
        update
    }

    /// The text ends here: lets out what was held back, and the beginning of a character.
    pub fn end_text(&mut self, text: &mut String) {
        let mut piece = String::new();
        if let Some(detokenizer) = &mut self.detokenizer {
            detokenizer.finish(&mut piece);
        }
        text.push_str(&self.stops.push(&piece, false).text);
        text.push_str(&self.stops.release());
    }

    /// Rows `[token_ids][logprobs][rank]` as entries: column 0 is the token itself, `top` of the
    /// others the most likely.
    fn rows(
        &self,
        (token_ids, logprobs, ranks): (&[Vec<u32>], &[Vec<f32>], &[u32]),
        rows: usize,
        top: usize,
    ) -> Vec<TokenLogprob> {
        let columns = token_ids.iter().zip(logprobs).zip(ranks).take(rows);
        columns
            .filter_map(|((ids, logprobs), &rank)| {
                let mut entries = ids.iter().copied().zip(logprobs.iter().copied());
                let (token_id, logprob) = entries.next()?;
                let top = entries
                    .take(top)
                    .map(|(token_id, logprob)| TopLogprob {
                        token_id,
                        text: self.vocabulary.text(token_id),
                        bytes: self.vocabulary.bytes(token_id).to_vec(),
                        logprob,
                    })
                    .collect();
                Some(TokenLogprob {
                    token_id,
                    text: self.vocabulary.text(token_id),
                    bytes: self.vocabulary.bytes(token_id).to_vec(),
                    logprob,
                    rank,
                    top,
                })
            })
            .collect()
    }
}
