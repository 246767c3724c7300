//! Whether a second run of a request gave what the first did.

use super::recorded::{Finish, Outcome, Recorded};

/// What a request came to in the second run.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    /// The core ended it.
    Finished(Finish),
    /// We aborted it where its client had.
    Aborted,
    /// It did not come to an end: why.
    Failed(String),
}

/// The verdict on one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Equal,
    /// As far as the recording goes, which is not to its end.
    EqualSoFar,
    Different(String),
    /// Nothing can be said: why.
    Incomparable(String),
    Failed(String),
}

impl Verdict {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::EqualSoFar => "equal_so_far",
            Self::Different(_) => "different",
            Self::Incomparable(_) => "incomparable",
            Self::Failed(_) => "failed",
        }
    }

    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Equal | Self::EqualSoFar => None,
            Self::Different(why) | Self::Incomparable(why) | Self::Failed(why) => Some(why),
        }
    }
}

/// Compares what was recorded with what came now.
pub fn verdict(recorded: &Recorded, tokens: &[u32], ended: &Ended) -> Verdict {
    if let Ended::Failed(why) = ended {
        return Verdict::Failed(why.clone());
    }
    if let Some(why) = recorded.incomparable() {
        return Verdict::Incomparable(why.into());
    }
    let expected = &recorded.tokens;
    let common = expected.len().min(tokens.len());
    if let Some(at) = (0..common).find(|&at| expected[at] != tokens[at]) {
        return Verdict::Different(format!(
            "token {at} is {}, recorded was {}",
            tokens[at], expected[at]
        ));
    }
    match (&recorded.outcome, ended) {
        (Outcome::Finished(then), Ended::Finished(now)) => {
            if expected.len() != tokens.len() {
                let (then, now) = (expected.len(), tokens.len());
                Verdict::Different(format!("{now} tokens came, recorded were {then}"))
            } else if then == now {
                Verdict::Equal
            } else {
                Verdict::Different(format!(
                    "it ended by {}, recorded was {}",
                    now.text(),
                    then.text()
                ))
            }
        }
        // The recording does not say how it would have ended, but it says how it went on.
        (_, Ended::Finished(now)) if tokens.len() < expected.len() => Verdict::Different(format!(
            "it ended by {} after {} tokens, recorded were {} and more",
            now.text(),
            tokens.len(),
            expected.len()
        )),
        (_, Ended::Finished(Finish { error: Some(code), .. })) => {
            Verdict::Different(format!("it failed with {code}, recorded was no failure"))
        }
        _ => Verdict::EqualSoFar,
    }
}

#[cfg(test)]
mod tests {
    use pawl_shared::protocol::{EngineCoreRequest, FinishReason, SamplingParams};

    use super::*;

    fn finish(reason: FinishReason) -> Finish {
        Finish { reason, stop: None, error: None, retryable: false }
    }

    fn recorded(tokens: &[u32], outcome: Outcome) -> Recorded {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        Recorded {
            at: 0.0,
            request: EngineCoreRequest::new("a".into(), vec![1], sampling),
            tokens: tokens.to_vec(),
            outcome,
            has_gap: false,
        }
    }

    #[test]
    fn whole_requests_must_agree_to_the_last_token_and_in_their_end() {
        let length = || Ended::Finished(finish(FinishReason::Length));
        let whole = recorded(&[1, 2, 3], Outcome::Finished(finish(FinishReason::Length)));
        assert_eq!(verdict(&whole, &[1, 2, 3], &length()), Verdict::Equal);
        let stopped = Ended::Finished(finish(FinishReason::Stop));
        for (tokens, ended, detail) in [
            (&[1, 9, 3][..], length(), "token 1 is 9, recorded was 2"),
            (&[1, 2], length(), "2 tokens came, recorded were 3"),
            (&[1, 2, 3, 4], length(), "4 tokens came, recorded were 3"),
            (&[1, 2, 3], stopped, "it ended by stop, recorded was length"),
        ] {
            assert_eq!(verdict(&whole, tokens, &ended), Verdict::Different(detail.into()));
        }
        let failed = Ended::Failed("the core is gone".into());
        assert_eq!(verdict(&whole, &[1], &failed).name(), "failed");
    }

    #[test]
    fn requests_that_were_cut_must_agree_as_far_as_they_went() {
        let length = Ended::Finished(finish(FinishReason::Length));
        for outcome in [Outcome::Open, Outcome::Lost, Outcome::Aborted { seconds: 1.0 }] {
            let cut = recorded(&[1, 2], outcome);
            assert_eq!(verdict(&cut, &[1, 2, 3], &length), Verdict::EqualSoFar);
            assert_eq!(verdict(&cut, &[1, 2, 3], &Ended::Aborted), Verdict::EqualSoFar);
            assert_eq!(verdict(&cut, &[1], &Ended::Aborted), Verdict::EqualSoFar);
            assert_eq!(verdict(&cut, &[1], &length).name(), "different");
            assert_eq!(verdict(&cut, &[1, 3], &Ended::Aborted).name(), "different");
            let refused =
                Finish { error: Some("validation_error".into()), ..finish(FinishReason::Error) };
            let cut = recorded(&[], cut.outcome);
            assert_eq!(verdict(&cut, &[], &Ended::Finished(refused)).name(), "different");
        }
    }

    #[test]
    fn what_chance_or_a_gap_decided_is_not_compared() {
        let whole = || recorded(&[1], Outcome::Finished(finish(FinishReason::Length)));
        let mut sampled = whole();
        sampled.request.sampling_params.as_mut().unwrap().temperature = 0.7;
        let ended = Ended::Finished(finish(FinishReason::Length));
        assert_eq!(verdict(&sampled, &[2], &ended).name(), "incomparable");
        sampled.request.sampling_params.as_mut().unwrap().seed = Some(1);
        assert_eq!(verdict(&sampled, &[2], &ended).name(), "different");
        let gap = Recorded { has_gap: true, ..whole() };
        assert_eq!(verdict(&gap, &[2], &ended).name(), "incomparable");
        let full = Finish { retryable: true, ..finish(FinishReason::Error) };
        let full = recorded(&[], Outcome::Finished(full));
        assert_eq!(verdict(&full, &[2], &ended).name(), "incomparable");
    }
}
