//! Calls by name, and their answers.

use super::Value;

/// A utility call: `[client_index, call_id, method, args]`.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilityCall {
    /// Who asks, as the caller says.
    pub client_index: u32,
    /// Echoed unchanged; often above 2^62.
    pub call_id: u64,
    /// The method's name.
    pub method: String,
    /// Positional arguments.
    pub args: Vec<Value>,
}

/// The answer: `[call_id, failure_message, result]`.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilityReply {
    /// Of the call, unchanged. An engine's own notices (-1, -2) read as `u64::MAX` and one below:
    /// no caller counts that far, so they match no call.
    pub call_id: u64,
    /// Success with a value (`Value::Nil` for "no value"), or why it failed.
    pub result: Result<Value, String>,
}
