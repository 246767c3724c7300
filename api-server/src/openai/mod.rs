//! OpenAI's requests and answers as types, with vLLM's additions. No HTTP here: a body's bytes come
//! in, a request or an [`error::ApiError`] comes out.

pub mod answer;
pub mod body;
pub mod chat;
pub mod completion;
pub mod error;
pub mod fields;
pub mod limits;
pub mod sampling;
pub mod tokens;
