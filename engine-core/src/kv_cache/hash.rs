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

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(salt: Option<&str>, prompt: &[u32], outputs: &[u32]) -> Vec<BlockHash> {
        let mut hashes = BlockHashes::new(4, salt);
        hashes.extend(prompt, outputs);
        hashes.full_blocks().to_vec()
    }

    #[test]
    fn a_chain_depends_on_the_tokens_and_not_on_how_it_grew() {
        let tokens: Vec<u32> = (0..19).collect();
        let whole = chain(None, &tokens, &[]);
        assert_eq!(whole.len(), 4);
        for split in 0..=tokens.len() {
            let (prompt, outputs) = tokens.split_at(split);
            assert_eq!(chain(None, prompt, outputs), whole);
            let mut grown = BlockHashes::new(4, None);
            (0..=outputs.len()).for_each(|known| grown.extend(prompt, &outputs[..known]));
            assert_eq!(grown.full_blocks(), whole);
        }
    }

    #[test]
    fn a_hash_names_everything_before_it() {
        let base = chain(None, &[1, 2, 3, 4, 5, 6, 7, 8], &[]);
        let other = chain(None, &[9, 2, 3, 4, 5, 6, 7, 8], &[]);
        assert!(base.iter().zip(&other).all(|(one, two)| one != two));
        for salt in ["", "a"] {
            let salted = chain(Some(salt), &[1, 2, 3, 4, 5, 6, 7, 8], &[]);
            assert!(base.iter().zip(&salted).all(|(one, two)| one != two));
        }
    }
}
