//! Tests over all messages: one of each ([`samples`]), bytes that vLLM wrote ([`golden`]), any
//! values ([`random`]), and bytes that nobody should have written ([`damage`], [`mistakes`]).

mod damage;
mod golden;
mod mistakes;
mod random;
mod samples;
mod snapshots;

use bytes::Bytes;

/// Bytes from hex digits; spaces are for the reader.
fn unhex(text: &str) -> Bytes {
    let digits = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8);
    let digits: Vec<u8> = digits.collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Hex digits from bytes.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
