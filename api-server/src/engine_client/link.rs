//! The way to the core: the transport's endpoint, or a pair of channels that a test holds.

use std::time::Duration;

use bytes::Bytes;
use pawl_shared::transport::{FrontendEndpoint, FrontendEvent, FrontendSender, SendRefused};

/// Where events come from.
pub(super) enum Link {
    /// Sockets.
    Endpoint(FrontendEndpoint),
    /// A test.
    #[cfg(test)]
    Channel(tokio::sync::mpsc::Receiver<FrontendEvent>),
}

impl Link {
    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> FrontendEvent {
        match self {
            Self::Endpoint(endpoint) => endpoint.next().await,
            #[cfg(test)]
            Self::Channel(events) => match events.recv().await {
                Some(event) => event,
                None => std::future::pending().await,
            },
        }
    }

    /// Takes leave of the core.
    pub async fn leave(self, deadline: Duration) {
        match self {
            Self::Endpoint(endpoint) => endpoint.leave(deadline).await,
            #[cfg(test)]
            Self::Channel(_) => {}
        }
    }
}

/// Where messages go.
pub(super) enum LinkSender {
    /// Sockets.
    Endpoint(FrontendSender),
    /// Whoever drives the client.
    Driver(Box<SendMessage>),
}

/// What [`LinkSender::try_send`] is.
pub(super) type SendMessage = dyn Fn(Vec<Bytes>) -> Result<(), SendRefused> + Send + Sync;

impl LinkSender {
    /// Never blocks; keeps the order.
    pub fn try_send(&self, frames: Vec<Bytes>) -> Result<(), SendRefused> {
        match self {
            Self::Endpoint(sender) => sender.try_send(frames),
            Self::Driver(send) => send(frames),
        }
    }
}
