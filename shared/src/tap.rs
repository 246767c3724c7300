//! A copy of one message between a core and a client, as a tap sees it and a recording keeps it.
//!
//! On its way to a tap a record is a header and then the message's own frames, which are shared,
//! not copied ([`TapRecord::to_frames`]). In a file it is one map ([`TapRecord::encode`]).

use bytes::Bytes;

use crate::protocol::{DecodeError, DecodeErrorKind, Value, decode_value, encode_value};

/// What passed.
#[derive(Clone, Debug, PartialEq)]
pub enum Passed {
    /// Client → core: the frames of an ADD, ABORT or UTILITY.
    ToCore(Vec<Bytes>),
    /// Core → client: the frames of an `EngineCoreOutputs`.
    ToClient(Vec<Bytes>),
    /// The client is there. Also told of those that were there when the tap came.
    Joined(String),
    /// The client, or from its own view the core, is gone: nothing more comes of its requests.
    Left(String),
}

impl Passed {
    /// Its name in records and filters.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::ToCore(_) => "to_core",
            Self::ToClient(_) => "to_client",
            Self::Joined(_) => "joined",
            Self::Left(_) => "left",
        }
    }

    /// The frames, undecoded; none where nothing was sent.
    #[must_use]
    pub fn frames(&self) -> &[Bytes] {
        match self {
            Self::ToCore(frames) | Self::ToClient(frames) => frames,
            Self::Joined(_) | Self::Left(_) => &[],
        }
    }

    fn text(&self) -> Option<&str> {
        match self {
            Self::ToCore(_) | Self::ToClient(_) => None,
            Self::Joined(text) | Self::Left(text) => Some(text),
        }
    }
}

/// One message, whole, with where and when.
#[derive(Clone, Debug, PartialEq)]
pub struct TapRecord {
    /// The tapped process's monotonic clock when it passed, in seconds.
    pub at: f64,
    /// The client's index.
    pub client: u32,
    /// The epoch of the client's link; `None` for a frontend of vLLM's, which has none.
    pub epoch: Option<u64>,
    /// Messages this tap has missed so far, since it read too slowly.
    pub missed: u64,
    /// What passed.
    pub passed: Passed,
}

impl TapRecord {
    /// The header as one msgpack map, then the message's frames.
    #[must_use]
    pub fn to_frames(&self) -> Vec<Bytes> {
        let header = encode_value(&Value::Map(self.header()));
        std::iter::once(header).chain(self.passed.frames().iter().cloned()).collect()
    }

    /// The record that came as a header and frames.
    ///
    /// # Errors
    /// When the first frame is no header.
    pub fn from_frames(frames: &[Bytes]) -> Result<Self, DecodeError> {
        let (header, frames) = frames.split_first().ok_or_else(no_record)?;
        Self::from_parts(&decode_value(header)?, frames.to_vec()).ok_or_else(no_record)
    }

    /// The record as one msgpack map.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut map = self.header();
        let frames = self.passed.frames().iter().map(|f| Value::Bytes(f.to_vec())).collect();
        map.push(("frames".into(), Value::Array(frames)));
        encode_value(&Value::Map(map))
    }

    /// The record in `bytes`.
    ///
    /// # Errors
    /// When `bytes` is no record.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let value = decode_value(bytes)?;
        let frames = value.get("frames").and_then(Value::as_array).ok_or_else(no_record)?.iter();
        let frames: Option<Vec<Bytes>> =
            frames.map(|f| f.as_bytes().map(Bytes::copy_from_slice)).collect();
        frames.and_then(|frames| Self::from_parts(&value, frames)).ok_or_else(no_record)
    }

    fn header(&self) -> Vec<(Value, Value)> {
        let text = |text: &str| Value::Text(text.into());
        let mut map = vec![
            (text("at"), Value::Float(self.at)),
            (text("what"), text(self.passed.name())),
            (text("client"), self.client.into()),
            (text("epoch"), self.epoch.map_or(Value::Nil, Value::from)),
            (text("missed"), self.missed.into()),
        ];
        if let Some(said) = self.passed.text() {
            map.push((text("text"), text(said)));
        }
        map
    }

    fn from_parts(header: &Value, frames: Vec<Bytes>) -> Option<Self> {
        let said = || header.get("text").and_then(Value::as_str).map(str::to_owned);
        Some(Self {
            at: header.get("at")?.as_f64()?,
            client: u32::try_from(header.get("client")?.as_u64()?).ok()?,
            epoch: header.get("epoch").and_then(Value::as_u64),
            missed: header.get("missed")?.as_u64()?,
            passed: match header.get("what")?.as_str()? {
                "to_core" => Passed::ToCore(frames),
                "to_client" => Passed::ToClient(frames),
                "joined" => Passed::Joined(said()?),
                "left" => Passed::Left(said()?),
                _ => return None,
            },
        })
    }
}

fn no_record() -> DecodeError {
    DecodeError {
        kind: DecodeErrorKind::Type,
        message: "a tap record is a map of at, what, client, epoch, missed, and frames or text"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_went() {
        let frames = vec![Bytes::from_static(b"\x90"), Bytes::new()];
        for passed in [
            Passed::ToCore(frames.clone()),
            Passed::ToClient(frames),
            Passed::Joined("frontend".into()),
            Passed::Left("it left".into()),
        ] {
            for epoch in [None, Some(1 << 52)] {
                let passed = passed.clone();
                let record = TapRecord { at: 12.5, client: 3, epoch, missed: 7, passed };
                assert_eq!(TapRecord::decode(&record.encode()).unwrap(), record);
                assert_eq!(TapRecord::from_frames(&record.to_frames()).unwrap(), record);
                for end in 0..record.encode().len() {
                    TapRecord::decode(&record.encode()[..end]).unwrap_err();
                }
            }
        }
        let shared = Bytes::from_static(b"a long message");
        let passed = Passed::ToClient(vec![shared.clone()]);
        let record = TapRecord { at: 1.0, client: 0, epoch: None, missed: 0, passed };
        assert_eq!(record.to_frames()[1].as_ptr(), shared.as_ptr(), "it is copied");
        TapRecord::from_frames(&[]).unwrap_err();
        TapRecord::from_frames(&[Bytes::from_static(b"\x80")]).unwrap_err();
    }
}
