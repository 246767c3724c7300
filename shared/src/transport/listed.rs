//! Pairs of addresses that are told to a core once for all, and bound again and again: each belongs
//! to one place among several frontends, whichever process has it.

use std::path::PathBuf;

use bytes::Bytes;
use socket2::Socket;

use super::listen;
use super::{Address, SocketDir, TransportError};

/// One of the pairs, for the frontend that has its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPair {
    /// Which of the pairs in the list.
    pub client_index: u32,
    /// Of the ROUTER that requests go out of.
    pub input: Address,
    /// Of the PULL that outputs come in by.
    pub output: Address,
    /// A file that all who are listed share: the core's last ready response is kept there for a
    /// process that takes the place of another, to whom vLLM's core does not say it again.
    pub ready_file: PathBuf,
}

impl ListedPair {
    /// The ready response that was kept, if any was.
    pub(super) fn kept_ready(&self) -> Option<Bytes> {
        std::fs::read(&self.ready_file).ok().map(Bytes::from)
    }

    /// Keeps a ready response: whole or not at all, since another process may read it any time.
    pub(super) fn keep_ready(&self, ready: &[u8]) {
        let draft = self.ready_file.with_extension(self.client_index.to_string());
        let kept =
            std::fs::write(&draft, ready).and_then(|()| std::fs::rename(&draft, &self.ready_file));
        if let Err(error) = kept {
            // Only one who takes our place after a crash would miss it.
            tracing::warn!(%error, "the core's ready response is not kept");
        }
    }
}

/// All the pairs.
#[derive(Debug)]
pub struct ListedPairs {
    pairs: Vec<ListedPair>,
    advertise: Option<String>,
    /// Ports stay ours while no process is bound to them.
    _reserved: Vec<Socket>,
}

impl ListedPairs {
    /// So many pairs for a core that dials `handshake`: sockets in `dir` if that is one, else ports
    /// that the system chooses, of the host `advertise` or the one that `handshake` names.
    ///
    /// # Errors
    /// When a port cannot be had or a path is too long.
    pub fn choose(
        count: u32,
        handshake: &Address,
        dir: &SocketDir,
        advertise: Option<&str>,
    ) -> Result<Self, TransportError> {
        let mut reserved = Vec::new();
        let mut address = |name: String| match handshake {
            Address::Ipc(_) => dir.address(&name),
            Address::Tcp { .. } => {
                let host = listen::host_for(advertise, handshake)?;
                let (socket, port) = listen::reserve(&host)?;
                reserved.push(socket);
                Ok(Address::Tcp { host, port })
            }
        };
        let pairs = (0..count)
            .map(|client_index| {
                Ok(ListedPair {
                    client_index,
                    input: address(format!("in{client_index}"))?,
                    output: address(format!("out{client_index}"))?,
                    ready_file: dir.path().join("ready"),
                })
            })
            .collect::<Result<_, TransportError>>()?;
        Ok(Self { pairs, advertise: advertise.map(str::to_owned), _reserved: reserved })
    }

    /// Each pair, as its frontend binds it.
    pub fn iter(&self) -> impl Iterator<Item = &ListedPair> {
        self.pairs.iter()
    }

    /// Inputs with their outputs as a core must write them, by client index.
    pub(super) fn as_told(&self) -> impl Iterator<Item = (String, String)> {
        let told = |address: &Address| match (address, &self.advertise) {
            (Address::Tcp { port, .. }, Some(host)) => {
                Address::Tcp { host: host.clone(), port: *port }.to_string()
            }
            (address, _) => address.to_string(),
        };
        self.pairs.iter().map(move |pair| (told(&pair.input), told(&pair.output)))
    }
}
