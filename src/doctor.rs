//! `pawl doctor`: what this machine offers, and what Pawl would do with it.

use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use nix::sys::resource::{Resource, getrlimit};
use pawl_engine_core::device::cpu::{Isa, allowed_cores, physical_cores};
use pawl_shared::model_card::DEFAULT_MODEL;

/// Descriptors below which many clients will not fit.
const DESCRIPTORS_WANTED: u64 = 4096;

/// Memory below which the default model is not sure to fit: its weights, repacked, and a cache.
const MEMORY_WANTED: u64 = 1 << 30;

#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// One thing looked at.
struct Finding {
    name: &'static str,
    value: String,
    /// What to do, if it is not as it should be.
    advice: Option<String>,
}

impl Finding {
    fn fine(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), advice: None }
    }
}

/// Prints what was found; exits 1 if anything needs a hand.
///
/// # Errors
/// When standard output is gone.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let findings = examine();
    let healthy = findings.iter().all(|f| f.advice.is_none());
    let mut out = std::io::stdout().lock();
    print(&mut out, &findings, args.json)?;
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(out: &mut impl std::io::Write, findings: &[Finding], json: bool) -> anyhow::Result<()> {
    if json {
        let object: serde_json::Map<_, _> = findings
            .iter()
            .map(|f| {
                let value = serde_json::json!({"value": f.value, "advice": f.advice});
                (f.name.to_owned(), value)
            })
            .collect();
        writeln!(out, "{}", serde_json::Value::Object(object))?;
        return Ok(());
    }
    for finding in findings {
        writeln!(out, "{:<18} {}", finding.name, finding.value)?;
        if let Some(advice) = &finding.advice {
            writeln!(out, "{:<18} → {advice}", "")?;
        }
    }
    Ok(())
}

fn examine() -> Vec<Finding> {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    vec![
        Finding::fine("version", env!("CARGO_PKG_VERSION")),
        instruction_sets(),
        vulkan(),
        cores(),
        memory(&text("/proc/meminfo"), &text("/sys/fs/cgroup/memory.max")),
        descriptors(),
        socket_folder(),
        default_model(DEFAULT_MODEL.cached_path().as_deref()),
        pip(),
    ]
}

/// Kernels that can run here, the fastest (the one that is used) first.
fn instruction_sets() -> Finding {
    let names = Isa::ALL.into_iter().rev().filter(|isa| isa.available()).map(Isa::as_str);
    let names: Vec<&str> = names.collect();
    let advice = (names == [Isa::Scalar.as_str()]).then(|| {
        "there are fast kernels for AVX2 and AVX-512 only: this machine will be slow".into()
    });
    Finding { name: "CPU kernels", value: names.join(", "), advice }
}

/// The adapters as `--device vulkan:N` counts them, and what would be made of each.
#[cfg(feature = "vulkan")]
fn vulkan() -> Finding {
    use pawl_engine_core::device::vulkan::{Wanted, choose, list};
    let offers = list();
    let each = offers.iter().enumerate().map(|(index, offer)| {
        let what = match offer.refusal() {
            Some(reason) => format!("refused: {reason}"),
            None => offer.path().to_string(),
        };
        let subgroup = match offer.subgroup {
            Some((least, most)) => format!("subgroups of {least} to {most}"),
            None => "no subgroups".to_owned(),
        };
        format!(
            "{index}: {} ({}; {}), memory {}, bindings of {} MiB, buffers of {} MiB, {subgroup}, \
             {}timestamps; {what}",
            offer.name,
            offer.kind,
            offer.driver,
            gib(offer.memory_bytes),
            offer.binding_bytes >> 20,
            offer.buffer_bytes >> 20,
            if offer.timestamps { "" } else { "no " },
        )
    });
    let mut lines: Vec<String> = each.collect();
    lines.push(match choose(&offers, Wanted::Gpu) {
        Ok(index) => format!("--device auto takes vulkan:{index}"),
        Err(reason) => format!("--device auto takes the CPU: {reason}"),
    });
    Finding::fine("Vulkan", lines.join(&format!("\n{:<18} ", "")))
}

#[cfg(not(feature = "vulkan"))]
fn vulkan() -> Finding {
    Finding::fine("Vulkan", "this pawl was built without it")
}

fn cores() -> Finding {
    let allowed = allowed_cores();
    let threads = physical_cores(&allowed).len();
    let value = format!("{threads} compute threads on {} usable processors", allowed.len());
    Finding::fine("threads", value)
}

/// What is free, by the texts of the kernel's own files: of the machine, and of the group of
/// processes that this one belongs to, if that is bounded.
fn memory(meminfo: &str, group_max: &str) -> Finding {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
    };
    let (Some(free), Some(total)) = (field("MemAvailable:"), field("MemTotal:")) else {
        return Finding::fine("memory", "unknown");
    };
    let mut value = format!("{} free of {}", gib(free), gib(total));
    let bound = group_max.trim().parse::<u64>().ok().filter(|&bound| bound < total);
    if let Some(bound) = bound {
        value += &format!(", this process's group may have {}", gib(bound));
    }
    let usable = bound.map_or(free, |bound| bound.min(free));
    let advice = (usable < MEMORY_WANTED).then(|| {
        format!("the default model with its cache wants {}: free some", gib(MEMORY_WANTED))
    });
    Finding { name: "memory", value, advice }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

fn default_model(path: Option<&Path>) -> Finding {
    let name = "default model";
    let Some(path) = path else {
        let advice = "set PAWL_CACHE_DIR to a folder for models".into();
        return Finding { name, value: "no cache folder".into(), advice: Some(advice) };
    };
    match std::fs::metadata(path) {
        Ok(file) if file.len() == DEFAULT_MODEL.bytes => {
            Finding::fine(name, format!("{} is there", path.display()))
        }
        Ok(_) => Finding {
            name,
            value: format!("{} is not what it should be", path.display()),
            advice: Some("remove it; `pawl model fetch` gets it anew".into()),
        },
        Err(_) => {
            let megabytes = DEFAULT_MODEL.bytes / 1_000_000;
            let value = format!("not fetched yet; `pawl model fetch` gets it ({megabytes} MB)");
            Finding::fine(name, value)
        }
    }
}

fn descriptors() -> Finding {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return Finding::fine("descriptors", "unknown");
    };
    let advice = (soft < DESCRIPTORS_WANTED).then(|| {
        format!("each client takes one: raise it, as with `ulimit -n {DESCRIPTORS_WANTED}`")
    });
    Finding { name: "descriptors", value: format!("{soft} (limit {hard})"), advice }
}

fn socket_folder() -> Finding {
    match pawl_shared::transport::SocketDir::create_default() {
        Ok(dir) => Finding::fine("socket folder", format!("{} can be made", dir.path().display())),
        Err(error) => Finding {
            name: "socket folder",
            value: error.to_string(),
            advice: Some("name another with --socket-dir".into()),
        },
    }
}

fn pip() -> Finding {
    let works = ["pip", "pip3"].iter().any(|program| {
        let version = std::process::Command::new(program).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    });
    if works {
        return Finding::fine("pip", "found");
    }
    let advice = "`pawl model fetch` needs it; a local GGUF file needs nothing".into();
    Finding { name: "pip", value: "not found".into(), advice: Some(advice) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(findings: &[Finding]) -> String {
        let mut out = Vec::new();
        print(&mut out, findings, false).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn memory_is_that_of_the_group_where_that_is_less() {
        let meminfo = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n";
        let findings = [
            memory(meminfo, "max\n"),
            memory(meminfo, "536870912\n"),
            memory(meminfo, "99999999999999\n"),
            memory("", ""),
        ];
        insta::assert_snapshot!(check(&findings), @r"
        memory             8.0 GiB free of 16.0 GiB
        memory             8.0 GiB free of 16.0 GiB, this process's group may have 0.5 GiB
                           → the default model with its cache wants 1.0 GiB: free some
        memory             8.0 GiB free of 16.0 GiB
        memory             unknown
        ");
    }

    #[test]
    fn the_model_is_there_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut findings = vec![default_model(None), default_model(Some(&path))];
        std::fs::write(&path, b"GGUF").unwrap();
        findings.push(default_model(Some(&path)));
        let whole = std::fs::File::create(&path).unwrap();
        whole.set_len(DEFAULT_MODEL.bytes).unwrap();
        findings.push(default_model(Some(&path)));
        let shown = check(&findings).replace(&*folder.path().to_string_lossy(), "FOLDER");
        insta::assert_snapshot!(shown, @r"
        default model      no cache folder
                           → set PAWL_CACHE_DIR to a folder for models
        default model      not fetched yet; `pawl model fetch` gets it (98 MB)
        default model      FOLDER/model.gguf is not what it should be
                           → remove it; `pawl model fetch` gets it anew
        default model      FOLDER/model.gguf is there
        ");
    }

    #[test]
    fn this_machine_can_run_something() {
        let names: Vec<&str> = examine().iter().map(|finding| finding.name).collect();
        insta::assert_snapshot!(names.join(", "), @"version, CPU kernels, Vulkan, threads, memory, descriptors, socket folder, default model, pip");
        assert!(instruction_sets().value.contains("scalar"));
    }
}
