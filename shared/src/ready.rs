//! Telling whoever started this process that it is ready, as systemd's `Type=notify` has it: the
//! datagram `READY=1` to the socket that the variable `NOTIFY_SOCKET` names.

use std::os::unix::net::UnixDatagram;

/// The variable that names the socket.
pub const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";

/// What is sent.
pub const READY: &[u8] = b"READY=1";

/// Tells it, if anybody wants to know. A socket that nobody reads from any more holds up nothing.
pub fn tell() {
    let Some(path) = std::env::var_os(SOCKET_VARIABLE) else { return };
    let told = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(READY, &path)
    });
    if let Err(error) = told {
        tracing::debug!("nobody at {path:?} hears that this process is ready: {error}");
    }
}
