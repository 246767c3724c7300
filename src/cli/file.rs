//! `--config FILE.toml`: a third source for flags, behind the command line and the environment.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{ArgAction, Command};
use serde::Serialize;

/// Keys that cannot come from a file: they say where the file is, or are no settings.
const NOT_IN_A_FILE: [&str; 3] = ["config", "help", "version"];

/// `command` with the values of the file named by `--config` (or `PAWL_CONFIG`) as defaults, and
/// what is to be said of keys that have no effect.
///
/// # Errors
/// When the file cannot be read, or holds a key that the chosen subcommand does not know.
pub fn with_file_defaults(
    command: Command,
    args: &[OsString],
) -> Result<(Command, Vec<String>), clap::Error> {
    let mut warnings = Vec::new();
    let Some(path) = config_path(args) else { return Ok((command, warnings)) };
    let mut for_errors = command.clone();
    let mut fail = move |text: String| for_errors.error(ErrorKind::ValueValidation, text);
    let text = std::fs::read_to_string(&path)
        .map_err(|e| fail(format!("--config {}: {e}", path.display())))?;
    let yaml = path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
    let hint = if yaml { "this is read as TOML, not as YAML: write key = value\n" } else { "" };
    let table: toml::Table =
        text.parse().map_err(|e| fail(format!("--config {}: {hint}{e}", path.display())))?;
    let Some(name) = chosen_subcommand(&command, args) else { return Ok((command, warnings)) };
    let mut command = command;
    for (key, value) in table {
        let id = key.replace('-', "_");
        let values = value_texts(&value)
            .ok_or_else(|| fail(format!("--config: {key} is neither a value nor a list")))?;
        let owner = [Some(name.as_str()), None]
            .into_iter()
            .find(|owner| has_arg(&command, *owner, &id))
            .filter(|_| !NOT_IN_A_FILE.contains(&id.as_str()) && !id.starts_with("no_"));
        let Some(owner) = owner else {
            let flag = id.replace('_', "-");
            let hint = match (flag.strip_prefix("no-"), super::refused::in_a_file(&flag, &values)) {
                (_, Some(Ok(warning))) => {
                    warnings.push(warning);
                    continue;
                }
                (_, Some(Err(way_out))) => format!(" of vLLM's: {way_out}"),
                (Some(positive), None) => format!("; write {positive} = false"),
                (None, None) => String::new(),
            };
            return Err(fail(format!("--config: `pawl {name}` has no flag {key:?}{hint}")));
        };
        command = set_default(command, owner, &id, values);
    }
    Ok((command, warnings))
}

/// The path after `--config`, if it was typed or is in the environment.
fn config_path(args: &[OsString]) -> Option<std::path::PathBuf> {
    let mut args = args.iter().skip(1);
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy();
        if text == "--" {
            break;
        }
        if text == "--config" {
            return args.next().map(Into::into);
        }
        if let Some(path) = text.strip_prefix("--config=") {
            return Some(path.into());
        }
    }
    std::env::var_os("PAWL_CONFIG").map(Into::into)
}

pub(super) fn chosen_subcommand(command: &Command, args: &[OsString]) -> Option<String> {
    let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    args.iter().skip(1).map(|a| a.to_string_lossy()).find(|a| names.contains(&&**a)).map(Into::into)
}

fn has_arg(command: &Command, subcommand: Option<&str>, id: &str) -> bool {
    let owner = match subcommand {
        Some(name) => command.find_subcommand(name),
        None => Some(command),
    };
    owner.is_some_and(|c| c.get_arguments().any(|a| a.get_id() == id))
}

fn set_default(
    command: Command,
    subcommand: Option<&str>,
    id: &str,
    values: Vec<String>,
) -> Command {
    let change = |owner: Command| {
        owner.mut_arg(id, |arg| {
            // A flag without a value is on or off.
            if matches!(arg.get_action(), ArgAction::SetTrue) {
                let on = values.first().is_some_and(|v| v == "true");
                return arg.default_value(if on { "true" } else { "false" });
            }
            arg.default_values(values)
        })
    };
    match subcommand {
        Some(name) => command.mut_subcommand(name, change),
        None => change(command),
    }
}

fn value_texts(value: &toml::Value) -> Option<Vec<String>> {
    let text = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    match value {
        toml::Value::Array(list) => list.iter().map(text).collect(),
        one => text(one).map(|t| vec![t]),
    }
}

/// Writes `flags` as a file for `--config`, readable by its owner alone (it may hold an API key).
///
/// # Errors
/// When the file cannot be written.
pub fn write_config(path: &Path, flags: &impl Serialize) -> anyhow::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let text = toml::to_string(flags)?;
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    Ok(())
}

/// Names of the environment variables that are flags of `subcommand`. A supervisor takes them out
/// of its children's environment: their files already hold what those variables said.
pub fn remove_flag_variables(subcommand: &str) -> Vec<String> {
    use clap::CommandFactory;
    let command = super::Cli::command();
    let owner = command.find_subcommand(subcommand).into_iter();
    owner
        .flat_map(|c| c.get_arguments())
        .chain(command.get_arguments())
        .filter_map(|arg| arg.get_env())
        .map(|name| name.to_string_lossy().into_owned())
        .collect()
}
