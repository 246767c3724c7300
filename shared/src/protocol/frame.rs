//! `EngineCoreOutputs`: the frames a core sends, and what a received one means.
//!
//! The nine-element array is private. The only ways to a frame that is sent are [`StepFrame::new`]
//! and [`UtilityFrame::new`]: a step's frame without its stamp and stats does not compile.

use bytes::Bytes;

use super::wire::{ArrayItems, Reader, Result, Unknown, Wire, Writer, or_nil};
use super::{
    DecodeError, DecodeErrorKind as Kind, EngineCoreOutput, RequestId, SchedulerStats,
    UtilityReply, Value,
};
use crate::clock::Stamp;

/// What one step means for one client.
///
/// ```
/// # use pawl_shared::{clock::Stamp, protocol::{EngineCoreOutput, SchedulerStats, StepFrame}};
/// fn sent(stamp: Stamp, stats: SchedulerStats, outputs: Vec<EngineCoreOutput>) -> StepFrame {
///     StepFrame::new(stamp, stats, 0, outputs)
/// }
/// ```
///
/// Without the stamp there is no frame:
///
/// ```compile_fail,E0061
/// # use pawl_shared::{clock::Stamp, protocol::{EngineCoreOutput, SchedulerStats, StepFrame}};
/// fn sent(stats: SchedulerStats, outputs: Vec<EngineCoreOutput>) -> StepFrame {
///     StepFrame::new(stats, 0, outputs)
/// }
/// ```
///
/// nor without the stats, and none are made up:
///
/// ```compile_fail,E0061
/// # use pawl_shared::{clock::Stamp, protocol::{EngineCoreOutput, SchedulerStats, StepFrame}};
/// fn sent(stamp: Stamp, outputs: Vec<EngineCoreOutput>) -> StepFrame {
///     StepFrame::new(stamp, 0, outputs)
/// }
/// ```
///
/// ```compile_fail,E0599
/// let stats = pawl_shared::protocol::SchedulerStats::default();
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct StepFrame {
    engine_index: u32,
    stamp: Stamp,
    stats: SchedulerStats,
    outputs: Vec<EngineCoreOutput>,
    finished_requests: Vec<RequestId>,
}

impl StepFrame {
    /// A frame of engine `engine_index`, stamped `stamp`, with the scheduler's `stats`.
    /// With no outputs it is a stats-only frame, which every frontend accepts.
    #[must_use]
    pub fn new(
        stamp: Stamp,
        stats: SchedulerStats,
        engine_index: u32,
        outputs: Vec<EngineCoreOutput>,
    ) -> Self {
        Self { engine_index, stamp, stats, outputs, finished_requests: Vec::new() }
    }

    /// Names requests the core ended by itself (shutdown, pause, reject).
    #[must_use]
    pub fn with_finished(mut self, finished: Vec<RequestId>) -> Self {
        self.finished_requests = finished;
        self
    }

    /// The frames to send: the payload, and a frame for each large tensor.
    #[must_use]
    pub fn encode(&self) -> Vec<Bytes> {
        // A plain output takes some 60 bytes and the stats some 700; larger ones grow the buffer.
        let mut w = Writer::with_capacity(1024 + 96 * self.outputs.len());
        w.array(EngineCoreOutputs::ELEMENTS);
        self.engine_index.write(&mut w);
        self.outputs.write(&mut w);
        self.stats.write(&mut w);
        w.float(self.stamp.seconds());
        w.nil(); // utility_output
        or_nil::write(&self.finished_requests, &mut w);
        w.nil(); // wave_complete
        w.nil(); // start_wave
        w.text("default"); // weight_version
        w.into_frames(None)
    }
}

/// The answer to one utility call, alone in its frame.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilityFrame {
    engine_index: u32,
    stamp: Stamp,
    reply: UtilityReply,
}

impl UtilityFrame {
    /// A frame of engine `engine_index` with `reply`.
    #[must_use]
    pub fn new(stamp: Stamp, reply: UtilityReply, engine_index: u32) -> Self {
        Self { engine_index, stamp, reply }
    }

    /// The frames to send.
    #[must_use]
    pub fn encode(&self) -> Vec<Bytes> {
        let mut w = Writer::with_capacity(256);
        w.array(EngineCoreOutputs::ELEMENTS);
        self.engine_index.write(&mut w);
        w.array(0); // outputs
        w.nil(); // scheduler_stats
        w.float(self.stamp.seconds());
        self.reply.write(&mut w);
        w.nil(); // finished_requests
        w.nil(); // wave_complete
        w.nil(); // start_wave
        w.nil(); // weight_version
        w.into_frames(None)
    }
}

/// What a received message means.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // One a step, moved once; nearly all of them are steps.
pub enum EngineMessage {
    /// Outputs, stats, or both. Frames of another engine may lack stats.
    Step {
        /// Which engine.
        engine_index: u32,
        /// Engine clock, seconds.
        timestamp: f64,
        /// `None` from an engine that keeps none.
        stats: Option<SchedulerStats>,
        /// One per request that moved.
        outputs: Vec<EngineCoreOutput>,
        /// Ended by the core itself.
        finished_requests: Vec<RequestId>,
    },
    /// An answer.
    Utility {
        /// Which engine.
        engine_index: u32,
        /// Engine clock, seconds.
        timestamp: f64,
        /// The answer.
        reply: UtilityReply,
    },
    /// `ENGINE_CORE_DEAD`: nothing comes after it.
    Dead,
}

/// The one message that is no msgpack.
pub const ENGINE_CORE_DEAD: &[u8] = b"ENGINE_CORE_DEAD";

impl EngineMessage {
    /// Reads the frames `[payload, aux…]` of the output socket.
    ///
    /// # Errors
    /// Anything that is not such a message. A utility reply that shares its frame with outputs is
    /// an error too: no engine sends one, and Python's frontend loses the outputs.
    pub fn decode(frames: &[Bytes]) -> std::result::Result<Self, DecodeError> {
        Self::decode_noting(frames, None)
    }

    /// What a message holds that this build does not know and passes over: where, and what.
    #[must_use]
    pub fn unknown_fields(frames: &[Bytes]) -> Vec<(String, Value)> {
        let unknown = Unknown::default();
        // What of it does not decode is told by whoever decodes it.
        let _ = Self::decode_noting(frames, Some(&unknown));
        unknown.into_found()
    }

    fn decode_noting(
        frames: &[Bytes],
        unknown: Option<&Unknown>,
    ) -> std::result::Result<Self, DecodeError> {
        match frames {
            [] => {
                let text = "expected a payload, found no frame";
                Err(DecodeError::new(Kind::Frames, text).within("EngineCoreOutputs"))
            }
            [only] if &only[..] == ENGINE_CORE_DEAD => Ok(Self::Dead),
            _ => Reader::over_frames(frames)
                .noting(unknown)
                .whole("EngineCoreOutputs", EngineCoreOutputs::read)
                .and_then(Self::from_wire),
        }
    }

    fn from_wire(wire: EngineCoreOutputs) -> Result<Self> {
        let EngineCoreOutputs { engine_index, outputs, timestamp, finished_requests, .. } = wire;
        match (wire.utility_output, wire.scheduler_stats) {
            (None, stats) => {
                Ok(Self::Step { engine_index, timestamp, stats, outputs, finished_requests })
            }
            (Some(reply), None) if outputs.is_empty() && finished_requests.is_empty() => {
                Ok(Self::Utility { engine_index, timestamp, reply })
            }
            (Some(_), stats) => {
                let text = format!(
                    "expected a utility reply alone, found it with {} outputs, {} finished \
                     requests, {} stats",
                    outputs.len(),
                    finished_requests.len(),
                    if stats.is_some() { "with" } else { "without" },
                );
                Err(DecodeError::new(Kind::Type, text).within("EngineCoreOutputs.utility_output"))
            }
        }
    }
}

/// The nine elements as they travel. `wave_complete` and `start_wave` are a coordinator's and mean
/// nothing to a frontend; `weight_version` changes nothing here.
struct EngineCoreOutputs {
    engine_index: u32,
    outputs: Vec<EngineCoreOutput>,
    scheduler_stats: Option<SchedulerStats>,
    timestamp: f64,
    utility_output: Option<UtilityReply>,
    finished_requests: Vec<RequestId>,
}

impl EngineCoreOutputs {
    /// vLLM's Rust frontend dies of any other number.
    const ELEMENTS: usize = 9;

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let mut items = ArrayItems::open(r, 0)?;
        let wire = Self {
            engine_index: items.next(r, "engine_index", Wire::read)?,
            outputs: items.next(r, "outputs", Wire::read)?,
            scheduler_stats: items.next(r, "scheduler_stats", Wire::read)?,
            timestamp: items.next(r, "timestamp", Wire::read)?,
            utility_output: items.next(r, "utility_output", Wire::read)?,
            finished_requests: items.next(r, "finished_requests", Wire::read)?,
        };
        for _ in ["wave_complete", "start_wave", "weight_version"] {
            items.pass(r)?;
        }
        items.skip_rest(r)?;
        Ok(wire)
    }
}
