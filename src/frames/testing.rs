//! Records as a tap would see them, for tests.

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineCoreRequest, RequestId, SamplingParams, SchedulerStats,
    StepFrame, testing::idle_stats,
};
use pawl_shared::tap::{Passed, TapRecord};

/// What passed at second 1, of a client without an epoch.
pub fn record(client: u32, passed: Passed) -> TapRecord {
    TapRecord { at: 1.0, client, epoch: None, missed: 0, passed }
}

/// An ADD of a greedy request.
pub fn add(id: &str) -> Passed {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let request = EngineCoreRequest::new(id.into(), vec![1], sampling);
    Passed::ToCore(ClientMessage::Add(Box::new(request)).encode())
}

pub fn abort(id: &str) -> Passed {
    Passed::ToCore(ClientMessage::Abort(vec![id.into()]).encode())
}

pub fn output(id: &str, tokens: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput {
        new_token_ids: tokens.to_vec(),
        ..EngineCoreOutput::new(RequestId::from(id))
    }
}

/// A frame of an idle scheduler with these outputs.
pub fn step(outputs: Vec<EngineCoreOutput>) -> Passed {
    let stats = SchedulerStats { pawl: None, ..idle_stats() };
    Passed::ToClient(StepFrame::new(Stamp::from_nanos(1), stats, 0, outputs).encode())
}
