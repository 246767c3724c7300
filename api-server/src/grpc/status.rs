//! Errors as gRPC statuses: the message is the one that HTTP tells; the details carry the code, the
//! field, and when to try again (`google.rpc.ErrorInfo`, `BadRequest`, `RetryInfo`).

use std::collections::HashMap;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt};

use crate::openai::error::{ApiError, ErrorCode};

/// What `ErrorInfo.domain` says.
const DOMAIN: &str = "pawl";

/// The status code of an error.
///
/// A full queue is told apart from a server that is away: clients that try again by themselves on
/// UNAVAILABLE, as their usual policies say, would only add to what is too much already.
pub fn code_of(code: ErrorCode) -> Code {
    match code {
        ErrorCode::InvalidJson
        | ErrorCode::MissingField
        | ErrorCode::InvalidValue
        | ErrorCode::Unsupported
        | ErrorCode::ContextLength
        | ErrorCode::Template
        | ErrorCode::MediaType => Code::InvalidArgument,
        ErrorCode::InvalidApiKey => Code::Unauthenticated,
        ErrorCode::ModelNotFound => Code::NotFound,
        ErrorCode::RouteNotFound | ErrorCode::MethodNotAllowed => Code::Unimplemented,
        ErrorCode::BodyTimeout | ErrorCode::CallTimeout => Code::DeadlineExceeded,
        ErrorCode::BodyTooLarge => Code::OutOfRange,
        ErrorCode::QueueFull | ErrorCode::SlowReader => Code::ResourceExhausted,
        ErrorCode::EngineDown
        | ErrorCode::EngineHung
        | ErrorCode::EnginePaused
        | ErrorCode::ShuttingDown => Code::Unavailable,
        ErrorCode::Engine | ErrorCode::CallFailed | ErrorCode::Internal => Code::Internal,
    }
}

/// HTTP's name of each field, and where it stands in a `GenerateRequest`.
const FIELDS: &[(&str, &str)] = &[
    ("request_id", "request_id"),
    ("model", "model"),
    ("prompt", "prompt"),
    ("temperature", "temperature"),
    ("n", "sampling.num_sequences"),
    ("top_k", "sampling.top_k"),
    ("top_p", "sampling.top_p"),
    ("min_p", "sampling.min_p"),
    ("seed", "sampling.seed"),
    ("presence_penalty", "decoding.presence_penalty"),
    ("frequency_penalty", "decoding.frequency_penalty"),
    ("repetition_penalty", "decoding.repetition_penalty"),
    ("logit_bias", "decoding.logit_bias"),
    ("allowed_token_ids", "decoding.allowed_token_ids"),
    ("structured_outputs", "decoding.structured_output"),
    ("bad_words", "decoding.bad_words"),
    ("max_tokens", "stopping.max_new_tokens"),
    ("min_tokens", "stopping.min_new_tokens"),
    ("stop_token_ids", "stopping.stop_token_ids"),
    ("stop", "stopping.stop_strings"),
    ("include_stop_str_in_output", "stopping.include_stop_strings"),
    ("ignore_eos", "stopping.ignore_eos"),
    ("return_token_ids", "response.output_token_ids"),
    ("logprobs", "response.output_candidates.top_n"),
    ("skip_special_tokens", "response.skip_special_tokens"),
    ("cache_salt", "kv.cache_salt"),
    ("truncate_prompt_tokens", "truncate_prompt_tokens"),
    ("priority", "priority"),
    ("add_special_tokens", "add_special_tokens"),
];

/// Where HTTP's field stands in a message; fields of gRPC alone are named as they stand.
fn place_of(field: &str) -> &str {
    FIELDS.iter().find(|(http, _)| *http == field).map_or(field, |(_, place)| place)
}

/// The status that tells `error`.
pub fn status(error: &ApiError) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(error.code.as_str(), DOMAIN, HashMap::new());
    if let Some(field) = &error.param {
        details.set_bad_request(vec![FieldViolation::new(place_of(field), &error.message)]);
    }
    // A reader that was too slow is not helped by waiting.
    if error.retry_after.is_some() && error.code != ErrorCode::SlowReader {
        details.set_retry_info(error.retry_after);
    }
    Status::with_error_details(code_of(error.code), &error.message, details)
}

/// A code as metrics name it.
pub fn label(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// `INVALID_ARGUMENT`, as the interface's own documentation writes it.
    fn shouted(code: Code) -> String {
        let mut text = String::new();
        for (at, letter) in label(code).char_indices() {
            if at > 0 && letter.is_uppercase() && code != Code::Ok {
                text.push('_');
            }
            text.push(letter.to_ascii_uppercase());
        }
        text
    }

    fn reference_markdown() -> String {
        let mut text = "| field of `GenerateRequest` | over HTTP |\n|---|---|\n".to_owned();
        for (http, place) in FIELDS {
            text += &format!("| `{place}` | `{http}` |\n");
        }
        text += "\n| `ErrorInfo.reason` | status | over HTTP | when |\n|---|---|---|---|\n";
        for code in ErrorCode::ALL {
            let (reason, status) = (code.as_str(), shouted(code_of(*code)));
            let meaning = code.meaning().trim_end_matches('.');
            text += &format!("| `{reason}` | {status} | {} | {meaning} |\n", code.status());
        }
        text
    }

    /// `docs/grpc.md` carries the generated tables between its markers; with `UPDATE_DOCS` set the
    /// test writes them.
    #[test]
    fn the_grpc_page_is_the_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/grpc.md");
        let page = std::fs::read_to_string(path).expect("docs/grpc.md is in the tree");
        let (begin, end) = ("<!-- generated: begin -->\n", "<!-- generated: end -->\n");
        let (before, rest) = page.split_once(begin).expect("the marker before the tables");
        let (_, after) = rest.split_once(end).expect("the marker after the tables");
        let current = format!("{before}{begin}\n{}\n{end}{after}", reference_markdown());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, &current).expect("docs/grpc.md can be written");
            return;
        }
        assert!(page == current, "docs/grpc.md is stale: run this test with UPDATE_DOCS=1");
    }

    #[test]
    fn a_status_tells_what_http_tells() {
        let error = ApiError::invalid("max_tokens", "must be from 1 to 5, got 9");
        let told = status(&error);
        assert_eq!((told.code(), told.message()), (Code::InvalidArgument, &*error.message));
        let details = told.get_error_details();
        let field = &details.bad_request().expect("a field").field_violations[0];
        assert_eq!(field.field, "stopping.max_new_tokens");
        assert_eq!(details.error_info().expect("a reason").reason, "invalid_value");
        assert!(details.retry_info().is_none());

        let full = status(&ApiError::new(ErrorCode::QueueFull, "try again soon"));
        assert_eq!(full.code(), Code::ResourceExhausted);
        let retry = full.get_error_details().retry_info().expect("when").retry_delay;
        assert_eq!(retry, Some(Duration::from_secs(1)));
    }

    /// The clients' own retry policies look at the code alone.
    #[test]
    fn whatever_is_away_for_a_while_is_unavailable_or_exhausted() {
        for code in ErrorCode::ALL.iter().filter(|code| code.status() == 503) {
            let told = code_of(*code);
            assert!([Code::Unavailable, Code::ResourceExhausted].contains(&told), "{code:?}");
        }
    }
}
