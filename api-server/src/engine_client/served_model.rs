//! What the core serves: its model card and the tokenizer built from it.

use std::sync::Arc;

use pawl_shared::model_card::{ModelCard, ModelError};
use pawl_shared::tokenizer::Tokenizer;

/// The model behind the core, as the HTTP layer needs it.
#[derive(Debug)]
pub struct ServedModel {
    /// As the core told it, or as read from the model path given to this process.
    pub card: ModelCard,
    /// Built from the card.
    pub tokenizer: Arc<Tokenizer>,
    /// Every name a client may use; the first is the one answers carry.
    pub names: Vec<String>,
    /// Prompt and output together, in tokens.
    pub max_model_len: u32,
}

impl ServedModel {
    /// Builds the tokenizer: work for a thread that serves no sockets. `names` take precedence
    /// over the card's; `engine_max_model_len` of an engine that runs with less than the model's
    /// length bounds it.
    ///
    /// # Errors
    /// When the card's tokenizer is none, or the model has no name.
    pub fn new(
        card: ModelCard,
        names: &[String],
        engine_max_model_len: u32,
    ) -> Result<Self, ModelError> {
        let tokenizer = Arc::new(Tokenizer::from_card(&card)?);
        let names = if names.is_empty() { card.names.clone() } else { names.to_vec() };
        let max_model_len = length(&card, engine_max_model_len);
        Ok(Self { card, tokenizer, names, max_model_len })
    }

    /// The name that answers and metrics carry.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map_or("model", String::as_str)
    }
}

/// The model's length, bounded by the engine's where that is known.
pub(super) fn length(card: &ModelCard, engine_max_model_len: u32) -> u32 {
    match engine_max_model_len {
        0 => card.max_model_len,
        engine => card.max_model_len.min(engine),
    }
}
