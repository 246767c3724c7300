//! From a chat's messages to the text of a prompt, by the template that came with the model.
//!
//! Templates are Jinja, written against Python: the environment is set up as Hugging Face's is, and
//! what their templates call is added ([`functions`]). A template is a program: it runs on a budget
//! of fuel, which bounds its time and its memory, writes a bounded output, and is to be rendered
//! off the reactor's threads.

mod functions;

pub use functions::strftime;

use std::io;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, context};
use pawl_shared::clock::Clock;

use crate::openai::chat::{Conversation, join_parts};
use crate::openai::error::{ApiError, ErrorCode};

/// Steps that a model's own template may take; some 64 bytes of text cost one as well. Ten times
/// what a full context of short messages takes.
const FUEL: u64 = 4_000_000;
/// Steps that a template sent with a request may take: about a tenth of a second at most.
const FUEL_UNTRUSTED: u64 = 500_000;
/// Depth of nested macros, blocks and expressions.
const RECURSION_MAX: usize = 64;
/// Bytes of a template's text.
const SOURCE_BYTES_MAX: usize = 1 << 20;

const NAME: &str = "chat_template";

/// What a template is given beside the conversation.
#[derive(Clone)]
pub struct TemplateContext {
    /// The text of the token that begins a sequence, empty if there is none.
    pub bos_token: String,
    /// The text of the token that ends one, empty if there is none.
    pub eos_token: String,
    /// For `strftime_now`.
    pub clock: Arc<dyn Clock>,
}

/// A template, parsed.
pub struct ChatTemplate {
    environment: Environment<'static>,
    context: TemplateContext,
    takes_tools: bool,
    content: ContentShape,
}

/// What a template expects as the content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentShape {
    /// A text.
    Text,
    /// A list of parts, always.
    Parts,
    /// Either: it asks which.
    Both,
}

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// With the line at fault.
    pub fn parse(source: &str, context: TemplateContext) -> Result<Self, ApiError> {
        Self::parse_with(source, context, FUEL)
    }

    /// Parses a template that came with a request: it gets less fuel.
    ///
    /// # Errors
    /// With the line at fault.
    pub fn parse_untrusted(source: &str, context: TemplateContext) -> Result<Self, ApiError> {
        Self::parse_with(source, context, FUEL_UNTRUSTED)
    }

    fn parse_with(source: &str, context: TemplateContext, fuel: u64) -> Result<Self, ApiError> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(ApiError::invalid(
                NAME,
                format!("at most {SOURCE_BYTES_MAX} bytes are allowed, got {}", source.len()),
            ));
        }
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .expect("only whitespace rules differ from the default syntax"),
        );
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(fuel));
        environment.set_recursion_limit(RECURSION_MAX);
        functions::add(&mut environment, Arc::clone(&context.clock));
        let source = functions::without_generation_marks(source);
        environment.add_template_owned(NAME, source.clone()).map_err(|error| {
            ApiError::new(ErrorCode::Template, format!("the chat template does not parse: {error}"))
                .at(NAME)
        })?;
        let template = environment.get_template(NAME).expect("it was added just now");
        let takes_tools = template.undeclared_variables(false).contains("tools");
        let content = content_shape(&source);
        Ok(Self { environment, context, takes_tools, content })
    }

    /// Whether the template tells the model of tools.
    #[must_use]
    pub fn takes_tools(&self) -> bool {
        self.takes_tools
    }

    /// Writes the prompt, at most `bytes_max` bytes.
    ///
    /// # Errors
    /// When the template refuses the messages (its own words are told), spends its fuel, or writes
    /// too much.
    pub fn render(
        &self,
        conversation: &Conversation,
        bytes_max: usize,
    ) -> Result<String, ApiError> {
        if !conversation.tools.is_empty() && !self.takes_tools {
            return Err(ApiError::unsupported(
                "tools",
                "the chat template of this model has no place for them; leave them out",
            ));
        }
        let messages: Vec<_> =
            conversation.messages.iter().map(|message| self.shape_content(message)).collect();
        let tools = (!conversation.tools.is_empty()).then_some(&conversation.tools);
        let variables = context! {
            messages => Value::from(Serde(&messages)),
            tools => Value::from(Serde(tools)),
            add_generation_prompt => conversation.add_generation_prompt,
            bos_token => self.context.bos_token.as_str(),
            eos_token => self.context.eos_token.as_str(),
            ..Value::from(Serde(&conversation.template_kwargs))
        };
        let template = self.environment.get_template(NAME).expect("it was added when parsed");
        let mut output = BoundedOutput { bytes: Vec::new(), bytes_max, overrun: false };
        let rendered = template.render_captured_to(variables, &mut output).map(drop);
        if output.overrun {
            return Err(ApiError::new(
                ErrorCode::ContextLength,
                format!(
                    "messages: the chat becomes more than {bytes_max} bytes of prompt, which \
                     cannot fit the model's context; shorten it"
                ),
            )
            .at("messages"));
        }
        rendered.map_err(|error| refusal(&error))?;
        let text = String::from_utf8(output.bytes).expect("templates write text");
        if conversation.continue_final_message { reopen(text, conversation) } else { Ok(text) }
    }

    fn shape_content(&self, message: &serde_json::Value) -> serde_json::Value {
        let mut message = message.clone();
        if let Some(content) = message.get_mut("content") {
            match (self.content, &*content) {
                // Null stands beside tool calls: these templates write content as it is.
                (ContentShape::Text, serde_json::Value::Array(_) | serde_json::Value::Null) => {
                    *content = join_parts(content).into();
                }
                (ContentShape::Parts, serde_json::Value::String(text)) => {
                    *content = serde_json::json!([{"type": "text", "text": text}]);
                }
                _ => {}
            }
        }
        message
    }
}

/// Finds out by its text whether a template loops over the parts of a message.
fn content_shape(source: &str) -> ContentShape {
    let squeezed: String = source.split_whitespace().collect::<Vec<_>>().join(" ");
    let looped = squeezed.split("for ").skip(1).any(|rest| {
        let Some((_, over)) = rest.split_once(" in ") else { return false };
        let over = over.split("%}").next().unwrap_or_default();
        let over = over.split('|').next().unwrap_or_default().trim_end_matches(['-', ' ']);
        ["content", ".content", "['content']", "[\"content\"]"]
            .iter()
            .any(|end| over.ends_with(end))
            && !over.contains(' ')
    });
    match (looped, squeezed.contains("is string")) {
        (false, _) => ContentShape::Text,
        (true, false) => ContentShape::Parts,
        (true, true) => ContentShape::Both,
    }
}

/// What a failed rendering tells the client.
fn refusal(error: &minijinja::Error) -> ApiError {
    if let Some(raised) = functions::raised(error) {
        let message = format!("messages: the chat template refuses them: {raised}");
        return ApiError::new(ErrorCode::Template, message).at("messages");
    }
    let message = if error.kind() == ErrorKind::OutOfFuel {
        "the chat template takes too many steps for these messages; send less".to_owned()
    } else {
        format!("the chat template fails on these messages: {error}")
    };
    ApiError::new(ErrorCode::Template, message).at("messages")
}

/// Cuts off what the template wrote after the last message's text, so that the model goes on there.
fn reopen(mut rendered: String, conversation: &Conversation) -> Result<String, ApiError> {
    let last = conversation.last_text();
    // Many templates trim what they write.
    let trimmed = last.trim();
    let at = rendered.rfind(trimmed).filter(|_| !trimmed.is_empty()).ok_or_else(|| {
        ApiError::invalid(
            "continue_final_message",
            "the last message has no text in the prompt that could be gone on with",
        )
    })?;
    let untrimmed_end = last.trim_start();
    let length =
        if rendered[at..].starts_with(untrimmed_end) { untrimmed_end.len() } else { trimmed.len() };
    rendered.truncate(at + length);
    Ok(rendered)
}

/// Takes so many bytes and then fails, which ends the rendering.
struct BoundedOutput {
    bytes: Vec<u8>,
    bytes_max: usize,
    overrun: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.bytes_max {
            self.overrun = true;
            return Err(io::Error::other("the prompt is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
