//! `pawl api-server`: flags to a [`pawl_api_server::FrontendConfig`], and its run.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use nix::unistd::getppid;
use pawl_api_server::{FrontendConfig, HttpLimits, RequestTimingMode};
use pawl_shared::lifeline::Lifeline;
use pawl_shared::transport::{Address, CoreAt, ListedPair};

use crate::cli::{ApiFlags, FrontendFlags, RequestTiming, SchedulingPolicy, SharedFlags};

#[derive(Clone, Debug, Args)]
pub struct ApiServerArgs {
    /// GGUF file or folder; only with --await-core, where the core may not tell
    #[arg(conflicts_with = "core")]
    pub model: Option<String>,
    /// The core to join: its --listen address
    #[arg(
        long,
        value_name = "ADDR",
        env = "PAWL_CORE",
        help_heading = "Sockets",
        conflicts_with = "await_core",
        required_unless_present_any = ["await_core", "listed_pair"]
    )]
    pub core: Option<Address>,
    /// Own a vLLM handshake socket at this address, and wait for a core to dial in
    #[arg(long, value_name = "ADDR", env = "PAWL_AWAIT_CORE", help_heading = "Sockets")]
    pub await_core: Option<Address>,
    /// The pair of addresses that a supervisor lists to cores
    #[arg(long, hide = true, num_args = 4, value_names = ["INDEX", "INPUT", "OUTPUT", "READY"],
          conflicts_with_all = ["core", "await_core"])]
    pub listed_pair: Vec<String>,
    /// Host that the core reaches this process at, when it is on another one
    #[arg(long, value_name = "HOST", env = "PAWL_ADVERTISE", help_heading = "Sockets")]
    pub advertise: Option<String>,
    /// Folder for this process's sockets [default: one of its own, for this run]
    #[arg(long, value_name = "DIR", env = "PAWL_SOCKET_DIR", help_heading = "Sockets")]
    pub socket_dir: Option<PathBuf>,
    /// Share --port and --grpc-port with other api-servers
    #[arg(long, help_heading = "Server")]
    pub reuse_port: bool,
    /// The core's --scheduling-policy: with fcfs a request's priority is refused
    #[arg(long, value_enum, default_value_t, env = "PAWL_SCHEDULING_POLICY", help_heading = "API")]
    pub scheduling_policy: SchedulingPolicy,
    #[command(flatten)]
    pub frontend: FrontendFlags,
    #[command(flatten)]
    pub shared: SharedFlags,
}

/// Runs a frontend to its end.
///
/// # Errors
/// When it cannot start; the text says why.
pub fn run(args: ApiServerArgs) -> anyhow::Result<ExitCode> {
    let supervisor = getppid();
    let mut config = config(&args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let shutdown = pawl_shared::shutdown::on_signal()?;
        if args.shared.supervised {
            config.lifeline = Some(Lifeline::on_stdin(shutdown.clone())?);
        }
        let listed = match &config.core {
            CoreAt::Listed(pair) => Some(pair.ready_file.clone()),
            CoreAt::Join(_) | CoreAt::AwaitCore(_) => None,
        };
        pawl_api_server::run(config, shutdown).await?;
        if let Some(folder) = listed.as_deref().and_then(Path::parent)
            && args.shared.supervised
            && getppid() != supervisor
        {
            remove_orphaned_folder(folder);
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// A supervisor that was killed could not remove the folder that it made for its children; with a
/// core elsewhere they are all of them api-servers, and the last one removes it.
fn remove_orphaned_folder(folder: &Path) {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::debug!("the folder {} is not removed: {error}", folder.display());
        }
        _ => {}
    }
}

/// The arguments by which an api-server is told its pair; [`listed_pair`] reads them.
pub fn listed_args(pair: &ListedPair) -> Vec<OsString> {
    let ListedPair { client_index, input, output, ready_file } = pair;
    let index = client_index.to_string();
    let texts = ["--listed-pair".into(), index, input.to_string(), output.to_string()];
    texts.into_iter().map(OsString::from).chain([ready_file.into()]).collect()
}

fn listed_pair(words: &[String]) -> anyhow::Result<Option<ListedPair>> {
    let [index, input, output, ready_file] = words else { return Ok(None) };
    Ok(Some(ListedPair {
        client_index: index.parse().context("--listed-pair: INDEX is no number")?,
        input: input.parse()?,
        output: output.parse()?,
        ready_file: ready_file.into(),
    }))
}

fn config(args: &ApiServerArgs) -> anyhow::Result<FrontendConfig> {
    let flags = &args.frontend;
    let core = match (&args.core, &args.await_core, listed_pair(&args.listed_pair)?) {
        (Some(core), ..) => CoreAt::Join(core.clone()),
        (None, Some(address), _) => CoreAt::AwaitCore(address.clone()),
        (None, None, Some(pair)) => CoreAt::Listed(pair),
        (None, None, None) => {
            anyhow::bail!("name the core with --core, or await one with --await-core")
        }
    };
    let model = match &core {
        CoreAt::Join(_) => None,
        _ => Some(crate::model::resolve_model(args.model.as_deref())?),
    };
    let admin_port = match flags.admin_port {
        None if flags.port == 0 => 0,
        None => flags.port.checked_add(1000).context("--admin-port: port + 1000 passes 65535")?,
        Some(port) => port,
    };
    let settings = api_settings(&flags.api, &args.shared, args.scheduling_policy)?;
    Ok(FrontendConfig {
        host: flags.host.clone(),
        port: flags.port,
        reuse_port: args.reuse_port,
        admin_host: flags.admin_host.clone(),
        admin_port: Some(admin_port),
        grpc_port: flags.grpc_port,
        port_file: flags.port_file.clone(),
        core,
        model,
        socket_dir: args.socket_dir.clone(),
        advertise: args.advertise.clone(),
        heartbeat: flags.heartbeat()?,
        api_keys: flags.api_key.clone(),
        allowed_origins: flags.allowed_origins.clone(),
        limits: HttpLimits {
            connections_max: usize::try_from(flags.max_connections)?,
            ..settings.limits.clone()
        },
        ..settings
    })
}

/// A frontend's settings as far as they say how requests are answered; the rest is at its default.
///
/// # Errors
/// When a value cannot be read; the text names the flag.
pub fn api_settings(
    flags: &ApiFlags,
    shared: &SharedFlags,
    policy: SchedulingPolicy,
) -> anyhow::Result<FrontendConfig> {
    let custom_histogram_buckets = match &flags.custom_histogram_buckets {
        Some(json) => serde_json::from_str(json).context(
            "--custom-histogram-buckets: write JSON such as {\"time_to_first_token\": [0.1, 1]}",
        )?,
        None => BTreeMap::new(),
    };
    if let Some(path) = &flags.chat_template {
        let file = std::fs::File::open(path);
        file.with_context(|| format!("--chat-template {}", path.display()))?;
    }
    Ok(FrontendConfig {
        served_model_names: shared.served_model_name.clone(),
        chat_template: flags.chat_template.clone(),
        trust_request_chat_template: flags.trust_request_chat_template,
        response_role: flags.response_role.clone(),
        max_logprobs: flags.max_logprobs,
        max_n: flags.max_n,
        max_num_queued_reqs: Some(shared.max_num_queued_reqs),
        priority_scheduling: policy == SchedulingPolicy::Priority,
        enable_prompt_tokens_details: flags.enable_prompt_tokens_details,
        enable_request_id_headers: flags.enable_request_id_headers,
        request_timing: match flags.request_timing {
            None => RequestTimingMode::Off,
            Some(RequestTiming::Log) => RequestTimingMode::Log,
            Some(RequestTiming::Header) => RequestTimingMode::Header,
        },
        disable_log_stats: flags.disable_log_stats,
        custom_histogram_buckets,
        shutdown_timeout: shared.shutdown_timeout(),
        limits: HttpLimits {
            body_bytes_max: usize::try_from(flags.max_body_bytes.0)?,
            ..HttpLimits::default()
        },
        ..FrontendConfig::default()
    })
}
