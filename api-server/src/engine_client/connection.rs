//! The task of one core connection: events and frames in, folded one by one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pawl_shared::protocol::{FinishReason, ReadyResponse};
use pawl_shared::transport::FrontendEvent;
use tokio::time::MissedTickBehavior;

use super::learning::{BuiltModel, ModelBuild};
use super::link::Link;
use super::{EngineFailure, EngineStatus, FailureKind, Inner, Session, UtilityError};

/// Runs until the client is shut down.
pub(super) async fn run(inner: Arc<Inner>, mut link: Link) {
    let mut seconds = tokio::time::interval(Duration::from_secs(1));
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let build = tokio::select! {
            biased;
            () = inner.stop.cancelled() => break,
            event = link.next() => inner.handle(event),
            _ = seconds.tick() => inner.tick(),
        };
        if let Some(build) = build {
            tokio::spawn(build_model(inner.clone(), build));
        }
    }
    let deadline = inner.state().leave_deadline;
    link.leave(deadline).await;
    inner.core_gone("the server is shutting down", FailureKind::Shutdown);
    inner.stopped.send_replace(true);
}

/// Builds a tokenizer on a thread that serves no sockets.
async fn build_model(inner: Arc<Inner>, build: ModelBuild) {
    let epoch = build.epoch();
    let built = tokio::task::spawn_blocking(move || build.run()).await;
    inner.built(built.unwrap_or_else(|error| BuiltModel::failed(epoch, &error)));
}

impl Inner {
    /// Takes in what the transport tells. Where that leads to work, it is returned.
    pub(super) fn handle(&self, event: FrontendEvent) -> Option<ModelBuild> {
        match event {
            FrontendEvent::Message { frames } => return self.fold(&frames),
            FrontendEvent::Waiting => {
                self.awaits.send_replace(true);
            }
            FrontendEvent::Up { ready, client_index, epoch, engine_index } => {
                self.awaits.send_replace(false);
                return self.joined(&ready, client_index, epoch, engine_index);
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
                let status = self.state().session.as_ref().map(Session::status);
                self.set_status(status.unwrap_or(EngineStatus::Connecting));
            }
            FrontendEvent::Stopping => {
                tracing::info!("the core stops: open streams may finish, new requests are refused");
                let mut state = self.state();
                if let Some(session) = &mut state.session {
                    session.stopping = true;
                    self.set_status(session.status());
                }
            }
            FrontendEvent::Down { reason } => {
                tracing::warn!(reason, "the core is gone");
                self.core_gone(&reason, FailureKind::CoreDown);
            }
        }
        None
    }

    fn fold(&self, frames: &[Bytes]) -> Option<ModelBuild> {
        let now = self.config.clock.now();
        let mut state = self.state();
        let folded = state.handler.fold(frames, now);
        if !folded.abort.is_empty() {
            self.tell_aborts(&mut state, folded.abort);
        }
        let mut build = None;
        if let Some(reply) = folded.reply {
            if state.learning.as_ref().is_some_and(|learning| learning.asked(reply.call_id)) {
                build = self.answered(&mut state, reply.result, now);
            } else if let Some(caller) = state.calls.remove(&reply.call_id) {
                // A caller that has stopped waiting wants no answer.
                let _ = caller.send(reply.result.map_err(UtilityError::Failed));
            }
        }
        self.told_idle(&state);
        drop(state);
        if folded.dead {
            tracing::warn!("the core says that it is dead");
            self.core_gone("the engine died", FailureKind::CoreDown);
        }
        build
    }

    /// To be called about once a second.
    pub(super) fn tick(&self) -> Option<ModelBuild> {
        let now = self.config.clock.now();
        let mut state = self.state();
        let ended = state.handler.tick(now);
        self.tell_aborts(&mut state, ended);
        self.told_idle(&state);
        self.learn_on(&mut state, now)
    }

    fn joined(
        &self,
        ready: &[u8],
        client_index: u32,
        epoch: u64,
        engine_index: u32,
    ) -> Option<ModelBuild> {
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
                return None;
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
        state.session =
            Some(Session { epoch, client_index, counter: 0, serving: false, stopping: false });
        state.ready = Some(Arc::new(ready.clone()));
        if self.config.inherits_outputs {
            state.handler.forget_all_but(epoch);
        }
        // A request sent while the old epoch ended may have reached the new core.
        self.tell_aborts(&mut state, Vec::new());
        self.set_status(EngineStatus::Connecting);
        self.begin_learning(&mut state, engine_index, ready, self.config.clock.now())
    }

    /// Every request of the epoch is lost: they end with an error, at once.
    pub(super) fn core_gone(&self, reason: &str, kind: FailureKind) {
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
        state.learning = None;
        state.unsent = state.handler.end_all(FinishReason::Error, &failure, now);
        // Dropping the senders is what tells the callers.
        state.calls.clear();
        self.told_idle(&state);
        self.set_status(EngineStatus::Down { reason: reason.to_string() });
    }

    /// Where another task may change the status too, this is called under the lock of the state.
    pub(super) fn set_status(&self, status: EngineStatus) {
        self.config.metrics.core_up(status == EngineStatus::Up);
        self.status.send_if_modified(|current| {
            let changed = *current != status;
            *current = status;
            changed
        });
    }
}
