//! `cargo bench -p pawl-shared`: messages between a core's end and a frontend's, which run as
//! in a deployment, on sockets of either kind. Over tcp each byte of a peer is checked on its way
//! (`src/transport/guard/`), over ipc none is; docs/wire.md says what that costs.

#![allow(clippy::print_stdout, reason = "a bench is read on the terminal")]

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use pawl_shared::transport::{
    Address, ClientId, CoreAt, CoreEndpoint, CoreEndpointConfig, CoreEvent, FrontendEndpoint,
    FrontendEndpointConfig, FrontendEvent, FrontendSender, SocketDir,
};

const TRIPS: usize = 1000;
/// What is under way at a time stays far below the credit of a link.
const WINDOW: usize = 64;
const TURNS: usize = 5;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let dir = SocketDir::create_default()?;
    let mut ends = Vec::new();
    for address in [dir.address("core")?, "tcp://127.0.0.1:0".parse()?] {
        ends.push(Ends::connect(address).await?);
    }
    // In turns, so that what else the machine does is in both; best of each.
    let mut best = [[Duration::MAX; 3]; 2];
    for _ in 0..TURNS {
        for (ends, best) in ends.iter_mut().zip(&mut best) {
            for (best, (bytes, count, window)) in best.iter_mut().zip([
                (1000, TRIPS, 1),
                (1000, 20 * TRIPS, WINDOW),
                (1 << 20, 200, 8),
            ]) {
                *best = (*best).min(ends.echo(bytes, count, window).await?);
            }
        }
    }
    println!("{:<6} {:>16} {:>16} {:>16}", "socket", "round trip, 1 kB", "1 kB, each way", "1 MiB");
    for (kind, [trips, small, large]) in ["ipc", "tcp"].into_iter().zip(best) {
        println!(
            "{kind:<6} {:>13.1} µs {:>14.0}/s {:>11.0} MB/s",
            trips.as_secs_f64() / TRIPS as f64 * 1e6,
            20.0 * TRIPS as f64 / small.as_secs_f64(),
            200.0 * (1 << 20) as f64 / large.as_secs_f64() / 1e6
        );
    }
    Ok(())
}

/// A core and a frontend that have found each other. What the frontend sends, the core sends back.
struct Ends {
    frontend: FrontendEndpoint,
    sender: FrontendSender,
}

impl Ends {
    async fn connect(address: Address) -> anyhow::Result<Self> {
        let (bound, is_bound) = tokio::sync::oneshot::channel();
        // As a core's io thread is: its own, with its own runtime.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut core = CoreEndpoint::bind(CoreEndpointConfig::new(vec![address])).await?;
                core.set_ready(vec![Bytes::from_static(b"ready")]);
                let _ = bound.send(core.addresses()[0].clone());
                loop {
                    match core.next().await {
                        CoreEvent::Message { client, frames } => echo(&mut core, client, frames)?,
                        CoreEvent::Joined { .. } => {}
                        CoreEvent::Left { .. } => return anyhow::Ok(()),
                    }
                }
            })
        });
        let core = is_bound.await.context("the core ended at once")?;
        let config = FrontendEndpointConfig::new(CoreAt::Join(core));
        let (mut frontend, sender) = FrontendEndpoint::start(config).await?;
        match frontend.next().await {
            FrontendEvent::Up { .. } => Ok(Self { frontend, sender }),
            other => bail!("{other:?} instead of a core"),
        }
    }

    /// The time that `count` messages of `bytes` take there and back, `window` at a time.
    async fn echo(
        &mut self,
        bytes: usize,
        count: usize,
        window: usize,
    ) -> anyhow::Result<Duration> {
        let body = Bytes::from(vec![7; bytes]);
        let begin = Instant::now();
        let (mut sent, mut received) = (0, 0);
        while received < count {
            while sent < count && sent - received < window {
                self.sender.try_send(vec![Bytes::from_static(b"\0"), body.clone()])?;
                sent += 1;
            }
            match self.frontend.next().await {
                FrontendEvent::Message { .. } => received += 1,
                other => bail!("{other:?} instead of a message"),
            }
        }
        Ok(begin.elapsed())
    }
}

fn echo(core: &mut CoreEndpoint, client: ClientId, frames: Vec<Bytes>) -> anyhow::Result<()> {
    Ok(core.send(client, frames)?)
}
