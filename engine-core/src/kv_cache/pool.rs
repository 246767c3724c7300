//! Blocks, free and used.
//!
//! Free blocks form a ring in the order in which they will be handed out. A free block keeps its
//! hash, and so can be found and used again, until it is handed out. Block 0 is the ring's anchor:
//! it is never handed out, and serves as the null block.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use super::BlockHash;
use crate::step::BlockId;

const ANCHOR: BlockId = BlockId(0);

#[derive(Clone, Copy, Debug)]
enum State {
    /// In the ring, between these two.
    Free { prev: BlockId, next: BlockId },
    /// In the tables of `refs` requests.
    Used { refs: NonZeroU32 },
}

#[derive(Clone, Copy, Debug)]
struct Block {
    state: State,
    hash: Option<BlockHash>,
}

#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<Block>,
    num_free: u32,
    num_used: u32,
    /// Holds exactly the blocks that carry a hash, each under its own. At most one entry a block.
    by_hash: BTreeMap<BlockHash, BlockId>,
}

impl BlockPool {
    pub(super) fn new(num_blocks: u32) -> Self {
        assert!(num_blocks >= 2, "a pool of {num_blocks} blocks has none to hand out");
        let ring = |id: u32| Block {
            state: State::Free {
                prev: BlockId((id + num_blocks - 1) % num_blocks),
                next: BlockId((id + 1) % num_blocks),
            },
            hash: None,
        };
        Self {
            blocks: (0..num_blocks).map(ring).collect(),
            num_free: num_blocks - 1,
            num_used: 0,
            by_hash: BTreeMap::new(),
        }
    }

    /// Blocks that can be handed out in all.
    pub(super) fn usable(&self) -> u32 {
        self.blocks.len() as u32 - 1
    }

    pub(super) fn num_free(&self) -> u32 {
        self.num_free
    }

    pub(super) fn is_free(&self, block: BlockId) -> bool {
        matches!(self.blocks[block.0 as usize].state, State::Free { .. })
    }

    /// The block that carries `hash`.
    pub(super) fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    /// Hands out the block that was free for longest, after [`Self::num_free`] was seen to be above
    /// zero. What it held is evicted.
    pub(super) fn take(&mut self) -> BlockId {
        let (_, block) = self.links(ANCHOR);
        assert!(block != ANCHOR, "a block was taken from an empty pool");
        self.forget(block);
        self.share(block);
        block
    }

    /// One more request uses `block`.
    pub(super) fn share(&mut self, block: BlockId) {
        let refs = match self.blocks[block.0 as usize].state {
            State::Used { refs } => refs.checked_add(1).expect("fewer requests than 2^32"),
            State::Free { .. } => {
                self.unlink(block);
                self.num_used += 1;
                NonZeroU32::MIN
            }
        };
        self.blocks[block.0 as usize].state = State::Used { refs };
        self.check_counts();
    }

    /// One request less uses `block`. Unused, it waits at the back of the ring if it can be found
    /// again, and is the next to be handed out if not.
    pub(super) fn release(&mut self, block: BlockId) {
        let Block { state, hash } = self.blocks[block.0 as usize];
        let State::Used { refs } = state else { panic!("block {} was released twice", block.0) };
        if let Some(refs) = NonZeroU32::new(refs.get() - 1) {
            self.blocks[block.0 as usize].state = State::Used { refs };
            return;
        }
        let (last, first) = self.links(ANCHOR);
        if hash.is_some() {
            self.link(last, block, ANCHOR);
        } else {
            self.link(ANCHOR, block, first);
        }
        self.num_used -= 1;
        self.check_counts();
    }

    /// Lets `block` be found by `hash`. `false` if another block is already found by it: two
    /// requests computed the same tokens side by side, and one copy is enough.
    pub(super) fn register(&mut self, block: BlockId, hash: BlockHash) -> bool {
        let slot = &mut self.blocks[block.0 as usize];
        assert!(slot.hash.is_none(), "block {} is given a second hash", block.0);
        assert!(matches!(slot.state, State::Used { .. }), "free block {} is hashed", block.0);
        if self.by_hash.contains_key(&hash) {
            return false;
        }
        self.by_hash.insert(hash, block);
        slot.hash = Some(hash);
        true
    }

    /// Nobody finds `block` any more. It stays where it is.
    pub(super) fn forget(&mut self, block: BlockId) {
        if let Some(hash) = self.blocks[block.0 as usize].hash.take() {
            self.by_hash.remove(&hash);
        }
    }

    /// Forgets every hash, unless a block is in use.
    pub(super) fn reset(&mut self) -> bool {
        if self.num_used > 0 {
            return false;
        }
        self.by_hash.clear();
        self.blocks.iter_mut().for_each(|block| block.hash = None);
        true
    }

    fn links(&self, block: BlockId) -> (BlockId, BlockId) {
        match self.blocks[block.0 as usize].state {
            State::Free { prev, next } => (prev, next),
            State::Used { .. } => panic!("used block {} is looked for in the ring", block.0),
        }
    }

    fn unlink(&mut self, block: BlockId) {
        let (prev, next) = self.links(block);
        self.join(prev, next);
        self.num_free -= 1;
    }

    fn link(&mut self, prev: BlockId, block: BlockId, next: BlockId) {
        self.blocks[block.0 as usize].state = State::Free { prev, next };
        self.join(prev, block);
        self.join(block, next);
        self.num_free += 1;
    }

    /// Makes `next` follow `prev`.
    fn join(&mut self, prev: BlockId, next: BlockId) {
        let (before, _) = self.links(prev);
        self.blocks[prev.0 as usize].state = State::Free { prev: before, next };
        let (_, after) = self.links(next);
        self.blocks[next.0 as usize].state = State::Free { prev, next: after };
    }

    /// What costs nothing is checked in every build: a lost block is lost for ever.
    fn check_counts(&self) {
        assert!(
            self.num_free + self.num_used == self.usable(),
            "{} free and {} used blocks are not {}",
            self.num_free,
            self.num_used,
            self.usable()
        );
    }

    /// `refs[b]` is in how many tables block b is.
    pub(super) fn check_invariants(&self, refs: &[u32]) {
        self.check_counts();
        let mut in_ring = 0;
        let (_, mut block) = self.links(ANCHOR);
        while block != ANCHOR {
            let (prev, next) = self.links(block);
            assert_eq!(self.links(prev).1, block, "the ring is broken before {block:?}");
            block = next;
            in_ring += 1;
            assert!(in_ring <= self.num_free, "more blocks are in the ring than are free");
        }
        assert_eq!(in_ring, self.num_free, "blocks in the ring, blocks counted as free");
        let mut hashed = 0;
        for (id, block) in (0..).zip(&self.blocks) {
            let expected = match block.state {
                State::Free { .. } => 0,
                State::Used { refs } => refs.get(),
            };
            assert_eq!(expected, refs[id as usize], "references of block {id}, tables with it");
            if let Some(hash) = block.hash {
                assert_eq!(self.find(&hash), Some(BlockId(id)), "block {id} has lost its hash");
                hashed += 1;
            }
        }
        assert_eq!(hashed, self.by_hash.len(), "hashed blocks, entries by hash");
    }
}
