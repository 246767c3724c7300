//! Being a client of a core: join, ask, read what comes, leave.

use std::net::ToSocketAddrs;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, bail};
use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineMessage, ReadyResponse, RequestId, UtilityCall,
    UtilityReply, Value,
};
use pawl_shared::transport::{
    Address, CoreAt, FrontendEndpoint, FrontendEndpointConfig, FrontendEvent, FrontendSender,
};

/// How long finding out whether anybody listens may take.
const KNOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LEAVE_GRACE: Duration = Duration::from_secs(1);

/// A frontend of one core.
pub struct CoreClient {
    endpoint: FrontendEndpoint,
    sender: FrontendSender,
    pub client: u32,
    epoch: u64,
    /// Requests so far: what makes wire ids differ.
    requests: u64,
    calls: u64,
    is_up: bool,
    /// Tokens of prompt and answer together at most, as the core says.
    pub max_model_len: u64,
}

/// What a client hears of its core.
pub enum Incoming {
    Outputs(Vec<EngineCoreOutput>),
    Reply(UtilityReply),
    /// The core is gone with all that was asked of it; the next [`CoreClient::joined`] waits for
    /// another.
    Down(String),
    /// It is silent or makes no progress; it may come back.
    Hung(Duration),
}

impl CoreClient {
    /// Joins the core at `address`, which must listen already and answer within `patience` (a core
    /// that loads its model lets nobody in before).
    ///
    /// # Errors
    /// With what is wrong at that address, as far as can be told from here.
    pub async fn join(address: &Address, patience: Duration) -> anyhow::Result<Self> {
        knock(address)?;
        let config = FrontendEndpointConfig::new(CoreAt::Join(address.clone()));
        let (endpoint, sender) = FrontendEndpoint::start(config).await?;
        let mut client = Self {
            endpoint,
            sender,
            client: 0,
            epoch: 0,
            requests: 0,
            calls: 0,
            is_up: false,
            max_model_len: u64::MAX,
        };
        match tokio::time::timeout(patience, client.joined()).await {
            Ok(joined) => joined.with_context(|| format!("cannot join the core at {address}"))?,
            Err(_) => bail!(
                "nothing has let us in at {address} within {} s: a core that still loads its model \
                 does so when it is done (wait longer with --wait), anything else there is no core",
                patience.as_secs_f64()
            ),
        }
        Ok(client)
    }

    /// Waits until a core has let us in.
    ///
    /// # Errors
    /// When one refuses.
    pub async fn joined(&mut self) -> anyhow::Result<()> {
        loop {
            match self.endpoint.next().await {
                FrontendEvent::Up { client_index, epoch, ready, .. } => {
                    let ready = ReadyResponse::decode(&ready).context("its ready response")?;
                    self.max_model_len = ready.max_model_len;
                    (self.client, self.epoch, self.is_up) = (client_index, epoch, true);
                    return Ok(());
                }
                FrontendEvent::Down { reason } => bail!("{reason}"),
                _ => {}
            }
        }
    }

    /// Whether there is a core that we have joined, as far as has been heard.
    pub fn is_up(&self) -> bool {
        self.is_up
    }

    /// A wire id that no request ever had.
    pub fn fresh_id(&mut self, external: &str) -> RequestId {
        self.requests += 1;
        RequestId::from(format!("{external}-{:x}{:010x}", self.epoch, self.requests))
    }

    /// Sends, without waiting for anything.
    ///
    /// # Errors
    /// When the core is gone, or 64 MiB wait since it does not read.
    pub fn send(&self, message: &ClientMessage) -> anyhow::Result<()> {
        Ok(self.sender.try_send(message.encode())?)
    }

    /// What comes next. Cancel-safe.
    ///
    /// # Errors
    /// A message that does not decode.
    pub async fn next(&mut self) -> anyhow::Result<Incoming> {
        loop {
            let frames = match self.endpoint.next().await {
                FrontendEvent::Message { frames } => frames,
                FrontendEvent::Down { reason } => {
                    self.is_up = false;
                    return Ok(Incoming::Down(reason));
                }
                FrontendEvent::Hung { silent_for } => return Ok(Incoming::Hung(silent_for)),
                FrontendEvent::Waiting | FrontendEvent::Resumed | FrontendEvent::Stopping => {
                    continue;
                }
                FrontendEvent::Up { client_index, epoch, .. } => {
                    (self.client, self.epoch, self.is_up) = (client_index, epoch, true);
                    continue;
                }
            };
            let message = EngineMessage::decode(&frames);
            return Ok(match message.context("the core sent what does not decode")? {
                EngineMessage::Step { outputs, .. } if outputs.is_empty() => continue,
                EngineMessage::Step { outputs, .. } => Incoming::Outputs(outputs),
                EngineMessage::Utility { reply, .. } => Incoming::Reply(reply),
                EngineMessage::Dead => Incoming::Down("the engine died".into()),
            });
        }
    }

    /// Calls a method and waits for the answer. Outputs that come meanwhile are passed over.
    ///
    /// # Errors
    /// The method's own failure, a core that is gone, or no answer within `patience`.
    pub async fn call(
        &mut self,
        method: &str,
        args: Vec<Value>,
        patience: Duration,
    ) -> anyhow::Result<Value> {
        self.calls += 1;
        let (client_index, call_id) = (self.client, self.calls);
        let call = UtilityCall { client_index, call_id, method: method.to_owned(), args };
        self.send(&ClientMessage::Utility(call))?;
        let answered = async {
            loop {
                match self.next().await? {
                    Incoming::Reply(reply) if reply.call_id == call_id => {
                        return reply.result.map_err(anyhow::Error::msg);
                    }
                    Incoming::Down(reason) => bail!("{reason}"),
                    _ => {}
                }
            }
        };
        match tokio::time::timeout(patience, answered).await {
            Ok(answer) => answer,
            Err(_) => bail!(
                "no answer to {method} within {} s: the core's engine is busy with a long step, or \
                 hangs",
                patience.as_secs_f64()
            ),
        }
    }

    /// Leaves; the core forgets what is still open.
    pub async fn leave(self) {
        self.endpoint.leave(LEAVE_GRACE).await;
    }
}

/// Whether anybody listens at `address`: joining waits for a core to come, and a typing error would
/// look like a core that takes its time.
fn knock(address: &Address) -> anyhow::Result<()> {
    match address {
        Address::Ipc(path) => match UnixStream::connect(path) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "there is no socket {}: is the core running, and is that its --listen address?",
                path.display()
            ),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => bail!(
                "nobody listens at {address} any more: the core that made this socket is gone"
            ),
            Err(error) => Err(error).with_context(|| format!("cannot connect to {address}")),
        },
        Address::Tcp { host, port } => {
            let found = (host.as_str(), *port).to_socket_addrs();
            let found = found.with_context(|| format!("{address}: no such host"))?.next();
            let found = found.with_context(|| format!("{address}: no such host"))?;
            std::net::TcpStream::connect_timeout(&found, KNOCK_TIMEOUT)
                .map(drop)
                .with_context(|| format!("nobody listens at {address}"))
        }
    }
}
