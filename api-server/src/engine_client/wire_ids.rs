//! The ids that the core knows requests by: a client's own id, and what makes it unlike any other.

use pawl_shared::protocol::RequestId;

use super::{Session, Submit};

/// How much of a client's id goes into wire ids, in bytes: it comes back with every output.
const EXTERNAL_ID_BYTES_MAX: usize = 64;

/// Digits of a wire id's counter, which stands at its end.
const COUNTER_DIGITS: usize = 10;

impl Session {
    /// Of each choice one, never given before.
    pub(super) fn fresh_ids(&mut self, submit: &Submit) -> Vec<RequestId> {
        let external = shortened(&submit.external_id);
        self.counter += 1;
        let (epoch, counter) = (self.epoch, self.counter);
        // The counter's width is fixed, so that no two pairs of epoch and counter look alike.
        let parent = format!("{external}-{epoch:x}{counter:0COUNTER_DIGITS$x}");
        match submit.params.n.max(1) {
            1 => vec![RequestId::from(parent)],
            n => (0..n).map(|choice| RequestId::from(format!("{choice}_{parent}"))).collect(),
        }
    }
}

/// The epoch in a wire id of ours.
pub(crate) fn epoch_of(id: &RequestId) -> Option<u64> {
    let (_, tail) = id.as_str().rsplit_once('-')?;
    let digits = tail.len().checked_sub(COUNTER_DIGITS)?;
    u64::from_str_radix(tail.get(..digits)?, 16).ok()
}

/// The beginning of a client's id, cut at a character.
pub(super) fn shortened(id: &str) -> &str {
    let mut end = id.len().min(EXTERNAL_ID_BYTES_MAX);
    while !id.is_char_boundary(end) {
        end -= 1;
    }
    &id[..end]
}
