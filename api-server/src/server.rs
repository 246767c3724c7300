//! The api-server's life: listeners up at once, requests served while a core is there, and on a
//! stop a drain: new work is refused, what is under way may finish, and then everything closes.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::lifeline::{self, Health, Lifeline};
use pawl_shared::model_card::{GgufFile, ModelCard};
use pawl_shared::shutdown::Shutdown;
use pawl_shared::transport::{CoreAt, FrontendEndpointConfig, SocketDir};
use tokio::sync::watch;

use crate::admin;
use crate::chat_template::{ChatTemplate, TemplateContext};
use crate::config::{FrontendConfig, RequestTimingMode};
use crate::engine_client::{ClientConfig, EngineClient, EngineStatus};
use crate::grpc;
use crate::http;
use crate::http::listener::{self, Stop};
use crate::metrics::{Metrics, MetricsConfig};
use crate::serving::App;

/// How long answers may take to end once they were aborted.
const ABORT_GRACE: Duration = Duration::from_secs(2);
/// How long taking leave of the core may take.
pub(crate) const LEAVE_GRACE: Duration = Duration::from_secs(1);
/// How long connections may take to send their last bytes.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// How long the core may take to let in a frontend that shares its port, before it listens there.
const JOIN_FIRST: Duration = Duration::from_secs(3);
/// How long the last report to the supervisor may take.
const REPORT_GRACE: Duration = Duration::from_millis(500);

/// Where a server listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// For clients.
    pub http: SocketAddr,
    /// For operators.
    pub admin: Option<SocketAddr>,
    /// For clients that speak gRPC.
    pub grpc: Option<SocketAddr>,
}

/// Runs one api-server until `shutdown`: looks for its core, serves, drains, leaves the core.
///
/// # Errors
/// When a port, a socket or a file cannot be had, or a template not be parsed.
pub async fn run(config: FrontendConfig, shutdown: Shutdown) -> anyhow::Result<()> {
    let lifeline = config.lifeline.clone();
    let together = config.reuse_port;
    let (app, client) = connect(config).await?;
    if together {
        joined(&client).await;
    }
    let served = serve(app, shutdown, |_| pawl_shared::ready::tell()).await;
    client.shutdown(LEAVE_GRACE).await;
    if let Some(lifeline) = &lifeline {
        lifeline.report();
        lifeline.flush(REPORT_GRACE);
    }
    served
}

/// Waits a moment for the core. One that shares its port with others would be given its part of the
/// new clients as soon as it listens, and refuse them while the others serve.
async fn joined(client: &EngineClient) {
    let mut status = client.watch();
    let up = status.wait_for(|status| *status == EngineStatus::Up);
    // The core may be loading its model, or be gone: then clients are told so.
    let _ = tokio::time::timeout(JOIN_FIRST, up).await;
}

/// Begins to look for the core; what comes of it is an app that can be served.
///
/// # Errors
/// When a socket or a file cannot be had, or a template not be parsed.
pub async fn connect(config: FrontendConfig) -> anyhow::Result<(Arc<App>, EngineClient)> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let template = config.chat_template.as_deref().map(read_template).transpose()?;
    let metrics = Arc::new(Metrics::new(MetricsConfig {
        clock: Arc::clone(&clock),
        custom_buckets: config.custom_histogram_buckets.clone(),
        recording: !config.disable_log_stats,
        ..MetricsConfig::default()
    })?);
    let client = EngineClient::start(
        endpoint(&config, &clock)?,
        ClientConfig {
            clock: Arc::clone(&clock),
            local_card: config.model.as_deref().map(read_card).transpose()?,
            served_model_names: config.served_model_names.clone(),
            inherits_outputs: matches!(config.core, CoreAt::Listed(_)),
            log_request_timing: config.request_timing == RequestTimingMode::Log,
            ..ClientConfig::new(Arc::clone(&metrics))
        },
    )
    .await
    .context("while setting up the sockets for the core")?;
    let engine = Arc::new(client.clone());
    let app = Arc::new(App::new(config, engine, metrics, clock, template));
    Ok((app, client))
}

fn endpoint(
    config: &FrontendConfig,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<FrontendEndpointConfig> {
    let socket_dir = config.socket_dir.as_deref().map(SocketDir::create).transpose()?;
    Ok(FrontendEndpointConfig {
        socket_dir: socket_dir.map(Arc::new),
        advertise: config.advertise.clone(),
        taps: true,
        heartbeat: config.heartbeat,
        clock: Arc::clone(clock),
        ..FrontendEndpointConfig::new(config.core.clone())
    })
}

/// A template of the user's own. It is parsed here only to say at once what is wrong with it.
fn read_template(path: &Path) -> anyhow::Result<String> {
    let source = std::fs::read_to_string(path)
        .with_context(|| format!("while reading the chat template {}", path.display()))?;
    let context = TemplateContext {
        bos_token: String::new(),
        eos_token: String::new(),
        clock: Arc::new(SystemClock),
    };
    ChatTemplate::parse(&source, context).with_context(|| format!("in {}", path.display()))?;
    Ok(source)
}

fn read_card(path: &Path) -> anyhow::Result<ModelCard> {
    let file = GgufFile::open(path).with_context(|| format!("while reading {}", path.display()))?;
    ModelCard::from_gguf(&file).with_context(|| format!("in {}", path.display()))
}

/// Listens, serves `app` until `shutdown`, drains, and closes. `bound` is told the addresses once
/// all ports are open.
///
/// # Errors
/// When a port cannot be bound, or the port file not be written.
pub async fn serve(
    app: Arc<App>,
    shutdown: Shutdown,
    bound: impl FnOnce(Bound),
) -> anyhow::Result<()> {
    let config = &app.config;
    let main = listener::bind(&config.host, config.port, config.reuse_port).await?;
    let admin = match config.admin_port {
        Some(port) => Some(listener::bind(&config.admin_host, port, false).await?),
        None => None,
    };
    let grpc = match config.grpc_port {
        Some(port) => Some(listener::bind(&config.host, port, config.reuse_port).await?),
        None => None,
    };
    let local = |listener: &Option<tokio::net::TcpListener>| {
        listener.as_ref().map(tokio::net::TcpListener::local_addr).transpose()
    };
    let addresses = Bound { http: main.local_addr()?, admin: local(&admin)?, grpc: local(&grpc)? };
    let health = grpc::Health::new().await;
    let grpc = match grpc {
        Some(listener) => Some((listener, grpc::router(Arc::clone(&app), &health)?)),
        None => None,
    };
    if let Some(path) = &config.port_file {
        write_ports(path, addresses)
            .with_context(|| format!("while writing the port file {}", path.display()))?;
    }
    match addresses.admin {
        Some(admin) => tracing::info!("listening on http://{} (admin: {admin})", addresses.http),
        None => tracing::info!("listening on http://{}", addresses.http),
    }
    if let Some(grpc) = addresses.grpc {
        tracing::info!("listening for gRPC on {grpc}");
    }
    bound(addresses);
    let reports = async {
        if let Some(lifeline) = config.lifeline.clone() {
            let metrics = Arc::clone(&app.metrics);
            lifeline.report_with(move || metrics.snapshot().encode().into());
            tell_health(&lifeline, app.engine.awaits_core()).await;
        }
        std::future::pending().await
    };

    let stop = Stop::default();
    let metrics = Some(Arc::clone(&app.metrics));
    let router = http::router(Arc::clone(&app));
    let serve_main = listener::serve(main, router, &config.limits, metrics, stop.clone());
    let admin_stop = Stop::default();
    let serve_admin = async {
        if let Some(admin) = admin {
            let router = admin::router(Arc::clone(&app));
            listener::serve(admin, router, &config.limits, None, admin_stop.clone()).await;
        }
    };
    let serve_grpc = async {
        let Some((listener, router)) = grpc else { return };
        tokio::select! {
            () = grpc::serve(listener, router, &config.limits, stop.clone()) => {}
            () = async {
                health.follow(Arc::clone(&app), shutdown.clone()).await;
                std::future::pending().await
            } => {}
        }
    };
    let life = async {
        shutdown.requested().await;
        drain(&app, &shutdown).await;
        stop.accepting.cancel();
        admin_stop.accepting.cancel();
        tokio::time::sleep(CLOSE_GRACE).await;
        stop.all.cancel();
        admin_stop.all.cancel();
    };
    tokio::select! {
        // The listeners end by themselves once every connection is closed, mostly before `life`.
        _ = async { tokio::join!(serve_main, serve_admin, serve_grpc) } => {}
        () = async { life.await; std::future::pending().await } => {}
        () = reports => {}
    }
    Ok(())
}

/// Tells the supervisor that this process serves, and what its metrics stand at.
async fn tell_health(lifeline: &Lifeline, mut awaits: watch::Receiver<bool>) {
    for progress in 0.. {
        let awaits_core = *awaits.borrow_and_update();
        lifeline.health(Health { ready: true, awaits_core, progress });
        lifeline.report();
        let changed = async {
            if awaits.changed().await.is_err() {
                // Nobody will ever say otherwise.
                std::future::pending::<()>().await;
            }
        };
        // Whether a core may come is told at once.
        let _ = tokio::time::timeout(lifeline::REPORT_EVERY, changed).await;
    }
}

/// Refuses new work and waits for what is under way, at most as long as configured or until the
/// shutdown is hurried; then aborts it. Connections are still accepted meanwhile, so that newcomers
/// are told what goes on.
async fn drain(app: &App, shutdown: &Shutdown) {
    let timeout = app.config.shutdown_timeout;
    app.begin_drain();
    let open = app.load();
    tracing::info!("stopping: {open} answers under way have {} s", timeout.as_secs_f64());
    tokio::select! {
        () = app.open.none() => return,
        () = tokio::time::sleep(timeout) => {}
        () = shutdown.hurried() => {}
    }
    let open = app.load();
    tracing::warn!("stopping: {open} answers are aborted");
    app.engine.abort_all("the server is shutting down");
    if tokio::time::timeout(ABORT_GRACE, app.open.none()).await.is_err() {
        tracing::warn!("stopping: {} answers did not end and are cut off", app.open.count());
    }
}

/// Writes the ports whole or not at all: a reader that sees the file can use it.
fn write_ports(path: &Path, bound: Bound) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let draft = folder.unwrap_or(Path::new(".")).join(format!(".{name}.{}", std::process::id()));
    let mut file = std::fs::File::create(&draft)?;
    let admin = bound.admin.map(|admin| admin.port());
    let grpc = bound.grpc.map(|grpc| grpc.port());
    let ports = serde_json::json!({
        "port": bound.http.port(), "admin_port": admin, "grpc_port": grpc,
    });
    writeln!(file, "{ports}")?;
    drop(file);
    std::fs::rename(&draft, path)
}
