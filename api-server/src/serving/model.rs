//! The served model as the routes use it: names, bounds, tokenizer, parsed chat template.

use std::sync::{Arc, Mutex, PoisonError};

use pawl_shared::clock::Clock;

use crate::chat_template::{ChatTemplate, TemplateContext};
use crate::config::FrontendConfig;
use crate::engine_client::ServedModel;
use crate::openai::error::{ApiError, ErrorCode};
use crate::openai::sampling::{Bounds, SamplingDefaults};

/// A model with all that is made of it once.
pub struct LoadedModel {
    /// As the core told.
    pub served: Arc<ServedModel>,
    /// What requests may ask for.
    pub bounds: Bounds,
    /// The chat template, or why there is none.
    pub template: Result<ChatTemplate, ApiError>,
    /// What templates are given.
    pub template_context: TemplateContext,
}

impl LoadedModel {
    fn new(
        served: Arc<ServedModel>,
        config: &FrontendConfig,
        template: Option<&str>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let card = &served.card;
        let template_context = TemplateContext {
            bos_token: card.bos_token.clone().unwrap_or_default(),
            eos_token: card.eos_token.clone().unwrap_or_default(),
            clock,
        };
        let template = match template.or(card.chat_template.as_deref()) {
            Some(source) => ChatTemplate::parse(source, template_context.clone()),
            None => Err(ApiError::new(
                ErrorCode::Template,
                "this model has no chat template; use /v1/completions, or start the server with \
                 --chat-template",
            )),
        };
        if let Err(error) = &template {
            tracing::warn!("chats will be refused: {error}");
        }
        let bounds = Bounds {
            vocab_size: card.vocab_size,
            max_model_len: served.max_model_len,
            max_logprobs: config.max_logprobs,
            max_n: config.max_n,
            max_choices: config.max_choices,
            answers_max: config.answers_max(),
            priority: config.priority_scheduling,
            defaults: sampling_defaults(&card.generation_defaults),
        };
        Self { served, bounds, template, template_context }
    }

    /// The name that answers carry.
    pub fn name(&self) -> &str {
        self.served.names.first().map_or("model", String::as_str)
    }

    /// Checks the name a request asks for; absent = the first.
    pub fn check_name(&self, asked: Option<&str>) -> Result<String, ApiError> {
        let Some(asked) = asked else { return Ok(self.name().to_owned()) };
        if self.served.names.iter().any(|name| name == asked) {
            return Ok(asked.to_owned());
        }
        let shown: String = asked.chars().take(128).collect();
        Err(ApiError::new(
            ErrorCode::ModelNotFound,
            format!("model: {shown:?} is not served here; GET /v1/models names what is"),
        )
        .at("model"))
    }

    /// Bytes of text that may still fit the context; more is refused before it is tokenized.
    pub fn prompt_bytes_max(&self, config: &FrontendConfig) -> usize {
        (self.bounds.max_model_len as usize).saturating_mul(config.limits.prompt_bytes_per_token)
    }
}

fn sampling_defaults(card: &pawl_shared::model_card::GenerationDefaults) -> SamplingDefaults {
    // Through text, so that 0.2 stays 0.2 and does not become 0.20000000298.
    let widen = |value: Option<f32>| value.and_then(|value| value.to_string().parse().ok());
    SamplingDefaults {
        temperature: widen(card.temperature),
        top_p: widen(card.top_p),
        top_k: card.top_k,
        min_p: widen(card.min_p),
        repetition_penalty: widen(card.repetition_penalty),
        max_tokens: card.max_new_tokens,
    }
}

/// Keeps the last model: it changes only when another core joins.
#[derive(Default)]
pub struct ModelCache {
    last: Mutex<Option<Arc<LoadedModel>>>,
}

impl ModelCache {
    /// What was made of `served`, made now if it is new.
    pub fn get(
        &self,
        served: Arc<ServedModel>,
        config: &FrontendConfig,
        template: Option<&str>,
        clock: &Arc<dyn Clock>,
    ) -> Arc<LoadedModel> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(model) if Arc::ptr_eq(&model.served, &served) => Arc::clone(model),
            _ => {
                let model = LoadedModel::new(served, config, template, Arc::clone(clock));
                let model = Arc::new(model);
                *last = Some(Arc::clone(&model));
                model
            }
        }
    }
}
