//! `pawl_status`: what the core is doing, as one map of bounded size.

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::Value;
use pawl_shared::transport::{self, Peer};

use super::requests::LiveRequest;
use super::{Engine, outbox};
use crate::step::RequestKey;

/// Requests that are listed where the caller does not say, and where he asks for more than is
/// good for an engine that has steps to run.
const REQUESTS_LISTED: u64 = 64;
const REQUESTS_LISTED_MAX: u64 = 1024;

/// Characters of a client's own words that are passed on.
const TEXT_CHARS_MAX: usize = 256;

impl Engine {
    /// Everything about the core that one may want to see, as a map. The oldest requests are
    /// listed, as many as `listed` says.
    pub(super) fn status(&mut self, listed: Option<&Value>) -> Value {
        let listed = listed.and_then(Value::as_u64).unwrap_or(REQUESTS_LISTED);
        let listed = listed.min(REQUESTS_LISTED_MAX) as usize;
        let now = self.clock.now();
        let gauges = outbox::gauges(&mut self.scheduler);
        let counters = &self.counters;
        let spent = &counters.spent;
        let kv = self.scheduler.kv();
        let oldest_step = self.in_flight.front();
        Value::map([
            ("engine_index", count(self.config.engine_index)),
            ("uptime_seconds", since(now, self.started)),
            ("depth", count(self.config.depth as u64)),
            ("clients", count(self.outbox.num_clients() as u64)),
            ("paused", Value::Bool(self.pause.is_paused())),
            ("steps", count(self.outbox.steps())),
            ("steps_in_flight", count(self.in_flight.len() as u64)),
            ("step_in_flight_seconds", oldest_step.map_or(Value::Nil, |s| since(now, s.begun))),
            ("schedule_seconds", Value::Float(spent.schedule.as_secs_f64())),
            ("execute_seconds", Value::Float(spent.execute.as_secs_f64())),
            ("update_seconds", Value::Float(spent.update.as_secs_f64())),
            ("tokens_scheduled", count(spent.num_tokens)),
            ("tokens_sampled", count(counters.tokens_sampled)),
            ("requests_live", count(self.requests.len() as u64)),
            ("requests_running", count(gauges.num_running_reqs)),
            ("requests_waiting", count(gauges.num_waiting_reqs)),
            ("requests_preempted", count(gauges.num_skipped_waiting_reqs)),
            ("kv_cache_usage", Value::Float(gauges.kv_cache_usage)),
            ("kv_blocks", count(kv.num_usable())),
            ("kv_blocks_used", count(kv.num_used())),
            ("block_size", count(kv.config().block_size)),
            ("requests_added", count(counters.requests_added)),
            ("requests_finished", counts(&counters.requests_finished)),
            ("requests_refused", counts(&counters.requests_refused)),
            ("duplicate_ids", count(counters.duplicate_ids)),
            ("undecodable", counts(&counters.undecodable)),
            ("wire_violations", violations()),
            ("unexpected_messages", count(counters.unexpected_messages)),
            ("requests_failed", count(counters.requests_failed)),
            ("frontends", self.frontends()),
            ("requests", self.oldest_requests(listed, now)),
        ])
    }

    fn frontends(&self) -> Value {
        let live = self.requests.count_by_client(|key| self.scheduler.is_running(key));
        let frontend = |(client, peer): (_, &Peer)| {
            let (running, waiting) = live.get(&client).copied().unwrap_or_default();
            Value::map([
                ("client", count(client.0)),
                ("peer", shortened(&peer.text)),
                ("pid", peer.pid.into()),
                ("epoch", peer.epoch.into()),
                ("taps", peer.taps.as_deref().map_or(Value::Nil, shortened)),
                ("running", count(running)),
                ("waiting", count(waiting)),
            ])
        };
        self.outbox.clients().map(frontend).collect()
    }

    fn oldest_requests(&self, listed: usize, now: Stamp) -> Value {
        let request = |(key, live): (RequestKey, &LiveRequest)| {
            let state = self.scheduler.state_of(key);
            Value::map([
                ("id", live.id.as_str().into()),
                ("client", count(live.client.0)),
                ("state", state.map_or("ended", |state| state.name).into()),
                ("age_seconds", since(now, live.added)),
                ("idle_seconds", since(now, live.moved)),
                ("prompt_tokens", count(live.prompt_tokens as u64)),
                ("computed_tokens", count(state.map_or(0, |state| state.computed))),
                ("output_tokens", count(live.output_tokens as u64)),
                ("blocks", count(state.map_or(0, |state| state.blocks))),
            ])
        };
        self.requests.iter().take(listed).map(request).collect()
    }
}

fn since(now: Stamp, earlier: Stamp) -> Value {
    Value::Float(now.since(earlier).as_secs_f64())
}

fn shortened(text: &str) -> Value {
    Value::Text(text.chars().take(TEXT_CHARS_MAX).collect())
}

fn count(number: impl Into<i128>) -> Value {
    Value::Integer(number.into())
}

/// Of the whole process; kinds that have happened.
fn violations() -> Value {
    let happened = transport::violations().into_iter().filter(|(_, count)| *count > 0);
    counts(&happened.map(|(kind, count)| (kind.as_str(), count)).collect())
}

fn counts<K: AsRef<str>>(counts: &std::collections::BTreeMap<K, u64>) -> Value {
    let pair = |(key, &n): (&K, &u64)| (Value::Text(key.as_ref().into()), count(n));
    Value::Map(counts.iter().map(pair).collect())
}
