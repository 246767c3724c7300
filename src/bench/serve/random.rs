//! Random numbers that a seed repeats: prompts, lengths and times of arrival.

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in (0, 1).
    fn unit(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// Standard normal, by Box and Muller.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Gamma of mean `shape`, by Marsaglia and Tsang (2000); below a shape of 1 with their boost.
    fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let boost = self.unit().powf(1.0 / shape);
            return self.gamma(shape + 1.0) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.unit().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }

    /// Seconds between two arrivals at `rate` a second: a gamma distribution of shape
    /// `burstiness`, which is a Poisson process at 1, burstier below, and more even above.
    pub fn interval(&mut self, rate: f64, burstiness: f64) -> f64 {
        if rate.is_infinite() { 0.0 } else { self.gamma(burstiness) / (rate * burstiness) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_the_mean_and_the_spread_of_their_distribution() {
        for burstiness in [0.5, 1.0, 4.0] {
            let mut random = Random::new(7);
            let drawn: Vec<f64> = (0..50_000).map(|_| random.interval(2.0, burstiness)).collect();
            let mean = drawn.iter().sum::<f64>() / 5e4;
            let variance = drawn.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 5e4;
            assert!((mean / 0.5 - 1.0).abs() < 0.03, "{burstiness}: mean {mean}");
            let expected = 0.25 / burstiness;
            assert!((variance / expected - 1.0).abs() < 0.08, "{burstiness}: {variance}");
        }
        assert_eq!(Random::new(1).interval(f64::INFINITY, 1.0), 0.0);
    }
}
