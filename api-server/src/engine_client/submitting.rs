//! How requests get to the core: all prompts of a client's request, or none.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pawl_shared::protocol::{ClientMessage, EngineCoreRequest, RequestId};
use pawl_shared::transport::SendRefused;

use super::{EngineStatus, Generation, Inner, ServedModel, Session, Submit, SubmitError, lower};
use crate::output_handler::{Mailbox, NewRequest};

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Submissions that can be sent.
struct Admitted {
    model: Arc<ServedModel>,
    /// Of each submission, one for each choice.
    ids: Vec<Vec<RequestId>>,
    client_index: u32,
    epoch: u64,
}

impl Inner {
    pub(super) fn submit(
        self: &Arc<Self>,
        submits: &[Submit],
    ) -> Result<Vec<Generation>, SubmitError> {
        let admitted = self.admit(submits)?;
        let wall = self.config.clock.wall();
        // Encoded outside the lock: a long prompt times n is real work.
        let messages: Vec<_> = submits
            .iter()
            .zip(&admitted.ids)
            .flat_map(|(submit, ids)| (0..).zip(ids).map(move |(choice, id)| (submit, choice, id)))
            .map(|(submit, choice, id)| {
                let prompt_tokens = u32::try_from(submit.prompt.len()).unwrap_or(u32::MAX);
                let model = &admitted.model;
                let params = lower::lower(
                    &submit.params,
                    choice,
                    &model.card,
                    model.max_model_len,
                    prompt_tokens,
                );
                let mut request =
                    EngineCoreRequest::new(id.clone(), submit.prompt.to_vec(), params);
                request.arrival_time = wall.0;
                request.client_index = admitted.client_index;
                request.priority = submit.priority;
                request.cache_salt = submit.cache_salt.clone();
                request.external_req_id = Some(submit.external_id.clone());
                (id, ClientMessage::Add(Box::new(request)).encode())
            })
            .collect();
        let mut state = self.state();
        if state.session.as_ref().is_none_or(|session| session.epoch != admitted.epoch) {
            return Err(self.unavailable());
        }
        let (news, mailboxes): (Vec<_>, Vec<_>) =
            submits.iter().zip(&admitted.ids).map(|both| self.opened(&admitted, both)).unzip();
        let keys = state.handler.add(news);
        let mut sent = Vec::with_capacity(messages.len());
        for (id, message) in messages {
            if let Err(refused) = self.sender.try_send(message) {
                state.handler.take_back(keys);
                self.tell_aborts(&mut state, sent);
                tracing::warn!(%refused, "a request could not be sent to the core");
                return Err(match refused {
                    SendRefused::Full => SubmitError::QueueFull { retry_after: RETRY_AFTER },
                    SendRefused::Down => self.unavailable(),
                });
            }
            sent.push(id.clone());
        }
        drop(state);
        let started = |(key, mailbox)| Generation::new(mailbox, key, self.clone());
        Ok(keys.zip(mailboxes).map(started).collect())
    }

    /// What the output handler keeps of a submission, and where its answer will lie.
    fn opened<'a>(
        &self,
        admitted: &Admitted,
        (submit, ids): (&'a Submit, &Vec<RequestId>),
    ) -> (NewRequest<'a>, Arc<Mailbox>) {
        let model = &admitted.model;
        let prompt_tokens = u32::try_from(submit.prompt.len()).unwrap_or(u32::MAX);
        let mailbox = Arc::new(Mailbox::new(submit.params.n.max(1)));
        let new = NewRequest {
            external_id: submit.external_id.as_str().into(),
            ids: ids.clone(),
            prompt_tokens: u64::from(prompt_tokens),
            params: &submit.params,
            max_tokens: lower::max_tokens(&submit.params, model.max_model_len, prompt_tokens),
            vocabulary: model.tokenizer.clone(),
            arrival: submit.arrival,
            sent: self.config.clock.now(),
            mailbox: mailbox.clone(),
        };
        (new, mailbox)
    }

    /// Whether the prompts can be taken now; if so, their wire ids, which are never given again.
    fn admit(&self, submits: &[Submit]) -> Result<Admitted, SubmitError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(SubmitError::Draining);
        }
        if *self.status.borrow() != EngineStatus::Up {
            return Err(self.unavailable());
        }
        let choices: usize = submits.iter().map(|submit| submit.params.n.max(1) as usize).sum();
        let mut state = self.state();
        if state.handler.open() + choices > self.config.open_max {
            return Err(SubmitError::QueueFull { retry_after: RETRY_AFTER });
        }
        let model = state.model.clone();
        let (Some(session), Some(model)) = (&mut state.session, model) else {
            return Err(self.unavailable());
        };
        let ids = submits.iter().map(|submit| session.fresh_ids(submit)).collect();
        let Session { client_index, epoch, .. } = *session;
        Ok(Admitted { model, ids, client_index, epoch })
    }
}
