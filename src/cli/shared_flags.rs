//! Flags that both kinds of process take.

use clap::Args;
use serde::Serialize;

#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SharedFlags {
    /// Name(s) the model is served under; the first is the one in answers and metric labels
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',',
          env = "PAWL_SERVED_MODEL_NAME", help_heading = "Model", value_parser = name)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub served_model_name: Vec<String>,
    /// Answers that may be under way at each api-server, and that may wait in the core; one more is
    /// refused with 503
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4096,
        env = "PAWL_MAX_NUM_QUEUED_REQS",
        help_heading = "Scheduler",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_num_queued_reqs: u32,
    /// Seconds that admitted requests may take to finish after SIGTERM; 0 aborts them
    #[arg(long, value_name = "SECONDS", default_value = "0", env = "PAWL_SHUTDOWN_TIMEOUT",
          value_parser = seconds, help_heading = "Server")]
    pub shutdown_timeout: f64,
    /// Watch standard input, and stop when it ends
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub supervised: bool,
}

impl SharedFlags {
    /// `--shutdown-timeout` as a duration.
    pub fn shutdown_timeout(&self) -> std::time::Duration {
        std::time::Duration::from_secs_f64(self.shutdown_timeout)
    }
}

fn name(text: &str) -> Result<String, String> {
    match text.trim().is_empty() {
        true => Err("write a name, or leave the flag out".into()),
        false => Ok(text.to_owned()),
    }
}

/// A time that a flag gives.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=86_400.0).contains(&value) => Ok(value),
        _ => Err("write seconds between 0 and 86400".into()),
    }
}
