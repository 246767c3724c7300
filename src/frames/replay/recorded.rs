//! The requests of a recording, each with what came of it.

use std::collections::{HashMap, HashSet};

use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineCoreRequest, EngineMessage, FinishReason, RequestId,
    StopReason,
};
use pawl_shared::tap::{Passed, TapRecord};

/// How a request ended, as far as it can be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishReason,
    pub stop: Option<StopReason>,
    /// The code of the failure, where it failed.
    pub error: Option<String>,
    /// Whether the same may go otherwise at another time (a full queue).
    pub retryable: bool,
}

impl Finish {
    pub fn of(output: &EngineCoreOutput) -> Option<Self> {
        Some(Self {
            reason: output.finish_reason?,
            stop: output.stop_reason.clone(),
            error: output.error.as_ref().map(|error| error.code.clone()),
            retryable: output.error.as_ref().is_some_and(|error| error.retryable),
        })
    }

    /// `length`, `stop on 7`, `error: queue_full`.
    pub fn text(&self) -> String {
        let on = match &self.stop {
            Some(StopReason::Token(id)) => format!(" on {id}"),
            Some(StopReason::Text(text)) => format!(" on {text:?}"),
            None => String::new(),
        };
        let error = self.error.as_ref().map(|code| format!(": {code}")).unwrap_or_default();
        format!("{}{on}{error}", self.reason.as_str())
    }
}

/// What became of a request in the recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The recording ends before it does.
    Open,
    /// The core ended it.
    Finished(Finish),
    /// Its client aborted it, `seconds` after the ADD.
    Aborted { seconds: f64 },
    /// Its client went, or its core.
    Lost,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Seconds after the first request.
    pub at: f64,
    pub request: EngineCoreRequest,
    /// What came of it, in order.
    pub tokens: Vec<u32>,
    pub outcome: Outcome,
    /// The tap missed messages while it ran, so `tokens` may not be all.
    pub has_gap: bool,
}

impl Recorded {
    /// Why its tokens say nothing about those of a second run; `None` where they do.
    pub fn incomparable(&self) -> Option<&'static str> {
        let Some(sampling) = &self.request.sampling_params else {
            return Some("it has no sampling parameters");
        };
        if self.has_gap {
            return Some("the tap missed messages while it ran");
        }
        if sampling.temperature > 0.0 && sampling.seed.is_none() {
            return Some("it was sampled without a seed");
        }
        match &self.outcome {
            Outcome::Finished(finish) if finish.retryable => Some("it was refused for the moment"),
            _ => None,
        }
    }
}

type Name = (u32, Option<u64>, RequestId);

/// Gathers the requests of a recording.
#[derive(Default)]
pub struct Gathered {
    pub requests: Vec<Recorded>,
    /// Requests that were not taken, since there are that many already.
    pub left_out: u64,
    pub undecodable: u64,
    // Bounded by `requests`.
    open: HashMap<Name, usize>,
    members: HashSet<(u32, Option<u64>)>,
    missed: u64,
    began: Option<f64>,
}

impl Gathered {
    /// Takes the next record; at most `requests_max` requests are kept.
    pub fn take(&mut self, record: &TapRecord, requests_max: usize) {
        let link = (record.client, record.epoch);
        // One who is there already is told again only to a tap that has joined again: what passed
        // meanwhile is not known.
        let again = matches!(record.passed, Passed::Joined(_)) && !self.members.insert(link);
        if again || record.missed != self.missed {
            self.missed = record.missed;
            for index in self.open.values() {
                self.requests[*index].has_gap = true;
            }
        }
        match &record.passed {
            Passed::ToCore(frames) => match ClientMessage::decode(frames) {
                Ok(ClientMessage::Add(request)) => self.add(record, *request, requests_max),
                Ok(ClientMessage::Abort(ids)) => {
                    for id in ids {
                        if let Some(index) = self.close(record, id) {
                            let request = &mut self.requests[index];
                            let added = request.at + self.began.unwrap_or_default();
                            let seconds = (record.at - added).max(0.0);
                            request.outcome = Outcome::Aborted { seconds };
                        }
                    }
                }
                Ok(_) => {}
                Err(_) => self.undecodable += 1,
            },
            Passed::ToClient(frames) => match EngineMessage::decode(frames) {
                Ok(EngineMessage::Step { outputs, .. }) => {
                    outputs.iter().for_each(|output| self.output(record, output));
                }
                Ok(_) => {}
                Err(_) => self.undecodable += 1,
            },
            Passed::Left(_) => {
                self.members.remove(&link);
                let (client, epoch) = link;
                let requests = &mut self.requests;
                self.open.retain(|(of, in_epoch, _), index| {
                    let lost = *of == client && *in_epoch == epoch;
                    if lost {
                        requests[*index].outcome = Outcome::Lost;
                    }
                    !lost
                });
            }
            Passed::Joined(_) => {}
        }
    }

    fn add(&mut self, record: &TapRecord, request: EngineCoreRequest, requests_max: usize) {
        if self.requests.len() >= requests_max {
            self.left_out += 1;
            return;
        }
        let name = (record.client, record.epoch, request.request_id.clone());
        let began = *self.began.get_or_insert(record.at);
        self.open.insert(name, self.requests.len());
        self.requests.push(Recorded {
            at: (record.at - began).max(0.0),
            request,
            tokens: Vec::new(),
            outcome: Outcome::Open,
            has_gap: false,
        });
    }

    fn close(&mut self, record: &TapRecord, id: RequestId) -> Option<usize> {
        self.open.remove(&(record.client, record.epoch, id))
    }

    fn output(&mut self, record: &TapRecord, output: &EngineCoreOutput) {
        let id = output.request_id.clone();
        let name = (record.client, record.epoch, id);
        let Some(&index) = self.open.get(&name) else { return };
        let request = &mut self.requests[index];
        request.tokens.extend(&output.new_token_ids);
        if let Some(finish) = Finish::of(output) {
            request.outcome = Outcome::Finished(finish);
            self.open.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use pawl_shared::protocol::FinishReason;

    use super::super::super::testing::{abort, add, output, record, step};
    use super::*;

    fn gather(records: &[TapRecord]) -> Gathered {
        let mut gathered = Gathered::default();
        records.iter().for_each(|record| gathered.take(record, 100));
        gathered
    }

    fn at(at: f64, record: TapRecord) -> TapRecord {
        TapRecord { at, ..record }
    }

    #[test]
    fn a_request_is_its_add_with_what_came_until_its_end() {
        let last = EngineCoreOutput {
            finish_reason: Some(FinishReason::Length),
            stop_reason: Some(StopReason::Token(7)),
            ..output("a", &[12])
        };
        let gathered = gather(&[
            at(5.0, record(0, add("a"))),
            // The same id from another client, and one whose ADD came before the recording.
            at(6.5, record(1, add("a"))),
            record(0, step(vec![output("a", &[10, 11]), output("early", &[1])])),
            record(1, step(vec![output("a", &[99])])),
            record(0, step(vec![last])),
            record(0, step(vec![output("a", &[13])])),
        ]);
        let [a, other] = &gathered.requests[..] else { panic!("{:?}", gathered.requests) };
        assert_eq!((a.at, &a.tokens[..]), (0.0, &[10, 11, 12][..]));
        let Outcome::Finished(finish) = &a.outcome else { panic!("{:?}", a.outcome) };
        assert_eq!(finish.text(), "length on 7");
        assert_eq!((other.at, &other.tokens[..], &other.outcome), (1.5, &[99][..], &Outcome::Open));
    }

    #[test]
    fn an_abort_a_leaving_client_and_the_end_of_the_file_are_told_apart() {
        let gathered = gather(&[
            at(1.0, record(0, add("aborted"))),
            at(1.0, record(0, add("lost"))),
            at(1.0, record(1, add("open"))),
            at(3.5, record(0, abort("aborted"))),
            record(0, step(vec![output("aborted", &[1])])),
            record(0, Passed::Left("it left".into())),
        ]);
        let outcomes: Vec<_> = gathered.requests.iter().map(|r| r.outcome.clone()).collect();
        assert_eq!(outcomes, [Outcome::Aborted { seconds: 2.5 }, Outcome::Lost, Outcome::Open]);
        assert!(gathered.requests[0].tokens.is_empty(), "what came after the abort");
    }

    #[test]
    fn what_a_tap_missed_makes_gaps_in_what_was_open() {
        let missed = |missed, record| TapRecord { missed, ..record };
        let gathered = gather(&[
            record(0, Passed::Joined("frontend".into())),
            record(0, add("before")),
            missed(3, record(0, add("after"))),
            missed(3, record(0, step(vec![output("after", &[1])]))),
        ]);
        assert_eq!(gathered.requests.iter().map(|r| r.has_gap).collect::<Vec<_>>(), [true, false]);
        // A tap that joins again is told again who is there.
        let joined = || record(0, Passed::Joined("frontend".into()));
        let gathered = gather(&[joined(), record(0, add("a")), joined(), record(0, add("b"))]);
        assert_eq!(gathered.requests.iter().map(|r| r.has_gap).collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn there_are_never_more_than_wanted() {
        let mut gathered = Gathered::default();
        for id in ["a", "b", "c"] {
            gathered.take(&record(0, add(id)), 2);
        }
        assert_eq!((gathered.requests.len(), gathered.left_out), (2, 1));
    }
}
