//! A message as one readable line, or as JSON.

use std::fmt::Write;

use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineMessage, SchedulerStats, StopReason, dump,
};
use pawl_shared::tap::{Passed, TapRecord};
use serde_json::json;

use super::wanted::{Meaning, Seen};

/// Token ids shown of a list; the rest is counted.
const IDS_SHOWN: usize = 8;

/// One line for people.
pub fn text(seen: &Seen) -> String {
    let record = &seen.record;
    let mut line = format!("{:.6} {:<8} {:>6} B  ", record.at, way(record), seen.bytes());
    match (&seen.meaning, &record.passed) {
        (Meaning::ToCore(message), _) => line.push_str(&to_core(message)),
        (Meaning::ToClient(message), _) => line.push_str(&to_client(message)),
        (Meaning::Bad(error), _) => {
            let _ = write!(line, "UNDECODABLE ({}): {error}", error.kind.as_str());
        }
        (Meaning::Note, Passed::Joined(who)) => {
            let _ = write!(line, "JOINED {who}");
        }
        (Meaning::Note, Passed::Left(why)) => {
            let _ = write!(line, "LEFT: {why}");
        }
        (Meaning::Note, _) => {}
    }
    for (field, value) in &seen.unknown {
        let _ = write!(line, " | UNKNOWN {field} = {}", shorten(&value.to_json()));
    }
    line
}

/// `2→core` or `core→2`; for what is no message, the client alone.
fn way(record: &TapRecord) -> String {
    match &record.passed {
        Passed::ToCore(_) => format!("{}→core", record.client),
        Passed::ToClient(_) => format!("core→{}", record.client),
        Passed::Joined(_) | Passed::Left(_) => record.client.to_string(),
    }
}

fn to_core(message: &ClientMessage) -> String {
    match message {
        ClientMessage::Add(request) => {
            let prompt = request.prompt_token_ids.as_deref().unwrap_or_default();
            let mut line = format!("ADD {} prompt {}", request.request_id, ids(prompt));
            if let Some(sampling) = &request.sampling_params {
                let _ = write!(line, " temperature {}", sampling.temperature);
                if let Some(max_tokens) = sampling.max_tokens {
                    let _ = write!(line, " max_tokens {max_tokens}");
                }
            }
            line
        }
        ClientMessage::Abort(requests) => {
            let names: Vec<&str> = requests.iter().map(|id| id.as_str()).collect();
            format!("ABORT {}", names.join(" "))
        }
        ClientMessage::StartDpWave { wave, .. } => format!("START_DP_WAVE {wave}"),
        ClientMessage::Utility(call) => {
            format!(
                "UTILITY {} call {} with {} arguments",
                call.method,
                call.call_id,
                call.args.len()
            )
        }
    }
}

fn to_client(message: &EngineMessage) -> String {
    match message {
        EngineMessage::Step { engine_index, timestamp, stats, outputs, finished_requests } => {
            let mut line = format!("STEP engine {engine_index} at {timestamp:.6}");
            match stats {
                Some(stats) => line.push_str(&stats_text(stats)),
                None => line.push_str(" NO STATS"),
            }
            for output in outputs {
                let _ = write!(line, " | {}", output_text(output));
            }
            for id in finished_requests {
                let _ = write!(line, " | {id} ended by the core");
            }
            line
        }
        EngineMessage::Utility { engine_index, timestamp, reply } => {
            let call = reply.call_id;
            let outcome = match &reply.result {
                Ok(value) => shorten(&value.to_json()),
                Err(message) => format!("FAILED: {message}"),
            };
            format!("REPLY engine {engine_index} at {timestamp:.6} call {call}: {outcome}")
        }
        EngineMessage::Dead => "ENGINE_CORE_DEAD".into(),
    }
}

fn stats_text(stats: &SchedulerStats) -> String {
    let mut line = format!(
        " step {} running {} waiting {} kv {:.1} %",
        stats.step_counter,
        stats.num_running_reqs,
        stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
        stats.kv_cache_usage * 100.0
    );
    let cache = &stats.prefix_cache_stats;
    if cache.queries > 0 {
        let _ = write!(line, " cached {}/{}", cache.hits, cache.queries);
    }
    if let Some(pawl) = &stats.pawl {
        if pawl.num_preemptions > 0 {
            let _ = write!(line, " preempted {}", pawl.num_preemptions);
        }
        if pawl.resent {
            line.push_str(" (resent)");
        }
    }
    line
}

fn output_text(output: &EngineCoreOutput) -> String {
    let mut line = format!("{} {}", output.request_id, ids(&output.new_token_ids));
    for event in &output.events {
        let _ = write!(line, " {:?}@{:.6}", event.kind, event.timestamp);
    }
    if let Some(prefill) = &output.prefill_stats {
        let _ = write!(
            line,
            " prompt {} ({} cached)",
            prefill.num_prompt_tokens, prefill.num_cached_tokens
        );
    }
    if let Some(reason) = output.finish_reason {
        let _ = write!(line, " finish {}", reason.as_str());
    }
    match &output.stop_reason {
        Some(StopReason::Token(id)) => drop(write!(line, " on token {id}")),
        Some(StopReason::Text(text)) => drop(write!(line, " on {text:?}")),
        None => {}
    }
    if let Some(error) = &output.error {
        let _ = write!(line, " {}: {}", error.code, error.message);
    }
    line
}

fn ids(ids: &[u32]) -> String {
    let shown: Vec<String> = ids.iter().take(IDS_SHOWN).map(u32::to_string).collect();
    match ids.len().saturating_sub(IDS_SHOWN) {
        0 => format!("[{}]", shown.join(" ")),
        more => format!("[{} … {more} more]", shown.join(" ")),
    }
}

fn shorten(text: &str) -> String {
    const CHARS_MAX: usize = 120;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.into(),
    }
}

/// One object with every frame as it came: type byte and aux frames as bytes, payload as a value,
/// with all its fields, known or not.
pub fn json(seen: &Seen) -> serde_json::Value {
    let record = &seen.record;
    let payload_at = usize::from(matches!(record.passed, Passed::ToCore(_)));
    let frames: Vec<serde_json::Value> = record
        .passed
        .frames()
        .iter()
        .enumerate()
        .map(|(index, frame)| match dump(frame) {
            Ok(value) if index == payload_at => value.to_json_value(),
            _ => json!({"bytes": frame.len(), "head": hex(&frame[..frame.len().min(16)])}),
        })
        .collect();
    let unknown: serde_json::Map<String, serde_json::Value> =
        seen.unknown.iter().map(|(field, value)| (field.clone(), value.to_json_value())).collect();
    json!({
        "at": record.at,
        "client": record.client,
        "epoch": record.epoch,
        "direction": way(record),
        "kind": seen.kind().name(),
        "bytes": seen.bytes(),
        "missed": record.missed,
        "text": text(seen),
        "unknown": unknown,
        "frames": frames,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
