//! `EngineCoreOutputs`: the frames a core sends, and what a received one means.
//!
//! The nine-element array is private. The only ways to a frame that is sent are [`StepFrame::new`]
//! and [`UtilityFrame::new`]: a step's frame without its stamp and stats does not compile.

use super::{EngineCoreOutput, RequestId, SchedulerStats, UtilityReply};
use crate::clock::Stamp;

/// What one step means for one client.
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
}

/// What a received message means.
#[derive(Clone, Debug, PartialEq)]
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
