//! Binding: stale files, permissions, and the port the system chose.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, fchmod};
use socket2::{Domain, SockAddr, Socket, Type};

use super::{Address, TransportError};

const BACKLOG: i32 = 1024;

/// A bound listener, its address as peers must write it, and its file, if it has one.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) listener: zeromq::Listener,
    pub(super) address: Address,
    pub(super) file: Option<SocketFile>,
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

pub(super) fn bind(address: &Address) -> Result<Bound, TransportError> {
    let failed = |source| TransportError::Bind { address: address.to_string(), source };
    match address {
        Address::Ipc(path) => {
            remove_stale(address, path)?;
            let listener = bind_unix(path).map_err(failed)?;
            let inode = std::fs::symlink_metadata(path).map_err(failed)?.ino();
            let file = Some(SocketFile { path: path.clone(), inode });
            Ok(Bound { listener: listener.into(), address: address.clone(), file })
        }
        Address::Tcp { host, port } => {
            let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
            let port = listener.local_addr().map_err(failed)?.port();
            let address = Address::Tcp { host: host.clone(), port };
            Ok(Bound { listener: listener.into(), address, file: None })
        }
    }
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
                .map_err(|source| TransportError::Bind { address: address.to_string(), source })
        }
        Err(source) => Err(TransportError::Bind { address: address.to_string(), source }),
    }
}

/// Binds with mode 0600 from the first moment on: the mode of the unbound socket, less the umask,
/// becomes that of its file.
fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)
        .map_err(|errno| std::io::Error::from_raw_os_error(errno as i32))?;
    socket.bind(&SockAddr::unix(path)?)?;
    socket.listen(BACKLOG)?;
    Ok(UnixListener::from(std::os::fd::OwnedFd::from(socket)))
}

/// The host of ours that a process at `peer` can reach: the one packets to it go out from.
pub(super) fn host_facing(peer: &Address) -> Result<String, TransportError> {
    let Address::Tcp { host, port } = peer else { return Ok("127.0.0.1".into()) };
    let failed = |source| TransportError::Resolve { address: peer.to_string(), source };
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
