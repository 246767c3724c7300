//! What a client is told when a request cannot be served.
//!
//! Every failure has the shape of OpenAI's: `{"error": {"message", "type", "param", "code"}}`. The
//! message names the field and the remedy; the code is for programs and is one of [`ErrorCode`].

use std::time::Duration;

use serde::Serialize;

macro_rules! error_codes {
    (
        $($(#[doc = $doc:literal])* $name:ident = $text:literal, $status:literal, $kind:literal;)*
    ) => {
        /// Why a request was not served. The texts are part of the interface.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $($(#[doc = $doc])* $name,)*
        }

        impl ErrorCode {
            /// Every code, for the reference pages.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The text of the field `code`.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The HTTP status that goes with it.
            #[must_use]
            pub fn status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }

            /// When it is used, in a line.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => [$($doc),*][0].trim_ascii(),)* }
            }

            /// The text of the field `type`.
            #[must_use]
            pub fn kind(self) -> &'static str {
                match self { $(Self::$name => $kind,)* }
            }
        }
    };
}

error_codes! {
    /// The body is not JSON, or not an object.
    InvalidJson = "invalid_json", 400, "invalid_request_error";
    /// A field is missing.
    MissingField = "missing_field", 400, "invalid_request_error";
    /// A field has a value that is not allowed.
    InvalidValue = "invalid_value", 400, "invalid_request_error";
    /// A field is known but what it asks for is not offered.
    Unsupported = "unsupported_parameter", 400, "invalid_request_error";
    /// Prompt and completion do not fit the model's context.
    ContextLength = "context_length_exceeded", 400, "invalid_request_error";
    /// The chat template refused the messages, or spent its budget.
    Template = "template_error", 400, "invalid_request_error";
    /// No key, or a wrong one.
    InvalidApiKey = "invalid_api_key", 401, "authentication_error";
    /// The model is not served here.
    ModelNotFound = "model_not_found", 404, "invalid_request_error";
    /// No such route.
    RouteNotFound = "route_not_found", 404, "invalid_request_error";
    /// The route exists, the method does not.
    MethodNotAllowed = "method_not_allowed", 405, "invalid_request_error";
    /// The body did not arrive in time.
    BodyTimeout = "body_timeout", 408, "invalid_request_error";
    /// The body is larger than the limit.
    BodyTooLarge = "body_too_large", 413, "invalid_request_error";
    /// The body's content type is not JSON.
    MediaType = "unsupported_media_type", 415, "invalid_request_error";
    /// The engine failed on this request.
    Engine = "engine_error", 500, "server_error";
    /// A fault of the server's own.
    Internal = "internal_error", 500, "server_error";
    /// The engine does not do what an operator asked of it.
    CallFailed = "engine_call_failed", 501, "server_error";
    /// The engine did not answer an operator's call in time.
    CallTimeout = "engine_call_timeout", 504, "server_error";
    /// Too much is waiting.
    QueueFull = "queue_full", 503, "service_unavailable_error";
    /// No engine core is connected, or it died.
    EngineDown = "engine_unavailable", 503, "service_unavailable_error";
    /// The engine core is connected but does not move.
    EngineHung = "engine_hung", 503, "service_unavailable_error";
    /// An operator has paused the engine.
    EnginePaused = "engine_paused", 503, "service_unavailable_error";
    /// The server is stopping.
    ShuttingDown = "shutting_down", 503, "service_unavailable_error";
    /// The client read its stream too slowly, or not at all.
    SlowReader = "reader_too_slow", 503, "service_unavailable_error";
}

/// One failure, as it is told to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Which kind.
    pub code: ErrorCode,
    /// The field at fault, if there is one.
    pub param: Option<String>,
    /// For people.
    pub message: String,
    /// When it is worth trying again; sent as `Retry-After` in whole seconds.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// A failure that no single field is to blame for.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let retry_after = (code.status() == 503).then_some(Duration::from_secs(1));
        Self { code, param: None, message: message.into(), retry_after }
    }

    /// A field's value is not allowed: `field: problem`.
    pub fn invalid(field: &str, problem: impl std::fmt::Display) -> Self {
        Self::new(ErrorCode::InvalidValue, format!("{field}: {problem}")).at(field)
    }

    /// A known field that asks for what is not offered.
    pub fn unsupported(field: &str, remedy: impl std::fmt::Display) -> Self {
        Self::new(ErrorCode::Unsupported, format!("{field} is not offered: {remedy}")).at(field)
    }

    /// The same failure, blamed on `field`.
    #[must_use]
    pub fn at(mut self, field: &str) -> Self {
        self.param = Some(field.to_owned());
        self
    }

    /// The body of the answer, also sent as an event in the middle of a stream.
    #[must_use]
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorFields {
                message: &self.message,
                kind: self.code.kind(),
                param: self.param.as_deref(),
                code: self.code.as_str(),
            },
        }
    }

    /// The body as JSON text.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string(&self.body()).expect("a struct of texts is always JSON")
    }
}

/// `{"error": …}`
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference_markdown() -> String {
        let mut table = "| `code` | status | `type` | when |\n|---|---|---|---|\n".to_owned();
        for code in ErrorCode::ALL {
            let (text, status, kind) = (code.as_str(), code.status(), code.kind());
            let meaning = code.meaning().trim_end_matches('.');
            table += &format!("| `{text}` | {status} | `{kind}` | {meaning} |\n");
        }
        table
    }

    /// `docs/api.md` carries the generated table between its markers; with `UPDATE_DOCS` set the
    /// test writes it.
    #[test]
    fn the_reference_page_is_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/api.md");
        let page = std::fs::read_to_string(path).expect("docs/api.md is in the tree");
        let (begin, end) = ("<!-- generated: begin -->\n", "<!-- generated: end -->\n");
        let (before, rest) = page.split_once(begin).expect("the marker before the table");
        let (_, after) = rest.split_once(end).expect("the marker after the table");
        let current = format!("{before}{begin}\n{}\n{end}{after}", reference_markdown());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, &current).expect("docs/api.md can be written");
            return;
        }
        assert!(page == current, "docs/api.md is stale: run this test with UPDATE_DOCS=1");
    }
}
