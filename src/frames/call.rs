//! `pawl frames call`: one method of a core, by name.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use pawl_shared::protocol::Value;
use pawl_shared::transport::Address;

use super::client::CoreClient;
use super::output;

#[derive(Debug, Args)]
pub struct CallArgs {
    /// The core's --listen address
    core: Address,
    /// The method: `pawl_status`, `reset_prefix_cache`, … (docs/wire.md lists them)
    method: String,
    /// Its arguments as JSON: a list of them, or the only one
    #[arg(value_name = "JSON-ARGS")]
    args: Option<String>,
    /// How long the answer may take
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = super::seconds)]
    timeout: Duration,
    /// How long the core may take to let us in
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = super::seconds)]
    wait: Duration,
    /// The answer on one line
    #[arg(long)]
    json: bool,
}

/// Prints the answer as JSON.
///
/// # Errors
/// No core, arguments that are no JSON, or what the core says went wrong.
pub async fn run(args: &CallArgs) -> anyhow::Result<ExitCode> {
    let arguments = args.args.as_deref().map_or(Ok(Vec::new()), arguments)?;
    let mut client = CoreClient::join(&args.core, args.wait).await?;
    let answer = client.call(&args.method, arguments, args.timeout).await;
    client.leave().await;
    let answer = answer?.to_json_value();
    output::line(&if args.json { answer.to_string() } else { format!("{answer:#}") })?;
    Ok(ExitCode::SUCCESS)
}

fn arguments(text: &str) -> anyhow::Result<Vec<Value>> {
    let json: serde_json::Value = serde_json::from_str(text).with_context(|| {
        format!("the arguments {text:?} are no JSON: write [\"abort\", true], or a single value")
    })?;
    Ok(match json {
        serde_json::Value::Array(values) => values.iter().map(Value::from_json).collect(),
        one => vec![Value::from_json(&one)],
    })
}
