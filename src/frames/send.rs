//! `pawl frames send`: one request to a core, without a frontend in between.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgGroup, Args};
use pawl_shared::clock::{Clock, Stamp, SystemClock};
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{
    ClientMessage, EngineCoreOutput, EngineCoreRequest, FinishReason, OutputKind, SamplingParams,
};
use pawl_shared::tokenizer::Tokenizer;
use pawl_shared::transport::Address;
use serde_json::json;

use super::client::{CoreClient, Incoming};
use super::{find, output};

/// How long the core may take to confirm that it has forgotten an aborted request.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
const CARD_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_TOKENS_DEFAULT: u32 = 64;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true).args(["prompt", "token_ids"]))]
pub struct SendArgs {
    /// The core's --listen address [default: the one core that runs here]
    core: Option<Address>,
    /// The prompt as text, which the core's model must have a tokenizer for
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The prompt as token ids: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    token_ids: Vec<u32>,
    /// Tokens at most [default: 64, less where less fits]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Of the most probable tokens, those that make up this share
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f64,
    /// Only so many of the most probable tokens; 0 is all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// For sampling that can be repeated
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// Go on after the model's end of text
    #[arg(long)]
    ignore_eos: bool,
    /// Lower runs earlier, with --scheduling-policy priority
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    priority: i64,
    /// The beginning of the request's id, to find it by
    #[arg(long, value_name = "TEXT", default_value = "send")]
    id: String,
    /// Token ids instead of text
    #[arg(long)]
    ids: bool,
    /// One JSON object for each output, and one for the end
    #[arg(long)]
    json: bool,
    /// Give up when nothing comes for so long
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = super::seconds)]
    timeout: Duration,
    /// How long the core may take to let us in
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = super::seconds)]
    wait: Duration,
}

/// Sends, shows tokens as they come, and aborts when interrupted.
///
/// # Errors
/// No core, a prompt that cannot be used, or what the core says went wrong.
pub async fn run(args: &SendArgs) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let core = find::core(args.core.as_ref())?;
    let joined = async {
        let mut client = CoreClient::join(&core, args.wait).await?;
        let model = learn_model(&mut client, args).await?;
        anyhow::Ok((client, model))
    };
    let (mut client, model) = tokio::select! {
        joined = joined => joined?,
        () = shutdown.requested() => return Ok(ExitCode::FAILURE),
    };
    let request = request(&mut client, args, model.as_ref())?;
    let id = request.request_id.clone();
    let mut shown = Shown::new(args, model.map(|(_, tokenizer)| tokenizer), &request);
    client.send(&ClientMessage::Add(Box::new(request)))?;
    tracing::debug!(request = %id, client = client.client, "sent");
    let end = loop {
        let incoming = tokio::select! {
            () = shutdown.requested() => break End::Interrupted,
            incoming = tokio::time::timeout(args.timeout, client.next()) => match incoming {
                Ok(incoming) => incoming?,
                Err(_) => break End::Silent,
            },
        };
        match incoming {
            Incoming::Outputs(outputs) => {
                let ours = outputs.into_iter().filter(|output| output.request_id == id);
                for output in ours {
                    if !shown.output(&output)? {
                        break;
                    }
                    shown.end = output.finish_reason.map(|reason| (reason, output.error));
                }
                if shown.closed {
                    break End::Interrupted;
                }
                if shown.end.is_some() {
                    break End::Finished;
                }
            }
            Incoming::Down(reason) => bail!("the core is gone: {reason}"),
            Incoming::Hung(silent_for) => {
                tracing::warn!("the core makes no progress for {} s", silent_for.as_secs());
            }
            Incoming::Reply(_) => {}
        }
    };
    if !matches!(end, End::Finished) {
        client.send(&ClientMessage::Abort(vec![id.clone()]))?;
        // Calls are answered in order, so that once this one is the request is forgotten.
        client.call("is_sleeping", Vec::new(), ABORT_TIMEOUT).await.context("after the abort")?;
    }
    client.leave().await;
    shown.finish(&end, id.as_str(), args.timeout)
}

enum End {
    Finished,
    Interrupted,
    Silent,
}

/// The card and its tokenizer; `None` from a core that tells neither, where none is needed.
async fn learn_model(
    client: &mut CoreClient,
    args: &SendArgs,
) -> anyhow::Result<Option<(ModelCard, Tokenizer)>> {
    let told = client.call("get_model_card", Vec::new(), CARD_TIMEOUT).await;
    let card = told.and_then(|card| Ok(ModelCard::from_value(&card)?));
    let model =
        card.and_then(|card| Tokenizer::from_card(&card).map(|t| (card, t)).map_err(Into::into));
    match model {
        Ok(model) => Ok(Some(model)),
        Err(error) if args.prompt.is_some() => {
            Err(error.context("the core tells no tokenizer: send --token-ids instead of --prompt"))
        }
        Err(error) => {
            tracing::warn!("the core tells no model ({error:#}): token ids are shown as they are");
            Ok(None)
        }
    }
}

fn request(
    client: &mut CoreClient,
    args: &SendArgs,
    model: Option<&(ModelCard, Tokenizer)>,
) -> anyhow::Result<EngineCoreRequest> {
    let prompt = match (&args.prompt, model) {
        (Some(text), Some((_, tokenizer))) => tokenizer.encode(text, true)?,
        _ => args.token_ids.clone(),
    };
    let mut sampling = SamplingParams {
        max_tokens: Some(max_tokens(args.max_tokens, prompt.len(), client.max_model_len)?),
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
        ignore_eos: args.ignore_eos,
        output_kind: OutputKind::Delta,
        ..SamplingParams::default()
    };
    if let Some((card, _)) = model.filter(|_| !args.ignore_eos) {
        sampling.eos_token_id = card.eos_token_id;
        let others = card.stop_token_ids.iter().filter(|id| Some(**id) != card.eos_token_id);
        sampling.stop_token_ids = others.copied().collect();
        sampling.all_stop_token_ids = card.stop_token_ids.iter().copied().collect();
        sampling.all_stop_token_ids.extend(card.eos_token_id);
    }
    let mut request = EngineCoreRequest::new(client.fresh_id(&args.id), prompt, sampling);
    request.client_index = client.client;
    request.priority = args.priority;
    request.external_req_id = Some(args.id.clone());
    request.arrival_time = SystemClock.wall().0;
    Ok(request)
}

/// How many tokens to ask for. The core would cut what does not fit without a word.
fn max_tokens(asked: Option<u32>, prompt: usize, max_model_len: u64) -> anyhow::Result<u32> {
    let room = max_model_len.saturating_sub(prompt as u64);
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    match asked {
        // The core says what is wrong with a prompt that leaves no room.
        None => Ok(MAX_TOKENS_DEFAULT.min(room.max(1))),
        Some(asked) if asked > room && room > 0 => bail!(
            "--max-tokens: the prompt has {prompt} tokens and {asked} are asked for; the model's \
             context length is {max_model_len} tokens for both together. Lower --max-tokens to \
             {room}, or shorten the prompt"
        ),
        Some(asked) => Ok(asked),
    }
}

/// What has been shown of the answer.
struct Shown {
    json: bool,
    /// `None`: token ids are shown.
    tokenizer: Option<Tokenizer>,
    sent: Stamp,
    first: Option<Stamp>,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    end: Option<(FinishReason, Option<pawl_shared::protocol::OutputError>)>,
    /// Nobody reads any more.
    closed: bool,
}

impl Shown {
    fn new(args: &SendArgs, tokenizer: Option<Tokenizer>, request: &EngineCoreRequest) -> Self {
        Self {
            json: args.json,
            tokenizer: tokenizer.filter(|_| !args.ids),
            sent: SystemClock.now(),
            first: None,
            prompt_tokens: request.prompt_token_ids.as_ref().map_or(0, Vec::len),
            tokens: Vec::new(),
            end: None,
            closed: false,
        }
    }

    /// `false` once nobody reads.
    fn output(&mut self, output: &EngineCoreOutput) -> anyhow::Result<bool> {
        let tokens = &output.new_token_ids;
        if !tokens.is_empty() {
            self.first.get_or_insert(SystemClock.now());
        }
        self.tokens.extend(tokens);
        let shown = match &self.tokenizer {
            _ if tokens.is_empty() => Ok(true),
            tokenizer if self.json => {
                let text = tokenizer.as_ref().map(|tokenizer| tokenizer.decode(tokens, true));
                output::line(&json!({ "token_ids": tokens, "text": text }).to_string())
            }
            // Bytes as they come: a letter of several tokens is whole once the last of them is.
            Some(tokenizer) => {
                let shown = tokens.iter().filter(|id| !tokenizer.is_special(**id));
                let bytes: Vec<u8> =
                    shown.flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
                output::write(&bytes)
            }
            None => {
                let ids: String = tokens.iter().map(|id| format!("{id} ")).collect();
                output::write(ids.as_bytes())
            }
        }?;
        self.closed = !shown;
        Ok(shown)
    }

    fn finish(self, end: &End, id: &str, timeout: Duration) -> anyhow::Result<ExitCode> {
        let (reason, error) = match (&self.end, end) {
            (Some((reason, error)), _) => (reason.as_str(), error.clone()),
            (None, End::Silent) => ("timeout", None),
            (None, _) => ("abort", None),
        };
        let seconds = SystemClock.now().since(self.sent).as_secs_f64();
        let first = self.first.map(|first| first.since(self.sent).as_secs_f64());
        if self.json {
            output::line(
                &json!({
                    "request": id,
                    "finish_reason": reason,
                    "error": error.as_ref().map(|e| json!({"code": e.code, "message": e.message})),
                    "prompt_tokens": self.prompt_tokens,
                    "output_tokens": self.tokens.len(),
                    "first_token_seconds": first,
                    "seconds": seconds,
                })
                .to_string(),
            )?;
        } else if !self.tokens.is_empty() {
            output::line("")?;
        }
        let (tokens, prompt) = (self.tokens.len(), self.prompt_tokens);
        match first {
            Some(first) => tracing::info!(
                "{id}: {reason} after {tokens} tokens in {seconds:.3} s (prompt of {prompt}, first \
                 token after {first:.3} s)"
            ),
            None if error.is_some() => {
                tracing::info!("{id}: refused after {seconds:.3} s (prompt of {prompt})");
            }
            None => tracing::info!(
                "{id}: {reason} without a token in {seconds:.3} s (prompt of {prompt})"
            ),
        }
        if let Some(error) = error {
            bail!("the core refused or failed the request: {}: {}", error.code, error.message);
        }
        Ok(match end {
            End::Finished if reason == FinishReason::Abort.as_str() => {
                tracing::error!("the core ended the request: it stops, or generation is paused");
                ExitCode::FAILURE
            }
            End::Finished => ExitCode::SUCCESS,
            // Whoever closes the output has seen what he wanted.
            End::Interrupted if self.closed => ExitCode::SUCCESS,
            End::Interrupted => ExitCode::FAILURE,
            End::Silent => {
                tracing::error!("nothing came for {} s: aborted", timeout.as_secs_f64());
                ExitCode::FAILURE
            }
        })
    }
}
