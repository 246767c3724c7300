//! Flags of an api-server, also taken by `serve`, which passes them on.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use pawl_shared::transport::HeartbeatConfig;
use serde::Serialize;

use super::ApiFlags;

#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FrontendFlags {
    /// Address to serve HTTP on
    #[arg(long, default_value = "127.0.0.1", env = "PAWL_HOST", help_heading = "Server")]
    pub host: String,
    /// Port to serve HTTP on; 0 takes a free one
    #[arg(long, default_value_t = 8000, env = "PAWL_PORT", value_parser = port,
          help_heading = "Server")]
    pub port: u16,
    /// Port of the first api-server's admin listener, the i-th takes this + i; 0 takes a free one
    /// [default: port + 1000]
    #[arg(long, env = "PAWL_ADMIN_PORT", help_heading = "Server")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_port: Option<u16>,
    /// Address of the admin listener
    #[arg(long, default_value = "127.0.0.1", env = "PAWL_ADMIN_HOST", help_heading = "Server")]
    pub admin_host: String,
    /// Port to serve gRPC on, at --host; 0 takes a free one [default: no gRPC]
    #[arg(long, env = "PAWL_GRPC_PORT", help_heading = "Server")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc_port: Option<u16>,
    /// File to write the bound ports to, as JSON, once listening
    #[arg(long, value_name = "FILE", env = "PAWL_PORT_FILE", help_heading = "Server")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port_file: Option<PathBuf>,
    /// Key(s) that clients must send as a bearer token
    #[arg(long, value_name = "KEY", num_args = 1.., value_delimiter = ',', env = "PAWL_API_KEY",
          hide_env_values = true, help_heading = "Server")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub api_key: Vec<String>,
    /// Origins whose pages may call from a browser; * is all
    #[arg(long, value_name = "ORIGIN", num_args = 1.., value_delimiter = ',',
          env = "PAWL_ALLOWED_ORIGINS", value_parser = origin, help_heading = "Server")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_origins: Vec<String>,
    /// Open connections; one more waits to be accepted
    #[arg(long, value_name = "N", default_value_t = 16384, env = "PAWL_MAX_CONNECTIONS",
          help_heading = "Server", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
    /// Seconds without a sign of progress from the core after which new requests are refused
    #[arg(long, value_name = "SECONDS", default_value = "10", env = "PAWL_ENGINE_HANG_TIMEOUT",
          value_parser = timeout, help_heading = "Server")]
    pub engine_hang_timeout: f64,
    /// Seconds without a sign of progress from the core after which it counts as dead: open streams
    /// end with an error, and serve kills it and starts another
    #[arg(long, value_name = "SECONDS", default_value = "60", env = "PAWL_ENGINE_DEAD_TIMEOUT",
          value_parser = timeout, help_heading = "Server")]
    pub engine_dead_timeout: f64,
    #[command(flatten)]
    #[serde(flatten)]
    pub api: ApiFlags,
}

impl FrontendFlags {
    /// When a silent core counts as hung, and when as dead.
    ///
    /// # Errors
    /// When it would be dead before it hangs.
    pub fn heartbeat(&self) -> anyhow::Result<HeartbeatConfig> {
        let (hang, dead) = (self.engine_hang_timeout, self.engine_dead_timeout);
        anyhow::ensure!(
            hang <= dead,
            "--engine-hang-timeout {hang} is more than --engine-dead-timeout {dead}: raise the \
             latter"
        );
        Ok(HeartbeatConfig {
            silence: Duration::from_secs_f64(hang),
            dead: Duration::from_secs_f64(dead),
            ..HeartbeatConfig::default()
        })
    }
}

/// A core that does nothing says so each second, so less than two could be a slow moment.
fn timeout(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (2.0..=86_400.0).contains(&value) => Ok(value),
        _ => Err("write seconds between 2 and 86400".into()),
    }
}

fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| match text.starts_with("tcp://") {
        true => "Kubernetes says so of a service called pawl: set enableServiceLinks to false in \
                 the pod, or PAWL_PORT to a number"
            .to_owned(),
        false => "write a number from 0 to 65535".to_owned(),
    })
}

/// vLLM takes them as a JSON list, whose pieces would make names that no browser sends.
fn origin(text: &str) -> Result<String, String> {
    match text.contains(['[', ']', '"']) && !text.contains("://[") {
        true => Err("write origins without brackets and quotes, apart by commas".to_owned()),
        false => Ok(text.to_owned()),
    }
}
