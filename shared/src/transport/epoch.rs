//! One epoch of a frontend: drives its machine with its sockets until one of them ends it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use zeromq::{SocketEvent, SocketRecv, SocketSend, ZmqMessage};

use super::frontend_endpoint::{Delivery, Driver};
use super::outbox::SharedOutbox;
use super::pair::{Pair, engine_index_of};
use super::thread::{Wish, Wishes};
use super::{CoreAt, FrontendEvent, ListedPair};
use crate::rendezvous::{
    FrontendAction, FrontendInput, OUTBOX_BYTES_MAX, Outbox, PairSocket, message_cost,
};

/// Why an epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The machine closed it; there may be another.
    Closed,
    /// The owner wants no more.
    Stopped,
}

/// Something a socket of the pair brought, or a wait that is over.
enum Happened {
    Input(FrontendInput),
    InputMessage(Vec<Bytes>),
    InputConnected(Bytes),
    InputLost(Bytes),
    Output(Vec<Bytes>),
    OutputPeers(i32),
    Delivered,
    WriterEnded,
    Nothing,
    Wish(Wish),
}

impl Happened {
    fn acknowledge(driver: &mut Driver) -> Self {
        driver
            .due_acknowledgement()
            .map_or(Self::Nothing, |total| Self::Input(FrontendInput::Acknowledge(total)))
    }
}

type Writer = Pin<Box<dyn Future<Output = ()>>>;

/// Waits for the end of a writer, for ever if there is none.
async fn ended(writer: &mut Option<Writer>) {
    match writer {
        Some(writer) => writer.await,
        None => std::future::pending().await,
    }
}

/// Runs one epoch on the current runtime.
pub(super) async fn run(
    driver: &mut Driver,
    core: &CoreAt,
    epoch: u64,
    wait: Duration,
    wishes: &mut Wishes,
) -> Ended {
    let open = async {
        tokio::time::sleep(wait).await;
        Pair::open(driver, core, epoch).await
    };
    let opened = tokio::select! {
        opened = open => opened,
        _ = wishes.changed() => return Ended::Stopped,
    };
    match opened {
        Ok(pair) => {
            let listed = match core {
                CoreAt::Listed(listed) => Some(listed),
                CoreAt::Join(_) | CoreAt::AwaitCore(_) => None,
            };
            Epoch::new(driver, pair, listed).run(wishes).await
        }
        Err(error) => {
            let reason = error.to_string();
            for action in driver.handle(FrontendInput::OpenFailed { reason }) {
                if let FrontendAction::Down { reason } = action {
                    let event = Delivery::Event(FrontendEvent::Down { reason });
                    driver.deliver(event, wishes).await;
                }
            }
            Ended::Closed
        }
    }
}

struct Epoch<'a> {
    driver: &'a mut Driver,
    pair: Pair,
    listed: Option<&'a ListedPair>,
    engine: Option<Bytes>,
    output_peers: i32,
    outbox: SharedOutbox,
    writer: Option<Writer>,
    // Events of the machine that wait for room in the deliveries. While any waits no output is
    // taken, so they keep their place; there are never more than a few: a hang that is over before
    // it was told is not told.
    waiting: VecDeque<Delivery>,
    ended: bool,
}

impl<'a> Epoch<'a> {
    fn new(driver: &'a mut Driver, pair: Pair, listed: Option<&'a ListedPair>) -> Self {
        // Requests wait here while the core does not read; when it is full `try_send` refuses.
        let outbox = SharedOutbox::new(Outbox::new(OUTBOX_BYTES_MAX, None));
        Self {
            driver,
            pair,
            listed,
            engine: None,
            output_peers: 0,
            outbox,
            writer: None,
            waiting: VecDeque::new(),
            ended: false,
        }
    }

    async fn run(mut self, wishes: &mut Wishes) -> Ended {
        let (input, output) = (self.pair.input.to_string(), self.pair.output.to_string());
        self.input(FrontendInput::Opened { input, output }).await;
        let mut leaving = false;
        while !self.ended {
            let happened = tokio::select! {
                happened = self.happens() => happened,
                wish = wishes.next(leaving) => Happened::Wish(wish),
            };
            match happened {
                Happened::Input(input) => self.input(input).await,
                Happened::InputMessage(frames) => self.on_input_message(frames).await,
                Happened::InputConnected(peer) => self.on_input_connected(peer).await,
                Happened::InputLost(peer) if self.engine.as_ref() == Some(&peer) => {
                    self.input(FrontendInput::Disconnected(PairSocket::Input)).await;
                }
                // Somebody else connected to our socket and went.
                Happened::InputLost(_) => {}
                Happened::Output(frames) => {
                    let cost = message_cost(&frames);
                    self.waiting.push_back(Delivery::Message { frames, cost });
                }
                Happened::OutputPeers(change) => {
                    self.output_peers += change;
                    if change < 0 && self.output_peers == 0 {
                        self.input(FrontendInput::Disconnected(PairSocket::Output)).await;
                    }
                }
                Happened::WriterEnded => self.writer = None,
                Happened::Delivered | Happened::Nothing => {}
                Happened::Wish(Wish::Finish(_)) => {
                    leaving = true;
                    self.input(FrontendInput::Leave).await;
                }
                Happened::Wish(_) => return Ended::Stopped,
            }
        }
        self.outbox.close();
        // The last word of this epoch, and what came before it, wait for as long as it takes.
        for delivery in std::mem::take(&mut self.waiting) {
            if !self.driver.deliver(delivery, wishes).await {
                return Ended::Stopped;
            }
        }
        Ended::Closed
    }

    /// Waits for the next thing to happen. Cancel-safe: each branch is, and each yields at once.
    async fn happens(&mut self) -> Happened {
        let Self { driver, pair, writer, waiting, .. } = self;
        let now = driver.clock.now();
        let tick_in = driver.machine.next_tick().since(now);
        let ack_in = driver.ack.due().map(|due| due.since(now));
        let takes_outputs = driver.machine.takes_outputs() && waiting.is_empty();
        let deliveries = driver.deliveries.clone();
        tokio::select! {
            input = pair.control.next() => input.map_or(Happened::Nothing, Happened::Input),
            message = pair.router.recv() => match message {
                Ok(message) => Happened::InputMessage(message.into_vec()),
                Err(_) => Happened::Nothing,
            },
            event = pair.router_monitor.next() => match event {
                Some(SocketEvent::Accepted(_, peer)) => Happened::InputConnected(peer.into()),
                Some(SocketEvent::Disconnected(peer)) => Happened::InputLost(peer.into()),
                _ => Happened::Nothing,
            },
            message = pair.pull.recv(), if takes_outputs => match message {
                Ok(message) => Happened::Output(message.into_vec()),
                // A peer whose bytes cannot be read has been dropped; the monitor tells.
                Err(_) => Happened::Nothing,
            },
            event = pair.pull_monitor.next() => match event {
                Some(SocketEvent::Accepted(..)) => Happened::OutputPeers(1),
                Some(SocketEvent::Disconnected(_)) => Happened::OutputPeers(-1),
                _ => Happened::Nothing,
            },
            permit = deliveries.reserve(), if !waiting.is_empty() => match permit {
                Ok(permit) => {
                    permit.send(waiting.pop_front().expect("the branch asks for one"));
                    Happened::Delivered
                }
                // The endpoint was dropped, and its wish comes at once.
                Err(_) => { waiting.clear(); Happened::Delivered }
            },
            () = ended(writer) => Happened::WriterEnded,
            () = driver.taken.changed() => Happened::acknowledge(driver),
            () = tokio::time::sleep(ack_in.unwrap_or_default()), if ack_in.is_some() => {
                Happened::acknowledge(driver)
            }
            () = tokio::time::sleep(tick_in) => Happened::Input(FrontendInput::Tick),
        }
    }

    async fn on_input_connected(&mut self, peer: Bytes) {
        let (Some(listed), Some(engine_index)) = (self.listed, engine_index_of(&peer)) else {
            return;
        };
        if self.engine.is_none() {
            self.engine = Some(peer);
        }
        let known = listed.kept_ready();
        self.input(FrontendInput::Connected { engine_index, known }).await;
    }

    async fn on_input_message(&mut self, frames: Vec<Bytes>) {
        // [identity, ready response], once; nothing else ever comes this way.
        let mut frames = frames.into_iter();
        let (Some(peer), Some(ready), None) = (frames.next(), frames.next(), frames.next()) else {
            return self.driver.machine.count_ignored();
        };
        let Some(engine_index) = engine_index_of(&peer) else {
            return self.driver.machine.count_ignored();
        };
        if self.engine.is_none() {
            self.engine = Some(peer);
        }
        self.input(FrontendInput::Ready { ready, engine_index }).await;
    }

    async fn input(&mut self, input: FrontendInput) {
        for action in self.driver.handle(input) {
            match action {
                FrontendAction::Send(message) => self.pair.control.send(message.encode()).await,
                FrontendAction::SendInit { engine_index } => {
                    // Whoever was heard on the input socket before is not this engine.
                    self.engine = None;
                    let Pair { control, input, output, .. } = &mut self.pair;
                    control.send_init(engine_index, input, output).await;
                }
                FrontendAction::Waiting => {
                    self.waiting.push_back(Delivery::Event(FrontendEvent::Waiting));
                }
                FrontendAction::Up { ready, client_index, epoch, engine_index } => {
                    if let Some(listed) = self.listed {
                        listed.keep_ready(&ready);
                    }
                    self.start_writer();
                    let event = FrontendEvent::Up { ready, client_index, epoch, engine_index };
                    let (outbox, taken) = (self.outbox.clone(), self.driver.taken.clone());
                    self.waiting.push_back(Delivery::Up { event, outbox, taken });
                }
                FrontendAction::Hung { silent_for } => {
                    self.waiting.push_back(Delivery::Event(FrontendEvent::Hung { silent_for }));
                }
                FrontendAction::Resumed => match self.waiting.back() {
                    Some(Delivery::Event(FrontendEvent::Hung { .. })) => {
                        self.waiting.pop_back();
                    }
                    _ => self.waiting.push_back(Delivery::Event(FrontendEvent::Resumed)),
                },
                FrontendAction::Stopping => {
                    self.waiting.push_back(Delivery::Event(FrontendEvent::Stopping));
                }
                FrontendAction::Down { reason } => {
                    self.outbox.close();
                    self.waiting.push_back(Delivery::Event(FrontendEvent::Down { reason }));
                }
                FrontendAction::Close => self.ended = true,
            }
        }
    }

    fn start_writer(&mut self) {
        let Some(engine) = self.engine.clone() else { return };
        let outbox = self.outbox.clone();
        let mut router = self.pair.router_sender.clone();
        self.writer = Some(Box::pin(async move {
            while let Some(frames) = outbox.pop().await {
                let mut message = VecDeque::from(frames);
                message.push_front(engine.clone());
                let Ok(message) = ZmqMessage::try_from(message) else { continue };
                if let Err(error) = router.send(message).await {
                    tracing::debug!(%error, "the core took no request");
                    outbox.close();
                    return;
                }
            }
        }));
    }
}
