//! A tap: an onlooker that is sent copies of what passes between a core and its frontends.

use std::time::Duration;

use super::frontend_endpoint::{CoreAt, FrontendEndpoint, FrontendEndpointConfig, FrontendEvent};
use super::{Address, TransportError};
use crate::protocol::DecodeError;
use crate::rendezvous::message::Role;
use crate::tap::TapRecord;

/// A place beside the wire.
pub struct Tap {
    endpoint: FrontendEndpoint,
}

/// What happened at a tap.
#[derive(Debug)]
pub enum TapEvent {
    /// Messages are copied from now on.
    Up,
    /// A message that passed.
    Record(Result<TapRecord, DecodeError>),
    /// The core is gone, or refuses; the tap goes on trying.
    Down {
        /// For people.
        reason: String,
    },
}

impl Tap {
    /// Looks for the core that listens at `core`, and goes on until closed.
    ///
    /// # Errors
    /// When the tap's own sockets cannot be made.
    pub async fn start(core: Address) -> Result<Self, TransportError> {
        let config = FrontendEndpointConfig {
            role: Role::Tap,
            ..FrontendEndpointConfig::new(CoreAt::Join(core))
        };
        let (endpoint, _sender) = FrontendEndpoint::start(config).await?;
        Ok(Self { endpoint })
    }

    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> TapEvent {
        loop {
            match self.endpoint.next().await {
                FrontendEvent::Up { .. } => return TapEvent::Up,
                FrontendEvent::Message { frames } => {
                    let bytes = frames.first().map(AsRef::as_ref).unwrap_or_default();
                    return TapEvent::Record(TapRecord::decode(bytes));
                }
                FrontendEvent::Down { reason } => return TapEvent::Down { reason },
                // Messages stop meanwhile, and come after.
                FrontendEvent::Hung { .. } | FrontendEvent::Resumed => {}
            }
        }
    }

    /// Leaves the core.
    pub async fn close(self) {
        self.endpoint.leave(Duration::from_secs(1)).await;
    }
}
