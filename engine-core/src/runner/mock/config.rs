//! What the mock runner is told.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

/// How the mock runner behaves.
#[derive(Clone, Debug)]
pub struct MockConfig {
    /// Mixed into every made-up token.
    pub seed: u64,
    /// Tokens to give instead of made-up ones.
    pub script: Option<Script>,
    /// Time of a step whatever it runs.
    pub step_base: Duration,
    /// Time on top for each token that runs.
    pub step_per_token: Duration,
    /// Rows of the logits it claims to have.
    pub vocab_size: u32,
    /// Made-up tokens are drawn from `[first, last]`: words in the mock's own tokenizer.
    pub alphabet: (u32, u32),
    /// Longest sequence.
    pub max_model_len: u32,
    /// KV blocks, block 0 included.
    pub num_blocks: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// Whether steps may be queued behind one another; also makes depth 2 the default.
    pub overlaps: bool,
    /// The n-th output token (from 0) is the request's EOS token.
    pub eos_at: Option<u32>,
    /// Fail on order.
    pub fault: Option<Fault>,
    /// Steps wait here for a permit before they run.
    pub gate: Option<Gate>,
}

impl Default for MockConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            script: None,
            step_base: Duration::ZERO,
            step_per_token: Duration::ZERO,
            vocab_size: 512,
            alphabet: (259, 511),
            max_model_len: 8192,
            num_blocks: 4096,
            block_size: 16,
            overlaps: true,
            eos_at: None,
            fault: None,
            gate: None,
        }
    }
}

impl MockConfig {
    /// The same for a model of another vocabulary: made-up tokens come from its upper half, away
    /// from bytes and control tokens.
    #[must_use]
    pub fn with_vocabulary(self, vocab_size: u32) -> Self {
        if vocab_size == self.vocab_size {
            return self;
        }
        Self { vocab_size, alphabet: (vocab_size / 2, vocab_size - 1), ..self }
    }

    /// How long a step of `num_tokens` takes.
    #[must_use]
    pub fn step_time(&self, num_tokens: u32) -> Duration {
        self.step_base.saturating_add(self.step_per_token.saturating_mul(num_tokens))
    }
}

/// Output token ids, given in a circle: token n is entry n modulo the length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script(pub Arc<[u32]>);

/// A failure on order, from the given step on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device reports an error.
    FailAt(u64),
    /// The runner panics.
    PanicAt(u64),
    /// The step never ends and shows no progress.
    HangAt(u64),
}

/// Lets a test decide when each step runs. Dropping every [`GateKeeper`] opens it for good.
#[derive(Clone, Debug)]
pub struct Gate(Receiver<()>);

/// The test's side of a [`Gate`].
#[derive(Clone, Debug)]
pub struct GateKeeper(Sender<()>);

impl Gate {
    /// A closed gate, and who opens it. At most `permits_max` steps can be let through ahead of
    /// time; letting through one more waits until one has run.
    #[must_use]
    pub fn closed(permits_max: usize) -> (Self, GateKeeper) {
        let (sender, receiver) = crossbeam_channel::bounded(permits_max);
        (Self(receiver), GateKeeper(sender))
    }

    pub(super) fn pass(&self) {
        // An error means that the keeper is gone: the gate stands open.
        let _ = self.0.recv();
    }
}

impl GateKeeper {
    /// Lets `steps` more steps run.
    pub fn let_through(&self, steps: usize) {
        for _ in 0..steps {
            // An error means that the runner is gone: nobody waits.
            let _ = self.0.send(());
        }
    }
}
