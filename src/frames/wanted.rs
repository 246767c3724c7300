//! Which messages are wanted: by client, by request, by kind.

use clap::{Args, ValueEnum};
use pawl_shared::protocol::{ClientMessage, DecodeError, EngineMessage, Value};
use pawl_shared::tap::{Passed, TapRecord};

#[derive(Clone, Debug, Default, Args)]
pub struct Wanted {
    /// Only messages of this client
    #[arg(long, value_name = "INDEX")]
    client: Option<u32>,
    /// Only messages that name a request whose id contains this text
    #[arg(long, value_name = "TEXT")]
    request: Option<String>,
    /// Only messages of these kinds, separated by commas
    #[arg(long, value_name = "KIND", value_enum, value_delimiter = ',')]
    kind: Vec<Kind>,
    /// Leave out frames that carry stats alone
    #[arg(long)]
    no_stats_only: bool,
}

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kind {
    /// A request
    Add,
    /// A list of requests to forget
    Abort,
    /// A call
    Call,
    /// What came of requests in a step
    Step,
    /// A frame of a step without outputs
    Stats,
    /// The answer to a call
    Reply,
    /// The core's last word
    Dead,
    /// A client has come
    Joined,
    /// A client has gone
    Left,
    /// A message that does not decode
    Bad,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Abort => "abort",
            Self::Call => "call",
            Self::Step => "step",
            Self::Stats => "stats",
            Self::Reply => "reply",
            Self::Dead => "dead",
            Self::Joined => "joined",
            Self::Left => "left",
            Self::Bad => "bad",
        }
    }
}

/// A record and what it means.
pub struct Seen {
    pub record: TapRecord,
    pub meaning: Meaning,
    /// What the message holds that this build does not know: where, and what.
    pub unknown: Vec<(String, Value)>,
}

#[allow(clippy::large_enum_variant)] // One a message, moved once.
pub enum Meaning {
    ToCore(ClientMessage),
    ToClient(EngineMessage),
    Note,
    Bad(DecodeError),
}

impl Seen {
    pub fn new(record: TapRecord) -> Self {
        let (meaning, unknown) = match &record.passed {
            Passed::ToCore(frames) => (
                ClientMessage::decode(frames).map(Meaning::ToCore),
                ClientMessage::unknown_fields(frames),
            ),
            Passed::ToClient(frames) => (
                EngineMessage::decode(frames).map(Meaning::ToClient),
                EngineMessage::unknown_fields(frames),
            ),
            Passed::Joined(_) | Passed::Left(_) => (Ok(Meaning::Note), Vec::new()),
        };
        Self { record, meaning: meaning.unwrap_or_else(Meaning::Bad), unknown }
    }

    pub fn kind(&self) -> Kind {
        match (&self.meaning, &self.record.passed) {
            (Meaning::ToCore(ClientMessage::Add(_)), _) => Kind::Add,
            (Meaning::ToCore(ClientMessage::Abort(_)), _) => Kind::Abort,
            (Meaning::ToCore(_), _) => Kind::Call,
            (Meaning::ToClient(message), _) => match message {
                EngineMessage::Step { outputs, finished_requests, .. } => {
                    let empty = outputs.is_empty() && finished_requests.is_empty();
                    if empty { Kind::Stats } else { Kind::Step }
                }
                EngineMessage::Utility { .. } => Kind::Reply,
                EngineMessage::Dead => Kind::Dead,
            },
            (Meaning::Note, Passed::Joined(_)) => Kind::Joined,
            (Meaning::Note, _) => Kind::Left,
            (Meaning::Bad(_), _) => Kind::Bad,
        }
    }

    /// Bytes of the message's frames.
    pub fn bytes(&self) -> u64 {
        self.record.passed.frames().iter().map(|frame| frame.len() as u64).sum()
    }

    /// Leaves only the parts of a step that `request` is wanted of.
    fn narrow(&mut self, request: &str) -> bool {
        match &mut self.meaning {
            Meaning::ToCore(ClientMessage::Add(add)) => {
                let external = add.external_req_id.as_deref();
                add.request_id.as_str().contains(request)
                    || external.is_some_and(|id| id.contains(request))
            }
            Meaning::ToCore(ClientMessage::Abort(ids)) => {
                ids.retain(|id| id.as_str().contains(request));
                !ids.is_empty()
            }
            Meaning::ToClient(EngineMessage::Step { outputs, finished_requests, .. }) => {
                outputs.retain(|output| output.request_id.as_str().contains(request));
                finished_requests.retain(|id| id.as_str().contains(request));
                !outputs.is_empty() || !finished_requests.is_empty()
            }
            // It takes every request along.
            Meaning::ToClient(EngineMessage::Dead) | Meaning::Note => {
                matches!(self.kind(), Kind::Left | Kind::Dead)
            }
            _ => false,
        }
    }
}

impl Wanted {
    /// Whether `seen` is wanted. Where a request is asked for, of a frame with several only that
    /// one is left in what it means; the record stays as it came.
    pub fn takes(&self, seen: &mut Seen) -> bool {
        let kind = seen.kind();
        self.client.is_none_or(|client| client == seen.record.client)
            && (self.kind.is_empty() || self.kind.contains(&kind))
            && !(self.no_stats_only && kind == Kind::Stats)
            && self.request.as_ref().is_none_or(|request| seen.narrow(request))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    fn add(id: &str) -> Seen {
        Seen::new(testing::record(2, testing::add(id)))
    }

    fn step(ids: &[&str]) -> Seen {
        let outputs = ids.iter().map(|id| testing::output(id, &[])).collect();
        Seen::new(testing::record(2, testing::step(outputs)))
    }

    fn seen(passed: Passed) -> Seen {
        Seen::new(testing::record(2, passed))
    }

    #[test]
    fn every_filter_must_take_it() {
        let all = Wanted::default();
        let client = |client| Wanted { client: Some(client), ..Wanted::default() };
        let kinds = |kind: &[Kind]| Wanted { kind: kind.to_vec(), ..Wanted::default() };
        let request = |text: &str| Wanted { request: Some(text.into()), ..Wanted::default() };
        let quiet = Wanted { no_stats_only: true, ..Wanted::default() };
        assert!(all.takes(&mut add("a")) && all.takes(&mut step(&[])));
        assert!(client(2).takes(&mut add("a")) && !client(1).takes(&mut add("a")));
        assert!(kinds(&[Kind::Add, Kind::Left]).takes(&mut add("a")));
        assert!(!kinds(&[Kind::Step]).takes(&mut add("a")));
        assert!(!kinds(&[Kind::Step]).takes(&mut step(&[])));
        assert!(!quiet.takes(&mut step(&[])) && quiet.takes(&mut step(&["a"])));
        assert!(request("ab").takes(&mut add("cabin")) && !request("ab").takes(&mut add("b")));
        assert!(request("a").takes(&mut seen(Passed::Left("it left".into()))));
        assert!(!request("a").takes(&mut seen(Passed::Joined("frontend a".into()))));
    }

    #[test]
    fn of_a_step_only_the_wanted_request_is_left() {
        let wanted = Wanted { request: Some("b".into()), ..Wanted::default() };
        let mut step = step(&["a", "b", "c"]);
        assert!(wanted.takes(&mut step));
        let Meaning::ToClient(EngineMessage::Step { outputs, .. }) = &step.meaning else {
            panic!("another message")
        };
        assert_eq!(outputs.len(), 1);
        assert_eq!(outputs[0].request_id.as_str(), "b");
    }
}
