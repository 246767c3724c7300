//! Random numbers by counting: no state, so nothing to restore after a preemption.

/// A number in `[0, 1)` that is a function of `seed` and `position` alone.
#[must_use]
pub fn uniform(seed: u64, position: u64) -> f64 {
    // The seed is mixed first: neighbouring seeds must not give the same numbers one position on.
    let mixed = mix(mix(seed) ^ position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    // 53 bits are what a double holds below 1.
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

/// A bijection whose every output bit depends on every input bit (the finaliser of SplitMix64).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
