//! Text to token ids and back, through the `tokenizers` crate.
//!
//! Encoding is theirs. Decoding is ours, by bytes: each token is a fixed run of bytes, so that a
//! stream of tokens is a stream of bytes, log probabilities can show the bytes of a token that is
//! not text by itself, and a whole answer decodes to what its pieces did.

use std::collections::HashMap;
use std::str::FromStr;

use serde::Deserialize;
use serde_json::Value as Json;

use crate::model_card::{ModelCard, ModelError};

/// The tokenizer of one model. Encoding is work for the CPU: keep it off threads that serve
/// sockets.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The bytes of token `id` are `bytes[starts[id]..starts[id + 1]]`.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    special: Vec<bool>,
    /// Put first where `add_special` is asked for and the tokenizer has not done it.
    bos: Option<u32>,
    /// The first token's space is not part of the text: the encoder has put it there.
    strips_first_space: bool,
}

/// How a piece of the vocabulary stands for bytes.
#[derive(Clone, Copy, PartialEq)]
enum Spelling {
    /// Each letter is a byte.
    ByteLevel,
    /// Text, with `▁` for a space and `<0x0A>` for a byte.
    SentencePiece,
    /// Text as it is.
    Plain,
}

/// The one part of a `tokenizer.json` that says how pieces are spelled.
#[derive(Deserialize)]
struct DecoderOnly {
    decoder: Option<Json>,
}

impl Tokenizer {
    /// Builds the tokenizer that a card carries.
    pub fn from_card(card: &ModelCard) -> Result<Self, ModelError> {
        let refuse = |error: String| ModelError::Tokenizer(error);
        let inner = tokenizers::Tokenizer::from_str(&card.tokenizer_json)
            .map_err(|error| refuse(error.to_string()))?;
        let DecoderOnly { decoder } = serde_json::from_str(&card.tokenizer_json)
            .map_err(|error| refuse(error.to_string()))?;
        let spelling = spelling(decoder.as_ref());
        let added = inner.get_added_tokens_decoder();
        let alphabet: HashMap<char, u8> = byte_alphabet().into_iter().zip(0..=u8::MAX).collect();

        let (mut bytes, mut starts, mut special) = (Vec::new(), vec![0], Vec::new());
        for id in 0..card.vocab_size {
            let added = added.get(&id);
            match added {
                // An added token stands for its text, whatever the spelling of the others.
                Some(token) => bytes.extend(token.content.as_bytes()),
                // An id that the tokenizer lacks is padding of the model's, and says nothing.
                None => {
                    let piece = inner.id_to_token(id).unwrap_or_default();
                    put_bytes(&piece, spelling, &alphabet, &mut bytes);
                }
            }
            special.push(added.is_some_and(|token| token.special));
            let end = u32::try_from(bytes.len())
                .map_err(|_| refuse("the vocabulary is longer than 4 GiB".into()))?;
            starts.push(end);
        }
        Ok(Self {
            inner,
            bytes,
            starts,
            special,
            bos: card.bos_token_id.filter(|_| card.add_bos),
            strips_first_space: strips_first_space(decoder.as_ref()),
        })
    }

    /// The ids of `text`. Special tokens that are written out in it are recognised. With
    /// `add_special` the begin and end tokens of the model are added, where it has them.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| ModelError::Tokenizer(error.to_string()))?;
        let ids = encoding.get_ids();
        match self.bos {
            Some(bos) if add_special && ids.first() != Some(&bos) => {
                Ok(std::iter::once(bos).chain(ids.iter().copied()).collect())
            }
            _ => Ok(ids.to_vec()),
        }
    }

    /// The text of `ids`; bytes that are not UTF-8 become `U+FFFD`, ids out of range nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids.iter().filter(|&&id| !(skip_special && self.is_special(id))) {
            bytes.extend(self.token_bytes(id));
        }
        let stripped = match bytes.first() {
            Some(b' ') if self.strips_first_space => &bytes[1..],
            _ => &bytes[..],
        };
        String::from_utf8_lossy(stripped).into_owned()
    }

    /// What one token adds to a text, as bytes; empty for ids out of range.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        match (self.starts.get(index), self.starts.get(index + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// What one token adds to a text; bytes that are not UTF-8 by themselves become `U+FFFD`.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// The token's spelling in the vocabulary: `Ġthe`.
    pub fn piece(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a spelling in the vocabulary or of an added token.
    pub fn id_of(&self, piece: &str) -> Option<u32> {
        self.inner.token_to_id(piece)
    }

    /// Ids are below this.
    pub fn vocab_size(&self) -> u32 {
        self.special.len() as u32
    }

    /// Whether `skip_special` leaves the token out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Whether the space that a first token begins with is the encoder's, not the text's: who joins
    /// `token_bytes` from the start of a text must leave it out.
    pub fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish()
    }
}

fn put_bytes(piece: &str, spelling: Spelling, alphabet: &HashMap<char, u8>, out: &mut Vec<u8>) {
    match spelling {
        Spelling::ByteLevel => {
            let start = out.len();
            for letter in piece.chars() {
                match alphabet.get(&letter) {
                    Some(&byte) => out.push(byte),
                    // Not spelled in bytes after all: the piece is its text.
                    None => {
                        out.truncate(start);
                        out.extend(piece.as_bytes());
                        return;
                    }
                }
            }
        }
        Spelling::SentencePiece => match byte_of(piece) {
            Some(byte) => out.push(byte),
            None => out.extend(piece.replace('▁', " ").as_bytes()),
        },
        Spelling::Plain => out.extend(piece.as_bytes()),
    }
}

/// 10 of `<0x0A>`.
fn byte_of(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// The steps of a decoder, which may be one or a sequence.
fn decoder_steps(decoder: Option<&Json>) -> Vec<&Json> {
    let Some(decoder) = decoder else { return Vec::new() };
    match decoder.get("decoders").and_then(Json::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![decoder],
    }
}

fn has_type(step: &Json, name: &str) -> bool {
    step.get("type").and_then(Json::as_str) == Some(name)
}

fn spelling(decoder: Option<&Json>) -> Spelling {
    let steps = decoder_steps(decoder);
    let has = |name: &str| steps.iter().any(|step| has_type(step, name));
    if has("ByteLevel") {
        Spelling::ByteLevel
    } else if has("ByteFallback") || has("Metaspace") {
        Spelling::SentencePiece
    } else {
        Spelling::Plain
    }
}

fn strips_first_space(decoder: Option<&Json>) -> bool {
    decoder_steps(decoder).iter().any(|step| {
        let strips = has_type(step, "Strip")
            && step.get("content").and_then(Json::as_str) == Some(" ")
            && step.get("start").and_then(Json::as_u64).is_some_and(|count| count > 0);
        let metaspace = has_type(step, "Metaspace")
            && step.get("prepend_scheme").and_then(Json::as_str) != Some("never");
        strips || metaspace
    })
}

/// The letter for each byte in byte-level vocabularies: printable Latin-1 stands for itself, the
/// other 68 bytes for the letters from U+0100 on, in order.
pub(crate) fn byte_alphabet() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let byte = byte as u32;
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return char::from_u32(byte).expect("below U+0100");
        }
        next += 1;
        char::from_u32(next - 1).expect("below U+0200")
    })
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
