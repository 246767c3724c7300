//! Token ids to text, piece by piece, never splitting a character.
//!
//! [`Detokenizer`] joins the bytes of one choice's tokens and lets out whole characters. The pieces
//! joined are what one decode of all ids gives: bytes that can never become a character show as
//! U+FFFD there and here, and an unfinished character is so only at the very end.

use pawl_shared::tokenizer::Tokenizer;

/// A vocabulary whose tokens each stand for a fixed run of bytes.
pub trait TokenText: Send + Sync {
    /// The bytes of a token; none for an id outside the vocabulary.
    fn bytes(&self, id: u32) -> &[u8];
    /// Whether the token is special: left out of the text unless asked for.
    fn is_special(&self, id: u32) -> bool;
    /// Whether a text loses one leading space (vocabularies that mark words by one).
    fn strips_first_space(&self) -> bool;

    /// The token's text alone, with U+FFFD where its bytes are no whole character.
    fn text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.bytes(id)).into_owned()
    }
}

impl TokenText for Tokenizer {
    fn bytes(&self, id: u32) -> &[u8] {
        self.token_bytes(id)
    }

    fn is_special(&self, id: u32) -> bool {
        Self::is_special(self, id)
    }

    fn strips_first_space(&self) -> bool {
        Self::strips_first_space(self)
    }
}

/// The text of one choice as it grows.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// Whether any byte came yet.
    begun: bool,
    /// The beginning of a character: at most three bytes.
    unfinished: Vec<u8>,
}

impl Detokenizer {
    /// At the beginning of a text.
    #[must_use]
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, begun: false, unfinished: Vec::new() }
    }

    /// Appends to `text` what token `id` completes.
    pub fn push(&mut self, tokens: &dyn TokenText, id: u32, text: &mut String) {
        if self.skip_special && tokens.is_special(id) {
            return;
        }
        let mut bytes = tokens.bytes(id);
        if !self.begun && !bytes.is_empty() {
            self.begun = true;
            if tokens.strips_first_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        if self.unfinished.is_empty() {
            self.whole_characters(bytes, text);
        } else {
            let mut joined = std::mem::take(&mut self.unfinished);
            joined.extend_from_slice(bytes);
            self.whole_characters(&joined, text);
        }
    }

    /// The end of the text: an unfinished character will not be finished any more.
    pub fn finish(&mut self, text: &mut String) {
        let rest = std::mem::take(&mut self.unfinished);
        text.push_str(&String::from_utf8_lossy(&rest));
    }

    /// Lets out what is whole, keeps the beginning of a character, and shows bytes that cannot
    /// begin or continue one as U+FFFD, one for each maximal run as the standard decoder does.
    fn whole_characters(&mut self, mut bytes: &[u8], text: &mut String) {
        loop {
            match std::str::from_utf8(bytes) {
                Ok(valid) => {
                    text.push_str(valid);
                    return;
                }
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("valid up to here"));
                    let Some(broken) = error.error_len() else {
                        self.unfinished = rest.to_vec();
                        return;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    bytes = &rest[broken..];
                }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
