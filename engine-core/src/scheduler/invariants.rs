//! What is true between any two calls.

use super::Scheduler;
use super::request::Phase;

/// Blocks up to which everything is checked each time. Larger pools are checked at every 64th step:
/// half a millisecond a check would be most of what a test with a fast runner does.
const SMALL_POOL: u32 = 1024;

impl Scheduler {
    /// After each mutation: what costs nothing in every build, the rest where debug assertions are
    /// on. A broken invariant ends the core loudly instead of serving wrong text.
    pub(super) fn assert_invariants(&self) {
        let listed = self.waiting.len() + self.deferred.len() + self.running.len();
        assert_eq!(self.requests.len(), listed, "requests known, requests in a list");
        assert!(
            self.running.len() <= self.config.max_num_seqs as usize,
            "{} requests run, {} are allowed to",
            self.running.len(),
            self.config.max_num_seqs
        );
        let blocks = self.kv.config().num_blocks;
        if cfg!(debug_assertions) && (blocks <= SMALL_POOL || self.step.is_multiple_of(64)) {
            self.check_invariants();
        }
    }

    /// Panics with a sentence if anything contradicts anything.
    pub fn check_invariants(&self) {
        assert!(self.running.is_sorted(), "the running list is out of order");
        for (key, request) in &self.requests {
            assert_eq!(*key, request.rank.key, "a request is filed under another one's key");
            let listed = match &request.phase {
                Phase::Waiting => self.waiting.contains(&request.rank),
                Phase::Deferred => self.deferred.contains(&request.rank),
                Phase::Running { .. } => self.running.binary_search(&request.rank).is_ok(),
            };
            assert!(listed, "{key:?} is not in the list that its phase says");
            match &request.phase {
                Phase::Waiting => assert_eq!(request.placeholders, 0, "{key:?} waits too early"),
                Phase::Deferred => assert!(request.placeholders > 0, "{key:?} waits for nothing"),
                Phase::Running { table, computed } => {
                    let known = request.num_tokens() + request.placeholders;
                    assert!(*computed <= known, "{key:?} computed tokens that do not exist");
                    let held = table.blocks().len() as u32;
                    let needed = computed.div_ceil(self.kv.config().block_size);
                    assert_eq!(held, needed, "blocks that {key:?} holds, blocks it needs");
                }
            }
            assert!(
                (request.placeholders as usize) <= self.planned.len(),
                "{key:?} awaits more tokens than there are steps in flight"
            );
        }
        for key in &self.finished {
            assert!(!self.requests.contains_key(key), "{key:?} has ended and is still known");
        }
        self.kv.check_invariants(self.requests.values().filter_map(
            |request| match &request.phase {
                Phase::Running { table, .. } => Some(table),
                Phase::Waiting | Phase::Deferred => None,
            },
        ));
    }
}
