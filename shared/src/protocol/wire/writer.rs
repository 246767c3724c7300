//! Writing msgpack into one buffer, and large tensors into frames beside it.

use bytes::Bytes;
use rmp::encode::{self, ByteBuf};

/// Tensors of at least this many bytes travel in a frame of their own, as vLLM's do.
const AUX_BYTES_MIN: usize = 256;

/// The ext type of a tensor's raw bytes.
pub(in crate::protocol) const EXT_RAW: i8 = 3;

/// The ext types of pickled objects: they run code where they are loaded, so none is sent or taken.
pub(in crate::protocol) const EXT_PICKLES: [i8; 2] = [1, 2];

/// Collects one message: the payload, and the auxiliary frames its tensors refer to.
#[derive(Debug)]
pub(in crate::protocol) struct Writer {
    payload: ByteBuf,
    aux: Vec<Bytes>,
}

/// Why no write fails: the buffer is memory, and memory that ends aborts the process.
const MEMORY: &str = "a buffer in memory takes every write";

impl Writer {
    pub(in crate::protocol) fn with_capacity(bytes: usize) -> Self {
        Self { payload: ByteBuf::with_capacity(bytes), aux: Vec::new() }
    }

    /// The frames: `first` if any, the payload, the auxiliary frames.
    pub(in crate::protocol) fn into_frames(self, first: Option<Bytes>) -> Vec<Bytes> {
        let mut frames = Vec::with_capacity(2 + self.aux.len());
        frames.extend(first);
        frames.push(self.payload.into_vec().into());
        frames.extend(self.aux);
        frames
    }

    /// The payload of a message that holds no tensor.
    pub(in crate::protocol) fn into_payload(self) -> Bytes {
        debug_assert!(self.aux.is_empty(), "a tensor's frame would be lost");
        self.payload.into_vec().into()
    }

    pub(in crate::protocol) fn nil(&mut self) {
        encode::write_nil(&mut self.payload).expect(MEMORY);
    }

    pub(in crate::protocol) fn bool(&mut self, value: bool) {
        encode::write_bool(&mut self.payload, value).expect(MEMORY);
    }

    pub(in crate::protocol) fn unsigned(&mut self, value: u64) {
        encode::write_uint(&mut self.payload, value).expect(MEMORY);
    }

    pub(in crate::protocol) fn signed(&mut self, value: i64) {
        encode::write_sint(&mut self.payload, value).expect(MEMORY);
    }

    pub(in crate::protocol) fn float(&mut self, value: f64) {
        encode::write_f64(&mut self.payload, value).expect(MEMORY);
    }

    pub(in crate::protocol) fn text(&mut self, value: &str) {
        encode::write_str_len(&mut self.payload, length(value.len())).expect(MEMORY);
        self.raw(value.as_bytes());
    }

    pub(in crate::protocol) fn bin(&mut self, value: &[u8]) {
        encode::write_bin_len(&mut self.payload, length(value.len())).expect(MEMORY);
        self.raw(value);
    }

    pub(in crate::protocol) fn ext(&mut self, kind: i8, value: &[u8]) {
        encode::write_ext_meta(&mut self.payload, length(value.len()), kind).expect(MEMORY);
        self.raw(value);
    }

    pub(in crate::protocol) fn array(&mut self, len: usize) {
        encode::write_array_len(&mut self.payload, length(len)).expect(MEMORY);
    }

    pub(in crate::protocol) fn map(&mut self, len: usize) {
        encode::write_map_len(&mut self.payload, length(len)).expect(MEMORY);
    }

    /// `[dtype, shape, data]`, the data inline where it is small or a scalar.
    pub(in crate::protocol) fn tensor(&mut self, dtype: &str, shape: &[usize], data: Bytes) {
        self.array(3);
        self.text(dtype);
        self.array(shape.len());
        for extent in shape {
            self.unsigned(*extent as u64);
        }
        if data.len() < AUX_BYTES_MIN || shape.is_empty() {
            self.ext(EXT_RAW, &data);
        } else {
            self.aux.push(data);
            self.unsigned(self.aux.len() as u64);
        }
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.payload.as_mut_vec().extend_from_slice(bytes);
    }
}

fn length(len: usize) -> u32 {
    u32::try_from(len).expect("a message is far smaller than 4 GiB")
}
