//! `pawl doctor`: what this machine offers, and what Pawl would do with it.

use std::process::ExitCode;

use clap::Args;
use nix::sys::resource::{Resource, getrlimit};

/// Descriptors below which many clients will not fit.
const DESCRIPTORS_WANTED: u64 = 4096;

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
    vec![
        Finding::fine("version", env!("CARGO_PKG_VERSION")),
        threads(),
        memory(),
        descriptors(),
        socket_folder(),
        pip(),
    ]
}

fn threads() -> Finding {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    Finding::fine("usable cores", usable.to_string())
}

fn memory() -> Finding {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
            .map_or_else(|| "?".into(), |kib| format!("{:.1} GiB", kib as f64 / (1 << 20) as f64))
    };
    Finding::fine("memory", format!("{} free of {}", field("MemAvailable:"), field("MemTotal:")))
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
