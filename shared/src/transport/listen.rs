//! Binding: stale files, permissions, and the port the system chose.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, fchmod};
use socket2::{Domain, SockAddr, Socket, Type};

use super::guard::{Gate, Limits};
use super::{Address, TransportError};

const BACKLOG: i32 = 1024;

/// A bound listener, its address as peers must write it, and its file, if it has one.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) listener: zeromq::Listener,
    pub(super) address: Address,
    pub(super) file: Option<SocketFile>,
    /// What stands before the listener, if the address is of tcp.
    pub(super) gate: Option<Gate>,
}

/// The file of a unix socket: removed when dropped, unless another socket has taken its place.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Binds. Over tcp at most `connections_max` peers, whose messages are held to `limits`.
pub(super) fn bind(
    address: &Address,
    limits: Limits,
    connections_max: usize,
) -> Result<Bound, TransportError> {
    let failed = |cause| TransportError::Bind { address: address.to_string(), cause };
    match address {
        Address::Ipc(path) => {
            guard_folder(path)?;
            remove_stale(address, path)?;
            let listener = bind_unix(path).map_err(failed)?;
            let inode = std::fs::symlink_metadata(path).map_err(failed)?.ino();
            let file = Some(SocketFile { path: path.clone(), inode });
            Ok(Bound { listener: listener.into(), address: address.clone(), file, gate: None })
        }
        Address::Tcp { host, port } => {
            let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
            let port = listener.local_addr().map_err(failed)?.port();
            let address = Address::Tcp { host: host.clone(), port };
            let (inside, gate) = Gate::new(listener, limits, connections_max)?;
            Ok(Bound { listener: inside.into(), address, file: None, gate: Some(gate) })
        }
    }
}

/// The folder of a socket: made, if it is missing, for its owner alone. The socket's own mode keeps
/// others from using it; the folder must keep them from putting another in its place.
fn guard_folder(socket: &Path) -> Result<(), TransportError> {
    const STICKY: u32 = 0o1000;
    let folder = match socket.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let failed = |cause| TransportError::SocketDir { path: folder.to_owned(), cause };
    let metadata = match std::fs::metadata(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return std::fs::DirBuilder::new().mode(0o700).create(folder).map_err(failed);
        }
        found => found.map_err(failed)?,
    };
    let mode = metadata.mode() & 0o7777;
    if mode & 0o022 != 0 && mode & STICKY == 0 {
        return Err(TransportError::OpenFolder { path: folder.to_owned(), mode });
    }
    if mode & 0o077 != 0 {
        tracing::warn!(
            "others can enter the folder {} (mode {mode:04o}); its socket is closed to them, but \
             0700 is safer",
            folder.display()
        );
    }
    Ok(())
}

/// A crash leaves the file behind, and then the address is "in use" for ever. Only a socket that
/// nobody answers at is removed.
fn remove_stale(address: &Address, path: &Path) -> Result<(), TransportError> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let in_use = |why| TransportError::InUse { address: address.to_string(), why };
    if !metadata.file_type().is_socket() {
        return Err(in_use(
            "a file that is no socket lies there: remove it or choose another path",
        ));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(in_use("another process listens there")),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            tracing::info!(%address, "removing the socket of a process that is gone");
            std::fs::remove_file(path)
                .map_err(|cause| TransportError::Bind { address: address.to_string(), cause })
        }
        Err(cause) => Err(TransportError::Bind { address: address.to_string(), cause }),
    }
}

/// Binds with mode 0600 from the first moment on: the mode of the unbound socket, less the umask,
/// becomes that of its file.
pub(super) fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)
        .map_err(|errno| std::io::Error::from_raw_os_error(errno as i32))?;
    socket.bind(&SockAddr::unix(path)?)?;
    socket.listen(BACKLOG)?;
    Ok(UnixListener::from(std::os::fd::OwnedFd::from(socket)))
}

/// A port of `host` that is kept free for listeners of this user: bound, and not listening, so
/// nobody connects to it.
pub(super) fn reserve(host: &str) -> Result<(Socket, u16), TransportError> {
    let bind = || {
        let address = (host, 0).to_socket_addrs()?.next();
        let address = address.ok_or(std::io::ErrorKind::NotFound)?;
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        // As a listener's: two such sockets may have one port as long as at most one listens.
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        let bound = socket.local_addr()?.as_socket().ok_or(std::io::ErrorKind::Unsupported)?;
        Ok((socket, bound.port()))
    };
    bind().map_err(|cause| TransportError::Bind { address: format!("tcp://{host}:0"), cause })
}

/// The host to bind where peers reach us as `advertise`, or as the one facing `peer`.
pub(super) fn host_for(advertise: Option<&str>, peer: &Address) -> Result<String, TransportError> {
    match advertise {
        Some(host) if host.contains(':') => Ok("::".to_owned()),
        Some(_) => Ok("0.0.0.0".to_owned()),
        None => host_facing(peer),
    }
}

/// The host of ours that a process at `peer` can reach: the one packets to it go out from.
fn host_facing(peer: &Address) -> Result<String, TransportError> {
    let Address::Tcp { host, port } = peer else { return Ok("127.0.0.1".into()) };
    let failed = |cause| TransportError::Resolve { address: peer.to_string(), cause };
    let peer = (host.as_str(), *port).to_socket_addrs().map_err(failed)?.next();
    let Some(peer) = peer else {
        return Err(failed(std::io::Error::from(std::io::ErrorKind::NotFound)));
    };
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket sends nothing, it only picks the route.
    let probe = UdpSocket::bind((any, 0)).map_err(failed)?;
    probe.connect(peer).map_err(failed)?;
    Ok(probe.local_addr().map_err(failed)?.ip().to_string())
}
