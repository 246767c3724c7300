//! Messages that are none, both ways over both transports.

use std::time::Duration;

use bytes::Bytes;
use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineCoreRequest, EngineMessage, FinishReason, ReadyResponse,
    RequestId, SamplingParams, StepFrame, UtilityCall, UtilityFrame, UtilityReply, Value as Plain,
    testing::{idle_stats, small_ready},
};
use pawl_shared::transport::{
    ClientId, CoreAt, CoreEndpoint, CoreEndpointConfig, CoreEvent, FrontendEndpoint,
    FrontendEndpointConfig, FrontendEvent, FrontendSender, SendRefused,
};
use serde_json::Value;
use tokio::sync::mpsc;

use super::{
    Counts, Dice, Memory, System, assert_serves, beside_live_traffic, counted, counts, tokens,
};
use crate::harness::{Run, rounds, wait_for};

/// Announcements of more than there is, and depth without end.
const ABSURD: [&[u8]; 8] = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
];

/// Spoils a message, mostly one place of its payload.
fn spoil(dice: &mut Dice, frames: &mut Vec<Bytes>) {
    let place = dice.below(frames.len());
    let mut bytes = frames[place].to_vec();
    match dice.below(12) {
        0..=3 => {
            for _ in 0..=dice.below(6) {
                let at = dice.below(bytes.len());
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = dice.next() as u8;
                }
            }
        }
        4 => bytes.truncate(dice.below(bytes.len())),
        5..=7 => {
            let absurd = ABSURD[dice.below(ABSURD.len())];
            let at = dice.below(bytes.len() + 1);
            let end = (at + absurd.len()).min(bytes.len());
            bytes.splice(at..end, absurd.iter().copied());
        }
        8 => {
            let at = dice.below(bytes.len() + 1);
            let count = dice.below(40);
            let more = dice.bytes(count);
            bytes.splice(at..at, more);
        }
        9 => {
            let count = 1 + dice.below(300);
            bytes = dice.bytes(count);
        }
        10 => {
            let level = [0x91, 0x81, 0xdd][dice.below(3)];
            let at = dice.below(bytes.len() + 1);
            let depth = 10 + dice.below(20_000);
            bytes.splice(at.., std::iter::repeat_n(level, depth));
        }
        _ => {
            let count = dice.below(20);
            let more = dice.bytes(count);
            frames.extend(std::iter::repeat_n(Bytes::from(more), 1 + dice.below(5)));
        }
    }
    frames[place] = bytes.into();
}

fn to_core(dice: &mut Dice, round: usize) -> Vec<Bytes> {
    let message = match dice.below(4) {
        0 | 1 => {
            let sampling = SamplingParams { max_tokens: Some(2), ..SamplingParams::default() };
            let id = RequestId::from(format!("bad-{round}"));
            ClientMessage::Add(Box::new(EngineCoreRequest::new(id, vec![1, 2, 3], sampling)))
        }
        2 => ClientMessage::Abort((0..4).map(|n| format!("bad-{n}").into()).collect()),
        _ => ClientMessage::Utility(call("is_sleeping", round as u64)),
    };
    let mut frames = message.encode();
    spoil(dice, &mut frames);
    frames
}

fn call(method: &str, call_id: u64) -> UtilityCall {
    UtilityCall { client_index: 0, call_id, method: method.into(), args: Vec::new() }
}

fn to_frontend(dice: &mut Dice, round: usize) -> Vec<Bytes> {
    let now = SystemClock.now();
    let mut frames = if dice.below(4) == 0 {
        let reply = UtilityReply { call_id: 1 << 62, result: Ok(Plain::Bool(true)) };
        UtilityFrame::new(now, reply, 0).encode()
    } else {
        let output = EngineCoreOutput {
            new_token_ids: vec![7, 8],
            finish_reason: Some(FinishReason::Length),
            ..EngineCoreOutput::new(RequestId::from(format!("bad-{round}")))
        };
        StepFrame::new(now, idle_stats(), 0, vec![output]).encode()
    };
    spoil(dice, &mut frames);
    frames
}

/// A frontend that has joined the core and may say what it likes.
struct BadFrontend {
    endpoint: FrontendEndpoint,
    sender: FrontendSender,
    calls: u64,
}

impl BadFrontend {
    async fn join(address: &str) -> Self {
        let config = FrontendEndpointConfig::new(CoreAt::Join(address.parse().unwrap()));
        let (mut endpoint, sender) = FrontendEndpoint::start(config).await.unwrap();
        while !matches!(endpoint.next().await, FrontendEvent::Up { .. }) {}
        Self { endpoint, sender, calls: 1 << 50 }
    }

    /// Takes what the core says, so that it may go on, while there is something.
    async fn read(&mut self) {
        let wait = Duration::from_millis(1);
        while tokio::time::timeout(wait, self.endpoint.next()).await.is_ok() {}
    }

    async fn send(&mut self, frames: Vec<Bytes>) {
        while let Err(refused) = self.sender.try_send(frames.clone()) {
            assert_eq!(refused, SendRefused::Full);
            self.read().await;
        }
    }

    /// The core's own account, once it has taken in all that was sent before.
    async fn status(&mut self) -> Value {
        self.calls += 1;
        let asked = ClientMessage::Utility(call("pawl_status", self.calls));
        self.send(asked.encode()).await;
        let answered = async {
            loop {
                let FrontendEvent::Message { frames } = self.endpoint.next().await else {
                    continue;
                };
                if let Ok(EngineMessage::Utility { reply, .. }) = EngineMessage::decode(&frames)
                    && reply.call_id == self.calls
                {
                    return serde_json::from_str(&reply.result.unwrap().to_json()).unwrap();
                }
            }
        };
        tokio::time::timeout(crate::harness::PATIENCE, answered).await.expect("an answer")
    }
}

/// Sends the core `count` messages; counts those that do not decode, by kind.
async fn talk_to_core(frontend: &mut BadFrontend, dice: &mut Dice, count: usize) -> Counts {
    let mut expected = Counts::new();
    for round in 0..count {
        let frames = to_core(dice, round);
        if let Err(error) = ClientMessage::decode(&frames) {
            *expected.entry(error.kind.as_str().into()).or_default() += 1;
        }
        frontend.send(frames).await;
        if round % 32 == 0 {
            frontend.read().await;
        }
    }
    expected
}

fn add(counts: &mut Counts, more: Counts) {
    for (kind, count) in more {
        *counts.entry(kind).or_default() += count;
    }
}

fn assert_kinds(seen: &Counts, kinds: [&str; 5]) {
    for kind in kinds {
        assert!(seen.contains_key(kind), "nothing {kind} in {seen:?}");
    }
}

fn bad_frontend(tcp: bool) {
    let mut system = System::start(tcp);
    let mut dice = Dice(11);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    beside_live_traffic(system.frontend.http, || {
        runtime.block_on(async {
            let mut frontend = BadFrontend::join(&system.address).await;
            // What is allocated once is not growth.
            let mut expected = talk_to_core(&mut frontend, &mut dice, 300).await;
            frontend.status().await;
            let before = Memory::of(&system.pids());
            let count = rounds(500, 20_000);
            add(&mut expected, talk_to_core(&mut frontend, &mut dice, count).await);
            let status = frontend.status().await;
            assert_eq!(counts(&status["undecodable"]), expected);
            assert_kinds(&expected, ["truncated", "trailing", "type", "utf8", "frames"]);
            before.assert_grown_little();
            frontend.endpoint.leave(Duration::from_secs(5)).await;
        });
    });
    system.assert_unharmed();
}

#[test]
fn hostile_payloads_to_the_core_over_ipc_are_counted_and_disturb_nobody() {
    bad_frontend(false);
}

#[test]
fn hostile_payloads_to_the_core_over_tcp_are_counted_and_disturb_nobody() {
    bad_frontend(true);
}

/// A core that answers as it should and says a good deal else.
struct BadCore {
    endpoint: CoreEndpoint,
    client: Option<ClientId>,
    /// Of each request: its id, its next token, and how many are still to come.
    open: Vec<(RequestId, u32, u32)>,
    dice: Dice,
    /// What did not decode, by kind.
    expected: Counts,
}

impl BadCore {
    async fn bind(address: &str) -> Self {
        let config = CoreEndpointConfig::new(vec![address.parse().unwrap()]);
        let mut endpoint = CoreEndpoint::bind(config).await.unwrap();
        let ready = ReadyResponse { max_model_len: 8192, max_num_seqs: 64, ..small_ready() };
        endpoint.set_ready(vec![ready.encode()]);
        let (dice, expected) = (Dice(12), Counts::new());
        Self { endpoint, client: None, open: Vec::new(), dice, expected }
    }

    /// Serves and, for each number that comes, says so many things that are none; it answers when
    /// they are said.
    async fn run(mut self, mut wanted: mpsc::Receiver<usize>, said: mpsc::Sender<Counts>) {
        let mut step = tokio::time::interval(Duration::from_millis(1));
        let mut left = 0;
        loop {
            tokio::select! {
                event = self.endpoint.next() => self.on_event(event),
                _ = step.tick() => {
                    self.step();
                    let now = left.min(10);
                    (0..now).for_each(|nth| self.say_something_bad(left - nth));
                    left -= now;
                    if now > 0 && left == 0 {
                        said.send(std::mem::take(&mut self.expected)).await.unwrap();
                    }
                }
                more = wanted.recv(), if left == 0 => match more {
                    Some(more) => left = more,
                    None => return self.endpoint.close(Duration::from_secs(1)).await,
                },
            }
        }
    }

    fn on_event(&mut self, event: CoreEvent) {
        match event {
            CoreEvent::Joined { client, .. } => self.client = Some(client),
            CoreEvent::Left { .. } => {}
            CoreEvent::Message { frames, .. } => match ClientMessage::decode(&frames).unwrap() {
                ClientMessage::Add(request) => {
                    let first = request.prompt_token_ids.unwrap()[0];
                    let count = request.sampling_params.unwrap().max_tokens.unwrap();
                    self.open.push((request.request_id, first, count));
                }
                ClientMessage::Utility(call) => {
                    let result = match call.method.as_str() {
                        "get_model_card" => Ok(ModelCard::mock().to_value()),
                        _ => Ok(Plain::Nil),
                    };
                    let reply = UtilityReply { call_id: call.call_id, result };
                    self.send(UtilityFrame::new(SystemClock.now(), reply, 0).encode());
                }
                _ => {}
            },
        }
    }

    /// A token for each request, each in a frame of its own.
    fn step(&mut self) {
        for (id, token, left) in std::mem::take(&mut self.open) {
            let output = EngineCoreOutput {
                new_token_ids: vec![token % 256],
                finish_reason: (left == 1).then_some(FinishReason::Length),
                ..EngineCoreOutput::new(id.clone())
            };
            self.send(StepFrame::new(SystemClock.now(), idle_stats(), 0, vec![output]).encode());
            if left > 1 {
                self.open.push((id, token + 1, left - 1));
            }
        }
    }

    fn say_something_bad(&mut self, round: usize) {
        let frames = to_frontend(&mut self.dice, round);
        if let Err(error) = EngineMessage::decode(&frames) {
            *self.expected.entry(error.kind.as_str().into()).or_default() += 1;
        }
        self.send(frames);
    }

    fn send(&mut self, frames: Vec<Bytes>) {
        let client = self.client.expect("somebody has joined");
        self.endpoint.send(client, frames).expect("the api-server reads");
    }
}

fn bad_core(tcp: bool) {
    let run = Run::new();
    let address = if tcp { "tcp://127.0.0.1:0".into() } else { run.core_address() };
    let (wanted, wanted_receiver) = mpsc::channel(1);
    let (said_sender, mut said) = mpsc::channel(1);
    let (bound, address_bound) = std::sync::mpsc::sync_channel(1);
    let core = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let core = BadCore::bind(&address).await;
            bound.send(core.endpoint.addresses()[0].to_string()).unwrap();
            core.run(wanted_receiver, said_sender).await;
        });
    });
    let address = address_bound.recv().unwrap();
    let mut frontend = run.frontend_of(&address, "api", &[]);
    beside_live_traffic(frontend.http, || {
        let mut say = |count: usize| {
            wanted.blocking_send(count).unwrap();
            said.blocking_recv().unwrap()
        };
        // What is allocated once is not growth.
        let mut expected = say(300);
        let before = Memory::of(&[frontend.process.pid()]);
        add(&mut expected, say(rounds(500, 20_000)));
        let sum = |counts: &Counts| counts.values().sum::<u64>();
        let seen = || counted(&frontend, "pawl:decode_errors_total");
        wait_for("all to be counted", || (sum(&seen()) >= sum(&expected)).then_some(()));
        assert_eq!(seen(), expected);
        assert_kinds(&expected, ["truncated", "type", "utf8", "range", "too_deep"]);
        before.assert_grown_little();
        let page = frontend.scrape();
        assert!(page.get("pawl:unknown_request_outputs_total") > 0.0);
    });
    assert_serves(&mut frontend);
    drop(wanted);
    core.join().unwrap();
}

#[test]
fn hostile_payloads_to_an_api_server_over_ipc_are_counted_and_disturb_nobody() {
    bad_core(false);
}

#[test]
fn hostile_payloads_to_an_api_server_over_tcp_are_counted_and_disturb_nobody() {
    bad_core(true);
}

/// Sound messages that are not the sender's to send.
#[test]
fn hostile_ids_reach_nobody_elses_requests() {
    let mut system = System::start(false);
    let http = system.frontend.http;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let aborted = beside_live_traffic(http, || {
        runtime.block_on(async {
            let mut frontend = BadFrontend::join(&system.address).await;
            let mut others = Vec::new();
            for _ in 0..rounds(50, 2_000) {
                let status = frontend.status().await;
                let listed = status["requests"].as_array().unwrap().iter();
                let ids: Vec<RequestId> =
                    listed.map(|request| request["id"].as_str().unwrap().into()).collect();
                // Another's request under its own id, twice, and an end to all of them.
                for id in &ids {
                    let sampling =
                        SamplingParams { max_tokens: Some(3), ..SamplingParams::default() };
                    let add = EngineCoreRequest::new(id.clone(), vec![9, 9], sampling);
                    let add = ClientMessage::Add(Box::new(add)).encode();
                    frontend.send(add.clone()).await;
                    frontend.send(add).await;
                }
                frontend.send(ClientMessage::Abort(ids.clone()).encode()).await;
                others.extend(ids);
                frontend.read().await;
            }
            let status = frontend.status().await;
            assert!(status["duplicate_ids"].as_u64().unwrap() > 0, "{status}");
            frontend.endpoint.leave(Duration::from_secs(5)).await;
            others.len()
        })
    });
    assert!(aborted > 0, "nothing was under way");
    assert!(tokens(http, 0).is_some());
    system.assert_unharmed();
}
