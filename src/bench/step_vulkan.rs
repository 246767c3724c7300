//! `pawl bench step --device vulkan`: steps, dispatches, and bytes beside the fewest.

use std::io::Write as _;
use std::process::ExitCode;

use pawl_engine_core::bench::{StepBench, decode_device_time, step};
use pawl_engine_core::device::vulkan::Wanted;
use pawl_engine_core::runner::vulkan::{VulkanConfig, VulkanRunner};
use pawl_engine_core::step::Progress;
use pawl_shared::model_card::GgufFile;
use serde_json::json;

use super::step::{BenchStepArgs, blocks, ms};

/// Measures and prints.
///
/// # Errors
/// When the model cannot be loaded, or the device fails.
pub fn run(args: &BenchStepArgs, bench: StepBench, adapter: Wanted) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(!args.profile, "--profile: only the CPU device has one; leave it out");
    let path = crate::model::resolve_model(args.model.as_deref())?;
    let file = GgufFile::open(&path)?;
    let block_size = VulkanConfig::default().block_size;
    let config = VulkanConfig {
        adapter,
        max_model_len: Some((bench.context + bench.decode_steps).max(bench.prefill)),
        num_blocks: Some(blocks(bench, block_size)),
        ..VulkanConfig::default()
    };
    let mut runner = VulkanRunner::load(&file, &config, &Progress::default(), &mut |_| ())?;
    let figures = step(&mut runner, bench)?;
    let device_time = decode_device_time(&mut runner, bench)?;
    let read = runner.decode_reads(bench.batch, bench.context + bench.decode_steps / 2);
    let device = runner.device();
    let (offer, dispatches) = (device.offer(), device.num_dispatches());
    let mut out = std::io::stdout().lock();
    if args.json {
        let object = json!({
            "adapter": offer.name,
            "path": device.path().to_string(),
            "batch_size": bench.batch,
            "context": bench.context,
            "decode_step_ms": ms(figures.decode_step),
            "decode_step_cpu_ms": ms(figures.decode_step_cpu),
            "decode_step_device_ms": device_time.map(ms),
            "decode_tokens_per_s": figures.decode_tokens_per_s,
            "decode_bytes": read.bytes,
            "decode_bytes_fewest": read.fewest,
            "dispatches": dispatches,
            "dispatches_per_layer": device.dispatches_per_layer(),
            "prefill": bench.prefill,
            "prefill_ms": ms(figures.prefill),
            "prefill_cpu_ms": ms(figures.prefill_cpu),
            "prefill_tokens_per_s": figures.prefill_tokens_per_s,
        });
        writeln!(out, "{object}")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{} ({}), {}", offer.name, offer.kind, device.path())?;
    writeln!(
        out,
        "decode of {} at {} tokens: {:.2} ms a step ({:.2} of CPU), {:.1} tokens/s; {dispatches} \
         dispatches, {} a layer; {:.1} MB read, {:.1} would be the fewest, {:.2} GB/s",
        bench.batch,
        bench.context,
        ms(figures.decode_step),
        ms(figures.decode_step_cpu),
        figures.decode_tokens_per_s,
        device.dispatches_per_layer(),
        read.bytes as f64 / 1e6,
        read.fewest as f64 / 1e6,
        read.bytes as f64 / 1e9 / figures.decode_step.as_secs_f64(),
    )?;
    if let Some(time) = device_time {
        writeln!(out, "by the device's clock: {:.2} ms a decode step", ms(time))?;
    }
    if bench.prefill > 0 {
        writeln!(
            out,
            "prefill of {} tokens: {:.1} ms ({:.1} of CPU), {:.0} tokens/s",
            bench.prefill,
            ms(figures.prefill),
            ms(figures.prefill_cpu),
            figures.prefill_tokens_per_s
        )?;
    }
    Ok(ExitCode::SUCCESS)
}
