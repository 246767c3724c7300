//! `pawl bench step`: a model's steps, and beside them what the machine gives at that moment.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use pawl_engine_core::bench::{StepBench, StepFigures, decode_profile, step};
use pawl_engine_core::device::cpu::measure::{Machine, MachineFigures};
use pawl_engine_core::device::cpu::profile::Part;
use pawl_engine_core::runner::cpu::{CpuConfig, CpuRunner};
use pawl_engine_core::step::Progress;
use pawl_shared::model_card::{GgufFile, ModelCard};
use serde_json::json;

use crate::cli::{DeviceKind, KvCacheDtype};

/// Tokens of a sequence: as many as the longest context there is.
const TOKENS_MAX: i64 = 1 << 20;

#[derive(Clone, Debug, Args)]
pub struct BenchStepArgs {
    /// GGUF file or folder [default: SmolLM2-135M-Instruct, fetched once]
    pub model: Option<String>,
    /// Requests that decode together
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch_size: u32,
    /// Tokens of each before the first step that counts
    #[arg(long, value_name = "TOKENS", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX))]
    pub context: u32,
    /// Decode steps that count
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX))]
    pub decode_steps: u32,
    /// Tokens of the prompts that are timed; 0 times none
    #[arg(long, value_name = "TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(..=TOKENS_MAX))]
    pub prefill: u32,
    /// Prompts that count
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_rounds: u32,
    /// Device: cpu, vulkan or vulkan:INDEX, or auto, which is a GPU if there is one
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Compute threads [default: one for each physical core that this process may use]
    #[arg(long, value_parser = crate::cli::threads)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU kernels [default: the best there is]
    #[arg(long, value_name = "ISA", value_parser = ["scalar", "avx2", "avx512"])]
    pub cpu_isa: Option<String>,
    /// Type of the cached keys and values
    #[arg(long, value_enum, default_value_t)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Also where the time of a decode step goes, in steps of their own
    #[arg(long)]
    pub profile: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Measures and prints.
///
/// # Errors
/// When the model cannot be loaded, or is shorter than what is to be measured.
pub fn run(args: &BenchStepArgs) -> anyhow::Result<ExitCode> {
    let bench = StepBench {
        batch: args.batch_size,
        context: args.context,
        decode_steps: args.decode_steps,
        prefill: args.prefill,
        prefill_rounds: args.prefill_rounds,
    };
    #[cfg(feature = "vulkan")]
    if let Some(adapter) = crate::engine_core::adapter(args.device) {
        return super::step_vulkan::run(args, bench, adapter);
    }
    #[cfg(not(feature = "vulkan"))]
    anyhow::ensure!(
        !matches!(args.device, DeviceKind::Vulkan(_)),
        "--device {}: this pawl was built without its feature vulkan; choose cpu",
        args.device
    );
    let mut runner = load(args, bench)?;
    let bytes = runner.bytes_of_decode(bench.batch, bench.context + bench.decode_steps / 2);
    let mut machine = Machine::new(runner.threads(), usize::try_from(bytes)?)?;
    let before = machine.measure();
    let figures = step(&mut runner, bench)?;
    let profile = if args.profile { decode_profile(&mut runner, bench)? } else { Vec::new() };
    let result = Result {
        isa: runner.isa().as_str(),
        threads: runner.threads(),
        bench,
        figures,
        machine: [before, machine.measure()],
        decode_bytes: bytes,
        profile,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", result.json())?;
    } else {
        write!(out, "{}", result.text())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn load(args: &BenchStepArgs, bench: StepBench) -> anyhow::Result<CpuRunner> {
    let path = crate::model::resolve_model(args.model.as_deref())?;
    let file = GgufFile::open(&path)?;
    let sequence = (bench.context + bench.decode_steps).max(bench.prefill);
    if let Some(own) = ModelCard::from_gguf(&file).ok().map(|card| card.max_model_len) {
        anyhow::ensure!(
            sequence <= own,
            "the model was made for up to {own} tokens: lower --context, which --decode-steps are \
             added to, or --prefill"
        );
    }
    crate::cli::warn_of_threads(args.threads);
    let mut config = CpuConfig {
        threads: args.threads,
        kv_cache_dtype: args.kv_cache_dtype.into(),
        isa: args.cpu_isa.clone(),
        max_model_len: Some(sequence),
        ..CpuConfig::default()
    };
    config.num_blocks = Some(blocks(bench, config.block_size));
    Ok(CpuRunner::load(&file, &config, &Progress::default(), &mut |_| ())?)
}

/// KV blocks that the bench needs.
pub fn blocks(bench: StepBench, block_size: u32) -> u32 {
    let of_batch = bench.batch * (bench.context + bench.decode_steps).div_ceil(block_size);
    // Block 0 is never handed out.
    1 + of_batch.max(bench.prefill.div_ceil(block_size)).max(1)
}

/// What was measured.
struct Result {
    isa: &'static str,
    threads: usize,
    bench: StepBench,
    figures: StepFigures,
    /// Before and after.
    machine: [MachineFigures; 2],
    /// What a decode step must read.
    decode_bytes: u64,
    /// Time of each part of a decode step, if it was asked for.
    profile: Vec<(Part, Duration)>,
}

impl Result {
    /// Of the time that reading alone would take, at the mean of both measurements.
    fn share_of_bandwidth(&self) -> f64 {
        let mean = self.machine.iter().map(|m| m.read_bytes_per_s).sum::<f64>() / 2.0;
        self.decode_bytes as f64 / self.figures.decode_step.as_secs_f64() / mean
    }

    fn text(&self) -> String {
        let Self { bench, figures, machine: [before, after], .. } = self;
        let mut text = format!(
            "{}, {} threads\n\
             before and after: memory {:.1}, {:.1} GB/s; threads meet in {}, {} ns\n\
             decode of {} at {} tokens: {:.2} ms a step ({:.2} of CPU), {:.0} tokens/s; {:.1} MB \
             read, {:.0} % of the bandwidth\n",
            self.isa,
            self.threads,
            before.read_bytes_per_s / 1e9,
            after.read_bytes_per_s / 1e9,
            before.meeting.as_nanos(),
            after.meeting.as_nanos(),
            bench.batch,
            bench.context,
            ms(figures.decode_step),
            ms(figures.decode_step_cpu),
            figures.decode_tokens_per_s,
            self.decode_bytes as f64 / 1e6,
            100.0 * self.share_of_bandwidth(),
        );
        if bench.prefill > 0 {
            text += &format!(
                "prefill of {} tokens: {:.1} ms ({:.1} of CPU), {:.0} tokens/s\n",
                bench.prefill,
                ms(figures.prefill),
                ms(figures.prefill_cpu),
                figures.prefill_tokens_per_s
            );
        }
        let whole: Duration = self.profile.iter().map(|(_, time)| *time).sum();
        for (part, time) in &self.profile {
            let share = time.as_secs_f64() / whole.as_secs_f64();
            // A bar of 40 places is a whole step.
            let bar = "█".repeat((40.0 * share).round() as usize);
            let part = part.to_string();
            text += &format!("{part:<24} {:>7.3} ms {:>4.0} % {bar}\n", ms(*time), 100.0 * share);
        }
        text
    }

    fn json(&self) -> serde_json::Value {
        let Self { bench, figures, machine, .. } = self;
        let profile: BTreeMap<_, _> =
            self.profile.iter().map(|(part, time)| (part.to_string(), ms(*time))).collect();
        json!({
            "isa": self.isa,
            "threads": self.threads,
            "batch_size": bench.batch,
            "context": bench.context,
            "prefill": bench.prefill,
            "memory_bytes_per_s": machine.map(|m| m.read_bytes_per_s),
            "meeting_ns": machine.map(|m| m.meeting.as_nanos() as u64),
            "decode_step_ms": ms(figures.decode_step),
            "decode_step_cpu_ms": ms(figures.decode_step_cpu),
            "decode_tokens_per_s": figures.decode_tokens_per_s,
            "decode_bytes": self.decode_bytes,
            "decode_share_of_bandwidth": self.share_of_bandwidth(),
            "prefill_ms": ms(figures.prefill),
            "prefill_cpu_ms": ms(figures.prefill_cpu),
            "prefill_tokens_per_s": figures.prefill_tokens_per_s,
            "decode_profile_ms": profile,
        })
    }
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
