//! A core made of two channels, for tests: what the client sends can be read, and anything can be
//! sent to it.

use std::sync::Arc;

use bytes::Bytes;
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{
    ClientMessage, EngineCoreRequest, StepFrame, UtilityFrame, UtilityReply, Value,
    testing::small_ready,
};
use pawl_shared::transport::{FrontendEvent, SendRefused};
use tokio::sync::mpsc;

use super::link::{Link, LinkSender};
use super::{ClientConfig, EngineClient, EngineStatus};

/// The other end of an [`EngineClient`].
pub(crate) struct FakeCore {
    pub events: mpsc::Sender<FrontendEvent>,
    pub messages: mpsc::Receiver<Vec<Bytes>>,
    clock: Arc<dyn pawl_shared::clock::Clock>,
}

/// A client whose core is the returned one; it has not joined yet.
pub(crate) fn connect(config: ClientConfig) -> (EngineClient, FakeCore) {
    // A test that leaves more than this unread finds out by a refusal.
    let (events_in, events) = mpsc::channel(1024);
    let (sender, messages) = mpsc::channel(1024);
    let clock = config.clock.clone();
    let send = move |frames| sender.try_send(frames).map_err(|_| SendRefused::Full);
    let sender = LinkSender::Driver(Box::new(send));
    let client = EngineClient::over(Link::Channel(events), sender, config);
    (client, FakeCore { events: events_in, messages, clock })
}

impl FakeCore {
    /// Joins as epoch `epoch`.
    pub async fn join(&self, epoch: u64) {
        let event = FrontendEvent::Up {
            ready: small_ready().encode(),
            client_index: 3,
            epoch,
            engine_index: 0,
        };
        self.events.send(event).await.expect("the client lives");
    }

    /// Joins, tells `card`, and waits until requests are taken.
    pub async fn serve(&mut self, client: &EngineClient, epoch: u64, card: &ModelCard) {
        self.join(epoch).await;
        self.answer("get_model_card", Ok(card.to_value())).await;
        let mut status = client.watch();
        status.wait_for(|status| *status == EngineStatus::Up).await.expect("the client lives");
    }

    /// The next message of the client.
    pub async fn message(&mut self) -> ClientMessage {
        let frames = self.messages.recv().await.expect("the client lives");
        ClientMessage::decode(&frames).expect("the client sends what can be read")
    }

    /// The next message, which must be an ADD.
    pub async fn added(&mut self) -> EngineCoreRequest {
        match self.message().await {
            ClientMessage::Add(request) => *request,
            other => panic!("expected an ADD, got {other:?}"),
        }
    }

    /// Waits for a call of `method` and answers it.
    pub async fn answer(&mut self, method: &str, result: Result<Value, String>) {
        let call = match self.message().await {
            ClientMessage::Utility(call) => call,
            other => panic!("expected a call of {method}, got {other:?}"),
        };
        assert_eq!(call.method, method);
        let reply = UtilityReply { call_id: call.call_id, result };
        self.send(UtilityFrame::new(self.clock.now(), reply, 0).encode()).await;
    }

    /// Sends one step.
    pub async fn step(&self, frame: &StepFrame) {
        self.send(frame.encode()).await;
    }

    pub async fn send(&self, frames: Vec<Bytes>) {
        self.events.send(FrontendEvent::Message { frames }).await.expect("the client lives");
    }

    /// Dies.
    pub async fn die(&self) {
        let event = FrontendEvent::Down { reason: "killed".into() };
        self.events.send(event).await.expect("the client lives");
    }
}
