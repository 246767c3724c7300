//! The clients: what they ask, how they read, and what they must be told.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures::FutureExt;
use pawl_api_server::engine_client::{Generation, Submit, Update};
use pawl_shared::clock::{Clock, Stamp};
use pawl_shared::protocol::{FinishReason, SamplingParams, Value};

use crate::chance::mix;
use crate::ledger::Account;
use crate::plan::{ANSWER_MAX, PROMPT_MAX};
use crate::world::{Event, World};

/// Words that only the mock says.
const FIRST_WORD: u64 = 259;
const WORDS: u64 = 253;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reader {
    /// Reads whatever is there.
    Prompt,
    /// Reads a little now and then.
    Lazy,
    /// Reads nothing.
    Never,
}

/// What must come of a choice that nothing disturbs.
#[derive(Debug)]
struct Choice {
    expected: Vec<u32>,
    finish: FinishReason,
    got: usize,
    account: Account,
    ended: bool,
    completed: bool,
}

/// A request on its way, with whoever reads it.
pub struct Request {
    generation: Generation,
    prompt: u64,
    choices: Vec<Choice>,
    pub reader: Reader,
    asked: Stamp,
    /// Of the core that it was sent to.
    pub core_life: u32,
    /// Whether the prompts it was sent with have been counted as not taken.
    refused: Rc<Cell<bool>>,
    slow: bool,
}

/// What the mock is told to say.
fn script(of: u64) -> Vec<u32> {
    (0..ANSWER_MAX).map(|nth| (FIRST_WORD + mix(of << 8 | nth) % WORDS) as u32).collect()
}

impl World {
    /// A client sends a request to some frontend.
    pub fn submit(&mut self, index: usize, plain: bool) {
        let up = |frontend: &crate::frontend::FrontendProcess| frontend.leaving_since.is_none();
        if self.stopped[index].is_some() || !self.frontends[index].as_ref().is_some_and(up) {
            return;
        }
        let prompts = if plain { 1 } else { self.chance.pick(&[1, 1, 1, 2]) };
        let name = format!("c{}", self.chance.between(0, 4));
        let arrival = self.clock.now();
        let n = if plain { 1 } else { self.chance.pick(&[1, 1, 1, 2, 3]) };
        let max_tokens = self.chance.between(1, ANSWER_MAX) as u32;
        let priority = self.chance.pick(&[0, 0, 1, -1]);
        let mut submits = Vec::new();
        let mut choices = Vec::new();
        for _ in 0..prompts {
            self.asked += 1;
            let words = script(self.asked);
            let stops = self
                .chance
                .percent(40)
                .then(|| words[self.chance.between(0, u64::from(max_tokens) - 1) as usize]);
            let cut = words[..max_tokens as usize].iter().position(|word| Some(*word) == stops);
            let expected = words[..cut.map_or(max_tokens as usize, |at| at + 1)].to_vec();
            let finish = if cut.is_some() { FinishReason::Stop } else { FinishReason::Length };
            let told = Value::Array(words.iter().map(|&word| Value::from(word)).collect());
            let params = SamplingParams {
                n,
                temperature: 0.0,
                max_tokens: Some(max_tokens),
                stop_token_ids: stops.into_iter().collect(),
                extra_args: Some(Value::map([("mock_tokens", told)])),
                ..SamplingParams::default()
            };
            let prompt = self.prompt();
            let mut submit = Submit::new(name.clone(), prompt, params, arrival);
            submit.priority = priority;
            submits.push(submit);
            choices.push((expected, finish));
        }
        let prompt_lens: Vec<u64> = submits.iter().map(|s| s.prompt.len() as u64).collect();
        let frontend = self.frontends[index].as_mut().expect("it is there");
        let generations = match frontend.client.client().submit_all(submits) {
            Ok(generations) => generations,
            Err(error) => {
                frontend.ledger.refused(&error);
                assert!(!plain, "frontend {index} serves nobody: {error}");
                return self.note(format_args!("frontend {index} refuses {name}: {error}"));
            }
        };
        let core_life = self.joined_core[index].expect("it is up");
        let refused = Rc::new(Cell::new(false));
        let reader = match self.chance.between(0, 99) {
            _ if plain || self.calm => Reader::Prompt,
            0..85 => Reader::Prompt,
            85..95 => Reader::Lazy,
            _ => Reader::Never,
        };
        for ((generation, prompt), (expected, finish)) in
            generations.into_iter().zip(prompt_lens).zip(choices)
        {
            self.sent += 1;
            let id = self.sent;
            let choice = || Choice {
                expected: expected.clone(),
                finish,
                got: 0,
                account: Account::default(),
                ended: false,
                completed: false,
            };
            let choices = (0..n).map(|_| choice()).collect();
            let refused = Rc::clone(&refused);
            let request = Request {
                generation,
                prompt,
                choices,
                reader,
                asked: arrival,
                core_life,
                refused,
                slow: false,
            };
            let frontend = self.frontends[index].as_mut().expect("it is there");
            frontend.requests.insert(id, request);
            let life = frontend.life;
            self.note(format_args!(
                "client {id} asks frontend {index} as {name}: {prompt} tokens, n {n}, \
                 {max_tokens} wanted, {reader:?}"
            ));
            if reader == Reader::Lazy {
                let wait = self.chance.millis(100, 3000);
                self.schedule(wait, Event::Read(index, life, id));
            }
            if !plain && self.chance.percent(25) {
                let wait = match self.chance.percent(30) {
                    true => Duration::ZERO,
                    false => self.chance.millis(0, 2000),
                };
                self.schedule(wait, Event::GoAway(index, life, id));
            }
        }
        self.flush_requests(index);
    }

    /// Prompts of a few families that begin alike.
    fn prompt(&mut self) -> Vec<u32> {
        let family = self.chance.between(0, 3);
        let alike = self.chance.between(0, PROMPT_MAX - 1);
        let own = self.chance.between(1, PROMPT_MAX - alike);
        let beginning = (0..alike).map(|nth| (mix(family * 100 + nth) % 250) as u32);
        let asked = self.asked;
        beginning.chain((0..own).map(|nth| (mix(asked << 9 | nth) % 250) as u32)).collect()
    }

    /// A lazy reader reads a little.
    pub fn read_some(&mut self, index: usize, id: u64) {
        self.read(index, id, 2);
        let Some(frontend) = &self.frontends[index] else { return };
        let life = frontend.life;
        if frontend.requests.contains_key(&id) {
            let wait = self.chance.millis(100, 3000);
            self.schedule(wait, Event::Read(index, life, id));
        }
    }

    pub fn read_prompt_readers(&mut self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        let prompt = frontend.requests.iter().filter(|(_, r)| r.reader == Reader::Prompt);
        for id in prompt.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.read(index, id, usize::MAX);
        }
    }

    /// Everybody reads what is there.
    pub fn read_all(&mut self, index: usize) {
        let Some(frontend) = &self.frontends[index] else { return };
        for id in frontend.requests.keys().copied().collect::<Vec<_>>() {
            self.read(index, id, usize::MAX);
        }
    }

    fn read(&mut self, index: usize, id: u64, most: usize) {
        for _ in 0..most {
            let Some(frontend) = &mut self.frontends[index] else { return };
            let Some(request) = frontend.requests.get_mut(&id) else { return };
            match request.generation.next().now_or_never() {
                None => return,
                Some(Some(update)) => self.told(index, id, &update),
                Some(None) => {
                    let request = frontend.requests.remove(&id).expect("it is read");
                    let open = request.choices.iter().filter(|choice| !choice.ended).count();
                    assert_eq!(open, 0, "client {id} was told that all is over");
                    if request.choices.iter().all(|choice| choice.completed) {
                        frontend.ledger.completed_request();
                    }
                    return;
                }
            }
        }
    }

    /// A client is told something: the next words of its script, or one end.
    fn told(&mut self, index: usize, id: u64, update: &Update) {
        let frontend = self.frontends[index].as_mut().expect("it tells");
        let request = frontend.requests.get_mut(&id).expect("it is read");
        let choice = &mut request.choices[update.choice as usize];
        assert!(!choice.ended, "client {id} is told {update:?} after its end");
        let rest = &choice.expected[choice.got..];
        assert!(
            rest.starts_with(&update.token_ids),
            "client {id} is told {:?}, but its script goes on {rest:?}",
            update.token_ids
        );
        choice.got += update.token_ids.len();
        let waited = self.clock.now().since(request.asked);
        let account = &mut choice.account;
        choice.completed = frontend.ledger.update(account, request.prompt, update, waited);
        let Some(finish) = &update.finish else { return };
        choice.ended = true;
        let whole = choice.got == choice.expected.len();
        match (finish.reason, &update.error) {
            (FinishReason::Stop | FinishReason::Length, None) => {
                assert!(whole, "client {id} ended with {finish:?} after {} tokens", choice.got);
                assert_eq!(finish.reason, choice.finish, "client {id} ended for another reason");
            }
            (FinishReason::Abort | FinishReason::Error, Some(error)) => {
                if choice.account.outputs == 0
                    && let Some(reason) = error.refusal()
                    && !request.refused.replace(true)
                {
                    frontend.ledger.rejected(reason);
                }
                if error.code == "slow_reader" && !std::mem::replace(&mut request.slow, true) {
                    frontend.ledger.slow_reader();
                    assert_ne!(request.reader, Reader::Prompt, "client {id} reads at once");
                }
                let known = [
                    "engine_down",
                    "engine_stopping",
                    "shutdown",
                    "slow_reader",
                    "queue_full",
                    "engine_aborted",
                ];
                let code = error.code.clone();
                assert!(known.contains(&code.as_str()), "client {id} ended with {error:?}");
                self.note(format_args!("client {id} ended: {code}"));
            }
            _ => panic!("client {id} ended with {update:?}"),
        }
    }

    /// A client goes away.
    pub fn go_away(&mut self, index: usize, id: u64) {
        self.read(index, id, usize::MAX);
        let Some(frontend) = &mut self.frontends[index] else { return };
        let Some(mut request) = frontend.requests.remove(&id) else { return };
        for choice in request.choices.iter_mut().filter(|choice| !choice.ended) {
            let update = Update {
                finish: Some(pawl_api_server::engine_client::Finish {
                    reason: FinishReason::Abort,
                    stop_reason: None,
                }),
                ..Update::default()
            };
            let waited = self.clock.now().since(request.asked);
            frontend.ledger.update(&mut choice.account, request.prompt, &update, waited);
        }
        drop(request);
        self.note(format_args!("client {id} goes away"));
        self.flush_requests(index);
    }
}
