//! From the bytes of a body to its fields, within a bound on memory.
//!
//! The bytes of a body are bounded where they are read. What they unfold to is bounded here: a
//! prompt's token ids are kept as `u32`, fields that nobody reads are skipped without being kept,
//! and the values of all others are counted.

use std::cell::{Cell, RefCell};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::error::{ApiError, ErrorCode};
use super::fields::{Fields, no_token_id};
use super::limits::{JSON_VALUES_MAX, PROMPTS_MAX};

/// A prompt as the client wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawPrompt {
    /// One text.
    Text(String),
    /// A list of texts.
    Texts(Vec<String>),
    /// One list of token ids; an empty list counts as this.
    Ids(Vec<u32>),
    /// A list of lists of token ids.
    IdLists(Vec<Vec<u32>>),
}

/// A body, read.
#[derive(Debug, Default)]
pub struct Body {
    /// The field that holds text or token ids: `prompt`, or `tokens`.
    pub prompt: Option<RawPrompt>,
    /// The fields that the route knows.
    pub fields: Fields,
    /// The names of those it does not know, for a line in the debug log.
    pub unknown: Vec<String>,
}

/// The field that holds text or token ids.
#[derive(Clone, Copy, Debug)]
pub struct PromptField<'a> {
    /// `prompt`, or `tokens`.
    pub name: &'a str,
    /// Its token ids are below this.
    pub vocab_size: u32,
}

/// Reads a body with a prompt; of the other fields those named in `known` are kept.
pub fn parse(bytes: &[u8], prompt: PromptField<'_>, known: &[&[&str]]) -> Result<Body, ApiError> {
    let reading = Reading {
        prompt,
        known,
        values_left: Cell::new(JSON_VALUES_MAX),
        refusal: RefCell::new(None),
    };
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let body = BodySeed(&reading).deserialize(&mut deserializer).and_then(|body| {
        deserializer.end()?;
        Ok(body)
    });
    body.map_err(|error| {
        reading.refusal.take().unwrap_or_else(|| {
            ApiError::new(ErrorCode::InvalidJson, format!("the body is not valid JSON: {error}"))
        })
    })
}

/// Reads a body without a prompt.
pub fn parse_fields(bytes: &[u8], known: &[&str]) -> Result<Fields, ApiError> {
    // No field has an empty name, so none is taken for a prompt.
    let prompt = PromptField { name: "", vocab_size: 0 };
    parse(bytes, prompt, &[known]).map(|body| body.fields)
}

/// What the visitors of one body share.
struct Reading<'a> {
    prompt: PromptField<'a>,
    known: &'a [&'a [&'a str]],
    values_left: Cell<u32>,
    /// Our own refusal: an error of the JSON library can carry only text.
    refusal: RefCell<Option<ApiError>>,
}

impl Reading<'_> {
    fn refuse<E: serde::de::Error>(&self, error: ApiError) -> E {
        let text = E::custom(&error.message);
        self.refusal.replace(Some(error));
        text
    }

    fn refuse_prompt<E: serde::de::Error>(&self, problem: impl fmt::Display) -> E {
        self.refuse(ApiError::invalid(self.prompt.name, problem))
    }

    fn count_value<E: serde::de::Error>(&self) -> Result<(), E> {
        match self.values_left.get().checked_sub(1) {
            Some(left) => {
                self.values_left.set(left);
                Ok(())
            }
            None => Err(self.refuse(ApiError::new(
                ErrorCode::InvalidValue,
                format!("the body holds more than {JSON_VALUES_MAX} values; send less at once"),
            ))),
        }
    }

    fn knows(&self, key: &str) -> bool {
        self.known.iter().any(|names| names.contains(&key))
    }
}

struct BodySeed<'a>(&'a Reading<'a>);

impl<'de> DeserializeSeed<'de> for BodySeed<'_> {
    type Value = Body;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Body, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for BodySeed<'_> {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Body, A::Error> {
        const UNKNOWN_SHOWN_MAX: usize = 8;
        let mut body = Body::default();
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if key == self.0.prompt.name {
                body.prompt = access.next_value_seed(PromptSeed(self.0))?;
            } else if self.0.knows(&key) {
                let value = access.next_value_seed(ValueSeed(self.0))?;
                map.insert(key, value);
            } else {
                access.next_value::<IgnoredAny>()?;
                if body.unknown.len() < UNKNOWN_SHOWN_MAX {
                    body.unknown.push(key.chars().take(64).collect());
                }
            }
        }
        body.fields = Fields::new(map);
        Ok(body)
    }
}

/// Any value, counted.
struct ValueSeed<'a>(&'a Reading<'a>);

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.0.count_value()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_element_seed(ValueSeed(self.0))? {
            entries.push(entry);
        }
        Ok(Value::Array(entries))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value_seed(ValueSeed(self.0))?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

const PROMPT_KINDS: &str =
    "must be a text, a list of texts, a list of token ids, or a list of lists of token ids";

/// The prompt, or `None` for `null`.
struct PromptSeed<'a>(&'a Reading<'a>);

impl<'de> DeserializeSeed<'de> for PromptSeed<'_> {
    type Value = Option<RawPrompt>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptSeed<'_> {
    type Value = Option<RawPrompt>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Self::Value, E> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got {value}")))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Self::Value, E> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got {value}")))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Self::Value, E> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got {value}")))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Self::Value, E> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got {value}")))
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got an object")))
    }

    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Some(RawPrompt::Text(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut prompt = RawPrompt::Ids(Vec::new());
        let mut entries = 0_usize;
        while let Some(element) = access.next_element_seed(ElementSeed(self.0))? {
            if entries == 0 {
                prompt = match &element {
                    Element::Id(_) => RawPrompt::Ids(Vec::new()),
                    Element::Text(_) => RawPrompt::Texts(Vec::new()),
                    Element::Ids(_) => RawPrompt::IdLists(Vec::new()),
                };
            }
            entries += 1;
            match (&mut prompt, element) {
                (RawPrompt::Ids(ids), Element::Id(id)) => ids.push(id),
                (RawPrompt::Texts(texts), Element::Text(text)) => texts.push(text),
                (RawPrompt::IdLists(lists), Element::Ids(ids)) => lists.push(ids),
                _ => {
                    return Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, not a mixture")));
                }
            }
            if entries > PROMPTS_MAX && !matches!(prompt, RawPrompt::Ids(_)) {
                return Err(self.0.refuse_prompt(format!(
                    "at most {PROMPTS_MAX} prompts are allowed in one request; send the others \
                     in further requests"
                )));
            }
        }
        Ok(Some(prompt))
    }
}

/// One element of a list of prompts.
enum Element {
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
}

struct ElementSeed<'a>(&'a Reading<'a>);

impl<'de> DeserializeSeed<'de> for ElementSeed<'_> {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Element, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl ElementSeed<'_> {
    fn id<E: serde::de::Error>(&self, id: Option<u32>, shown: impl fmt::Display) -> Result<u32, E> {
        let PromptField { name, vocab_size } = self.0.prompt;
        id.filter(|&id| id < vocab_size)
            .ok_or_else(|| self.0.refuse(no_token_id(name, shown, vocab_size)))
    }
}

impl<'de> Visitor<'de> for ElementSeed<'_> {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id or a list of token ids")
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Element, E> {
        self.id(u32::try_from(value).ok(), value).map(Element::Id)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Element, E> {
        self.id(u32::try_from(value).ok(), value).map(Element::Id)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Element, E> {
        self.id(None, value).map(Element::Id)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Element, E> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got null in a list")))
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Element, E> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got {value} in a list")))
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Element, A::Error> {
        Err(self.0.refuse_prompt(format!("{PROMPT_KINDS}, got an object in a list")))
    }

    fn visit_str<E>(self, value: &str) -> Result<Element, E> {
        Ok(Element::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Element, A::Error> {
        let mut ids = Vec::new();
        while let Some(element) = access.next_element_seed(IdSeed(self.0))? {
            ids.push(element);
        }
        Ok(Element::Ids(ids))
    }
}

/// One token id of an inner list. A list within it is refused before it is read.
struct IdSeed<'a>(&'a Reading<'a>);

impl<'de> DeserializeSeed<'de> for IdSeed<'_> {
    type Value = u32;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for IdSeed<'_> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id")
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<u32, E> {
        ElementSeed(self.0).id(u32::try_from(value).ok(), value)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<u32, E> {
        ElementSeed(self.0).id(u32::try_from(value).ok(), value)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<u32, E> {
        ElementSeed(self.0).id(None, value)
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<u32, E> {
        ElementSeed(self.0).id(None, "a text")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<u32, E> {
        ElementSeed(self.0).id(None, "null")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<u32, E> {
        ElementSeed(self.0).id(None, value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<u32, A::Error> {
        ElementSeed(self.0).id(None, "a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<u32, A::Error> {
        ElementSeed(self.0).id(None, "an object")
    }
}
