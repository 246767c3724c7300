//! A copy of one message between a core and a client, as a tap sees it and a recording keeps it.

use bytes::Bytes;

use crate::protocol::{DecodeError, DecodeErrorKind, Value, decode_value, encode_value};

/// Which way a message went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Client → core: ADD, ABORT, UTILITY.
    ToCore,
    /// Core → client: `EngineCoreOutputs`.
    ToClient,
}

/// One message, whole, with where and when.
#[derive(Clone, Debug, PartialEq)]
pub struct TapRecord {
    /// The core's monotonic clock when the message passed, in seconds.
    pub at: f64,
    /// The client's index.
    pub client: u32,
    /// Which way it went.
    pub direction: Direction,
    /// Its frames, undecoded.
    pub frames: Vec<Bytes>,
    /// Messages this tap has missed so far, since it read too slowly.
    pub missed: u64,
}

impl TapRecord {
    /// The record as one msgpack map.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let frames = self.frames.iter().map(|f| Value::Bytes(f.to_vec())).collect();
        let direction = match self.direction {
            Direction::ToCore => "to_core",
            Direction::ToClient => "to_client",
        };
        encode_value(&Value::map([
            ("at", Value::Float(self.at)),
            ("client", Value::Integer(i128::from(self.client))),
            ("direction", Value::Text(direction.into())),
            ("missed", Value::Integer(i128::from(self.missed))),
            ("frames", Value::Array(frames)),
        ]))
    }

    /// The record in `bytes`.
    ///
    /// # Errors
    /// When `bytes` is no record.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let value = decode_value(bytes)?;
        Self::from_value(&value).ok_or_else(|| DecodeError {
            kind: DecodeErrorKind::Type,
            message: "a tap record is a map of at, client, direction, missed, frames".into(),
        })
    }

    fn from_value(value: &Value) -> Option<Self> {
        let direction = match value.get("direction")?.as_str()? {
            "to_core" => Direction::ToCore,
            "to_client" => Direction::ToClient,
            _ => return None,
        };
        let frames = value.get("frames")?.as_array()?.iter();
        let frames: Option<Vec<Bytes>> =
            frames.map(|f| f.as_bytes().map(Bytes::copy_from_slice)).collect();
        Some(Self {
            at: value.get("at")?.as_f64()?,
            client: u32::try_from(value.get("client")?.as_u64()?).ok()?,
            direction,
            frames: frames?,
            missed: value.get("missed")?.as_u64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_went() {
        let record = TapRecord {
            at: 12.5,
            client: 3,
            direction: Direction::ToClient,
            frames: vec![Bytes::from_static(b"\x90"), Bytes::new()],
            missed: 7,
        };
        assert_eq!(TapRecord::decode(&record.encode()).unwrap(), record);
        for end in 0..record.encode().len() {
            TapRecord::decode(&record.encode()[..end]).unwrap_err();
        }
    }
}
