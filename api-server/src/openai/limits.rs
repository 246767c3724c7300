//! How much a request may ask for. All of these are checked before any tokenizing or per-token
//! work, so that a request that is too big costs no more than reading it.

/// Prompts in one completion request.
pub const PROMPTS_MAX: usize = 1_024;
/// Messages in one chat request.
pub const MESSAGES_MAX: usize = 4_096;
/// Parts in one message.
pub const PARTS_MAX: usize = 4_096;
/// Tools offered to the model in one request.
pub const TOOLS_MAX: usize = 128;
/// Entries of `stop`.
pub const STOP_MAX: usize = 16;
/// Bytes of one entry of `stop`.
pub const STOP_BYTES_MAX: usize = 1_024;
/// Entries of `stop_token_ids`.
pub const STOP_TOKEN_IDS_MAX: usize = 128;
/// Entries of `bad_words`.
pub const BAD_WORDS_MAX: usize = 128;
/// Bytes of one entry of `bad_words`.
pub const BAD_WORD_BYTES_MAX: usize = 256;
/// Keys of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1_024;
/// Entries of `allowed_token_ids`.
pub const ALLOWED_TOKEN_IDS_MAX: usize = 16_384;
/// Bytes of `request_id`, `X-Request-Id` and `cache_salt`.
pub const ID_BYTES_MAX: usize = 128;
/// JSON values in one body beside the prompt's own token ids. Each costs some 32 bytes once read,
/// so the bound on the body's bytes alone would not bound the memory.
pub const JSON_VALUES_MAX: u32 = 262_144;

/// `temperature` reaches from 0 (greedy) to here.
pub const TEMPERATURE_MAX: f64 = 100.0;
/// `presence_penalty` and `frequency_penalty` reach from minus this to this.
pub const PENALTY_MAX: f64 = 2.0;
/// `repetition_penalty` is above 0 and at most this.
pub const REPETITION_PENALTY_MAX: f64 = 100.0;
/// `logit_bias` values reach from minus this to this.
pub const LOGIT_BIAS_VALUE_MAX: f64 = 100.0;
