//! `pawl serve`: the supervisor. It starts one engine-core and its api-servers as children of this
//! same binary, passes signals on in the right order, restarts what dies, and leaves nothing
//! behind.
//!
//! It serves no request and sees no frame. Children get their settings in a file each (the flags
//! as resolved here) and hold an end of a line: when the supervisor dies, whatever the cause, it
//! ends and they stop. On it they say that they live; one that hangs is killed and started again.
//!
//! With `--await-core` the core is none of its children but dials in: the supervisor owns vLLM's
//! handshake socket, where it lists a pair of addresses for each api-server. The pairs are told
//! once, so they belong to the api-servers' places: whoever is started in the place of another
//! binds them again.

mod child;
mod fleet;
mod restart;
mod supervisor;

use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use pawl_shared::lifeline::Lifeline;
use pawl_shared::shutdown::Shutdown;
use pawl_shared::transport::{Address, HandshakeDesk, ListedPair, ListedPairs, SocketDir};

use crate::cli::{CoreFlags, FrontendFlags, LogFlags, RunnerKind, SchedulingPolicy, SharedFlags};
use child::ChildSpec;
pub use fleet::Role;
use restart::RestartPolicy;
pub use supervisor::Supervisor;

/// How long the core may take to end once every frontend is gone, and a frontend beyond its drain
/// time, before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// How long the signal to stop may take to reach us after it reached a child.
const SIGNAL_GRACE: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// GGUF file or folder [default: SmolLM2-135M-Instruct, fetched once]
    pub model: Option<String>,
    /// Number of api-servers; they share --port
    #[arg(long, value_name = "N", default_value_t = 1, env = "PAWL_API_SERVER_COUNT",
          help_heading = "Server", value_parser = clap::value_parser!(u16).range(1..=32))]
    pub api_server_count: u16,
    /// Folder for the sockets between the processes [default: one of its own, for this run]
    #[arg(long, value_name = "DIR", env = "PAWL_SOCKET_DIR", help_heading = "Server")]
    pub socket_dir: Option<PathBuf>,
    /// Start no core: own a vLLM handshake socket at this address, and wait for one to dial in
    #[arg(long, value_name = "ADDR", env = "PAWL_AWAIT_CORE", help_heading = "Server")]
    pub await_core: Option<Address>,
    /// Host that the core reaches this process at, when it is on another one
    #[arg(
        long,
        value_name = "HOST",
        env = "PAWL_ADVERTISE",
        help_heading = "Server",
        requires = "await_core"
    )]
    pub advertise: Option<String>,
    #[command(flatten)]
    pub core: CoreFlags,
    #[command(flatten)]
    pub frontend: FrontendFlags,
    #[command(flatten)]
    pub shared: SharedFlags,
}

/// Runs the supervisor to its end.
///
/// # Errors
/// When a child cannot be started, or dies too often.
pub fn run(mut args: ServeArgs, log: &LogFlags) -> anyhow::Result<ExitCode> {
    args.core.fold_negations();
    // What can be seen to be wrong is not left to the children, who would say it one by one.
    crate::api_server::api_settings(&args.frontend.api, &args.shared, args.core.scheduling_policy)?;
    let model = match args.core.runner {
        // A mock needs none, but speaks with the tokenizer of one that is named.
        RunnerKind::Mock if args.await_core.is_none() && args.model.is_none() => None,
        _ => Some(crate::model::resolve_model(args.model.as_deref())?),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(supervise(&args, model, log))
}

async fn supervise(
    args: &ServeArgs,
    model: Option<PathBuf>,
    log: &LogFlags,
) -> anyhow::Result<ExitCode> {
    let shutdown = pawl_shared::shutdown::on_signal()?;
    if args.shared.supervised {
        Lifeline::on_stdin(shutdown.clone())?;
    }
    let dir = match &args.socket_dir {
        Some(base) => SocketDir::create(base),
        None => SocketDir::create_default(),
    }?;
    let reserve = |flag, port| reserve_port(flag, &args.frontend.host, port, args.api_server_count);
    let http = reserve("--port", args.frontend.port)?;
    let grpc = args.frontend.grpc_port.map(|port| reserve("--grpc-port", port)).transpose()?;
    let ports = (http.address.port(), grpc.as_ref().map(|grpc| grpc.address.port()));
    let heartbeat = args.frontend.heartbeat()?;
    // The pairs hold their ports until the end.
    let (mut children, _pairs) = match &args.await_core {
        None => {
            let (address, core) = core_spec(&args.core, &args.shared, model, log, &dir)?;
            let at = |_| vec!["--core".into(), address.to_string().into()];
            let specs = [vec![core], frontend_specs(args, log, &dir, ports, at)?].concat();
            (Supervisor::start(specs, heartbeat)?, None)
        }
        Some(address) => {
            let (count, advertise) = (args.api_server_count.into(), args.advertise.as_deref());
            let pairs = ListedPairs::choose(count, address, &dir, advertise)?;
            let listed: Vec<&ListedPair> = pairs.iter().collect();
            let at = |index: u16| {
                let pair = crate::api_server::listed_args(listed[usize::from(index)]);
                model.iter().map(OsString::from).chain(pair).collect()
            };
            let specs = frontend_specs(args, log, &dir, ports, at)?;
            let desk = HandshakeDesk::bind(address, &pairs).await?;
            tracing::info!("waiting for a core to dial {}", desk.address());
            let mut children = Supervisor::start(specs, heartbeat)?;
            children.let_cores_in(desk);
            (children, Some(pairs))
        }
    };
    let code = keep_running(&mut children, &shutdown).await?;
    // Frontends first, so that they can finish what they admitted; then the core.
    let drain = args.shared.shutdown_timeout() + STOP_GRACE;
    children.stop(Role::Frontend, drain, &shutdown).await;
    children.stop(Role::Core, STOP_GRACE, &shutdown).await;
    Ok(code)
}

/// Starts again what dies, until there is a reason to stop everything.
async fn keep_running(children: &mut Supervisor, shutdown: &Shutdown) -> anyhow::Result<ExitCode> {
    let mut policies = vec![RestartPolicy::default(); children.count()];
    loop {
        let (index, status) = tokio::select! {
            () = shutdown.requested() => return Ok(ExitCode::SUCCESS),
            died = children.next_exit() => died,
        };
        // A child that ends well was asked to. Whoever stops a group of processes asks all of them,
        // and we may be the last to hear of it.
        if status.success()
            && tokio::time::timeout(SIGNAL_GRACE, shutdown.requested()).await.is_ok()
        {
            return Ok(ExitCode::SUCCESS);
        }
        let name = children.name(index);
        if children.failed_to_start(index, status) {
            // It has said why.
            tracing::warn!("{name} could not start ({status}): stopping");
            return Ok(ExitCode::FAILURE);
        }
        if let Err(too_often) = policies[index].record_death(std::time::Instant::now()) {
            tracing::error!("{name} ended ({status}); {too_often}");
            return Ok(ExitCode::FAILURE);
        }
        tracing::warn!("{name} ended ({status}): starting it again");
        children.restart(index)?;
    }
}

/// Each api-server's spec. `core_at` says by which arguments it finds its core.
fn frontend_specs(
    args: &ServeArgs,
    log: &LogFlags,
    dir: &SocketDir,
    (port, grpc_port): (u16, Option<u16>),
    core_at: impl Fn(u16) -> Vec<OsString>,
) -> anyhow::Result<Vec<ChildSpec>> {
    let mut specs = Vec::new();
    for index in 0..args.api_server_count {
        let mut frontend = args.frontend.clone();
        frontend.port = port;
        frontend.grpc_port = grpc_port;
        frontend.admin_port = match args.frontend.admin_port {
            Some(0) => Some(0),
            Some(first) => Some(first.checked_add(index).context("--admin-port + i passes 65535")?),
            None => Some(0).filter(|_| args.frontend.port == 0).or(port.checked_add(1000 + index)),
        };
        if index > 0 {
            frontend.port_file =
                frontend.port_file.map(|p| PathBuf::from(format!("{}.{index}", p.display())));
        }
        let file = dir.path().join(format!("api-{index}.toml"));
        crate::cli::write_config(&file, &(&frontend, &args.shared).merged())?;
        let name = format!("api-server {index}");
        let mut api = ChildSpec::new(&name, Role::Frontend, &file, log);
        api.args.extend(core_at(index));
        if args.core.scheduling_policy == SchedulingPolicy::Priority {
            api.args.extend(["--scheduling-policy".into(), "priority".into()]);
        }
        if args.api_server_count > 1 {
            api.args.push("--reuse-port".into());
        }
        specs.push(api);
    }
    Ok(specs)
}

/// A core that listens in `dir`, with its settings in a file there, and its address.
///
/// # Errors
/// When the file cannot be written.
pub fn core_spec(
    core: &CoreFlags,
    shared: &SharedFlags,
    model: Option<PathBuf>,
    log: &LogFlags,
    dir: &SocketDir,
) -> anyhow::Result<(Address, ChildSpec)> {
    let address = dir.address("core")?;
    let file = dir.path().join("core.toml");
    crate::cli::write_config(&file, &(core, shared).merged())?;
    let mut spec = ChildSpec::new("engine-core", Role::Core, &file, log);
    spec.args.extend(["--listen".into(), address.to_string().into()]);
    spec.args.extend(model.map(Into::into));
    Ok((address, spec))
}

/// Two sets of flags as one table of a file.
trait Merged {
    fn merged(&self) -> toml::Table;
}

impl<A: serde::Serialize, B: serde::Serialize> Merged for (&A, &B) {
    fn merged(&self) -> toml::Table {
        let table = |flags: &dyn Fn() -> Result<toml::Table, toml::ser::Error>| {
            flags().expect("flags are names with values")
        };
        let mut all = table(&|| toml::Table::try_from(self.0));
        all.extend(table(&|| toml::Table::try_from(self.1)));
        all
    }
}

/// A port that is ours. With several api-servers the supervisor stays bound (not listening, so it
/// gets no connection): a port asked for as 0 has to be the same one for all.
struct ReservedPort {
    address: SocketAddr,
    _socket: Option<std::net::TcpListener>,
}

fn reserve_port(
    flag: &str,
    host: &str,
    port: u16,
    api_servers: u16,
) -> anyhow::Result<ReservedPort> {
    let address = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("--host {host}"))?
        .next()
        .with_context(|| format!("--host {host} names no address"))?;
    // Without SO_REUSEPORT this fails if anybody serves there, another Pawl included, whose
    // clients would otherwise be shared out between the two.
    let probe = std::net::TcpListener::bind(address)
        .with_context(|| format!("port {port} of {host} cannot be had; choose another {flag}"))?;
    let bound = probe.local_addr()?;
    if api_servers == 1 {
        // The one api-server binds it for itself; with port 0 it takes any.
        return Ok(ReservedPort { address, _socket: None });
    }
    drop(probe);
    let socket = pawl_api_server::bind_shared(bound)?;
    Ok(ReservedPort { address: bound, _socket: Some(socket) })
}
