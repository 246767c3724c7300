//! vLLM's start-up messages.

use bytes::Bytes;

use super::wire::{Reader, Result, Wire, Writer};
use super::{DecodeError, DecodeErrorKind as Kind, Value};

/// Engine → handshake socket.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineHello {
    /// HELLO or READY.
    pub status: HelloStatus,
    /// Started by the same supervisor.
    pub local: bool,
    /// Without frontends of its own.
    pub headless: bool,
}

/// Where an engine is in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloStatus {
    /// First contact.
    Hello,
    /// Loaded and connected.
    Ready,
}

/// Frontend → engine: where to connect.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct HandshakeInit {
    /// Input addresses, by client index.
    pub inputs: Vec<String>,
    /// Output addresses, by client index.
    pub outputs: Vec<String>,
    /// Data parallel only.
    pub coordinator_input: Option<String>,
    /// Data parallel only.
    pub coordinator_output: Option<String>,
    /// Data parallel only.
    pub frontend_stats_publish_address: Option<String>,
    /// Empty but for MoE data parallel.
    pub parallel_config: Vec<(String, Value)>,
}

/// `EngineCoreReadyResponse`: the first frame on every input socket.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // vLLM's names.
pub struct ReadyResponse {
    pub max_model_len: u64,
    pub num_gpu_blocks: u64,
    pub block_size: u64,
    pub dp_stats_address: Option<String>,
    /// `float32`, `float16`, `bfloat16`
    pub dtype: String,
    pub vllm_version: String,
    pub world_size: u64,
    pub data_parallel_size: u64,
    pub tensor_parallel_size: u64,
    pub pipeline_parallel_size: u64,
    pub decode_context_parallel_size: u64,
    pub data_parallel_rank: u64,
    pub max_num_seqs: u64,
    pub max_num_batched_tokens: u64,
    pub instance_id: String,
    pub supports_lora: bool,
    pub max_loras: u64,
    pub kv_cache_size_tokens: Option<u64>,
    pub kv_cache_max_concurrency: Option<f64>,
    /// Every other key as it came, and those of ours (`pawl_…`): vLLM's frontends ignore them.
    pub extra: Vec<(String, Value)>,
}

impl EngineHello {
    /// The payload to send.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut w = Writer::with_capacity(64);
        w.map(3);
        w.text("status");
        w.text(match self.status {
            HelloStatus::Hello => "HELLO",
            HelloStatus::Ready => "READY",
        });
        w.text("local");
        w.bool(self.local);
        w.text("headless");
        w.bool(self.headless);
        w.into_payload()
    }

    /// Reads a payload.
    ///
    /// # Errors
    /// Anything but a map whose `status` is HELLO or READY.
    pub fn decode(payload: &[u8]) -> std::result::Result<Self, DecodeError> {
        Reader::over(payload).whole("EngineHello", |r| {
            let before = r.clone();
            let (mut status, mut local, mut headless) = (None, false, false);
            r.keys(|r, key| {
                match key {
                    "status" => {
                        let before = r.clone();
                        status = match r.text()? {
                            "HELLO" => Some(HelloStatus::Hello),
                            "READY" => Some(HelloStatus::Ready),
                            _ => return Err(before.unexpected(Kind::Range, "HELLO or READY")),
                        }
                    }
                    "local" => local = r.bool()?,
                    "headless" => headless = r.bool()?,
                    _ => r.skip()?,
                }
                Ok(())
            })?;
            let status = status.ok_or_else(|| before.unexpected(Kind::Missing, "a status"))?;
            Ok(Self { status, local, headless })
        })
    }
}

impl HandshakeInit {
    /// The payload to send.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut w = Writer::with_capacity(256);
        w.map(2);
        w.text("addresses");
        w.map(5);
        w.text("inputs");
        self.inputs.write(&mut w);
        w.text("outputs");
        self.outputs.write(&mut w);
        w.text("coordinator_input");
        self.coordinator_input.write(&mut w);
        w.text("coordinator_output");
        self.coordinator_output.write(&mut w);
        w.text("frontend_stats_publish_address");
        self.frontend_stats_publish_address.write(&mut w);
        w.text("parallel_config");
        self.parallel_config.write(&mut w);
        w.into_payload()
    }

    /// Reads a payload.
    ///
    /// # Errors
    /// Anything but a map with `addresses` that list as many inputs as outputs, one at least.
    pub fn decode(payload: &[u8]) -> std::result::Result<Self, DecodeError> {
        Reader::over(payload).whole("HandshakeInit", |r| {
            let before = r.clone();
            let mut init = Self::default();
            r.keys(|r, key| {
                match key {
                    "addresses" => r.keys(|r, key| {
                        match key {
                            "inputs" => init.inputs = Wire::read(r)?,
                            "outputs" => init.outputs = Wire::read(r)?,
                            "coordinator_input" => init.coordinator_input = Wire::read(r)?,
                            "coordinator_output" => init.coordinator_output = Wire::read(r)?,
                            "frontend_stats_publish_address" => {
                                init.frontend_stats_publish_address = Wire::read(r)?;
                            }
                            _ => r.skip()?,
                        }
                        Ok(())
                    })?,
                    "parallel_config" => init.parallel_config = Wire::read(r)?,
                    _ => r.skip()?,
                }
                Ok(())
            })?;
            if init.inputs.is_empty() || init.inputs.len() != init.outputs.len() {
                let expected = "addresses with as many inputs as outputs";
                return Err(before.unexpected(Kind::Missing, expected));
            }
            Ok(init)
        })
    }
}

/// Lists the keys of the ready response: those that vLLM's frontends cannot do without, and those
/// that have a field but may be left away.
macro_rules! ready_response {
    (required $($required:ident),+; optional $($optional:ident),+ $(,)?) => {
        impl ReadyResponse {
            const KEYS: &'static [&'static str] =
                &[$(stringify!($required),)+ $(stringify!($optional)),+];

            fn write_fields(&self, w: &mut Writer) {
                $(w.text(stringify!($required)); self.$required.write(w);)+
                $(w.text(stringify!($optional)); self.$optional.write(w);)+
            }

            fn read(r: &mut Reader<'_>) -> Result<Self> {
                $(let mut $required = None;)+
                $(let mut $optional = None;)+
                let mut extra = Vec::new();
                r.keys(|r, key| {
                    match key {
                        $(stringify!($required) => $required = Some(Wire::read(r)?),)+
                        $(stringify!($optional) => $optional = Wire::read(r)?,)+
                        _ => {
                            r.charge(size_of::<(String, Value)>() + key.len())?;
                            extra.push((key.to_owned(), Value::read(r)?));
                        }
                    }
                    Ok(())
                })?;
                Ok(Self {
                    $($required: $required.ok_or_else(|| {
                        DecodeError::new(Kind::Missing, "missing, and required")
                            .in_field(stringify!($required))
                    })?,)+
                    $($optional,)+
                    extra,
                })
            }
        }
    };
}

ready_response! {
    required max_model_len, num_gpu_blocks, block_size, dtype, vllm_version, world_size,
        data_parallel_size, tensor_parallel_size, pipeline_parallel_size,
        decode_context_parallel_size, data_parallel_rank, max_num_seqs, max_num_batched_tokens,
        instance_id, supports_lora, max_loras;
    optional dp_stats_address, kv_cache_size_tokens, kv_cache_max_concurrency,
}

impl ReadyResponse {
    /// vLLM's other keys with what they say where Pawl has no such feature. All keys are sent
    /// always; one of the same name in `extra` takes the place.
    fn other_keys() -> [(&'static str, Value); 9] {
        [
            ("mamba_block_size", Value::Nil),
            ("kv_events_config", Value::Nil),
            ("weight_transfer_backend", Value::Nil),
            ("enable_sleep_mode", Value::Bool(false)),
            ("supports_draft_weight_updates", Value::Bool(false)),
            ("effective_attention_block_size", Value::Nil),
            ("coord_store_port", Value::Integer(0)),
            ("coordinator_input_address", Value::Nil),
            ("coordinator_output_address", Value::Nil),
        ]
    }

    /// The payload to send. `supports_lora` is sent as `max_loras > 0`, whatever the field says:
    /// vLLM's Rust frontend refuses an engine whose two answers differ.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let consistent = Self { supports_lora: self.max_loras > 0, ..self.clone() };
        let own = |key: &str| Self::KEYS.contains(&key);
        let extra: Vec<_> = self.extra.iter().filter(|(key, _)| !own(key)).collect();
        let mut others = Vec::from(Self::other_keys());
        others.retain(|(key, _)| extra.iter().all(|(name, _)| name != key));
        let mut w = Writer::with_capacity(1024);
        w.map(Self::KEYS.len() + others.len() + extra.len());
        consistent.write_fields(&mut w);
        for (key, value) in &others {
            w.text(key);
            value.write(&mut w);
        }
        for (key, value) in extra {
            w.text(key);
            value.write(&mut w);
        }
        w.into_payload()
    }

    /// Reads a payload.
    ///
    /// # Errors
    /// Anything but a map with the keys that vLLM's frontends cannot do without.
    pub fn decode(payload: &[u8]) -> std::result::Result<Self, DecodeError> {
        Reader::over(payload).whole("EngineCoreReadyResponse", Self::read)
    }
}
