//! Where the mock runner's tokens and logprobs come from.

use std::sync::Arc;

use pawl_shared::protocol::{SamplingParams, Value};

use super::config::{MockConfig, Script};
use crate::step::{NewRequest, TokenLogprobs};

/// One request's tokens: a pure function of position.
pub(super) struct TokenSource {
    /// Of the prompt and the seeds.
    hash: u64,
    prompt_len: u32,
    sampling: Arc<SamplingParams>,
    script: Option<Script>,
    alphabet: (u32, u32),
    vocab_size: u32,
    eos_at: Option<u32>,
}

impl TokenSource {
    pub(super) fn new(config: &MockConfig, request: &NewRequest) -> Self {
        let mut hash = mix(config.seed);
        for &token in request.prompt.iter() {
            hash = mix(hash ^ u64::from(token));
        }
        // Greedy requests depend on the prompt alone, like a real model's; others on their seed.
        if request.sampling.temperature > 0.0 {
            hash = mix(hash ^ request.seed);
        }
        Self {
            hash,
            prompt_len: request.prompt.len() as u32,
            sampling: Arc::clone(&request.sampling),
            script: scripted(&request.sampling, config.vocab_size)
                .or_else(|| config.script.clone())
                .filter(|script| !script.0.is_empty()),
            alphabet: config.alphabet,
            vocab_size: config.vocab_size,
            eos_at: config.eos_at,
        }
    }

    /// The token at `position` of the whole sequence.
    pub(super) fn token_at(&self, position: u32) -> u32 {
        let nth = position - self.prompt_len;
        let token = self.choose(position, nth);
        if nth < self.sampling.min_tokens && self.stops(token) {
            // A real sampler masks these tokens; the nearest that does not stop stands in.
            return (0..self.vocab_size)
                .map(|step| (token + step) % self.vocab_size)
                .find(|&other| !self.stops(other))
                .unwrap_or(token);
        }
        token
    }

    fn choose(&self, position: u32, nth: u32) -> u32 {
        if let (Some(at), Some(eos)) = (self.eos_at, self.sampling.eos_token_id)
            && nth >= at
        {
            return eos;
        }
        if let Some(Script(tokens)) = &self.script {
            return tokens[nth as usize % tokens.len()];
        }
        let random = mix(self.hash ^ u64::from(position));
        match &self.sampling.allowed_token_ids {
            Some(allowed) if !allowed.is_empty() => {
                allowed[(random % allowed.len() as u64) as usize]
            }
            _ => {
                let (first, last) = self.alphabet;
                first + (random % u64::from(last.saturating_sub(first) + 1)) as u32
            }
        }
    }

    fn stops(&self, token: u32) -> bool {
        self.sampling.eos_token_id == Some(token)
            || self.sampling.stop_token_ids.contains(&token)
            || self.sampling.all_stop_token_ids.contains(&token)
    }

    /// Made up, but of the right form: the sampled token first, then the top-k in falling order,
    /// of which the sampled token is the best, or the tokens that the request names.
    pub(super) fn logprobs(&self, sampled: u32) -> Option<TokenLogprobs> {
        let wanted = match self.sampling.logprobs? {
            wanted if wanted < 0 => self.vocab_size,
            wanted => (wanted as u32).min(self.vocab_size),
        };
        let others = match &self.sampling.logprob_token_ids {
            Some(named) => named.clone(),
            None => (0..wanted).map(|rank| (sampled + rank) % self.vocab_size).collect(),
        };
        // The further a token is above the sampled one, the less probable.
        let logprob = |token: u32| {
            let rank = (token + self.vocab_size - sampled) % self.vocab_size;
            -0.125 - rank as f32
        };
        let token_ids: Vec<u32> = std::iter::once(sampled).chain(others).collect();
        let logprobs = token_ids.iter().map(|&token| logprob(token)).collect();
        Some(TokenLogprobs { token_ids, logprobs, sampled_rank: 1 })
    }
}

/// A request's own script: `mock_tokens` in its extra arguments (`vllm_xargs`), a list of token
/// ids. Anything else under that name is taken as no script.
fn scripted(sampling: &SamplingParams, vocab_size: u32) -> Option<Script> {
    let tokens = sampling.extra_args.as_ref()?.get("mock_tokens")?.as_array()?;
    let in_vocabulary = |token: &Value| {
        token.as_u64().and_then(|token| u32::try_from(token).ok()).filter(|&id| id < vocab_size)
    };
    tokens.iter().map(in_vocabulary).collect::<Option<Vec<u32>>>().map(|ids| Script(ids.into()))
}

/// Steele, Lea and Flood's splitmix finaliser: every input bit moves every output bit.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What a request will be given, without running it.
#[cfg(test)]
pub(crate) fn first_tokens(config: &MockConfig, request: &NewRequest, count: u32) -> Vec<u32> {
    let source = TokenSource::new(config, request);
    (0..count).map(|nth| source.token_at(source.prompt_len + nth)).collect()
}
