//! Standard output, whose reader may go at any time.

use std::io::{ErrorKind, Write};

/// Writes all of `bytes` at once; `false` once nobody reads any more (`| head`), which is no
/// error: the command just has nothing left to do.
///
/// # Errors
/// Any other failure, a full disk for one.
pub fn write(bytes: &[u8]) -> anyhow::Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true).map_err(|e| anyhow::anyhow!("cannot write the output: {e}")),
    }
}

/// [`write`] of one line.
///
/// # Errors
/// As there.
pub fn line(text: &str) -> anyhow::Result<bool> {
    write(format!("{text}\n").as_bytes())
}
