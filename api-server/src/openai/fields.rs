//! Reading a request's fields one by one, so that each refusal names its field, what was expected
//! and what came, without the type names of a JSON library.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::{ApiError, ErrorCode};

/// Bytes of a value that are quoted in an error.
const EXCERPT_BYTES_MAX: usize = 48;

/// The fields of a request's body. Reading one takes it out; `null` counts as absent.
#[derive(Debug, Default)]
pub struct Fields {
    map: Map<String, Value>,
}

/// Which numbers a field takes.
#[derive(Clone, Copy, Debug)]
pub struct NumberRange {
    /// Smallest, or what it must be above.
    pub min: f64,
    /// Whether `min` itself is refused.
    pub above_min: bool,
    /// Largest.
    pub max: f64,
}

impl NumberRange {
    /// `min..=max`
    #[must_use]
    pub const fn of(min: f64, max: f64) -> Self {
        Self { min, above_min: false, max }
    }

    /// `min` excluded.
    #[must_use]
    pub const fn above(min: f64, max: f64) -> Self {
        Self { min, above_min: true, max }
    }

    /// Refuses what lies outside, naming the range.
    pub fn check(self, name: &str, number: f64, shown: &str) -> Result<f64, ApiError> {
        let low = if self.above_min { number > self.min } else { number >= self.min };
        if low && number <= self.max {
            return Ok(number);
        }
        let Self { min, above_min, max } = self;
        Err(ApiError::invalid(
            name,
            if above_min {
                format!("must be above {min} and at most {max}, got {shown}")
            } else {
                format!("must be from {min} to {max}, got {shown}")
            },
        ))
    }
}

impl Fields {
    /// The fields of `map`.
    #[must_use]
    pub fn new(map: Map<String, Value>) -> Self {
        Self { map }
    }

    /// Takes a field of any kind.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a boolean.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_kind(name, "true or false", &other)),
        }
    }

    /// Takes a boolean that has a default.
    pub fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        Ok(self.boolean(name)?.unwrap_or(default))
    }

    /// Takes a whole number.
    pub fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        integer_of(name, &value, range).map(Some)
    }

    /// Takes a whole number that fits `u32`.
    pub fn count(
        &mut self,
        name: &str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, ApiError> {
        let range = i64::from(*range.start())..=i64::from(*range.end());
        let number = self.integer(name, range)?;
        Ok(number.map(|number| u32::try_from(number).expect("the range lies within u32")))
    }

    /// Takes a number.
    pub fn number(&mut self, name: &str, range: NumberRange) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = value
            .as_f64()
            .filter(|_| value.is_number())
            .ok_or_else(|| wrong_kind(name, "a number", &value))?;
        range.check(name, number, &excerpt(&value)).map(Some)
    }

    /// Takes a text of at most `bytes_max` bytes.
    pub fn text(&mut self, name: &str, bytes_max: usize) -> Result<Option<String>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => {
                check_bytes(name, text.len(), bytes_max)?;
                Ok(Some(text))
            }
            Some(other) => Err(wrong_kind(name, "a text", &other)),
        }
    }

    /// Takes a text or a list of texts, none of them empty.
    pub fn texts(
        &mut self,
        name: &str,
        entries_max: usize,
        bytes_max: usize,
    ) -> Result<Vec<String>, ApiError> {
        let entries = match self.value(name) {
            None => return Ok(Vec::new()),
            Some(text @ Value::String(_)) => vec![text],
            Some(Value::Array(entries)) => entries,
            Some(other) => return Err(wrong_kind(name, "a text or a list of texts", &other)),
        };
        check_entries(name, entries.len(), entries_max)?;
        let text_of = |entry| match entry {
            Value::String(text) if text.is_empty() => {
                Err(ApiError::invalid(name, "an empty text is not allowed; leave it out"))
            }
            Value::String(text) => {
                check_bytes(name, text.len(), bytes_max)?;
                Ok(text)
            }
            other => Err(wrong_kind(name, "a list of texts", &other)),
        };
        entries.into_iter().map(text_of).collect()
    }

    /// Takes a list of token ids below `vocab_size`.
    pub fn token_ids(
        &mut self,
        name: &str,
        entries_max: usize,
        vocab_size: u32,
    ) -> Result<Option<Vec<u32>>, ApiError> {
        let entries = match self.value(name) {
            None => return Ok(None),
            Some(Value::Array(entries)) => entries,
            Some(other) => return Err(wrong_kind(name, "a list of token ids", &other)),
        };
        check_entries(name, entries.len(), entries_max)?;
        entries
            .iter()
            .map(|entry| token_id_of(name, entry, vocab_size))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Takes an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong_kind(name, "an object", &other)),
        }
    }

    /// Takes a list of at most `entries_max` values.
    pub fn list(&mut self, name: &str, entries_max: usize) -> Result<Option<Vec<Value>>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Array(entries)) => {
                check_entries(name, entries.len(), entries_max)?;
                Ok(Some(entries))
            }
            Some(other) => Err(wrong_kind(name, "a list", &other)),
        }
    }
}

/// Refuses a list that is too long.
pub fn check_entries(name: &str, entries: usize, entries_max: usize) -> Result<(), ApiError> {
    if entries <= entries_max {
        return Ok(());
    }
    Err(ApiError::invalid(
        name,
        format!("at most {entries_max} entries are allowed, got {entries}"),
    ))
}

fn check_bytes(name: &str, bytes: usize, bytes_max: usize) -> Result<(), ApiError> {
    if bytes <= bytes_max {
        return Ok(());
    }
    Err(ApiError::invalid(name, format!("at most {bytes_max} bytes are allowed, got {bytes}")))
}

/// A value that is a whole number within `range`.
pub fn integer_of(name: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
    let refuse = || {
        let shown = excerpt(value);
        let allowed = match (range.start(), range.end()) {
            (only, same) if only == same => only.to_string(),
            (from, to) => format!("a whole number from {from} to {to}"),
        };
        Err(ApiError::invalid(name, format!("must be {allowed}, got {shown}")))
    };
    let Value::Number(number) = value else { return refuse() };
    // A client may write 2.0 for 2: beyond 2^53 a float no longer names one whole number.
    let whole = |float: f64| {
        (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i64)
    };
    match number.as_i64().or_else(|| number.as_f64().and_then(whole)) {
        Some(integer) if range.contains(&integer) => Ok(integer),
        _ => refuse(),
    }
}

/// A value that is a token id of the vocabulary.
pub fn token_id_of(name: &str, value: &Value, vocab_size: u32) -> Result<u32, ApiError> {
    let id = integer_of(name, value, 0..=i64::from(vocab_size.saturating_sub(1)))
        .map_err(|_| no_token_id(name, excerpt(value), vocab_size))?;
    Ok(u32::try_from(id).expect("the range lies within u32"))
}

/// The one refusal of everything that is no token id of the vocabulary, wherever it stands.
pub fn no_token_id(name: &str, shown: impl std::fmt::Display, vocab_size: u32) -> ApiError {
    let last = vocab_size.saturating_sub(1);
    ApiError::invalid(
        name,
        format!("{shown} is no token id of this model; they are whole numbers from 0 to {last}"),
    )
}

/// A field that came with a value of another kind.
pub fn wrong_kind(name: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::invalid(name, format!("must be {expected}, got {}", excerpt(found)))
}

/// A field that must be there.
pub fn missing(name: &str, remedy: &str) -> ApiError {
    ApiError::new(ErrorCode::MissingField, format!("{name} is missing: {remedy}")).at(name)
}

/// The beginning of a value as JSON.
pub fn excerpt(value: &Value) -> String {
    // Lists and objects are named, not quoted: writing a large one out only to cut it is waste.
    match value {
        Value::Array(entries) => format!("a list of {} entries", entries.len()),
        Value::Object(entries) => format!("an object of {} keys", entries.len()),
        Value::String(text) if text.len() > EXCERPT_BYTES_MAX => {
            let cut = (0..=EXCERPT_BYTES_MAX).rev().find(|&at| text.is_char_boundary(at));
            format!("{}…", Value::from(&text[..cut.unwrap_or(0)]))
        }
        other => other.to_string(),
    }
}
