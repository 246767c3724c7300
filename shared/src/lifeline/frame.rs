//! How messages lie on the lifeline: length (4 bytes, little endian, of what follows), kind
//! (1 byte), sequence number (8 bytes, little endian), payload.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{FromChild, Health, ToChild};

/// Bytes of one message at most. The largest is a snapshot of all metrics, some 100 KiB.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

const HEAD: usize = 1 + 8;

const HEALTH: u8 = 1;
const REPORT: u8 = 2;
const SUM_WANTED: u8 = 3;
/// Bits of a health's first byte.
const READY: u8 = 1;
const AWAITS_CORE: u8 = 2;
const ASK_REPORT: u8 = 16;
const SUM: u8 = 17;

/// Bytes that are no message of a lifeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LifelineError {
    /// More than [`MESSAGE_BYTES_MAX`], or too few to be a message.
    #[error("a message of {0} bytes; between {HEAD} and {MESSAGE_BYTES_MAX} can be one")]
    Length(usize),
    /// Not one of the kinds that travel this way.
    #[error("a message of the unknown kind {0} with {1} bytes")]
    Kind(u8, usize),
}

/// Cuts a stream of bytes into messages.
#[derive(Debug, Default)]
pub struct Decoder(BytesMut);

impl Decoder {
    /// Takes what was read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next message a supervisor sent; `None` until all of it is there.
    ///
    /// # Errors
    /// When the bytes are none; nothing after them can be read either.
    pub fn next_to_child(&mut self) -> Result<Option<ToChild>, LifelineError> {
        let Some((kind, seq, payload)) = self.next()? else { return Ok(None) };
        match kind {
            ASK_REPORT => Ok(Some(ToChild::AskReport { seq })),
            SUM => Ok(Some(ToChild::Sum { seq, sum: payload })),
            _ => Err(LifelineError::Kind(kind, payload.len())),
        }
    }

    /// The next message a child sent; `None` until all of it is there.
    ///
    /// # Errors
    /// When the bytes are none; nothing after them can be read either.
    pub fn next_from_child(&mut self) -> Result<Option<FromChild>, LifelineError> {
        let Some((kind, seq, mut payload)) = self.next()? else { return Ok(None) };
        match kind {
            HEALTH if payload.len() == 9 => Ok(Some(FromChild::Health(Health {
                ready: payload[0] & READY != 0,
                awaits_core: payload.get_u8() & AWAITS_CORE != 0,
                progress: payload.get_u64_le(),
            }))),
            REPORT => Ok(Some(FromChild::Report { seq, snapshot: payload })),
            SUM_WANTED => Ok(Some(FromChild::SumWanted { seq })),
            _ => Err(LifelineError::Kind(kind, payload.len())),
        }
    }

    fn next(&mut self) -> Result<Option<(u8, u64, Bytes)>, LifelineError> {
        let Some(length) = self.0.first_chunk().map(|bytes| u32::from_le_bytes(*bytes) as usize)
        else {
            return Ok(None);
        };
        if !(HEAD..=MESSAGE_BYTES_MAX).contains(&length) {
            return Err(LifelineError::Length(length));
        }
        if self.0.len() < 4 + length {
            return Ok(None);
        }
        self.0.advance(4);
        let mut message = self.0.split_to(length);
        let (kind, seq) = (message.get_u8(), message.get_u64_le());
        Ok(Some((kind, seq, message.freeze())))
    }
}

fn encode(kind: u8, seq: u64, payload: &[u8]) -> Bytes {
    let length = HEAD + payload.len();
    let mut bytes = BytesMut::with_capacity(4 + length);
    bytes.put_u32_le(u32::try_from(length).expect("a message is far below 4 GiB"));
    bytes.put_u8(kind);
    bytes.put_u64_le(seq);
    bytes.put_slice(payload);
    bytes.freeze()
}

impl FromChild {
    /// The bytes that travel.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Health(health) => {
                let bit = |set, bit| if set { bit } else { 0 };
                let bits = bit(health.ready, READY) | bit(health.awaits_core, AWAITS_CORE);
                let mut payload = [bits; 9];
                payload[1..].copy_from_slice(&health.progress.to_le_bytes());
                encode(HEALTH, 0, &payload)
            }
            Self::Report { seq, snapshot } => encode(REPORT, *seq, snapshot),
            Self::SumWanted { seq } => encode(SUM_WANTED, *seq, &[]),
        }
    }
}

impl ToChild {
    /// The bytes that travel.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        match self {
            Self::AskReport { seq } => encode(ASK_REPORT, *seq, &[]),
            Self::Sum { seq, sum } => encode(SUM, *seq, sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_any_cut() {
        let sent = [
            FromChild::Health(Health { ready: true, awaits_core: false, progress: u64::MAX - 1 }),
            FromChild::Health(Health { ready: false, awaits_core: true, progress: 1 }),
            FromChild::Report { seq: 7, snapshot: Bytes::from_static(b"{}") },
            FromChild::SumWanted { seq: 8 },
            FromChild::Health(Health::default()),
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(|message| message.encode()).collect();
        for step in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut received = Vec::new();
            for chunk in bytes.chunks(step) {
                decoder.push(chunk);
                while let Some(message) = decoder.next_from_child().unwrap() {
                    received.push(message);
                }
            }
            assert_eq!(received, sent);
        }
        let down =
            [ToChild::AskReport { seq: 3 }, ToChild::Sum { seq: 4, sum: Bytes::from_static(b"x") }];
        let mut decoder = Decoder::default();
        down.iter().for_each(|message| decoder.push(&message.encode()));
        for message in down {
            assert_eq!(decoder.next_to_child(), Ok(Some(message)));
        }
    }

    #[test]
    fn what_is_no_message_is_an_error_before_it_is_read() {
        for (bytes, error) in [
            (&[0xff; 4][..], LifelineError::Length(u32::MAX as usize)),
            (&[8, 0, 0, 0], LifelineError::Length(8)),
            (&[9, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0], LifelineError::Kind(99, 0)),
            // A health of no size that health has.
            (&[9, 0, 0, 0, HEALTH, 0, 0, 0, 0, 0, 0, 0, 0], LifelineError::Kind(HEALTH, 0)),
        ] {
            let mut decoder = Decoder::default();
            decoder.push(bytes);
            assert_eq!(decoder.next_from_child(), Err(error));
        }
    }
}
