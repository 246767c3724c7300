//! Calls by name: what a frontend may ask of the engine itself.

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{OutputError, UtilityCall, UtilityReply, Value};
use pawl_shared::transport::ClientId;

use super::{Engine, Lifecycle, admission};

/// Pause calls that may wait for their moment. One more is refused: the engine is pausing anyway.
const PAUSE_CALLS_MAX: usize = 64;

/// How generation is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PauseMode {
    /// Requests were ended, new ones are refused.
    Abort,
    /// Requests run to their end, new ones are refused.
    Wait,
    /// Requests stand still, new ones wait with them.
    Keep,
}

/// Whether generation is paused, and who waits to hear that the pause is reached.
#[derive(Debug, Default)]
pub(super) struct Pause {
    mode: Option<PauseMode>,
    /// Whether it is a `sleep`, which a `wake_up` ends.
    asleep: bool,
    clear_cache: bool,
    /// Bounded by [`PAUSE_CALLS_MAX`].
    callers: Vec<(ClientId, u64)>,
}

impl Pause {
    /// No step may start.
    pub fn holds_running(&self) -> bool {
        self.mode == Some(PauseMode::Keep)
    }

    pub fn is_paused(&self) -> bool {
        self.mode.is_some()
    }

    pub fn admits_new(&self) -> Result<(), OutputError> {
        match self.mode {
            None | Some(PauseMode::Keep) => Ok(()),
            Some(PauseMode::Abort | PauseMode::Wait) => Err(paused()),
        }
    }

    pub fn forget(&mut self, client: ClientId) {
        self.callers.retain(|(caller, _)| *caller != client);
    }
}

impl Engine {
    /// Answers a call, at once unless it is a pause that must first be reached.
    pub(super) fn call(&mut self, client: ClientId, call: UtilityCall) {
        let result = if self.lifecycle == Lifecycle::Serving {
            match self.answer(client, &call) {
                Answer::Now(result) => result,
                Answer::Later => return,
            }
        } else {
            Err("Server shutting down".into())
        };
        let reply = UtilityReply { call_id: call.call_id, result };
        self.outbox.push_reply(client, self.clock.now(), reply);
    }

    fn answer(&mut self, client: ClientId, call: &UtilityCall) -> Answer {
        let value = match call.method.as_str() {
            "get_model_card" => self.config.card.clone(),
            "get_supported_tasks" => Value::Array(vec![text("generate")]),
            // There is no such cache, so it is always empty; the answer must be nil all the same.
            "reset_mm_cache" | "reset_encoder_cache" => Value::Nil,
            "reset_prefix_cache" => match flag(call, 0, "reset_running_requests") {
                Ok(running) => Value::Bool(self.reset_prefix_cache(running)),
                Err(why) => return Answer::Now(Err(failed(call, &why))),
            },
            "is_sleeping" => Value::Bool(self.pause.asleep),
            "is_scheduler_paused" => Value::Bool(self.pause.is_paused()),
            "pause_generation" | "pause_scheduler" => {
                let asked =
                    mode_of(call, 0).and_then(|mode| Ok((mode, flag(call, 1, "clear_cache")?)));
                return self.pause(client, call, asked);
            }
            "sleep" => {
                let asked = mode_of(call, 1).and_then(|mode| Ok((mode, sleep_level(call)? > 0)));
                let answer = self.pause(client, call, asked);
                self.pause.asleep |= matches!(answer, Answer::Later);
                return answer;
            }
            "resume_generation" | "resume_scheduler" => {
                self.resume();
                Value::Nil
            }
            "wake_up" => match wakes_all(call) {
                Ok(all) => {
                    if all {
                        self.resume();
                    }
                    Value::Bool(!self.pause.asleep)
                }
                Err(why) => return Answer::Now(Err(failed(call, &why))),
            },
            "profile" => {
                let why = "this engine has no profiler; pawl:step_phase_seconds tells where steps \
                           spend their time";
                return Answer::Now(Err(failed(call, why)));
            }
            "list_loras" => Value::Array(Vec::new()),
            "get_weight_version" => text("default"),
            "pawl_status" => self.status(call.args.first()),
            _ => return Answer::Now(Err(failed(call, "this engine has no such method"))),
        };
        Answer::Now(Ok(value))
    }

    /// Forgets what the KV blocks hold; `false` if requests still hold some. With `running`, those
    /// that run give theirs up first and compute everything again. (A cache outside the engine,
    /// the second argument of the call, does not exist, so it is always empty.)
    fn reset_prefix_cache(&mut self, running: bool) -> bool {
        if running {
            self.scheduler.preempt_running(self.clock.now());
        }
        self.scheduler.reset_prefix_cache()
    }

    /// Begins a pause, in the mode and with or without clearing the cache as `asked`.
    fn pause(
        &mut self,
        client: ClientId,
        call: &UtilityCall,
        asked: Result<(PauseMode, bool), String>,
    ) -> Answer {
        let full = || format!("{PAUSE_CALLS_MAX} calls already wait for the pause");
        let room = self.pause.callers.len() < PAUSE_CALLS_MAX;
        let asked = asked.and_then(|asked| room.then_some(asked).ok_or_else(full));
        let (mode, clear_cache) = match asked {
            Ok(asked) => asked,
            Err(why) => return Answer::Now(Err(failed(call, &why))),
        };
        self.pause.mode = Some(mode);
        self.pause.clear_cache |= clear_cache;
        self.pause.callers.push((client, call.call_id));
        if mode == PauseMode::Abort {
            self.abort_all(&paused());
        }
        Answer::Later
    }

    fn resume(&mut self) {
        self.pause.mode = None;
        self.pause.asleep = false;
    }

    /// A pause is reached when no step is in flight and, unless requests are kept, none is left.
    pub(super) fn answer_reached_pauses(&mut self, now: Stamp) {
        if self.pause.callers.is_empty() {
            return;
        }
        let kept = self.pause.mode == Some(PauseMode::Keep);
        let resumed = self.pause.mode.is_none();
        let reached = self.in_flight.is_empty() && (kept || self.requests.is_empty());
        if !reached && !resumed {
            return;
        }
        if std::mem::take(&mut self.pause.clear_cache) && reached {
            // Requests that are kept hold blocks; they compute everything again once resumed.
            self.reset_prefix_cache(true);
        }
        for (client, call_id) in std::mem::take(&mut self.pause.callers) {
            self.outbox.push_reply(client, now, UtilityReply { call_id, result: Ok(Value::Nil) });
        }
    }
}

fn paused() -> OutputError {
    OutputError {
        code: admission::code::PAUSED.into(),
        message: "generation is paused; send the request again after it is resumed".into(),
        retryable: true,
    }
}

enum Answer {
    Now(Result<Value, String>),
    Later,
}

fn mode_of(call: &UtilityCall, at: usize) -> Result<PauseMode, String> {
    match call.args.get(at) {
        None | Some(Value::Nil) => Ok(PauseMode::Abort),
        Some(Value::Text(mode)) => match mode.as_str() {
            "abort" => Ok(PauseMode::Abort),
            "wait" => Ok(PauseMode::Wait),
            "keep" => Ok(PauseMode::Keep),
            other => Err(format!("mode is {other:?}; it must be abort, wait or keep")),
        },
        Some(_) => Err("mode must be text: abort, wait or keep".into()),
    }
}

/// How deep to sleep. The weights are in main memory already, so they stay there at every level:
/// 0 only pauses, 1 forgets the cached blocks as well.
fn sleep_level(call: &UtilityCall) -> Result<i128, String> {
    match call.args.first() {
        None | Some(Value::Nil) => Ok(1),
        Some(Value::Integer(level @ 0..=1)) => Ok(*level),
        Some(Value::Integer(2)) => {
            Err("level 2 throws the weights away, which this engine cannot load again; use 1"
                .into())
        }
        Some(_) => Err("level must be 0 or 1".into()),
    }
}

/// Whether the parts named are all that sleeps. The weights never do, and a cache alone is of no
/// use to a scheduler that stands still, so naming either of the others wakes everything.
fn wakes_all(call: &UtilityCall) -> Result<bool, String> {
    let tags = match call.args.first() {
        None | Some(Value::Nil) => return Ok(true),
        Some(Value::Array(tags)) => tags,
        Some(_) => return Err("tags must be a list of texts".into()),
    };
    let mut all = tags.is_empty();
    for tag in tags {
        match tag {
            Value::Text(tag) if tag == "weights" => {}
            Value::Text(tag) if tag == "kv_cache" || tag == "scheduling" => all = true,
            _ => return Err("tags are weights, kv_cache and scheduling".into()),
        }
    }
    Ok(all)
}

/// A boolean argument; absent is no.
fn flag(call: &UtilityCall, at: usize, name: &str) -> Result<bool, String> {
    match call.args.get(at) {
        None | Some(Value::Nil) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(format!("{name} must be true or false")),
    }
}

fn failed(call: &UtilityCall, why: &str) -> String {
    format!("Call to {} method failed: {why}", call.method)
}

fn text(text: &str) -> Value {
    Value::Text(text.into())
}
