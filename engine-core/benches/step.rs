//! `cargo bench -p pawl-engine-core --bench step -- model=FILE [batch=1] [context=256] [steps=64]
//! [prefill=512] [rounds=5] [threads=N] [kv=f16]`: steps of a real model inside the engine, no
//! scheduler and no sockets.

#![allow(clippy::print_stdout, reason = "a bench is read on the terminal")]

use std::path::Path;

use anyhow::{Context, bail};
use pawl_engine_core::bench::{StepBench, step};
use pawl_engine_core::runner::cpu::{CpuConfig, CpuRunner, KvCacheDtype};
use pawl_engine_core::step::Progress;
use pawl_shared::model_card::GgufFile;

fn main() -> anyhow::Result<()> {
    let (mut bench, mut config, mut model) = (StepBench::default(), CpuConfig::default(), None);
    for arg in std::env::args().skip(1).filter(|arg| !arg.starts_with("--")) {
        let (name, value) = arg.split_once('=').context("arguments are name=value")?;
        let number = || value.parse::<u32>().with_context(|| format!("{name} is a number"));
        match name {
            "model" => model = Some(value.to_owned()),
            "batch" => bench.batch = number()?,
            "context" => bench.context = number()?,
            "steps" => bench.decode_steps = number()?,
            "prefill" => bench.prefill = number()?,
            "rounds" => bench.prefill_rounds = number()?,
            "threads" => config.threads = Some(number()? as usize),
            "kv" => {
                config.kv_cache_dtype = match value {
                    "f16" => KvCacheDtype::F16,
                    "bf16" => KvCacheDtype::BF16,
                    "f32" => KvCacheDtype::F32,
                    _ => bail!("kv is f16, bf16 or f32"),
                }
            }
            _ => bail!("no argument is called {name}"),
        }
    }
    let Some(model) = model else {
        println!("step: give it a model to measure: -- model=FILE.gguf");
        return Ok(());
    };
    let file = GgufFile::open(Path::new(&model))?;
    let mut runner = CpuRunner::load(&file, &config, &Progress::default(), &mut |_| ())?;
    drop(file);
    let (isa, threads) = (runner.isa().as_str(), runner.threads());
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let figures = step(&mut runner, bench)?;
    println!(
        "{isa}, {threads} threads: decode of {} at {}: {:.2} ms a step ({:.2} of CPU), \
         {:.0} tokens/s; prefill of {}: {:.1} ms ({:.1} of CPU), {:.0} tokens/s",
        bench.batch,
        bench.context,
        ms(figures.decode_step),
        ms(figures.decode_step_cpu),
        figures.decode_tokens_per_s,
        bench.prefill,
        ms(figures.prefill),
        ms(figures.prefill_cpu),
        figures.prefill_tokens_per_s
    );
    Ok(())
}
