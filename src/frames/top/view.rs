//! What a look at a core reads like.

use std::fmt::Write;

use serde_json::Value as Json;

/// A request without a new token for this long is marked: it may be stuck.
const IDLE_MARKED_SECONDS: f64 = 10.0;

/// The whole screen, at most `rows` lines of at most `columns` letters.
pub fn screen(snapshot: &Json, trouble: Option<&str>, rows: usize, columns: usize) -> String {
    let mut lines = Vec::new();
    if let Some(trouble) = trouble {
        lines.push(format!("NO ANSWER: {trouble}"));
        if !snapshot.is_null() {
            lines.push("what was known last:".into());
        }
    }
    if !snapshot.is_null() {
        head(snapshot, &mut lines);
        frontends(snapshot, &mut lines);
        requests(snapshot, &mut lines);
    }
    let mut text = String::new();
    // The last line of a terminal scrolls it.
    for line in lines.iter().take(rows.saturating_sub(1)) {
        text.extend(line.chars().take(columns));
        text.push('\n');
    }
    text
}

fn head(s: &Json, lines: &mut Vec<String>) {
    let number = |key: &str| s[key].as_f64().unwrap_or_default();
    let mut line = format!(
        "{}  engine {}  up {}  depth {}",
        s["core"].as_str().unwrap_or("core"),
        s["engine_index"],
        time(number("uptime_seconds")),
        s["depth"]
    );
    if s["paused"] == true {
        line += "  PAUSED";
    }
    lines.push(line);
    lines.push(format!(
        "requests {} running, {} waiting, {} preempted   KV {:.1} % ({} of {} blocks of {})",
        s["requests_running"],
        s["requests_waiting"],
        s["requests_preempted"],
        number("kv_cache_usage") * 100.0,
        s["kv_blocks_used"],
        s["kv_blocks"],
        s["block_size"]
    ));
    let rate = |key: &str| s["rates"][key].as_f64().unwrap_or_default();
    let mut line = format!(
        "steps {} ({:.1}/s, {:.2} ms each: schedule {:.2}, execute {:.2}, update {:.2})",
        s["steps"],
        rate("steps_per_second"),
        rate("step_ms"),
        rate("schedule_ms"),
        rate("execute_ms"),
        rate("update_ms")
    );
    if let Some(seconds) = s["step_in_flight_seconds"].as_f64() {
        let _ = write!(line, "   {} in flight since {}", s["steps_in_flight"], time(seconds));
    }
    lines.push(line);
    lines.push(format!(
        "tokens {:.1}/s sampled, {:.1}/s scheduled   finished {}   refused {}",
        rate("tokens_sampled_per_second"),
        rate("tokens_scheduled_per_second"),
        counts(&s["requests_finished"]),
        counts(&s["requests_refused"])
    ));
}

fn frontends(s: &Json, lines: &mut Vec<String>) {
    lines.push(String::new());
    lines.push(format!(
        "{:>6} {:>16} {:>8} {:>8} {:>8}  {}",
        "CLIENT", "EPOCH", "PID", "RUNNING", "WAITING", "TAPS"
    ));
    for frontend in s["frontends"].as_array().into_iter().flatten() {
        let taps = match frontend["taps"].as_str() {
            Some(address) => address,
            None if frontend["client"] == s["own_client"] => "(this view)",
            None => "-",
        };
        lines.push(format!(
            "{:>6} {:>16} {:>8} {:>8} {:>8}  {taps}",
            text(&frontend["client"]),
            frontend["epoch"].as_u64().map_or("-".into(), |epoch| format!("{epoch:x}")),
            text(&frontend["pid"]),
            text(&frontend["running"]),
            text(&frontend["waiting"]),
        ));
    }
}

fn requests(s: &Json, lines: &mut Vec<String>) {
    let listed = s["requests"].as_array().map_or(&[][..], Vec::as_slice);
    lines.push(String::new());
    lines.push(format!(
        "{:>8} {:>8}  {:>9} {:>6} {:>8} {:>8} {:>7}  {}",
        "AGE", "IDLE", "STATE", "CLIENT", "PROMPT", "OUTPUT", "BLOCKS", "REQUEST"
    ));
    for request in listed {
        let seconds = |key: &str| request[key].as_f64().unwrap_or_default();
        let mark = if seconds("idle_seconds") >= IDLE_MARKED_SECONDS { "!" } else { " " };
        lines.push(format!(
            "{:>8} {:>8}{mark} {:>9} {:>6} {:>8} {:>8} {:>7}  {}",
            time(seconds("age_seconds")),
            time(seconds("idle_seconds")),
            text(&request["state"]),
            text(&request["client"]),
            text(&request["prompt_tokens"]),
            text(&request["output_tokens"]),
            text(&request["blocks"]),
            text(&request["id"]),
        ));
    }
    let more = s["requests_live"].as_u64().unwrap_or_default().saturating_sub(listed.len() as u64);
    if more > 0 {
        lines.push(format!("… and {more} younger"));
    }
}

/// Without quotes, and a dash for nothing.
fn text(value: &Json) -> String {
    match value {
        Json::Null => "-".into(),
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn counts(counts: &Json) -> String {
    let pairs = counts.as_object().into_iter().flatten();
    let texts: Vec<_> = pairs.map(|(reason, count)| format!("{count} {reason}")).collect();
    if texts.is_empty() { "0".into() } else { texts.join(", ") }
}

/// `250ms`, `12.3s`, `4m05s`, `3h07m`.
fn time(seconds: f64) -> String {
    let whole = seconds as u64;
    match seconds {
        s if s < 1.0 => format!("{:.0}ms", s * 1e3),
        s if s < 60.0 => format!("{s:.1}s"),
        s if s < 3600.0 => format!("{}m{:02}s", whole / 60, whole % 60),
        _ => format!("{}h{:02}m", whole / 3600, whole / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn snapshot() -> Json {
        json!({
            "core": "ipc:///tmp/pawl/core", "own_client": 2, "engine_index": 0,
            "uptime_seconds": 3725.0, "depth": 2, "paused": false, "steps": 1200,
            "steps_in_flight": 1, "step_in_flight_seconds": 0.012, "requests_live": 3,
            "requests_running": 1, "requests_waiting": 1, "requests_preempted": 1,
            "kv_cache_usage": 0.25, "kv_blocks": 4095, "kv_blocks_used": 1024, "block_size": 16,
            "requests_finished": {"length": 7, "stop": 2}, "requests_refused": {},
            "rates": {"steps_per_second": 50.0, "step_ms": 20.0, "schedule_ms": 0.5,
                      "execute_ms": 19.0, "update_ms": 0.5, "tokens_sampled_per_second": 100.0,
                      "tokens_scheduled_per_second": 140.5},
            "frontends": [
                {"client": 0, "epoch": 0x5f0c, "pid": 77, "running": 1, "waiting": 2,
                 "taps": "ipc:///tmp/pawl-1/taps"},
                {"client": 1, "epoch": null, "pid": null, "running": 0, "waiting": 0, "taps": null},
                {"client": 2, "epoch": 0x5f0d, "pid": 78, "running": 0, "waiting": 0, "taps": null}],
            "requests": [
                {"id": "cmpl-a", "client": 0, "state": "decode", "age_seconds": 75.0,
                 "idle_seconds": 14.0, "prompt_tokens": 12, "output_tokens": 5, "blocks": 2},
                {"id": "cmpl-b", "client": 0, "state": "waiting", "age_seconds": 0.25,
                 "idle_seconds": 0.25, "prompt_tokens": 9, "output_tokens": 0, "blocks": 0}],
        })
    }

    #[test]
    fn a_look_shows_frontends_requests_cache_and_steps() {
        insta::assert_snapshot!(screen(&snapshot(), None, usize::MAX, usize::MAX), @r"
        ipc:///tmp/pawl/core  engine 0  up 1h02m  depth 2
        requests 1 running, 1 waiting, 1 preempted   KV 25.0 % (1024 of 4095 blocks of 16)
        steps 1200 (50.0/s, 20.00 ms each: schedule 0.50, execute 19.00, update 0.50)   1 in flight since 12ms
        tokens 100.0/s sampled, 140.5/s scheduled   finished 7 length, 2 stop   refused 0

        CLIENT            EPOCH      PID  RUNNING  WAITING  TAPS
             0             5f0c       77        1        2  ipc:///tmp/pawl-1/taps
             1                -        -        0        0  -
             2             5f0d       78        0        0  (this view)

             AGE     IDLE      STATE CLIENT   PROMPT   OUTPUT  BLOCKS  REQUEST
           1m15s    14.0s!    decode      0       12        5       2  cmpl-a
           250ms    250ms    waiting      0        9        0       0  cmpl-b
        … and 1 younger
        ");
    }

    #[test]
    fn a_screen_fits_its_terminal_whatever_is_in_it() {
        for rows in 0..12 {
            for columns in 0..40 {
                let text = screen(&snapshot(), Some("it hangs"), rows, columns);
                assert!(text.lines().count() <= rows.saturating_sub(1));
                assert!(text.lines().all(|line| line.chars().count() <= columns));
            }
        }
        // A core of another build may say less, or something else.
        screen(&json!({"requests": 3, "frontends": [1, null], "rates": "x"}), None, 50, 80);
        let gone = screen(&Json::Null, Some("it hangs"), 50, 80);
        assert_eq!(gone, "NO ANSWER: it hangs\n");
    }
}
