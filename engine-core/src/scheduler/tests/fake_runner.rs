//! A runner without a model. Its KV cache holds, in each slot, a digest of the token there and of
//! all before it, so that it sees whether a block holds what the scheduler thinks.

use std::collections::{BTreeMap, BTreeSet};

use crate::step::{BlockId, BlockTableUpdate, RequestKey, Sampled, StepPlan, TokenLogprobs};

pub const VOCAB: u64 = 97;

/// What a sequence is before its first token. Nothing is shared across salts.
pub fn root(salt: Option<&str>) -> u64 {
    salt.into_iter().flat_map(str::bytes).fold(17, |digest, byte| mix(digest, u64::from(byte)))
}

/// The digest of a sequence that is one token longer.
pub fn mix(digest: u64, token: u64) -> u64 {
    let mut bits = digest.rotate_left(5) ^ token.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 32)
}

/// The token that follows a sequence.
pub fn next_token(digest: u64, seed: u64) -> u32 {
    (mix(digest, seed) % VOCAB) as u32
}

#[derive(Default)]
struct Sequence {
    seed: u64,
    tokens: Vec<u32>,
    /// `digests[p]` is that of tokens `0..=p`.
    digests: Vec<u64>,
    table: Vec<BlockId>,
    logprobs: bool,
}

pub struct FakeRunner {
    block_size: usize,
    slots: Vec<u64>,
    sequences: BTreeMap<RequestKey, Sequence>,
    /// The digest under which a request's tokens start; told before it is introduced.
    pub roots: BTreeMap<RequestKey, u64>,
    /// Sampled in place of what the digest says, by output number.
    pub scripts: BTreeMap<RequestKey, Vec<u32>>,
    /// Whose next row of logits is spoilt.
    pub nans: BTreeSet<RequestKey>,
}

impl FakeRunner {
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        Self {
            block_size: block_size as usize,
            slots: vec![0; (num_blocks * block_size) as usize],
            sequences: BTreeMap::new(),
            roots: BTreeMap::new(),
            scripts: BTreeMap::new(),
            nans: BTreeSet::new(),
        }
    }

    pub fn execute(&mut self, plan: &StepPlan) -> Vec<Sampled> {
        for key in &plan.finished {
            assert!(self.sequences.remove(key).is_some(), "{key:?} ended and was never there");
        }
        for new in &plan.new_requests {
            let mut sequence = Sequence {
                seed: new.seed,
                logprobs: new.sampling.logprobs.is_some(),
                ..Sequence::default()
            };
            new.prompt.iter().for_each(|token| sequence.push(self.roots[&new.key], *token));
            let before = self.sequences.insert(new.key, sequence);
            assert!(before.is_none(), "{:?} is introduced twice", new.key);
        }
        let keys: BTreeSet<_> = plan.scheduled.iter().map(|scheduled| scheduled.key).collect();
        assert_eq!(keys.len(), plan.scheduled.len(), "a request is twice in a plan");
        self.write(plan);
        self.sample(plan)
    }

    /// All of the step's tokens are written before any is read.
    fn write(&mut self, plan: &StepPlan) {
        for scheduled in &plan.scheduled {
            let sequence = self.sequences.get_mut(&scheduled.key).expect("introduced");
            match &scheduled.blocks {
                BlockTableUpdate::Append(blocks) => sequence.table.extend(blocks),
                BlockTableUpdate::Replace(blocks) => sequence.table.clone_from(blocks),
            }
            assert!(sequence.table.iter().all(|block| block.0 != 0), "the null block is in use");
            let first = scheduled.first_position as usize;
            let end = first + scheduled.num_tokens as usize;
            assert!(first < end, "{:?} is planned without a token", scheduled.key);
            assert!(end <= sequence.tokens.len(), "a token is read before it is sampled");
            assert_eq!(scheduled.samples, end == sequence.tokens.len(), "samples at the end only");
            for position in first..end {
                let slot = slot(&sequence.table, position, self.block_size);
                self.slots[slot] = sequence.digests[position];
            }
        }
    }

    fn sample(&mut self, plan: &StepPlan) -> Vec<Sampled> {
        let mut all = Vec::new();
        for scheduled in &plan.scheduled {
            let sequence = self.sequences.get_mut(&scheduled.key).expect("introduced");
            let end = (scheduled.first_position + scheduled.num_tokens) as usize;
            for position in 0..end {
                let slot = slot(&sequence.table, position, self.block_size);
                assert_eq!(
                    self.slots[slot], sequence.digests[position],
                    "{:?} reads something else at position {position}",
                    scheduled.key
                );
            }
            if !scheduled.samples {
                continue;
            }
            let root = self.roots[&scheduled.key];
            let digest = *sequence.digests.last().expect("a prompt has tokens");
            let script = self.scripts.get_mut(&scheduled.key).filter(|script| !script.is_empty());
            let token = match script {
                Some(script) => script.remove(0),
                None => next_token(digest, sequence.seed),
            };
            sequence.push(root, token);
            let logprobs = TokenLogprobs {
                token_ids: vec![token, 1],
                logprobs: vec![-0.5, -1.0],
                sampled_rank: 1,
            };
            all.push(Sampled {
                key: scheduled.key,
                token,
                logprobs: sequence.logprobs.then_some(logprobs),
                num_nans: u32::from(self.nans.remove(&scheduled.key)) * 3,
            });
        }
        all
    }
}

impl Sequence {
    fn push(&mut self, root: u64, token: u32) {
        let before = self.digests.last().copied().unwrap_or(root);
        self.tokens.push(token);
        self.digests.push(mix(before, u64::from(token)));
    }
}

fn slot(table: &[BlockId], position: usize, block_size: usize) -> usize {
    table[position / block_size].0 as usize * block_size + position % block_size
}
