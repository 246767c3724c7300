//! A core's life: its threads, and what becomes of it when one of them ends.
//!
//! Three threads: io (sockets), engine (decides), runner (computes). They share nothing but bounded
//! channels and the progress counter. Whichever fails ends all three: a core is never half alive.

#[cfg(test)]
mod tests;
pub mod unthreaded;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use crossbeam_channel::Receiver;
use pawl_shared::model_card::{GgufFile, ModelCard};
use pawl_shared::protocol::{ReadyResponse, Value};
use pawl_shared::shutdown::Shutdown;
use pawl_shared::transport::{CoreEndpoint, CoreEndpointConfig};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::config::{CoreConfig, RunnerChoice};
use crate::engine::driver::{self, EngineChannels};
use crate::engine::{Engine, EngineConfig, Inbox};
use crate::io::{self, EngineEnd, IoChannels, IoContext};
use crate::kv_cache::CacheConfig;
use crate::runner::cpu::{CpuRunner, LoadProgress};
use crate::runner::mock::MockRunner;
#[cfg(feature = "vulkan")]
use crate::runner::vulkan::VulkanRunner;
use crate::runner::{self, Loaded, RunnerChannels, catch_panic};
use crate::step::{Progress, Runner, RunnerSpec};

/// Messages from clients that wait for the engine, which takes them also while a step runs. When
/// it is full the io thread stops reading, and the sockets push back on the clients.
const INBOX_MAX: usize = 1024;

/// Batches of frames that wait to be encoded. When it is full the engine waits.
const OUT_MAX: usize = 256;

/// The runner's step in flight may end within this time when the core stops; its thread is left
/// alone after that, to go with the process.
const RUNNER_GRACE: Duration = Duration::from_secs(1);

/// vLLM's version whose wire this core speaks, and its own.
const WIRE_VERSION: &str = concat!("0.33.0+pawl.", env!("CARGO_PKG_VERSION"));

/// Runs a core until `shutdown` is requested or something fails.
///
/// The endpoint listens at once; frontends that join are answered when the model is loaded. On
/// `shutdown`, admitted requests may go on for `config.shutdown_timeout` or until it is hurried,
/// then what is left is ended with ABORT outputs.
///
/// # Errors
/// Sockets that cannot be bound, a model that does not load, settings that do not fit the model, a
/// step that failed, or a thread that panicked. Every client has been told before.
pub async fn run(config: CoreConfig, shutdown: Shutdown) -> anyhow::Result<()> {
    let depth_max = config.depth.unwrap_or(2).max(1) as usize;
    let progress = Arc::clone(&config.vitals.progress);
    let inbox_space = Arc::new(Notify::new());
    let (inbox_in, inbox) = crossbeam_channel::bounded(INBOX_MAX);
    let (out, out_from_engine) = mpsc::channel(OUT_MAX);
    let (ready, ready_from_engine) = oneshot::channel();
    let (end, end_from_engine) = oneshot::channel();
    let (loaded_in, loaded) = crossbeam_channel::bounded(1);
    // Both hold the steps in flight, of which there are never more than the depth.
    let (plans, plans_to_run) = crossbeam_channel::bounded(depth_max);
    let (results_in, results) = crossbeam_channel::bounded(depth_max);
    let (spent, spent_results) = crossbeam_channel::bounded(depth_max);

    let (bound, is_bound) = oneshot::channel();
    let io_channels = IoChannels {
        inbox: inbox_in,
        inbox_space: Arc::clone(&inbox_space),
        ready: ready_from_engine,
        out: out_from_engine,
        end: end_from_engine,
    };
    let io_thread = {
        let (config, progress, shutdown) =
            (config.clone(), Arc::clone(&progress), shutdown.clone());
        spawn("io", move || io_thread(&config, io_channels, progress, shutdown, bound))?
    };
    if is_bound.await.is_err() {
        return join(io_thread).await.and(Err(anyhow::anyhow!("the io thread ended early")));
    }

    let runner_channels = RunnerChannels {
        loaded: loaded_in,
        plans: plans_to_run,
        results: results_in,
        spent: spent_results,
    };
    let runner_thread = {
        let (config, progress) = (config.clone(), Arc::clone(&progress));
        spawn("runner", move || {
            runner::run(|progress| load(&config, progress), &runner_channels, &progress);
            Ok(())
        })?
    };
    let engine_channels = EngineChannels { inbox, inbox_space, plans, results, spent, out };
    let engine_thread = spawn("engine", move || {
        let outcome = catch_panic("running the engine", || {
            engine_thread(&config, &engine_channels, &loaded, ready, progress)
        });
        let how = if outcome.is_ok() { EngineEnd::Stopped } else { EngineEnd::Dead };
        // An error means that the io thread is gone, and its own outcome says why.
        let _ = end.send(how);
        outcome
    })?;

    let engine_outcome = join(engine_thread).await;
    let io_outcome = join(io_thread).await;
    if tokio::time::timeout(RUNNER_GRACE, join(runner_thread)).await.is_err() {
        tracing::warn!("a step is still running; its thread is left behind");
    }
    // Where the io thread has failed, the engine only knows that it is gone.
    io_outcome.and(engine_outcome)
}

type Outcome = oneshot::Receiver<anyhow::Result<()>>;

/// Starts a thread whose end, also by a panic, can be awaited.
fn spawn(
    name: &'static str,
    body: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<Outcome> {
    let (outcome, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name(format!("pawl-{name}"))
        .spawn(move || {
            // Nobody may be waiting any more; then nobody needs to know.
            let _ = outcome.send(catch_panic(name, body));
        })
        .with_context(|| format!("cannot start the {name} thread"))?;
    Ok(receiver)
}

async fn join(outcome: Outcome) -> anyhow::Result<()> {
    outcome.await.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread ended without an outcome")))
}

fn io_thread(
    config: &CoreConfig,
    channels: IoChannels,
    progress: Progress,
    shutdown: Shutdown,
    bound: oneshot::Sender<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the io thread's runtime")?;
    runtime.block_on(async {
        let endpoint = CoreEndpoint::bind(CoreEndpointConfig {
            listen: config.listen.clone(),
            handshake: config.handshake.clone(),
            engine_index: config.engine_index,
            heartbeat: config.heartbeat,
            clock: Arc::clone(&config.clock),
        })
        .await?;
        // The receiver waits for this and nothing else.
        let _ = bound.send(());
        let context = IoContext {
            engine_index: config.engine_index,
            clock: Arc::clone(&config.clock),
            progress,
        };
        io::serve(endpoint, channels, context, shutdown).await;
        Ok(())
    })
}

fn engine_thread(
    config: &CoreConfig,
    channels: &EngineChannels,
    loaded: &Receiver<anyhow::Result<(RunnerSpec, ModelCard)>>,
    ready: oneshot::Sender<ReadyResponse>,
    progress: Progress,
) -> anyhow::Result<()> {
    let Some((spec, card)) = wait_for_model(channels, loaded)? else {
        return Ok(()); // Told to stop while the model loaded.
    };
    let config_for_engine = engine_config(config, spec, card)?;
    let depth = config_for_engine.depth;
    let mut engine = Engine::new(config_for_engine, Arc::clone(&config.clock), progress)?;
    let response = ready_response(config, spec, engine.max_model_len(), depth);
    tracing::info!(
        max_model_len = response.max_model_len,
        kv_blocks = response.num_gpu_blocks,
        block_size = response.block_size,
        depth,
        "the engine is ready"
    );
    config.vitals.ready.send_replace(true);
    // An error means that the io thread is gone, which the loop finds out at once.
    let _ = ready.send(response);
    pawl_shared::ready::tell();
    driver::run(&mut engine, channels, config.clock.as_ref())
}

/// Waits for the runner thread; `None` if the core is told to stop before.
fn wait_for_model(
    channels: &EngineChannels,
    loaded: &Receiver<anyhow::Result<(RunnerSpec, ModelCard)>>,
) -> anyhow::Result<Option<(RunnerSpec, ModelCard)>> {
    loop {
        crossbeam_channel::select! {
            recv(loaded) -> outcome => {
                return outcome.context("the runner thread is gone")?.map(Some);
            }
            recv(channels.inbox) -> message => match message.context("the io thread is gone")? {
                Inbox::Shutdown | Inbox::Hurry => return Ok(None),
                // Nobody has been let in yet.
                other => tracing::debug!(?other, "ignored while the model loads"),
            }
        }
    }
}

fn load(config: &CoreConfig, progress: &Progress) -> anyhow::Result<Loaded<ModelCard>> {
    match &config.runner {
        RunnerChoice::Cpu(cpu) => {
            // The cache is sized by the longest sequence.
            let mut cpu = cpu.clone();
            cpu.max_model_len = config.max_model_len.or(cpu.max_model_len);
            load_model(config, |file, loading| {
                Ok(Box::new(CpuRunner::load(file, &cpu, progress, loading)?))
            })
        }
        #[cfg(feature = "vulkan")]
        RunnerChoice::Vulkan(vulkan) => {
            let mut vulkan = vulkan.clone();
            vulkan.max_model_len = config.max_model_len.or(vulkan.max_model_len);
            load_model(config, |file, loading| {
                Ok(Box::new(VulkanRunner::load(file, &vulkan, progress, loading)?))
            })
        }
        RunnerChoice::Mock(mock) => {
            let card = match &config.model {
                None => ModelCard::mock(),
                Some(path) => ModelCard::from_gguf(&GgufFile::open(path)?)
                    .with_context(|| format!("cannot use {}", path.display()))?,
            };
            let mock = mock.clone().with_vocabulary(card.vocab_size);
            Ok(Loaded { runner: Box::new(MockRunner::new(mock)), card })
        }
    }
}

/// Opens the model's file, and loads a runner from it.
fn load_model(
    config: &CoreConfig,
    load: impl FnOnce(&GgufFile, &mut dyn FnMut(LoadProgress)) -> anyhow::Result<Box<dyn Runner>>,
) -> anyhow::Result<Loaded<ModelCard>> {
    let path = config.model.as_deref();
    let path = path.context("no model: name a GGUF file, or choose --runner mock")?;
    let cannot_use = || format!("cannot use {}", path.display());
    let file = GgufFile::open(path)?;
    let card = ModelCard::from_gguf(&file).with_context(cannot_use)?;
    let on_load = &config.on_load;
    let runner = load(&file, &mut |loaded| on_load(loaded)).with_context(cannot_use)?;
    Ok(Loaded { runner, card })
}

fn engine_config(
    config: &CoreConfig,
    spec: RunnerSpec,
    mut card: ModelCard,
) -> anyhow::Result<EngineConfig> {
    if let Some(asked) = config.max_model_len
        && asked > spec.max_model_len
    {
        anyhow::bail!(
            "--max-model-len is {asked}, but the model knows {} positions; lower it or leave it \
             out",
            spec.max_model_len
        );
    }
    let mut scheduler = config.scheduler;
    scheduler.max_model_len = config.max_model_len.unwrap_or(spec.max_model_len);
    if !config.served_model_names.is_empty() {
        card.names.clone_from(&config.served_model_names);
    }
    // What a frontend is told is what can be served, also where the cache holds less than the model
    // knows.
    card.max_model_len = scheduler.max_model_len.min(usable_tokens(spec));
    let depth = config.depth.unwrap_or(if spec.overlaps { 2 } else { 1 });
    anyhow::ensure!(depth >= 1, "the batch queue's depth is 0; at least 1 is needed");
    Ok(EngineConfig {
        engine_index: config.engine_index,
        depth: depth as usize,
        scheduler,
        cache: CacheConfig {
            num_blocks: spec.num_blocks,
            block_size: spec.block_size,
            prefix_caching: config.prefix_caching,
        },
        vocab_size: spec.vocab_size,
        seed: config.seed,
        card: card.to_value(),
        shutdown_timeout: config.shutdown_timeout,
    })
}

/// What one sequence could have if it had the whole cache; block 0 is never used.
fn usable_tokens(spec: RunnerSpec) -> u32 {
    spec.num_blocks.saturating_sub(1).saturating_mul(spec.block_size)
}

fn ready_response(
    config: &CoreConfig,
    spec: RunnerSpec,
    max_model_len: u32,
    depth: usize,
) -> ReadyResponse {
    let text = |text: &str| Value::Text(text.into());
    let usable_tokens = usable_tokens(spec);
    let cache_dtype = match &config.runner {
        RunnerChoice::Mock(_) => "auto".into(),
        RunnerChoice::Cpu(cpu) => format!("{:?}", cpu.kv_cache_dtype).to_lowercase(),
        #[cfg(feature = "vulkan")]
        RunnerChoice::Vulkan(_) => "auto".into(),
    };
    ReadyResponse {
        max_model_len: max_model_len.into(),
        num_gpu_blocks: spec.num_blocks.into(),
        block_size: spec.block_size.into(),
        dp_stats_address: None,
        dtype: spec.dtype.into(),
        vllm_version: WIRE_VERSION.into(),
        world_size: 1,
        data_parallel_size: 1,
        tensor_parallel_size: 1,
        pipeline_parallel_size: 1,
        decode_context_parallel_size: 1,
        data_parallel_rank: config.engine_index.into(),
        max_num_seqs: config.scheduler.max_num_seqs.into(),
        max_num_batched_tokens: config.scheduler.max_num_batched_tokens.into(),
        instance_id: uuid::Uuid::new_v4().simple().to_string(),
        supports_lora: false,
        max_loras: 0,
        kv_cache_size_tokens: Some(usable_tokens.into()),
        kv_cache_max_concurrency: Some(f64::from(usable_tokens) / f64::from(max_model_len)),
        extra: vec![
            ("pawl_version".into(), text(env!("CARGO_PKG_VERSION"))),
            ("pawl_depth".into(), Value::Integer(depth as i128)),
            ("pawl_cache_dtype".into(), text(&cache_dtype)),
            ("pawl_enable_prefix_caching".into(), Value::Bool(config.prefix_caching)),
            ("pawl_prefix_caching_hash_algo".into(), text("sha256")),
        ],
    }
}
