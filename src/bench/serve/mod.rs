//! `pawl bench serve`: load on any server that speaks the OpenAI API, with the flags and the result
//! file of `vllm bench serve`, so that scripts and comparisons made for that one go on working.
//!
//! It is a client like any other: it needs no model and no tokenizer, since the server has them.

mod client;
mod prompts;
mod random;
mod report;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use pawl_api_server::chat_template::strftime;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use client::{Client, Kind, Outcome};
use prompts::{Ask, Lengths};
use random::Random;
use report::{Goal, Metric, Report, Wanted};

/// Between two tries to reach a server that is not ready.
const TRY_EVERY: Duration = Duration::from_millis(500);
/// How long a server may take to name its models, if no longer time was given.
const TRY_PATIENCE: Duration = Duration::from_secs(2);
/// Tokens of a made-up prompt's parts, and of an answer: as many as the longest context there is.
const TOKENS_MAX: i64 = 1 << 20;
/// Tokens of all made-up prompts together, which are held in memory: 1 GiB.
const PROMPT_TOKENS_MAX: u64 = 1 << 28;

/// `--backend`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Completions
    #[default]
    Openai,
    /// Completions
    Vllm,
    /// Chat completions
    OpenaiChat,
}

impl Backend {
    fn kind(self) -> Kind {
        match self {
            Self::Openai | Self::Vllm => Kind::Completions,
            Self::OpenaiChat => Kind::Chat,
        }
    }

    fn endpoint(self) -> &'static str {
        match self.kind() {
            Kind::Completions => "/v1/completions",
            Kind::Chat => "/v1/chat/completions",
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// `--dataset-name`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Dataset {
    /// Made-up prompts of a wanted length
    #[default]
    Random,
    /// The field "prompt" of each line of --dataset-path
    Custom,
}

#[derive(Clone, Debug, Args)]
pub struct BenchServeArgs {
    /// How the server is asked
    #[arg(long, value_enum, default_value_t, alias = "endpoint-type", help_heading = "Server")]
    pub backend: Backend,
    /// The server's address, instead of --host and --port
    #[arg(long, value_name = "URL", help_heading = "Server")]
    pub base_url: Option<String>,
    /// The server's host
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub host: String,
    /// The server's port
    #[arg(long, default_value_t = 8000, help_heading = "Server")]
    pub port: u16,
    /// Path of the route [default: that of the backend]
    #[arg(long, value_name = "PATH", help_heading = "Server")]
    pub endpoint: Option<String>,
    /// Model to ask for [default: the first that the server names]
    #[arg(long, help_heading = "Server")]
    pub model: Option<String>,
    /// Name of the model in requests, where it is another than --model
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub served_model_name: Option<String>,
    /// Noted in the result; prompts are made with the server's tokenizer
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub tokenizer: Option<String>,
    /// Key to send
    #[arg(
        long,
        value_name = "KEY",
        env = "PAWL_BENCH_API_KEY",
        hide_env_values = true,
        help_heading = "Server"
    )]
    pub api_key: Option<String>,
    /// More headers, as x-name=value; may be repeated
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = pair,
          help_heading = "Server")]
    pub header: Vec<(String, String)>,
    /// How long to wait for the server to be ready; 0 tries once
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = "Server",
          value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub ready_check_timeout_sec: u64,

    /// Where prompts come from
    #[arg(long, value_enum, default_value_t, help_heading = "Requests")]
    pub dataset_name: Dataset,
    /// File of --dataset-name custom: JSON lines
    #[arg(
        long,
        value_name = "FILE",
        required_if_eq("dataset_name", "custom"),
        help_heading = "Requests"
    )]
    pub dataset_path: Option<PathBuf>,
    /// Requests to send
    #[arg(long, value_name = "N", default_value_t = 1000, help_heading = "Requests",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub num_prompts: u32,
    /// Requests that are sent before, and not counted
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Requests",
          value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub num_warmups: u32,
    /// Prompt tokens of a made-up request, besides --random-prefix-len
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, alias = "input-len",
          help_heading = "Requests", value_parser = clap::value_parser!(u32).range(..=TOKENS_MAX))]
    pub random_input_len: u32,
    /// Tokens to generate
    #[arg(long, value_name = "TOKENS", default_value_t = 128, help_heading = "Requests",
          aliases = ["output-len", "custom-output-len"],
          value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX))]
    pub random_output_len: u32,
    /// Lengths are drawn from so far below and above, as a share
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share,
          help_heading = "Requests")]
    pub random_range_ratio: f64,
    /// Tokens that all made-up prompts begin with
    #[arg(long, value_name = "TOKENS", default_value_t = 0, help_heading = "Requests",
          value_parser = clap::value_parser!(u32).range(..=TOKENS_MAX))]
    pub random_prefix_len: u32,
    /// Generate as many tokens as asked for, whatever the model says
    #[arg(long, help_heading = "Requests")]
    pub ignore_eos: bool,
    /// Sampling temperature [default: the server's]
    #[arg(long, help_heading = "Requests")]
    pub temperature: Option<f64>,
    /// Logprobs to ask for with each token
    #[arg(long, value_name = "N", help_heading = "Requests")]
    pub logprobs: Option<u32>,
    /// More fields of each request, as one JSON object
    #[arg(long, value_name = "JSON", value_parser = object, help_heading = "Requests")]
    pub extra_body: Option<Map<String, Value>>,
    /// Seed of prompts, lengths and times of arrival
    #[arg(long, default_value_t = 0, help_heading = "Requests")]
    pub seed: u64,

    /// Requests that are sent a second; inf sends all at once
    #[arg(long, value_name = "RATE", default_value_t = f64::INFINITY, value_parser = positive,
          help_heading = "Load")]
    pub request_rate: f64,
    /// How evenly they come: 1 is a Poisson process, less comes in bursts, more is even
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0, value_parser = positive,
          help_heading = "Load")]
    pub burstiness: f64,
    /// Requests under way at once; others wait their turn [default: no bound]
    #[arg(long, value_name = "N", help_heading = "Load",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// Draw no progress bar
    #[arg(long, help_heading = "Load")]
    pub disable_tqdm: bool,

    /// Times to sum up, of ttft, tpot, itl and e2el
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "ttft,tpot,itl",
        help_heading = "Result"
    )]
    pub percentile_metrics: Vec<Metric>,
    /// Percentiles of these
    #[arg(long, value_name = "PERCENTS", value_delimiter = ',', default_value = "99",
          value_parser = percent, help_heading = "Result")]
    pub metric_percentiles: Vec<f64>,
    /// Count the requests that meet goals in milliseconds, as ttft:200 tpot:50
    #[arg(long, value_name = "NAME:MS", num_args = 1.., help_heading = "Result")]
    pub goodput: Vec<Goal>,
    /// Write the result as JSON
    #[arg(long, help_heading = "Result")]
    pub save_result: bool,
    /// Also each request's times, text and error
    #[arg(long, requires = "save_result", help_heading = "Result")]
    pub save_detailed: bool,
    /// Folder of the result
    #[arg(long, value_name = "DIR", help_heading = "Result")]
    pub result_dir: Option<PathBuf>,
    /// Name of the result's file [default: made of rate, model and time]
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub result_filename: Option<PathBuf>,
    /// Name of this run in the result [default: the backend]
    #[arg(long, help_heading = "Result")]
    pub label: Option<String>,
    /// More fields of the result, as key=value; may be repeated
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = pair,
          help_heading = "Result")]
    pub metadata: Vec<(String, String)>,
}

fn share(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..1.0).contains(value));
    value.ok_or_else(|| "write a number from 0 to below 1".into())
}

/// Not less, so that the time between two requests is one that can be waited for.
fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| *value >= 0.001);
    value.ok_or_else(|| "write a number of at least 0.001, or inf".into())
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}

fn percent(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=100.0).contains(value));
    value.ok_or_else(|| "write numbers from 0 to 100, as 50,90,99".into())
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("write one JSON object: {error}"))
}

/// Puts the load on, prints what came of it, and writes it if it is to be kept. Requests that
/// failed make the exit status 1.
///
/// # Errors
/// When the server cannot be reached, or the result cannot be written.
pub fn run(args: BenchServeArgs) -> anyhow::Result<ExitCode> {
    ensure!(args.burstiness.is_finite(), "--burstiness inf: write a number; 1000 is even enough");
    let prompt = u64::from(args.random_prefix_len) + u64::from(args.random_input_len);
    let tokens = prompt * (u64::from(args.num_prompts) + u64::from(args.num_warmups));
    ensure!(
        args.dataset_name != Dataset::Random || tokens <= PROMPT_TOKENS_MAX,
        "--num-prompts and --num-warmups of --random-prefix-len and --random-input-len are \
         {tokens} tokens, at most {PROMPT_TOKENS_MAX} are made: lower one of them"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(bench(&args))
}

async fn bench(args: &BenchServeArgs) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    let base = match &args.base_url {
        Some(url) => url.clone(),
        None if args.host.contains(':') => format!("http://[{}]:{}", args.host, args.port),
        None => format!("http://{}:{}", args.host, args.port),
    };
    let client = Client::new(&base, &args.header, args.api_key.as_deref())?;
    let mut random = Random::new(args.seed);
    let (load, asks) = tokio::select! {
        prepared = prepare(args, client, &base, &mut random) => prepared?,
        () = shutdown.requested() => return Ok(ExitCode::FAILURE),
    };
    let started = Instant::now();
    let (outcomes, stopped) = load.put_on(&asks, started, &mut random, &shutdown).await?;
    let wanted = Wanted {
        metrics: args.percentile_metrics.clone(),
        percentiles: args.metric_percentiles.clone(),
        goals: args.goodput.clone(),
    };
    let report = Report { outcomes: &outcomes, duration: started.elapsed(), wanted: &wanted };
    if stopped {
        crate::progress::tell("stopped: the figures are of the requests that had ended");
    }
    write!(std::io::stdout().lock(), "{}", report.text())?;
    if args.save_result {
        save(args, &load.model, &report)?;
    }
    let good = report.failed() == 0 && !stopped;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Waits for the server, makes the prompts and sends those that warm it up; the others are left.
async fn prepare<'a>(
    args: &'a BenchServeArgs,
    client: Client,
    base: &str,
    random: &mut Random,
) -> anyhow::Result<(Load<'a>, Vec<Ask>)> {
    let named = ready(&client, args.ready_check_timeout_sec).await;
    let model = match (args.model.clone(), named) {
        (Some(model), _) => model,
        (None, named) => named.with_context(|| format!("no server answers at {base}"))?,
    };
    let count = args.num_prompts + args.num_warmups;
    let mut asks = match (args.dataset_name, &args.dataset_path) {
        (Dataset::Custom, Some(path)) => prompts::custom(path, count, args.random_output_len)?,
        (Dataset::Custom, None) => bail!("--dataset-name custom needs --dataset-path"),
        (Dataset::Random, _) => {
            let lengths = Lengths {
                prefix: args.random_prefix_len,
                input: args.random_input_len,
                output: args.random_output_len,
                range_ratio: args.random_range_ratio,
            };
            let as_text = args.backend.kind() == Kind::Chat;
            prompts::random(&client, count, lengths, as_text, random).await?
        }
    };
    let load = Load { args, client, model };
    for ask in asks.drain(..args.num_warmups as usize) {
        load.send(&ask, Duration::ZERO).await;
    }
    Ok((load, asks))
}

/// Waits until the server names its models. One try is given [`TRY_PATIENCE`] at least.
async fn ready(client: &Client, patience_s: u64) -> anyhow::Result<String> {
    let until = Instant::now() + Duration::from_secs(patience_s);
    loop {
        let last = until.max(Instant::now() + TRY_PATIENCE);
        match tokio::time::timeout_at(last.into(), client.first_model()).await {
            Err(_) => bail!("it takes connections, but does not answer"),
            Ok(Err(_)) if Instant::now() < until => tokio::time::sleep(TRY_EVERY).await,
            Ok(named) => return named,
        }
    }
}

#[derive(Clone)]
struct Load<'a> {
    args: &'a BenchServeArgs,
    client: Client,
    model: String,
}

impl Load<'_> {
    fn body(&self, ask: &Ask) -> Value {
        let args = self.args;
        let mut body = json!({
            "model": args.served_model_name.as_ref().unwrap_or(&self.model),
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let fields = body.as_object_mut().expect("it was made as an object");
        let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        match args.backend.kind() {
            Kind::Completions => {
                put("prompt", ask.prompt.to_json());
                put("max_tokens", json!(ask.output_len));
                args.logprobs.map(|count| put("logprobs", json!(count)));
            }
            Kind::Chat => {
                let content = ask.prompt.to_json();
                put("messages", json!([{"role": "user", "content": content}]));
                put("max_completion_tokens", json!(ask.output_len));
                if let Some(count) = args.logprobs {
                    put("logprobs", json!(true));
                    put("top_logprobs", json!(count));
                }
            }
        }
        if args.ignore_eos {
            put("ignore_eos", json!(true));
        }
        args.temperature.map(|temperature| put("temperature", json!(temperature)));
        fields.extend(args.extra_body.clone().unwrap_or_default());
        body
    }

    fn send(&self, ask: &Ask, sent: Duration) -> impl Future<Output = Outcome> + Send + 'static {
        let kind = self.args.backend.kind();
        let path = self.args.endpoint.clone();
        let path = path.unwrap_or_else(|| self.args.backend.endpoint().to_owned());
        let (client, body, input_len) =
            (self.client.clone(), self.body(ask).to_string().into(), ask.input_len);
        async move { client.stream(kind, &path, body, sent, input_len).await }
    }

    /// Sends all, each at its time, and waits for the ends; or until a signal comes.
    async fn put_on(
        &self,
        asks: &[Ask],
        started: Instant,
        random: &mut Random,
        shutdown: &pawl_shared::shutdown::Shutdown,
    ) -> anyhow::Result<(Vec<Outcome>, bool)> {
        let bar = self.bar(asks.len() as u64)?;
        let bound = self.args.max_concurrency.map_or(Semaphore::MAX_PERMITS, |n| n as usize);
        let turns = Arc::new(Semaphore::new(bound));
        let mut under_way = JoinSet::new();
        let mut outcomes = Vec::new();
        let mut note = |outcome: Result<Outcome, tokio::task::JoinError>| {
            bar.inc(1);
            outcomes.push(outcome.expect("a request's task neither panics nor is aborted"));
        };
        let mut next = asks.iter();
        let mut due = Duration::ZERO;
        let stopped = loop {
            let all_sent = next.len() == 0;
            if all_sent && under_way.is_empty() {
                break false;
            }
            let turn = async {
                tokio::time::sleep_until((started + due).into()).await;
                Arc::clone(&turns).acquire_owned().await
            };
            tokio::select! {
                biased;
                () = shutdown.requested() => break true,
                Some(outcome) = under_way.join_next() => note(outcome),
                turn = turn, if !all_sent => {
                    let turn = turn.expect("the turns are never closed");
                    let Some(ask) = next.next() else { continue };
                    let request = self.send(ask, started.elapsed());
                    under_way.spawn(async move {
                        let outcome = request.await;
                        drop(turn);
                        outcome
                    });
                    let interval = random.interval(self.args.request_rate, self.args.burstiness);
                    due += Duration::from_secs_f64(interval);
                }
            }
        };
        bar.finish_and_clear();
        outcomes.sort_by_key(|outcome| outcome.sent);
        Ok((outcomes, stopped))
    }

    fn bar(&self, count: u64) -> anyhow::Result<ProgressBar> {
        if self.args.disable_tqdm {
            return Ok(ProgressBar::hidden());
        }
        let style = "{pos} of {len} answered [{wide_bar}] {elapsed}, {eta} to go";
        Ok(ProgressBar::new(count).with_style(ProgressStyle::with_template(style)?))
    }
}

/// Writes the result where it is wanted.
fn save(args: &BenchServeArgs, model: &str, report: &Report<'_>) -> anyhow::Result<()> {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let date = strftime("%Y%m%d-%H%M%S", now.as_secs_f64()).unwrap_or_default();
    let rate = match args.request_rate {
        rate if rate.is_infinite() => json!("inf"),
        rate => json!(rate),
    };
    let label = args.label.clone().unwrap_or_else(|| args.backend.name());
    let mut result = Map::new();
    let mut put = |name: &str, value: Value| result.insert(name.to_owned(), value);
    put("date", json!(date));
    put("endpoint_type", json!(args.backend.name()));
    put("backend", json!(args.backend.name()));
    put("label", json!(label));
    put("model_id", json!(model));
    put("tokenizer_id", json!(args.tokenizer.as_deref().unwrap_or(model)));
    put("num_prompts", json!(args.num_prompts));
    for (key, value) in &args.metadata {
        put(key, json!(value));
    }
    put("request_rate", rate.clone());
    put("burstiness", json!(args.burstiness));
    put("max_concurrency", json!(args.max_concurrency));
    result.extend(report.json(args.save_detailed));

    let name = args.result_filename.clone().unwrap_or_else(|| {
        let concurrency =
            args.max_concurrency.map_or_else(String::new, |n| format!("-concurrency{n}"));
        let model = model.rsplit('/').next().unwrap_or(model);
        let rate = rate.as_str().map_or_else(|| rate.to_string(), ToOwned::to_owned);
        format!("{label}-{rate}qps{concurrency}-{model}-{date}.json").into()
    });
    let path = match &args.result_dir {
        Some(folder) => {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("--result-dir {}", folder.display()))?;
            folder.join(name)
        }
        None => name,
    };
    std::fs::write(&path, format!("{}\n", Value::Object(result)))
        .with_context(|| format!("while writing the result to {}", path.display()))?;
    writeln!(std::io::stdout().lock(), "The result is in {}", path.display())?;
    Ok(())
}
