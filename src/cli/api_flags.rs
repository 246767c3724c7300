//! How requests are read and answered, and what is told of them: flags of everything that answers
//! OpenAI requests, over HTTP or from a file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::Bytes;

/// `--request-timing`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RequestTiming {
    /// A log line for each request
    Log,
    /// A response header (a comment line at the end of a stream)
    Header,
}

#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ApiFlags {
    /// Largest request body
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "32MiB",
        env = "PAWL_MAX_BODY_BYTES",
        help_heading = "API"
    )]
    pub max_body_bytes: Bytes,
    /// File with a chat template, instead of the model's
    #[arg(long, value_name = "FILE", env = "PAWL_CHAT_TEMPLATE", help_heading = "API")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
    /// Render chat templates that come with a request
    #[arg(long, env = "PAWL_TRUST_REQUEST_CHAT_TEMPLATE", help_heading = "API")]
    pub trust_request_chat_template: bool,
    /// Most logprobs a position
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        env = "PAWL_MAX_LOGPROBS",
        help_heading = "API"
    )]
    pub max_logprobs: u32,
    /// Most answers to one prompt (`n`)
    #[arg(long, value_name = "N", default_value_t = 128, env = "PAWL_MAX_N", help_heading = "API",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_n: u32,
    /// Role of the messages in chat answers
    #[arg(
        long,
        value_name = "ROLE",
        default_value = "assistant",
        env = "PAWL_RESPONSE_ROLE",
        help_heading = "API"
    )]
    pub response_role: String,
    /// Tell cached prompt tokens in `usage`
    #[arg(long, env = "PAWL_ENABLE_PROMPT_TOKENS_DETAILS", help_heading = "API")]
    pub enable_prompt_tokens_details: bool,
    /// Tell each request's id in the header X-Request-Id
    #[arg(long, env = "PAWL_ENABLE_REQUEST_ID_HEADERS", help_heading = "API")]
    pub enable_request_id_headers: bool,

    /// Record no metrics; the token stream stays the same
    #[arg(long, env = "PAWL_DISABLE_LOG_STATS", help_heading = "Metrics")]
    pub disable_log_stats: bool,
    /// Tell where each request's time went
    #[arg(long, value_enum, env = "PAWL_REQUEST_TIMING", help_heading = "Metrics")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_timing: Option<RequestTiming>,
    /// Bounds of histogram families, as JSON: {"time_to_first_token": [0.1, 1]}
    #[arg(
        long,
        value_name = "JSON",
        env = "PAWL_CUSTOM_HISTOGRAM_BUCKETS",
        help_heading = "Metrics"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_histogram_buckets: Option<String>,
}
