//! The names under which full blocks are found again.

use std::fmt;

use sha2::{Digest, Sha256};

/// Names a full block by its tokens, all tokens before it, and whatever else the content depends
/// on. A cryptographic hash, because a collision would show one user another one's text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockHash([u8; 32]);

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}{d:02x}")
    }
}

/// The hashes of a request's full blocks: a chain that grows with its tokens, each link computed
/// once.
#[derive(Debug)]
pub struct BlockHashes {
    block_size: usize,
    root: BlockHash,
    chain: Vec<BlockHash>,
}

impl BlockHashes {
    /// An empty chain. Requests with different `cache_salt` share nothing: the salt is the parent
    /// of block 0, and through it of every block.
    #[must_use]
    pub fn new(block_size: u32, cache_salt: Option<&str>) -> Self {
        let mut hasher = Sha256::new_with_prefix(b"pawl kv block\0");
        if let Some(salt) = cache_salt {
            hasher.update(b"cache_salt\0");
            hasher.update(salt.as_bytes());
        }
        let root = BlockHash(hasher.finalize().into());
        Self { block_size: block_size as usize, root, chain: Vec::new() }
    }

    /// Continues the chain over the full blocks of `prompt` followed by `outputs`.
    pub fn extend(&mut self, prompt: &[u32], outputs: &[u32]) {
        let full = (prompt.len() + outputs.len()) / self.block_size;
        for index in self.chain.len()..full {
            let (start, end) = (index * self.block_size, (index + 1) * self.block_size);
            let cut = |at: usize| at.saturating_sub(prompt.len());
            let mut hasher = Sha256::new_with_prefix(self.chain.last().unwrap_or(&self.root).0);
            hasher.update(bytemuck::cast_slice::<u32, u8>(
                &prompt[start.min(prompt.len())..end.min(prompt.len())],
            ));
            hasher.update(bytemuck::cast_slice::<u32, u8>(&outputs[cut(start)..cut(end)]));
            self.chain.push(BlockHash(hasher.finalize().into()));
        }
    }

    /// The hash of each full block so far.
    #[must_use]
    pub fn full_blocks(&self) -> &[BlockHash] {
        &self.chain
    }
}
