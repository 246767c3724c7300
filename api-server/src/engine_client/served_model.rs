//! What the core serves.

/// The model behind the core, as the HTTP layer needs it. (The card and the tokenizer join these
/// fields as `card: ModelCard` and `tokenizer: Arc<Tokenizer>` once the shared crate has them.)
#[derive(Debug)]
pub struct ServedModel {
    /// Every name a client may use; the first is the one answers carry.
    pub names: Vec<String>,
    /// Prompt and output together, in tokens.
    pub max_model_len: u32,
}
