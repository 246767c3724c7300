//! Where a socket is: `ipc://PATH` or `tcp://HOST:PORT`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::TransportError;

/// The kernel's limit on the path of a unix socket, in bytes.
pub const IPC_PATH_BYTES_MAX: usize = 107;

/// An address of the wire.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A unix socket.
    Ipc(PathBuf),
    /// TCP. IPv6 hosts are kept without brackets.
    Tcp {
        /// Name or number.
        host: String,
        /// 0 lets the system choose, when bound.
        port: u16,
    },
}

impl Address {
    /// A unix socket at `path`, if the kernel takes such a path.
    pub fn ipc(path: impl Into<PathBuf>) -> Result<Self, TransportError> {
        let path = path.into();
        let bytes = path.as_os_str().len();
        if bytes > IPC_PATH_BYTES_MAX {
            return Err(TransportError::PathTooLong { path, bytes });
        }
        Ok(Self::Ipc(path))
    }

    /// Whether only this machine can reach it.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Ipc(_) => true,
            Self::Tcp { host, .. } => {
                host == "localhost"
                    || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }
}

impl FromStr for Address {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = |why| TransportError::BadAddress { address: text.to_owned(), why };
        if let Some(path) = text.strip_prefix("ipc://") {
            return match path {
                "" | "*" => Err(bad("name the file of the socket")),
                _ if path.starts_with('@') => Err(bad("abstract sockets are not supported")),
                _ => Self::ipc(path),
            };
        }
        let Some(rest) = text.strip_prefix("tcp://") else {
            return Err(bad("write ipc://PATH or tcp://HOST:PORT"));
        };
        let Some((host, port)) = rest.rsplit_once(':') else {
            return Err(bad("the port is missing: write tcp://HOST:PORT"));
        };
        let Ok(port) = port.parse::<u16>() else {
            return Err(bad("the port is a number from 0 to 65535"));
        };
        let unbracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match unbracketed {
            Some(inner) => inner,
            None if host.contains(':') => {
                return Err(bad("write an IPv6 host in brackets: tcp://[::1]:PORT"));
            }
            None => host,
        };
        match host {
            "" => Err(bad("the host is missing: write tcp://HOST:PORT")),
            // What ZeroMQ users write for "all interfaces".
            "*" => Ok(Self::Tcp { host: "0.0.0.0".into(), port }),
            _ => Ok(Self::Tcp { host: host.into(), port }),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
        }
    }
}
