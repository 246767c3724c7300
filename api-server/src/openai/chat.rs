//! `POST /v1/chat/completions`: the request. Turning the messages into a prompt is the business of
//! [`crate::chat_template`].

use serde_json::{Map, Value};

use super::body::{self, PromptField};
use super::completion::{check_min_tokens, log_unknown, logprobs};
use super::error::ApiError;
use super::fields::{Fields, excerpt, missing, wrong_kind};
use super::limits::{MESSAGES_MAX, PARTS_MAX, TOOLS_MAX};
use super::sampling::{Bounds, COMMON_FIELDS, Common};

/// Bytes of a role's or a tool's name.
const NAME_BYTES_MAX: usize = 256;

/// A chat request, checked as far as that is possible before its template is rendered.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// What the template is given.
    pub conversation: Conversation,
    /// Answer with the last message's text before the new text.
    pub echo: bool,
    /// As asked for; the default is all that the context has room for.
    pub max_tokens: Option<u32>,
    /// The rest.
    pub common: Common,
}

/// What a chat template is rendered with.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Conversation {
    /// At least one; each an object with a `role`, and `content` that is a text or a list of text
    /// parts (or null beside tool calls).
    pub messages: Vec<Value>,
    /// Tools the model may call; empty for none.
    pub tools: Vec<Value>,
    /// End the prompt with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the model goes on with it.
    pub continue_final_message: bool,
    /// Further variables of the template.
    pub template_kwargs: Map<String, Value>,
    /// A template sent with the request; only where the server trusts them.
    pub chat_template: Option<String>,
}

/// The names read by [`Conversation::read`].
pub const CONVERSATION_FIELDS: &[&str] = &[
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
];

const FIELDS: &[&str] =
    &["max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "echo"];

impl ChatRequest {
    /// Reads a body. `trust_template` says whether a template in the request is used or refused.
    pub fn parse(bytes: &[u8], bounds: &Bounds, trust_template: bool) -> Result<Self, ApiError> {
        let prompt = PromptField { name: "prompt", vocab_size: bounds.vocab_size };
        let mut body = body::parse(bytes, prompt, &[COMMON_FIELDS, CONVERSATION_FIELDS, FIELDS])?;
        log_unknown(&body.unknown);
        if body.prompt.is_some() {
            return Err(ApiError::unsupported("prompt", "a chat takes messages"));
        }
        let fields = &mut body.fields;
        let conversation = Conversation::read(fields, trust_template)?;
        let mut common = Common::read(fields, bounds, 1)?;
        let wants = fields.flag("logprobs", false)?;
        let top = logprobs("top_logprobs", fields, bounds)?;
        // As in vLLM, 0 asks for nothing.
        if top.is_some_and(|top| top > 0) && !wants {
            return Err(ApiError::invalid("top_logprobs", "needs logprobs: true beside it"));
        }
        common.sampling.logprobs = wants.then(|| top.unwrap_or(0));
        let older = fields.count("max_tokens", 1..=u32::MAX)?;
        let max_tokens = fields.count("max_completion_tokens", 1..=u32::MAX)?.or(older);
        check_min_tokens(&common, max_tokens.unwrap_or(u32::MAX))?;
        Ok(Self { conversation, echo: fields.flag("echo", false)?, max_tokens, common })
    }
}

impl Conversation {
    /// Reads the fields named in [`CONVERSATION_FIELDS`].
    pub fn read(fields: &mut Fields, trust_template: bool) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let messages = fields
            .list("messages", MESSAGES_MAX)?
            .ok_or_else(|| missing("messages", "send a list of {role, content}"))?;
        if messages.is_empty() {
            return Err(ApiError::invalid("messages", "is empty: a chat needs at least one"));
        }
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| self::message(&format!("messages[{index}]"), message))
            .collect::<Result<Vec<_>, _>>()?;
        let tools = tools(fields)?;
        let chat_template = fields.text("chat_template", usize::MAX)?;
        if chat_template.is_some() && !trust_template {
            return Err(ApiError::unsupported(
                "chat_template",
                "templates in requests are not trusted; start the server with \
                 --trust-request-chat-template, or with --chat-template",
            ));
        }
        let mut template_kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(effort) = fields.text("reasoning_effort", NAME_BYTES_MAX)? {
            template_kwargs.entry("reasoning_effort").or_insert(effort.into());
        }
        let continue_final_message = fields.flag("continue_final_message", false)?;
        let add_generation_prompt = fields.boolean("add_generation_prompt")?;
        if continue_final_message && add_generation_prompt == Some(true) {
            return Err(ApiError::invalid(
                "continue_final_message",
                "cannot go with add_generation_prompt: true; set one of them",
            ));
        }
        Ok(Self {
            messages,
            tools,
            add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
            continue_final_message,
            template_kwargs,
            chat_template,
        })
    }

    /// The text of the last message, for `echo` and for going on with it.
    #[must_use]
    pub fn last_text(&self) -> String {
        let content = self.messages.last().and_then(|message| message.get("content"));
        content.map(join_parts).unwrap_or_default()
    }
}

/// The text of a content: parts are joined by line breaks.
pub fn join_parts(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part.get("text").and_then(Value::as_str))
            .collect::<Vec<_>>()
            .join("\n"),
        _ => String::new(),
    }
}

fn message(at: &str, message: Value) -> Result<Value, ApiError> {
    let Value::Object(map) = message else {
        return Err(wrong_kind("messages", "a list of objects", &message));
    };
    let mut out = map.clone();
    let mut fields = Fields::new(map);
    let blame = |error: ApiError| {
        let message = format!("{at}.{}", error.message);
        ApiError { message, ..error }.at("messages")
    };
    let role = fields.text("role", NAME_BYTES_MAX).map_err(blame)?;
    if role.is_none_or(|role| role.is_empty()) {
        return Err(blame(missing("role", "for example \"user\"")));
    }
    let calls = fields.list("tool_calls", TOOLS_MAX).map_err(blame)?;
    match fields.value("content") {
        None if calls.is_some() => {
            out.insert("content".to_owned(), Value::Null);
        }
        None => return Err(blame(missing("content", "send a text, which may be empty"))),
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            out.insert("content".to_owned(), content_parts(parts).map_err(blame)?);
        }
        Some(other) => {
            return Err(blame(wrong_kind("content", "a text or a list of text parts", &other)));
        }
    }
    if let Some(calls) = calls {
        out.insert("tool_calls".to_owned(), calls.into_iter().map(call_arguments).collect());
    }
    Ok(Value::Object(out))
}

fn content_parts(parts: Vec<Value>) -> Result<Value, ApiError> {
    const NAME: &str = "content";
    super::fields::check_entries(NAME, parts.len(), PARTS_MAX)?;
    let part = |part: Value| {
        if let Value::String(text) = part {
            return Ok(serde_json::json!({"type": "text", "text": text}));
        }
        let kind = part.get("type").and_then(Value::as_str);
        match (kind, part.get("text")) {
            (Some("text" | "input_text" | "output_text"), Some(Value::String(text))) => {
                Ok(serde_json::json!({"type": "text", "text": text}))
            }
            (Some("refusal"), _) if part.get("refusal").is_some_and(Value::is_string) => {
                Ok(serde_json::json!({"type": "text", "text": part["refusal"]}))
            }
            (Some("text"), _) => Err(ApiError::invalid(NAME, "a text part needs a field text")),
            (Some(kind), _) => {
                let kind = excerpt(&Value::from(kind));
                let remedy = "the models served read text only";
                Err(ApiError::unsupported(&format!("content part {kind}"), remedy))
            }
            (None, _) => Err(ApiError::invalid(NAME, "each part needs a type, such as \"text\"")),
        }
    };
    parts.into_iter().map(part).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

/// OpenAI sends a call's arguments as JSON text; templates write them out as an object.
fn call_arguments(mut call: Value) -> Value {
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && let Some(text) = arguments.as_str()
        && let Ok(parsed @ Value::Object(_)) = serde_json::from_str::<Value>(text)
    {
        *arguments = parsed;
    }
    call
}

fn tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools = fields.list("tools", TOOLS_MAX)?.unwrap_or_default();
    for tool in &tools {
        let name = tool.pointer("/function/name").and_then(Value::as_str);
        if name.is_none_or(str::is_empty) {
            return Err(ApiError::invalid(
                "tools",
                "each entry must be {\"type\": \"function\", \"function\": {\"name\": …}}",
            ));
        }
    }
    fields.boolean("parallel_tool_calls")?;
    const NAME: &str = "tool_choice";
    match fields.value(NAME) {
        None => Ok(tools),
        // A model that may not call a tool is not told of any.
        Some(Value::String(choice)) if choice == "none" => Ok(Vec::new()),
        Some(Value::String(choice)) if choice == "auto" => Ok(tools),
        Some(choice) => {
            let shown = match &choice {
                Value::Object(_) => "a named function".to_owned(),
                other => excerpt(other),
            };
            Err(ApiError::unsupported(
                &format!("tool_choice {shown}"),
                "calls cannot be forced; use \"auto\" or \"none\"",
            )
            .at(NAME))
        }
    }
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    const TEXT_ONLY: &str = "the models served read and write text only";
    const REFUSED: &[(&str, &str)] = &[
        ("documents", "put them into the messages"),
        ("mm_processor_kwargs", TEXT_ONLY),
        ("media_io_kwargs", TEXT_ONLY),
        ("audio", TEXT_ONLY),
        ("functions", "use tools"),
        ("function_call", "use tool_choice"),
        ("prediction", "leave it out"),
        ("web_search_options", "leave it out"),
    ];
    for (name, remedy) in REFUSED {
        if fields.value(name).is_some() {
            return Err(ApiError::unsupported(name, remedy));
        }
    }
    if let Some(kinds) = fields.list("modalities", 8)?
        && kinds.iter().any(|kind| kind != "text")
    {
        return Err(ApiError::unsupported("modalities", "only [\"text\"] is"));
    }
    Ok(())
}
