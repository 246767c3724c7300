//! `POST /tokenize`, `POST /detokenize`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use super::App;
use super::body::JsonBytes;
use crate::openai::error::ApiError;
use crate::openai::tokens::{
    DetokenizeRequest, DetokenizeResponse, TokenizeInput, TokenizeRequest, TokenizeResponse,
};
use crate::serving::prompts;

/// Text or a chat to token ids.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let model = app.serving_model()?;
    let trust = app.config.trust_request_chat_template;
    let bytes_max = model.prompt_bytes_max(&app.config);
    app.off_reactor(move || {
        let request = TokenizeRequest::parse(&bytes, model.bounds.vocab_size, trust)?;
        model.check_name(request.model.as_deref())?;
        let (text, field) = match request.input {
            TokenizeInput::Text(text) => (text, "prompt"),
            TokenizeInput::Chat(chat) => (prompts::render(&model, &chat, bytes_max)?, "messages"),
        };
        let special = request.add_special_tokens;
        let tokens = prompts::tokenize(&model, &text, special, field, bytes_max)?;
        let text_of = |&id: &u32| model.served.tokenizer.token_text(id);
        Ok(Json(TokenizeResponse {
            count: tokens.len(),
            max_model_len: model.bounds.max_model_len,
            token_strs: request.return_token_strs.then(|| tokens.iter().map(text_of).collect()),
            tokens,
        }))
    })
    .await
}

/// Token ids to text, special tokens included.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let model = app.serving_model()?;
    app.off_reactor(move || {
        let request = DetokenizeRequest::parse(&bytes, model.bounds.vocab_size)?;
        model.check_name(request.model.as_deref())?;
        let prompt = model.served.tokenizer.decode(&request.tokens, false);
        Ok(Json(DetokenizeResponse { prompt }))
    })
    .await
}
