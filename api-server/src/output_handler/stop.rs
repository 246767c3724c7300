//! Stop strings: found as the text grows, and never let out piece by piece.

/// Watches the text of one choice.
///
/// The text ends where the first stop string is complete, as if it came letter by letter: the
/// result does not depend on how the text was cut into pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct StopWatch {
    stops: Vec<String>,
    /// Whether the stop string itself is part of the answer.
    include: bool,
    /// The longest tail of the text that may still begin a stop string. Shorter than the longest
    /// stop string, so it is bounded.
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Watched {
    /// Text that is sure.
    pub text: String,
    /// The stop string that ended it.
    pub stopped: Option<String>,
}

impl StopWatch {
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, include, held: String::new() }
    }

    /// Takes in new text. With `may_stop` false (fewer than `min_tokens` so far) no stop string
    /// can end in it; one may begin in it.
    pub fn push(&mut self, piece: &str, may_stop: bool) -> Watched {
        if self.stops.is_empty() {
            return Watched { text: piece.to_string(), stopped: None };
        }
        if piece.is_empty() {
            return Watched { text: String::new(), stopped: None };
        }
        let old = self.held.len();
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some((start, stop)) = may_stop.then(|| self.first_stop(&text, old)).flatten() {
            let end = if self.include { start + stop.len() } else { start };
            let stopped = Some(stop.clone());
            text.truncate(end);
            return Watched { text, stopped };
        }
        self.held = text.split_off(text.len() - self.tail_to_hold(&text));
        Watched { text, stopped: None }
    }

    /// The end of the text: what was held back is sure now.
    pub fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Of the stop strings that are complete after byte `old`, the one complete first; of several
    /// that end together, the longest.
    fn first_stop(&self, text: &str, old: usize) -> Option<(usize, &String)> {
        self.stops
            .iter()
            .filter_map(|stop| {
                // A match that ends in the new part starts at most that far back.
                let mut from = (old + 1).saturating_sub(stop.len());
                while !text.is_char_boundary(from) {
                    from += 1;
                }
                let start = from + text[from..].find(stop.as_str())?;
                Some((start, stop))
            })
            .min_by_key(|(start, stop)| (start + stop.len(), *start))
    }

    /// Length of the longest tail of `text` that begins a stop string without being all of it.
    fn tail_to_hold(&self, text: &str) -> usize {
        let longest = |stop: &String| {
            let most = (stop.len() - 1).min(text.len());
            (1..=most)
                .rev()
                .find(|&length| stop.is_char_boundary(length) && text.ends_with(&stop[..length]))
                .unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pieces: &[&str], stops: &[&str], include: bool) -> (Vec<String>, Option<String>) {
        let stops = stops.iter().map(ToString::to_string).collect();
        let mut watch = StopWatch::new(stops, include);
        let mut seen = Vec::new();
        for piece in pieces {
            let watched = watch.push(piece, true);
            seen.push(watched.text);
            if watched.stopped.is_some() {
                return (seen, watched.stopped);
            }
        }
        seen.push(watch.release());
        (seen, None)
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_never_let_out() {
        let words = [" red", " green", " blue", " violet", " amber"];
        insta::assert_debug_snapshot!(check(&words, &[" blue violet amber"], false), @r#"
        (
            [
                " red",
                " green",
                "",
                "",
                "",
            ],
            Some(
                " blue violet amber",
            ),
        )
        "#);
        let (seen, _) = check(&words, &[" blue violet amber"], true);
        assert_eq!(seen.concat(), " red green blue violet amber");
    }

    #[test]
    fn a_beginning_that_leads_nowhere_is_released() {
        insta::assert_debug_snapshot!(check(&["ab", "ab", "x", "aba"], &["abac"], false), @r#"
        (
            [
                "",
                "ab",
                "abx",
                "",
                "aba",
            ],
            None,
        )
        "#);
    }

    #[test]
    fn the_stop_string_complete_first_wins_and_of_those_the_longest() {
        let (seen, stopped) = check(&["xabcy"], &["abcy", "bc", "abc"], false);
        assert_eq!((seen.concat().as_str(), stopped.as_deref()), ("x", Some("abc")));
    }

    /// The letters alone decide, not how they are cut into pieces.
    #[test]
    fn pieces_do_not_matter() {
        use proptest::prelude::*;
        proptest!(|(
            text in "[aböЖ]{0,24}",
            stops in proptest::collection::vec("[aböЖ]{1,4}", 0..4),
            cuts in proptest::collection::vec(0usize..24, 0..6),
            include: bool,
        )| {
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> =
                cuts.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let run = |pieces: Vec<&str>| {
                let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
                let (seen, stopped) = check(&pieces, &stops, include);
                (seen.concat(), stopped)
            };
            let whole = run(vec![&text]);
            prop_assert_eq!(run(pieces.iter().map(String::as_str).collect()), whole.clone());
            // And the answer holds no stop string.
            if !include {
                for stop in &stops {
                    prop_assert!(!whole.0.contains(stop.as_str()));
                }
            }
        });
    }
}
