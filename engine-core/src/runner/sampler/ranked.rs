//! The best of a row, in order, without sorting all of it.

use super::Scratch;
use crate::device::cpu::logits;

/// Values of which one maximum is taken. Small, so that few that are not wanted come with one.
const CHUNK: usize = 64;

/// Puts the best `count` values of `row` (and those equal to the last of them) into
/// `scratch.ranked`, best first, equals by token id. NaNs are left out.
pub fn rank(row: &[f32], count: usize, scratch: &mut Scratch) {
    let count = count.max(1);
    let bound = lower_bound(row, count, scratch);
    let ranked = &mut scratch.ranked;
    ranked.clear();
    for (token, &value) in row.iter().enumerate() {
        if value >= bound {
            ranked.push((value, token as u32));
        }
    }
    ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if let Some(&(last, _)) = ranked.get(count - 1) {
        ranked.truncate(ranked.partition_point(|&(value, _)| value >= last));
    }
}

/// A value that at least `count` of the row's reach: of chunks, as many have a maximum of at least
/// the `count`-th largest maximum.
fn lower_bound(row: &[f32], count: usize, scratch: &mut Scratch) -> f32 {
    let chunks = row.len().div_ceil(CHUNK);
    if count >= chunks {
        return f32::NEG_INFINITY;
    }
    scratch.chunks.clear();
    scratch.chunks.resize(chunks, f32::NEG_INFINITY);
    logits::chunk_maxima(scratch.isa, row, CHUNK, &mut scratch.chunks);
    let by_size = |a: &f32, b: &f32| b.total_cmp(a);
    *scratch.chunks.select_nth_unstable_by(count - 1, by_size).1
}
