//! The command line: what was typed, where it may also come from, and what is refused.
//!
//! Every flag has three sources, the nearer one wins: the command line, the environment
//! (`PAWL_MAX_NUM_SEQS` for `--max-num-seqs`), the file named by `--config`. A file's values are
//! handed to clap as defaults, so that they are checked and explained like typed ones.

mod api_flags;
mod core_flags;
mod environment;
mod file;
mod frontend_flags;
mod refused;
mod shared_flags;
mod units;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

pub use api_flags::{ApiFlags, RequestTiming};
pub use core_flags::{
    CoreFlags, DeviceKind, KvCacheDtype, RunnerKind, SchedulingPolicy, threads, warn_of_threads,
};
#[cfg(test)]
pub use environment::unknown_variables;
pub use file::{remove_flag_variables, write_config};
pub use frontend_flags::FrontendFlags;
#[cfg(test)]
pub use refused::{Answer, FOREIGN, SERVING};
pub use shared_flags::{SharedFlags, seconds};
pub use units::{Bytes, Count};

use pawl_shared::telemetry::LogFormat;

/// An LLM server whose every step is counted where the user's requests are served.
#[derive(Debug, Parser)]
#[command(name = "pawl", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub log: LogFlags,
    #[command(subcommand)]
    pub command: Command,
    /// To be logged once there is a log: what was typed, or is set, and has no effect.
    #[arg(skip)]
    pub warnings: Vec<String>,
}

/// Flags of every subcommand.
#[derive(Clone, Debug, clap::Args)]
pub struct LogFlags {
    /// TOML file whose keys are flag names; command line and environment win over it
    #[arg(long, global = true, value_name = "FILE", env = "PAWL_CONFIG")]
    pub config: Option<std::path::PathBuf>,
    /// Log lines for people or as JSON
    #[arg(long, global = true, value_enum, default_value = "text", env = "PAWL_LOG_FORMAT")]
    pub log_format: LogFormatFlag,
    /// Log level, or a filter as in RUST_LOG (which wins)
    #[arg(long, global = true, default_value = "info", env = "PAWL_LOG_LEVEL",
          value_parser = log_filter)]
    pub log_level: String,
}

fn log_filter(text: &str) -> Result<String, String> {
    pawl_shared::telemetry::check_filter(text).map(|()| text.to_owned())
}

/// `--log-format`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum LogFormatFlag {
    Text,
    Json,
}

impl From<LogFormatFlag> for LogFormat {
    fn from(flag: LogFormatFlag) -> Self {
        match flag {
            LogFormatFlag::Text => Self::Text,
            LogFormatFlag::Json => Self::Json,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start an engine-core and its api-servers, and keep them running
    Serve(Box<crate::serve::ServeArgs>),
    /// Run the core alone; frontends join it at --listen
    EngineCore(Box<crate::engine_core::EngineCoreArgs>),
    /// Run one frontend of a core that runs elsewhere
    ApiServer(Box<crate::api_server::ApiServerArgs>),
    /// Answer a file of requests offline
    Batch(Box<crate::batch::BatchArgs>),
    /// Measure speed
    Bench(crate::bench::BenchArgs),
    /// Look at the frames between core and frontends
    Frames(crate::frames::FramesArgs),
    /// Get and look at models
    Model(crate::model::ModelArgs),
    /// Say what this machine offers
    Doctor(crate::doctor::DoctorArgs),
}

impl Cli {
    fn api_keys(&mut self) -> Option<&mut Vec<String>> {
        match &mut self.command {
            Command::Serve(args) => Some(&mut args.frontend.api_key),
            Command::ApiServer(args) => Some(&mut args.frontend.api_key),
            _ => None,
        }
    }

    fn asks_for_no_key(&mut self) -> bool {
        self.api_keys().is_some_and(|keys| keys.is_empty())
    }

    /// An empty key is none, as for vLLM: a variable is set to nothing by many a compose file.
    fn drop_empty_keys(&mut self) {
        let Some(keys) = self.api_keys() else { return };
        let before = keys.len();
        keys.retain(|key| !key.is_empty());
        if keys.len() < before {
            let rest = if keys.is_empty() { ": no request needs a key" } else { "" };
            self.warnings.push(format!("an empty --api-key is no key{rest}"));
        }
    }

    fn is_supervised(&self) -> bool {
        match &self.command {
            Command::Serve(args) => args.shared.supervised,
            Command::EngineCore(args) => args.shared.supervised,
            Command::ApiServer(args) => args.shared.supervised,
            _ => false,
        }
    }

    /// The filter of log lines: `--log-level`, with less of what a subcommand would say too often.
    pub fn log_filter(&self) -> String {
        match self.command {
            // A line for each request would bury the progress bar; a filter typed in full stands.
            Command::Batch(_) if self.log.log_level == "info" => "info,pawl::request=warn".into(),
            _ => self.log.log_level.clone(),
        }
    }
}

/// Parses the process's arguments, its environment and its `--config` file.
///
/// # Errors
/// As text for people, with clap's exit status; `--help` is such an "error" with status 0.
pub fn parse() -> Result<Cli, clap::Error> {
    let mut cli = parse_from(std::env::args_os().collect())?;
    // A supervisor's children have its environment, of which it has said the same already.
    if !cli.is_supervised() {
        let text = |name: std::ffi::OsString| name.to_string_lossy().into_owned();
        let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
        cli.warnings.extend(environment::unknown_variables(variables));
        if cli.asks_for_no_key() && std::env::var_os("VLLM_API_KEY").is_some() {
            let text = "VLLM_API_KEY is set, but Pawl reads PAWL_API_KEY: no request needs a key";
            cli.warnings.push(text.into());
        }
    }
    Ok(cli)
}

fn parse_from(args: Vec<std::ffi::OsString>) -> Result<Cli, clap::Error> {
    let command = like_argparse(Cli::command());
    let refused::Sifted { args, mut warnings } = refused::sift(&command, args)?;
    let (command, of_file) = file::with_file_defaults(command, &args)?;
    warnings.extend(of_file);
    let mut for_errors = command.clone();
    let matches = command.try_get_matches_from(args)?;
    if let Some(flag) = flag_of_a_core_elsewhere(&matches) {
        let text = format!(
            "--{flag} is for a core, and with --await-core that is started elsewhere: give it the \
             flag there"
        );
        return Err(for_errors.error(clap::error::ErrorKind::ArgumentConflict, text));
    }
    let mut cli = Cli { warnings, ..Cli::from_arg_matches(&matches)? };
    cli.drop_empty_keys();
    Ok(cli)
}

/// As start scripts made for vLLM expect: of a flag that is typed twice the last counts, and `-1`
/// is a value, if a wrong one.
fn like_argparse(command: clap::Command) -> clap::Command {
    let has_value = |arg: &clap::Arg| {
        !arg.is_positional() && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
    };
    command
        .args_override_self(true)
        .mut_args(|arg| if has_value(&arg) { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(like_argparse)
}

/// A flag that was typed for the core of a `serve` that starts none.
fn flag_of_a_core_elsewhere(matches: &clap::ArgMatches) -> Option<String> {
    use clap::Args;
    use clap::parser::ValueSource;
    let serve = matches.subcommand_matches("serve")?;
    serve.get_one::<pawl_shared::transport::Address>("await_core")?;
    let flags = CoreFlags::augment_args(clap::Command::new("core"));
    let typed = |id: &str| serve.value_source(id) == Some(ValueSource::CommandLine);
    // The api-servers want to know that one, too.
    let mut flags = flags.get_arguments().filter(|arg| arg.get_id() != "scheduling_policy");
    let found = flags.find(|arg| typed(arg.get_id().as_str()))?;
    found.get_long().map(str::to_owned)
}

/// What a whole command line means.
#[cfg(test)]
pub fn parse_words(words: &[String]) -> Result<Cli, String> {
    parse_from(words.iter().map(Into::into).collect()).map_err(|error| error.to_string())
}

/// Whether the words are a command and flags that exist, whatever else is missing of it.
#[cfg(test)]
pub fn known_flags(words: &[&str]) -> Result<(), String> {
    use clap::error::ErrorKind;
    let words = words.iter().map(Into::into).collect();
    match parse_from(words) {
        Ok(_) => Ok(()),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::MissingRequiredArgument
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Ok(()),
            // A flag may be spoken of without its value.
            ErrorKind::InvalidValue if error.to_string().contains("none was supplied") => Ok(()),
            _ => Err(error.to_string()),
        },
    }
}

#[cfg(test)]
mod tests;
