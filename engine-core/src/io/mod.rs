//! The io thread: sockets on one side, the engine's channels on the other.
//!
//! It decodes what clients say, encodes what the engine answers, and never decides anything about a
//! request. A few times a second it repeats the gauges to clients that would else have heard
//! nothing for a second, asks the engine for a sign of life, and passes on how far work has come.

mod repeat;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Sender, TrySendError};
use pawl_shared::clock::Clock;
use pawl_shared::protocol::{
    ClientMessage, DecodeError, ReadyResponse, RequestId, StepFrame, Value, dump,
};
use pawl_shared::shutdown::Shutdown;
use pawl_shared::transport::{ClientId, CoreEndpoint, CoreEvent};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use crate::engine::{Batch, GAUGES_EVERY, Inbox, Outgoing};
use crate::step::Progress;
use repeat::Repeater;

/// How long what was queued may take to leave when the core ends.
const LINGER: Duration = Duration::from_secs(2);

/// How often the io thread looks who has heard nothing: so often that nobody's gauges are older
/// than [`GAUGES_EVERY`].
pub(crate) const TICK: Duration = GAUGES_EVERY.checked_div(4).expect("4 is not 0");

/// How the engine came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineEnd {
    /// It was told to stop; every client has been told what became of its requests.
    Stopped,
    /// It failed; every client must hear that nothing comes any more.
    Dead,
}

/// The io thread's ends of its channels, and what it shares.
pub(crate) struct IoChannels {
    /// To the engine. When it is full, one message is held here and no further one is read.
    pub inbox: Sender<Inbox>,
    /// The engine has taken messages.
    pub inbox_space: Arc<Notify>,
    /// The model is loaded: joins can be answered.
    pub ready: oneshot::Receiver<ReadyResponse>,
    /// From the engine. When it is full the engine waits.
    pub out: mpsc::Receiver<Batch>,
    /// The engine thread has ended; everything it had to say is in `out`.
    pub end: oneshot::Receiver<EngineEnd>,
}

/// Serves until the engine has ended.
pub(crate) async fn serve(
    mut endpoint: CoreEndpoint,
    mut channels: IoChannels,
    context: IoContext,
    shutdown: Shutdown,
) {
    let mut io = Io::new(context);
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut told_to_stop, mut told_to_hurry) = (false, false);
    let end = loop {
        tokio::select! {
            ready = &mut channels.ready, if !io.ready => {
                // An error means that the engine ends before it was ready; `end` tells how.
                io.set_ready();
                if let Ok(ready) = ready {
                    // From here on the engine answers ticks whenever no step is in flight, so a
                    // counter that stands still always means that something hangs.
                    endpoint.set_busy(true);
                    endpoint.set_ready(vec![ready.encode()]);
                }
            }
            Some(batch) = channels.out.recv() => {
                io.send_batch(batch, |client, frames| send(&mut endpoint, client, frames));
            }
            event = endpoint.next(), if io.held.is_none() => {
                let message = io.understand(event);
                io.hand_over(&channels.inbox, message);
            }
            () = channels.inbox_space.notified(), if io.held.is_some() => {
                io.hand_over_held(&channels.inbox);
            }
            _ = tick.tick() => {
                endpoint.set_progress(io.progress());
                io.tick(&channels.inbox, |client, frames| send(&mut endpoint, client, frames));
            }
            () = shutdown.requested(), if !told_to_stop && io.held.is_none() => {
                told_to_stop = true;
                endpoint.set_stopping();
                io.hand_over(&channels.inbox, Inbox::Shutdown);
            }
            () = shutdown.hurried(), if !told_to_hurry && io.held.is_none() => {
                told_to_hurry = true;
                io.hand_over(&channels.inbox, Inbox::Hurry);
            }
            end = &mut channels.end => break end.unwrap_or(EngineEnd::Dead),
        }
    };
    // What the engine said last was queued before its end.
    while let Ok(batch) = channels.out.try_recv() {
        io.send_batch(batch, |client, frames| send(&mut endpoint, client, frames));
    }
    match end {
        EngineEnd::Dead => endpoint.broadcast_dead(),
        EngineEnd::Stopped => endpoint.broadcast_end(),
    }
    endpoint.close(LINGER).await;
}

/// What the io thread needs besides its channels.
pub(crate) struct IoContext {
    pub engine_index: u32,
    pub clock: Arc<dyn Clock>,
    pub progress: Progress,
}

/// What the io thread decides, without the sockets.
pub(crate) struct Io {
    repeater: Repeater,
    /// A message for which the inbox had no room. While there is one, no further one is read.
    held: Option<Inbox>,
    /// Whether the engine has been heard of. Before that it takes no messages.
    ready: bool,
    context: IoContext,
}

impl Io {
    pub(crate) fn new(context: IoContext) -> Self {
        Self { repeater: Repeater::default(), held: None, ready: false, context }
    }

    /// Whether a message waits for room in the inbox. While one does, no further one may come.
    pub(crate) fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// The engine can be asked for signs of life.
    pub(crate) fn set_ready(&mut self) {
        self.ready = true;
    }

    /// How far work has come, for PONGs.
    pub(crate) fn progress(&self) -> u64 {
        self.context.progress.load(Ordering::Relaxed)
    }

    /// How many clients are told the gauges.
    pub(crate) fn num_told(&self) -> usize {
        self.repeater.num_told()
    }

    pub(crate) fn understand(&mut self, event: CoreEvent) -> Inbox {
        match event {
            CoreEvent::Joined { client, peer } => {
                self.repeater.join(client, self.context.clock.now());
                Inbox::Joined(client, peer)
            }
            CoreEvent::Left { client, .. } => {
                self.repeater.leave(client);
                Inbox::Left(client)
            }
            CoreEvent::Message { client, frames } => decode(client, &frames),
        }
    }

    pub(crate) fn hand_over_held(&mut self, inbox: &Sender<Inbox>) {
        if let Some(message) = self.held.take() {
            self.hand_over(inbox, message);
        }
    }

    pub(crate) fn hand_over(&mut self, inbox: &Sender<Inbox>, message: Inbox) {
        assert!(self.held.is_none(), "a message may not overtake the one that is held");
        match inbox.try_send(message) {
            Ok(()) => {}
            Err(TrySendError::Full(message)) => self.held = Some(message),
            // The engine is gone; `end` tells how.
            Err(TrySendError::Disconnected(_)) => {}
        }
    }

    /// Encodes what the engine says.
    pub(crate) fn send_batch(&mut self, batch: Batch, mut send: impl FnMut(ClientId, Vec<Bytes>)) {
        if let Some(gauges) = batch.gauges {
            self.repeater.gauges(gauges);
        }
        let now = self.context.clock.now();
        for frame in batch.frames {
            let (client, frames) = match frame {
                Outgoing::Step(client, frame) => {
                    self.repeater.told(client, now);
                    (client, frame.encode())
                }
                Outgoing::Utility(client, frame) => (client, frame.encode()),
            };
            send(client, frames);
        }
    }

    /// To be called each [`TICK`].
    pub(crate) fn tick(
        &mut self,
        inbox: &Sender<Inbox>,
        mut send: impl FnMut(ClientId, Vec<Bytes>),
    ) {
        let progress = self.progress();
        if self.ready && self.held.is_none() {
            // No room for a sign of life means that there is enough else to do.
            let _ = inbox.try_send(Inbox::Tick);
        }
        let now = self.context.clock.now();
        for (client, stats) in self.repeater.due(now, progress) {
            let frame = StepFrame::new(now, stats, self.context.engine_index, Vec::new());
            send(client, frame.encode());
        }
    }
}

fn send(endpoint: &mut CoreEndpoint, client: ClientId, frames: Vec<Bytes>) {
    if let Err(refused) = endpoint.send(client, frames) {
        // Its leaving is, or will be, an event of the endpoint, which aborts its requests.
        tracing::debug!(client = client.0, %refused, "a frame was not sent");
    }
}

fn decode(client: ClientId, frames: &[Bytes]) -> Inbox {
    match ClientMessage::decode(frames) {
        Ok(message) => Inbox::Message(client, message),
        Err(error) => Inbox::Undecodable {
            client,
            request_id: add_id(frames),
            kind: error.kind.as_str(),
            message: error.to_string(),
        },
    }
}

/// The request id of an ADD that does not decode, if that much of it can be read.
fn add_id(frames: &[Bytes]) -> Option<RequestId> {
    let [kind, payload, ..] = frames else { return None };
    if kind.as_ref() != [0] {
        return None;
    }
    match dump(payload) {
        Ok(Value::Array(fields)) => match fields.into_iter().next() {
            Some(Value::Text(id)) => Some(RequestId::from(id)),
            _ => None,
        },
        Ok(_) | Err(DecodeError { .. }) => None,
    }
}

#[cfg(test)]
mod tests;
