//! The task of one core connection: events and frames in, folded one by one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{FinishReason, ReadyResponse, Value};
use pawl_shared::transport::FrontendEvent;
use tokio::time::MissedTickBehavior;

use super::link::Link;
use super::{
    EngineFailure, EngineStatus, FailureKind, Inner, ServedModel, Session, UtilityError,
    served_model,
};

/// How long to wait before the core is asked for its model again.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// Runs until the client is shut down.
pub(super) async fn run(inner: Arc<Inner>, mut link: Link) {
    let mut seconds = tokio::time::interval(Duration::from_secs(1));
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = inner.stop.cancelled() => break,
            event = link.next() => inner.handle(event),
            _ = seconds.tick() => inner.tick(),
        }
    }
    let deadline = inner.state().leave_deadline;
    link.leave(deadline).await;
    inner.core_gone("the server is shutting down", FailureKind::Shutdown);
    inner.stopped.send_replace(true);
}

impl Inner {
    fn handle(self: &Arc<Self>, event: FrontendEvent) {
        match event {
            FrontendEvent::Message { frames } => self.fold(&frames),
            FrontendEvent::Waiting => {
                self.awaits.send_replace(true);
            }
            FrontendEvent::Up { ready, client_index, epoch, engine_index } => {
                self.awaits.send_replace(false);
                self.joined(&ready, client_index, epoch, engine_index);
            }
            FrontendEvent::Hung { silent_for } => {
                let now = self.config.clock.now();
                let nanos = u64::try_from(silent_for.as_nanos()).unwrap_or(u64::MAX);
                let since =
                    pawl_shared::clock::Stamp::from_nanos(now.nanos().saturating_sub(nanos));
                tracing::warn!(?silent_for, "the core makes no progress; open streams are kept");
                self.set_status(EngineStatus::Hung { since });
            }
            FrontendEvent::Resumed => {
                tracing::info!("the core goes on");
                let serving = self.state().session.as_ref().is_some_and(|session| session.serving);
                let connecting = EngineStatus::Connecting;
                self.set_status(if serving { EngineStatus::Up } else { connecting });
            }
            FrontendEvent::Down { reason } => {
                tracing::warn!(reason, "the core is gone");
                self.core_gone(&reason, FailureKind::CoreDown);
            }
        }
    }

    fn fold(&self, frames: &[Bytes]) {
        let now = self.config.clock.now();
        let mut state = self.state();
        let folded = state.handler.fold(frames, now);
        if !folded.abort.is_empty() {
            self.tell_aborts(&mut state, folded.abort);
        }
        if let Some(reply) = folded.reply
            && let Some(caller) = state.calls.remove(&reply.call_id)
        {
            // A caller that has stopped waiting wants no answer.
            let _ = caller.send(reply.result.map_err(UtilityError::Failed));
        }
        self.told_idle(&state);
        drop(state);
        if folded.dead {
            tracing::warn!("the core says that it is dead");
            self.core_gone("the engine died", FailureKind::CoreDown);
        }
    }

    fn tick(&self) {
        let now = self.config.clock.now();
        let mut state = self.state();
        let ended = state.handler.tick(now);
        self.tell_aborts(&mut state, ended);
        self.told_idle(&state);
    }

    fn joined(self: &Arc<Self>, ready: &[u8], client_index: u32, epoch: u64, engine_index: u32) {
        // An epoch ends with Down; should that ever be missing, nothing of the old one may live on.
        if self.state().session.is_some() {
            self.core_gone("another core has joined", FailureKind::CoreDown);
        }
        let ready = match ReadyResponse::decode(ready) {
            Ok(ready) => ready,
            Err(error) => {
                let reason = format!("its ready response cannot be read: {error}");
                tracing::error!(reason, "the core cannot be used");
                self.set_status(EngineStatus::Down { reason });
                return;
            }
        };
        tracing::info!(
            engine_index,
            client_index,
            vllm_version = ready.vllm_version,
            "core joined"
        );
        self.config.metrics.core_joined(engine_index, &ready);
        let mut state = self.state();
        state.session = Some(Session { epoch, client_index, counter: 0, serving: false });
        state.ready = Some(Arc::new(ready.clone()));
        if self.config.inherits_outputs {
            state.handler.forget_all_but(epoch);
        }
        // A request sent while the old epoch ended may have reached the new core.
        self.tell_aborts(&mut state, Vec::new());
        drop(state);
        self.set_status(EngineStatus::Connecting);
        tokio::spawn(self.clone().learn_model(epoch, engine_index, ready));
    }

    /// Every request of the epoch is lost: they end with an error, at once.
    fn core_gone(&self, reason: &str, kind: FailureKind) {
        let failure = EngineFailure {
            kind,
            code: match kind {
                FailureKind::Shutdown => "shutdown",
                _ => "engine_down",
            }
            .to_string(),
            message: format!("the engine is gone: {reason}"),
            retryable: true,
        };
        let now = self.config.clock.now();
        let mut state = self.state();
        if state.session.take().is_some() {
            state.handler.engine_gone();
        }
        state.unsent = state.handler.end_all(FinishReason::Error, &failure, now);
        // Dropping the senders is what tells the callers.
        state.calls.clear();
        self.told_idle(&state);
        self.set_status(EngineStatus::Down { reason: reason.to_string() });
    }

    /// Where another task may change the status too, this is called under the lock of the state.
    fn set_status(&self, status: EngineStatus) {
        self.config.metrics.core_up(status == EngineStatus::Up);
        self.status.send_if_modified(|current| {
            let changed = *current != status;
            *current = status;
            changed
        });
    }

    /// Asks the core for its model until it is known or the epoch is over.
    async fn learn_model(self: Arc<Self>, epoch: u64, engine_index: u32, ready: ReadyResponse) {
        loop {
            match self.ask_for_model(&ready).await {
                Ok((model, told)) => {
                    self.serve(epoch, engine_index, model, told);
                    return;
                }
                Err(reason) => {
                    let state = self.state();
                    if state.session.as_ref().is_none_or(|session| session.epoch != epoch) {
                        return;
                    }
                    tracing::error!(reason, "requests are refused");
                    self.set_status(EngineStatus::Down { reason });
                }
            }
            tokio::select! {
                () = tokio::time::sleep(ASK_AGAIN) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    async fn ask_for_model(
        &self,
        ready: &ReadyResponse,
    ) -> Result<(Arc<ServedModel>, Option<Value>), String> {
        let told = match self.call("get_model_card", Vec::new()).await {
            Ok(Value::Nil) => Err("it tells no model card".to_string()),
            Ok(card) => Ok(card),
            Err(error) => Err(error.to_string()),
        };
        let bound = u32::try_from(ready.max_model_len).unwrap_or(u32::MAX);
        let names = self.config.served_model_names.clone();
        let (card, told) = match (told, &self.config.local_card) {
            (Ok(told), _) => {
                if let Some(model) = self.same_model(&told, bound) {
                    return Ok((model, Some(told)));
                }
                let card = ModelCard::from_value(&told)
                    .map_err(|error| format!("its model card cannot be used: {error}"))?;
                (card, Some(told))
            }
            (Err(why), Some(local)) => {
                tracing::info!(why, "the core tells no model; the one given here is used");
                (local.clone(), None)
            }
            (Err(why), None) => {
                return Err(format!(
                    "the core does not tell its model ({why}); start the api-server with the \
                     model's path"
                ));
            }
        };
        // Building a tokenizer takes up to a second of work.
        tokio::task::spawn_blocking(move || ServedModel::new(card, &names, bound))
            .await
            .map_err(|error| format!("its tokenizer could not be built: {error}"))?
            .map(|model| (Arc::new(model), told))
            .map_err(|error| format!("its tokenizer cannot be used: {error}"))
    }

    /// The model of the epoch before, if the core has told the very same again.
    fn same_model(&self, told: &Value, bound: u32) -> Option<Arc<ServedModel>> {
        let state = self.state();
        let model = state.model.as_ref().filter(|_| state.told_card.as_ref() == Some(told))?;
        (model.max_model_len == served_model::length(&model.card, bound)).then(|| model.clone())
    }

    fn serve(&self, epoch: u64, engine_index: u32, model: Arc<ServedModel>, told: Option<Value>) {
        let engine = self.config.metrics.engine(model.name(), engine_index, model.max_model_len);
        let mut state = self.state();
        let Some(session) = state.session.as_mut().filter(|session| session.epoch == epoch) else {
            return;
        };
        session.serving = true;
        state.handler.set_engine(engine, engine_index);
        tracing::info!(model = model.name(), max_model_len = model.max_model_len, "serving");
        state.model = Some(model);
        state.told_card = told;
        self.set_status(EngineStatus::Up);
    }
}
