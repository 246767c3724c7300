//! Tests over all messages: one of each ([`samples`]), bytes that vLLM wrote ([`golden`]), and what
//! comes of bytes that nobody should have written ([`damage`]).

mod golden;

use bytes::Bytes;

/// Bytes from hex digits.
pub(super) fn unhex(text: &str) -> Bytes {
    let digits: Vec<u8> = text.bytes().map(|c| (c as char).to_digit(16).unwrap() as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Hex digits from bytes.
#[allow(dead_code)]
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The stats of an engine that does nothing.
fn idle_stats() -> super::SchedulerStats {
    super::SchedulerStats {
        num_running_reqs: 0,
        num_waiting_reqs: 0,
        num_skipped_waiting_reqs: 0,
        num_kv_fetch_reqs_by_stage: [0; 3],
        step_counter: 0,
        current_wave: 0,
        kv_cache_usage: 0.0,
        prefix_cache_stats: super::PrefixCacheStats::default(),
        spec_decoding_stats: None,
        iteration_details: None,
        kv_cache_eviction_events: Vec::new(),
        waiting_lora_adapters: Vec::new(),
        running_lora_adapters: Vec::new(),
        pawl: None,
    }
}
