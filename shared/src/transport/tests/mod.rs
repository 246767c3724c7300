//! Real sockets, both ends in one process. Every wait is for an event and has a deadline.

mod ending;
mod guard;
mod handshake;
mod joining;
mod places;

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::*;

/// Far beyond what anything here takes; a test that waits this long has failed.
const DEADLINE: Duration = Duration::from_secs(10);

type Command<T> = Box<dyn FnOnce(&mut T) + Send>;

/// A core that is polled all the time, as the io thread does.
struct TestCore {
    events: mpsc::Receiver<CoreEvent>,
    commands: mpsc::Sender<Command<CoreEndpoint>>,
    task: tokio::task::JoinHandle<CoreEndpoint>,
    address: Address,
}

impl TestCore {
    async fn bind(address: &Address) -> Self {
        Self::start(CoreEndpointConfig::new(vec![address.clone()])).await
    }

    async fn start(config: CoreEndpointConfig) -> Self {
        let mut endpoint = CoreEndpoint::bind(config).await.unwrap();
        let address = endpoint.addresses().first().cloned().unwrap_or(Address::Ipc("none".into()));
        let (event_sender, events) = mpsc::channel(100_000);
        let (commands, mut command_receiver) = mpsc::channel::<Command<CoreEndpoint>>(100);
        let task = tokio::spawn(async move {
            loop {
                tokio::select! {
                    event = endpoint.next() => event_sender.try_send(event).unwrap(),
                    command = command_receiver.recv() => match command {
                        Some(command) => command(&mut endpoint),
                        None => return endpoint,
                    },
                }
            }
        });
        Self { events, commands, task, address }
    }

    async fn ready(address: &Address) -> Self {
        let mut core = Self::bind(address).await;
        core.tell(|core| core.set_ready(vec![Bytes::from_static(b"ready")])).await;
        core
    }

    /// Runs `command` on the endpoint and waits until it has run.
    async fn tell<R: Send + 'static>(
        &mut self,
        command: impl FnOnce(&mut CoreEndpoint) -> R + Send + 'static,
    ) -> R {
        let (done, answer) = tokio::sync::oneshot::channel();
        let command: Command<CoreEndpoint> = Box::new(move |endpoint| {
            let _ = done.send(command(endpoint));
        });
        self.commands.send(command).await.unwrap_or_else(|_| panic!("the core's task has ended"));
        answer.await.unwrap()
    }

    async fn next(&mut self) -> CoreEvent {
        tokio::time::timeout(DEADLINE, self.events.recv()).await.expect("an event").unwrap()
    }

    async fn joined(&mut self) -> ClientId {
        match self.next().await {
            CoreEvent::Joined { client, .. } => client,
            other => panic!("{other:?} instead of a join"),
        }
    }

    async fn send(&mut self, client: ClientId, text: &str) -> Result<(), SendRefused> {
        let frames = vec![Bytes::copy_from_slice(text.as_bytes())];
        self.tell(move |core| core.send(client, frames)).await
    }

    /// Takes the endpoint back, to close or drop it.
    async fn endpoint(self) -> CoreEndpoint {
        drop(self.commands);
        self.task.await.unwrap()
    }
}

async fn join(core: &Address) -> (FrontendEndpoint, FrontendSender) {
    FrontendEndpoint::start(FrontendEndpointConfig::new(CoreAt::Join(core.clone()))).await.unwrap()
}

async fn next(frontend: &mut FrontendEndpoint) -> FrontendEvent {
    tokio::time::timeout(DEADLINE, frontend.next()).await.expect("an event")
}

async fn up(frontend: &mut FrontendEndpoint) -> (u32, u64) {
    match next(frontend).await {
        FrontendEvent::Up { ready, client_index, epoch, engine_index } => {
            assert_eq!((&ready[..], engine_index), (&b"ready"[..], 0));
            (client_index, epoch)
        }
        other => panic!("{other:?} instead of Up"),
    }
}

async fn message(frontend: &mut FrontendEndpoint) -> String {
    match next(frontend).await {
        FrontendEvent::Message { frames } => text(&frames),
        other => panic!("{other:?} instead of a message"),
    }
}

fn frames(text: &str) -> Vec<Bytes> {
    text.split(' ').map(|part| Bytes::copy_from_slice(part.as_bytes())).collect()
}

fn text(frames: &[Bytes]) -> String {
    frames.iter().map(|frame| String::from_utf8_lossy(frame)).collect::<Vec<_>>().join(" ")
}

/// An address in a folder of its own, over each transport.
fn ipc() -> (SocketDir, Address) {
    let dir = SocketDir::create(&std::env::temp_dir()).unwrap();
    let address = dir.address("core").unwrap();
    (dir, address)
}

fn tcp() -> Address {
    "tcp://127.0.0.1:0".parse().unwrap()
}
