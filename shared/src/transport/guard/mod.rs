//! The header check on tcp: every byte of a peer passes here before the socket crate sees it.
//!
//! The crate reserves whatever length a frame's header announces, and the process aborts when that
//! is more than there is; it has no bound on the frames of a message, none on the time a handshake
//! takes, and a peer that shows another's identity takes its place. It takes no stream of ours,
//! only listeners and addresses. So a tcp connection ends here: its bytes are checked
//! ([`StreamCheck`]) and copied to a unix socket in a folder of our own, which is all that the
//! crate ever has. What the crate writes is copied back unchecked.
//!
//! A connection's tasks run on the runtime of the socket it belongs to, so they end with it, count
//! among what is still to be written ([`super::thread::writers_done`]), and a slow peer is felt by
//! the crate as before: two buffers of [`BUFFER_BYTES`] are all that lies between.

mod stream;

use std::collections::HashSet;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use zeromq::Socket;

pub(super) use stream::Limits;
use stream::StreamCheck;
pub use stream::Violation;

use super::listen::bind_unix;
use super::{Address, SocketDir, TransportError};

/// What lies between a peer and the crate, each way.
const BUFFER_BYTES: usize = 64 << 10;
/// Connections of one listener that have not shaken hands; a newcomer beyond is closed at once.
const HANDSHAKES_MAX: usize = 64;
/// Connections to a control or handshake socket, of which there are as many as peers and some that
/// come and go; a newcomer beyond is closed at once.
pub(super) const CONTROL_CONNECTIONS_MAX: usize = 512;
/// Between two tries to accept when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Between two tries to connect where nobody listens.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

static VIOLATIONS: [AtomicU64; Violation::ALL.len()] =
    [const { AtomicU64::new(0) }; Violation::ALL.len()];

/// How many connections this process has closed, by what their peer did.
#[must_use]
pub fn violations() -> [(Violation, u64); Violation::ALL.len()] {
    Violation::ALL.map(|kind| (kind, VIOLATIONS[kind as usize].load(Ordering::Relaxed)))
}

fn count(violation: Violation, peer: SocketAddr) {
    let count = VIOLATIONS[violation as usize].fetch_add(1, Ordering::Relaxed) + 1;
    // A peer that does nothing else must not fill the log.
    if count.is_power_of_two() {
        let kind = violation.as_str();
        tracing::warn!(%peer, kind, count, "a peer's connection was closed: {violation}");
    }
}

/// A tcp listener that the crate does not have. It has the unix listener behind it.
#[derive(Debug)]
pub(super) struct Gate {
    outside: std::net::TcpListener,
    inside: PathBuf,
    folder: SocketDir,
    limits: Limits,
    connections_max: usize,
}

impl Gate {
    /// Returns what to hand to the crate, too.
    pub(super) fn new(
        outside: std::net::TcpListener,
        limits: Limits,
        connections_max: usize,
    ) -> Result<(UnixListener, Self), TransportError> {
        let folder = SocketDir::create_default()?;
        let inside = folder.path().join("tcp");
        let listener = bind_unix(&inside)
            .map_err(|cause| TransportError::SocketDir { path: inside.clone(), cause })?;
        Ok((listener, Self { outside, inside, folder, limits, connections_max }))
    }

    /// Begins to accept, on the runtime of the crate's socket.
    pub(super) fn open(self) -> std::io::Result<OpenGate> {
        let Self { outside, inside, folder, limits, connections_max } = self;
        outside.set_nonblocking(true)?;
        let outside = TcpListener::from_std(outside)?;
        let room = Room { inside, limits, connections_max, places: Mutex::default() };
        let accepting = tokio::spawn(accept(outside, Arc::new(room))).abort_handle();
        Ok(OpenGate { accepting, _folder: folder })
    }
}

/// Accepts until dropped. Connections that stand go on.
#[derive(Debug)]
pub(super) struct OpenGate {
    accepting: AbortHandle,
    _folder: SocketDir,
}

impl Drop for OpenGate {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// What the connections of one listener share.
struct Room {
    inside: PathBuf,
    limits: Limits,
    connections_max: usize,
    places: Mutex<Places>,
}

/// Who is connected.
#[derive(Default)]
struct Places {
    // At most the room's connections_max; of those, HANDSHAKES_MAX have not shaken hands.
    connections: usize,
    handshakes: usize,
    // One per connection at most.
    identities: HashSet<Vec<u8>>,
}

impl Room {
    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().expect("no code panics while it holds the places")
    }

    fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut places = self.places();
        if places.connections >= self.connections_max || places.handshakes >= HANDSHAKES_MAX {
            return None;
        }
        places.connections += 1;
        places.handshakes += 1;
        Some(Place { room: Arc::clone(self), identity: None })
    }
}

/// One connection's place; given back when dropped.
struct Place {
    room: Arc<Room>,
    /// Once it has shaken hands.
    identity: Option<Vec<u8>>,
}

impl Place {
    fn shaken(&mut self, identity: Vec<u8>) -> Result<(), Violation> {
        let mut places = self.room.places();
        // Without an identity the crate makes one up.
        if !identity.is_empty() && !places.identities.insert(identity.clone()) {
            return Err(Violation::Identity);
        }
        places.handshakes -= 1;
        drop(places);
        self.identity = Some(identity);
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.room.places();
        places.connections -= 1;
        match &self.identity {
            Some(identity) => {
                places.identities.remove(identity);
            }
            None => places.handshakes -= 1,
        }
    }
}

async fn accept(outside: TcpListener, room: Arc<Room>) {
    loop {
        match outside.accept().await {
            Ok((stream, peer)) => match room.enter() {
                Some(place) => {
                    tokio::spawn(serve(stream, peer, place));
                }
                None => count(Violation::Connections, peer),
            },
            // Mostly no descriptors are left, and trying again at once would only spin.
            Err(error) => {
                tracing::debug!(%error, "accepting failed, trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(outside: TcpStream, peer: SocketAddr, place: Place) {
    let limits = place.room.limits;
    match UnixStream::connect(&place.room.inside).await {
        Ok(inside) => relay(outside, inside, peer, limits, Some(place)).await,
        Err(error) => tracing::debug!(%peer, %error, "a connection came to nothing"),
    }
}

/// Connects a socket of the crate's to `address`, over tcp through a check of what comes back.
/// Waits at most `patience` for somebody to listen there.
pub(super) async fn connect(
    socket: &mut impl Socket,
    address: &Address,
    limits: Limits,
    patience: Duration,
) -> std::io::Result<()> {
    let Address::Tcp { host, port } = address else {
        return socket.connect(&address.to_string()).await.map_err(Error::other);
    };
    let outside = tokio::time::timeout(patience, dial(host, *port)).await;
    let outside = outside.map_err(|_| Error::from(ErrorKind::TimedOut))??;
    let peer = outside.peer_addr()?;
    let folder = SocketDir::create_default().map_err(Error::other)?;
    let inside = folder.address("tcp").map_err(Error::other)?;
    let listener = bind_unix(&folder.path().join("tcp"))?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let relaying = tokio::spawn(async move {
        match listener.accept().await {
            Ok((inside, _)) => relay(outside, inside, peer, limits, None).await,
            Err(error) => tracing::debug!(%peer, %error, "a connection came to nothing"),
        }
    });
    let connected = socket.connect(&inside.to_string()).await.map_err(Error::other);
    if connected.is_err() {
        relaying.abort();
    }
    connected
}

/// One that listens in a moment is waited for; the caller says how long.
async fn dial(host: &str, port: u16) -> std::io::Result<TcpStream> {
    loop {
        match TcpStream::connect((host, port)).await {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
            connected => return connected,
        }
    }
}

/// Copies both ways until one side has closed or the peer has broken a rule; then closes both.
async fn relay(
    mut outside: TcpStream,
    mut inside: UnixStream,
    peer: SocketAddr,
    limits: Limits,
    mut place: Option<Place>,
) {
    // Tokens are small writes, and each is wanted at once.
    if let Err(error) = outside.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY");
    }
    let (from_peer, to_peer) = outside.split();
    let (from_crate, to_crate) = inside.split();
    let deadline = Instant::now() + limits.handshake;
    let check = StreamCheck::new(limits);
    let ended = tokio::select! {
        ended = let_in(from_peer, to_crate, check, deadline, place.as_mut()) => ended,
        // All that the crate had to say is written before the connection is closed.
        () = let_out(from_crate, to_peer) => Ok(()),
    };
    if let Err(violation) = ended {
        count(violation, peer);
    }
}

/// From the peer to the crate, checked.
async fn let_in(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut check: StreamCheck,
    deadline: Instant,
    mut place: Option<&mut Place>,
) -> Result<(), Violation> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = if check.is_ready() {
            from.read(&mut buffer).await
        } else {
            let read = tokio::time::timeout_at(deadline, from.read(&mut buffer)).await;
            read.map_err(|_| Violation::HandshakeTime)?
        };
        let Ok(bytes @ 1..) = read else { return Ok(()) };
        let bytes = &buffer[..bytes];
        if let (Some(identity), Some(place)) = (check.take(bytes)?, place.as_deref_mut()) {
            place.shaken(identity)?;
        }
        if to.write_all(bytes).await.is_err() {
            return Ok(());
        }
    }
}

/// From the crate to the peer.
async fn let_out(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(bytes @ 1..) = from.read(&mut buffer).await {
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
    }
}
