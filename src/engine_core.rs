//! `pawl engine-core`: flags to a [`pawl_engine_core::CoreConfig`], and its run.

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use nix::unistd::getppid;
#[cfg(feature = "vulkan")]
use pawl_engine_core::device::vulkan::{Wanted, choose, list};
use pawl_engine_core::runner::cpu::{CpuConfig, LoadProgress};
use pawl_engine_core::runner::mock::{Fault, MockConfig, Script};
#[cfg(feature = "vulkan")]
use pawl_engine_core::runner::vulkan::VulkanConfig;
use pawl_engine_core::scheduler::{Policy, SchedulerConfig};
use pawl_engine_core::{CoreConfig, RunnerChoice, Vitals};
use pawl_shared::lifeline::{self, Health, Lifeline};
use pawl_shared::transport::Address;

#[cfg(feature = "vulkan")]
use crate::cli::KvCacheDtype;
use crate::cli::{CoreFlags, Count, DeviceKind, RunnerKind, SchedulingPolicy, SharedFlags};
use crate::progress::Progress;

#[derive(Clone, Debug, Args)]
pub struct EngineCoreArgs {
    /// GGUF file or folder [default: SmolLM2-135M-Instruct, fetched once]
    pub model: Option<String>,
    /// Where frontends join: ipc:///run/pawl/core or tcp://127.0.0.1:5555; may be repeated
    #[arg(
        long,
        value_name = "ADDR",
        required_unless_present = "handshake",
        env = "PAWL_LISTEN",
        help_heading = "Sockets"
    )]
    pub listen: Vec<Address>,
    /// Handshake socket of a vLLM frontend to dial; may be repeated
    #[arg(long, value_name = "ADDR", env = "PAWL_HANDSHAKE", help_heading = "Sockets")]
    pub handshake: Vec<Address>,
    #[command(flatten)]
    pub core: CoreFlags,
    #[command(flatten)]
    pub shared: SharedFlags,
}

/// Runs a core to its end.
///
/// # Errors
/// When it cannot start, or died: the text says of what.
pub fn run(mut args: EngineCoreArgs) -> anyhow::Result<ExitCode> {
    args.core.fold_negations();
    let config = config(&args)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let shutdown = pawl_shared::shutdown::on_signal()?;
        let supervisor = getppid();
        if args.shared.supervised {
            let lifeline = Lifeline::on_stdin(shutdown.clone())?;
            tokio::spawn(tell_health(lifeline, config.vitals.clone()));
        }
        pawl_engine_core::run(config, shutdown).await?;
        if args.shared.supervised && getppid() != supervisor {
            args.listen.iter().for_each(remove_orphaned_folder);
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Tells the supervisor how the core does, for as long as the process lives.
async fn tell_health(lifeline: Lifeline, vitals: Vitals) {
    let mut ready = vitals.ready.subscribe();
    loop {
        lifeline.health(Health {
            ready: *ready.borrow_and_update(),
            awaits_core: false,
            progress: vitals.progress.load(Ordering::Relaxed),
        });
        // That it has become ready is told at once.
        let _ = tokio::time::timeout(lifeline::REPORT_EVERY, ready.changed()).await;
    }
}

/// A supervisor that was killed could not remove the folder of sockets that it made for this core.
fn remove_orphaned_folder(address: &Address) {
    if let Address::Ipc(socket) = address
        && let Some(folder) = socket.parent()
        && let Err(error) = std::fs::remove_dir_all(folder)
    {
        tracing::warn!("the folder {} is not removed: {error}", folder.display());
    }
}

fn config(args: &EngineCoreArgs) -> anyhow::Result<CoreConfig> {
    let flags = &args.core;
    let max_model_len =
        flags.max_model_len.map(|count| narrow("--max-model-len", count)).transpose()?;
    let (runner, model) = match flags.runner {
        RunnerKind::Mock => {
            let model = args.model.as_deref().map(|m| crate::model::resolve_model(Some(m)));
            (RunnerChoice::Mock(mock_config(flags)?), model.transpose()?)
        }
        RunnerKind::Model => {
            let model = crate::model::resolve_model(args.model.as_deref())?;
            (device_runner(flags, max_model_len)?, Some(model))
        }
    };
    let seed = match flags.seed {
        Some(seed) => seed,
        None => u64::from_le_bytes(uuid::Uuid::new_v4().as_bytes()[..8].try_into()?),
    };
    Ok(CoreConfig {
        listen: args.listen.clone(),
        handshake: args.handshake.clone(),
        runner,
        model,
        served_model_names: args.shared.served_model_name.clone(),
        scheduler: SchedulerConfig {
            max_num_seqs: flags.max_num_seqs,
            max_num_batched_tokens: narrow(
                "--max-num-batched-tokens",
                flags.max_num_batched_tokens,
            )?,
            long_prefill_token_threshold: match flags.long_prefill_token_threshold {
                Some(count) => narrow("--long-prefill-token-threshold", count)?,
                None => 0,
            },
            chunked_prefill: flags.enable_chunked_prefill.unwrap_or(true),
            policy: match flags.scheduling_policy {
                SchedulingPolicy::Fcfs => Policy::Fcfs,
                SchedulingPolicy::Priority => Policy::Priority,
            },
            watermark: flags.watermark,
            max_step: milliseconds(flags.max_step_ms),
            max_shared_step: milliseconds(flags.max_shared_step_ms),
            max_queued: args.shared.max_num_queued_reqs,
            ..SchedulerConfig::default()
        },
        max_model_len,
        prefix_caching: flags.enable_prefix_caching.unwrap_or(true),
        depth: flags.depth(),
        seed,
        shutdown_timeout: args.shared.shutdown_timeout(),
        on_load: load_bar(),
        ..CoreConfig::default()
    })
}

fn mock_config(flags: &CoreFlags) -> anyhow::Result<MockConfig> {
    anyhow::ensure!(
        flags.kv_cache_memory_bytes.is_none(),
        "--kv-cache-memory-bytes: the mock runner has no memory to divide; give the number of its \
         KV blocks with --num-gpu-blocks-override"
    );
    let default = MockConfig::default();
    Ok(MockConfig {
        script: Some(&flags.mock_script).filter(|s| !s.is_empty()).map(|s| Script(s[..].into())),
        step_base: Duration::from_secs_f64(flags.mock_step_ms / 1e3),
        step_per_token: Duration::from_secs_f64(flags.mock_token_us / 1e6),
        num_blocks: flags.num_gpu_blocks_override.unwrap_or(default.num_blocks),
        block_size: flags.block_size,
        eos_at: flags.mock_eos_at,
        fault: flags.mock_fail_at.map(Fault::FailAt),
        ..default
    })
}

/// The adapter that `device` asks for; `None` is the processor. What `auto` takes is told.
#[cfg(feature = "vulkan")]
pub fn adapter(device: DeviceKind) -> Option<Wanted> {
    match device {
        DeviceKind::Cpu => None,
        DeviceKind::Auto => match choose(&list(), Wanted::Gpu) {
            Ok(index) => {
                tracing::info!("--device auto takes the GPU vulkan:{index}");
                Some(Wanted::Index(index))
            }
            Err(reason) => {
                tracing::info!("--device auto takes the CPU: {reason}");
                None
            }
        },
        DeviceKind::Vulkan(None) => Some(Wanted::Best),
        DeviceKind::Vulkan(Some(index)) => Some(Wanted::Index(index)),
    }
}

/// The runner of `--device`.
#[cfg(feature = "vulkan")]
fn device_runner(flags: &CoreFlags, max_model_len: Option<u32>) -> anyhow::Result<RunnerChoice> {
    let Some(adapter) = adapter(flags.device) else {
        return Ok(RunnerChoice::Cpu(cpu_config(flags, max_model_len)));
    };
    anyhow::ensure!(
        matches!(flags.kv_cache_dtype, KvCacheDtype::Auto | KvCacheDtype::F16),
        "--kv-cache-dtype: a Vulkan device keeps half floats; leave it out, or choose --device cpu"
    );
    Ok(RunnerChoice::Vulkan(VulkanConfig {
        adapter,
        memory_share: flags.gpu_memory_utilization,
        block_size: flags.block_size,
        num_blocks: flags.num_gpu_blocks_override,
        kv_cache_bytes: flags.kv_cache_memory_bytes.map(|bytes| bytes.0),
        max_model_len,
    }))
}

/// The runner of `--device`.
#[cfg(not(feature = "vulkan"))]
fn device_runner(flags: &CoreFlags, max_model_len: Option<u32>) -> anyhow::Result<RunnerChoice> {
    anyhow::ensure!(
        !matches!(flags.device, DeviceKind::Vulkan(_)),
        "--device {}: this pawl was built without its feature vulkan; choose cpu",
        flags.device
    );
    Ok(RunnerChoice::Cpu(cpu_config(flags, max_model_len)))
}

fn cpu_config(flags: &CoreFlags, max_model_len: Option<u32>) -> CpuConfig {
    crate::cli::warn_of_threads(flags.threads);
    CpuConfig {
        threads: flags.threads,
        kv_cache_dtype: flags.kv_cache_dtype.into(),
        block_size: flags.block_size,
        num_blocks: flags.num_gpu_blocks_override,
        kv_cache_bytes: flags.kv_cache_memory_bytes.map(|bytes| bytes.0),
        max_model_len,
        isa: flags.cpu_isa.clone(),
    }
}

/// 0 is none.
fn milliseconds(value: u64) -> Option<Duration> {
    Some(Duration::from_millis(value)).filter(|time| !time.is_zero())
}

fn narrow(flag: &str, count: Count) -> anyhow::Result<u32> {
    u32::try_from(count.0).with_context(|| format!("{flag} {count} is more than {}", u32::MAX))
}

/// Draws how far the model has been loaded; the bar is made when the first weight is there.
fn load_bar() -> Arc<dyn Fn(LoadProgress) + Send + Sync> {
    let bar: Mutex<Option<Progress>> = Mutex::new(None);
    Arc::new(move |loaded: LoadProgress| {
        let mut bar = bar.lock().expect("drawing a bar does not panic");
        let drawn = bar.get_or_insert_with(|| Progress::start("loading", loaded.total_bytes));
        drawn.set(loaded.done_bytes);
        if loaded.done_bytes == loaded.total_bytes
            && let Some(bar) = bar.take()
        {
            bar.finish();
        }
    })
}
