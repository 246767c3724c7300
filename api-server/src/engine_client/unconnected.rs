//! A client without sockets and without a task: whoever holds it plays the transport and the clock.
//!
//! The simulator in `tests/simulation/` drives frontends with it. It is the client as it is: what
//! the task of a real one does with an event or a tick is the same call.

use bytes::Bytes;
use pawl_shared::transport::{FrontendEvent, SendRefused};

use super::learning::ModelBuild;
use super::link::LinkSender;
use super::{ClientConfig, EngineClient, FailureKind};

/// Hands events and the time to an [`EngineClient`].
pub struct Unconnected {
    client: EngineClient,
}

impl Unconnected {
    /// A client whose messages go to `send`; it has heard of no core yet.
    pub fn new(
        config: ClientConfig,
        send: impl Fn(Vec<Bytes>) -> Result<(), SendRefused> + Send + Sync + 'static,
    ) -> Self {
        Self { client: EngineClient::new(LinkSender::Driver(Box::new(send)), config) }
    }

    /// The handle for submitting.
    #[must_use]
    pub fn client(&self) -> &EngineClient {
        &self.client
    }

    /// Something happened at the frontend's end.
    pub fn event(&self, event: FrontendEvent) {
        let build = self.client.inner.handle(event);
        self.build(build);
    }

    /// To be called about once a second.
    pub fn tick(&self) {
        let build = self.client.inner.tick();
        self.build(build);
    }

    /// The client has stopped: what is open ends, as when its task ends.
    pub fn stopped(&self) {
        self.client.inner.core_gone("the server is shutting down", FailureKind::Shutdown);
    }

    /// How much is kept, by what it is: all of it must be 0 again when nothing is open.
    #[must_use]
    pub fn kept(&self) -> [(&'static str, usize); 4] {
        let state = self.client.inner.state();
        [
            ("open choices", state.handler.open()),
            ("open requests", state.handler.open_parents()),
            ("unsent aborts", state.unsent.len()),
            ("calls", state.calls.len()),
        ]
    }

    fn build(&self, build: Option<ModelBuild>) {
        if let Some(build) = build {
            self.client.inner.built(build.run());
        }
    }
}
