//! What an api-server is started with. One plain struct: the command maps its flags to it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use pawl_shared::lifeline::Lifeline;
use pawl_shared::transport::{Address, CoreAt, HeartbeatConfig};

/// `--request-timing`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RequestTimingMode {
    /// Not told.
    #[default]
    Off,
    /// In the access log's line, and in a line for each of the `n` choices.
    Log,
    /// In the log, and to the client: header `x-pawl-timing`, or a last comment of the stream.
    Header,
}

/// Everything an api-server is started with.
#[derive(Clone, Debug)]
pub struct FrontendConfig {
    /// `--host`: address or name that clients connect to.
    pub host: String,
    /// `--port`: 0 lets the system choose; the choice is logged and written to `port_file`.
    pub port: u16,
    /// Whether other processes accept on the same port (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// `--admin-host`
    pub admin_host: String,
    /// `--admin-port`; `None` = no admin listener, 0 = the system chooses.
    pub admin_port: Option<u16>,
    /// `--grpc-port`; `None` = no gRPC, 0 = the system chooses. On `host`, shared like `port`.
    pub grpc_port: Option<u16>,
    /// `--port-file`: where the bound ports are written once all are bound, as
    /// `{"port": 8000, "admin_port": 9000, "grpc_port": 9001}` (null where there is no listener).
    pub port_file: Option<PathBuf>,

    /// `--core` (a core listens there; no model file is needed) or `--await-core` (a core dials a
    /// handshake socket, of this frontend or of the supervisor that lists its pair).
    pub core: CoreAt,
    /// The model's file, for a core that cannot be asked what it serves.
    pub model: Option<PathBuf>,
    /// `--socket-dir`: folder under which this frontend's own socket folder is made.
    pub socket_dir: Option<PathBuf>,
    /// `--advertise`: the host under which the core reaches this frontend's sockets.
    pub advertise: Option<String>,
    /// Which engine this frontend talks to.
    pub engine_index: u32,
    /// How long silence of the core is borne.
    pub heartbeat: HeartbeatConfig,

    /// `--served-model-name`: names clients may use, the first in answers. Empty = the core's.
    pub served_model_names: Vec<String>,
    /// `--chat-template`: a file that takes the place of the model's own template.
    pub chat_template: Option<PathBuf>,
    /// `--trust-request-chat-template`: use templates that come with requests.
    pub trust_request_chat_template: bool,
    /// `--response-role`: of the messages in chat answers.
    pub response_role: String,

    /// `--api-key`, repeatable; empty = open. See [`crate::http`] for the routes that need none.
    pub api_keys: Vec<String>,
    /// `--allowed-origins`: origins whose pages may call from a browser; `*` = every one.
    pub allowed_origins: Vec<String>,

    /// `--max-logprobs`: most likely tokens told per position.
    pub max_logprobs: u32,
    /// `--max-n`: answers to one prompt.
    pub max_n: u32,
    /// `--max-choices`: prompts × `n` of one request.
    pub max_choices: u32,
    /// `--max-num-queued-reqs`: answers being made at once by this frontend; beyond it a request is
    /// refused with 503 and `Retry-After`, or with 400 if it alone asks for more. `None` = as many
    /// as there are connections.
    pub max_num_queued_reqs: Option<u32>,
    /// Whether the core schedules by priority; else a `priority` in a request is refused.
    pub priority_scheduling: bool,
    /// `--enable-prompt-tokens-details`: tell cached prompt tokens in `usage`.
    pub enable_prompt_tokens_details: bool,
    /// `--enable-request-id-headers`: tell each request's id in the header `X-Request-Id`.
    pub enable_request_id_headers: bool,
    /// `--request-timing`
    pub request_timing: RequestTimingMode,
    /// `--disable-log-stats`: record nothing until the admin listener turns it on.
    pub disable_log_stats: bool,
    /// `--custom-histogram-buckets`: bounds by the name of their family.
    pub custom_histogram_buckets: BTreeMap<String, Vec<f64>>,
    /// `--shutdown-timeout`: how long answers under way may take once a stop was asked for.
    pub shutdown_timeout: Duration,

    /// Bounds on connections and bodies.
    pub limits: HttpLimits,
    /// The line to the supervisor that started this process, if one did. It keeps the sum over all
    /// its api-servers, which is what `/metrics` on the port they share shows.
    pub lifeline: Option<Lifeline>,
}

impl Default for FrontendConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            reuse_port: false,
            admin_host: "127.0.0.1".into(),
            admin_port: None,
            grpc_port: None,
            port_file: None,
            core: CoreAt::Join(Address::Ipc(PathBuf::from("/run/pawl/core"))),
            model: None,
            socket_dir: None,
            advertise: None,
            engine_index: 0,
            heartbeat: HeartbeatConfig::default(),
            served_model_names: Vec::new(),
            chat_template: None,
            trust_request_chat_template: false,
            response_role: "assistant".into(),
            api_keys: Vec::new(),
            allowed_origins: Vec::new(),
            max_logprobs: 20,
            max_n: 128,
            max_choices: 1_024,
            max_num_queued_reqs: None,
            priority_scheduling: false,
            enable_prompt_tokens_details: false,
            enable_request_id_headers: false,
            request_timing: RequestTimingMode::Off,
            disable_log_stats: false,
            custom_histogram_buckets: BTreeMap::new(),
            shutdown_timeout: Duration::from_secs(15),
            limits: HttpLimits::default(),
            lifeline: None,
        }
    }
}

impl FrontendConfig {
    /// Answers that can be made at once, at least one: else nothing could be served.
    pub(crate) fn answers_max(&self) -> Option<u32> {
        self.max_num_queued_reqs.map(|max| max.max(1))
    }
}

/// Bounds on what clients can hold open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Connections at once on one listener. When they are all taken nothing is accepted until one
    /// closes: newcomers wait in the kernel's queue.
    pub connections_max: usize,
    /// Bytes of a request's head; beyond: 431.
    pub head_bytes_max: usize,
    /// Bytes of a request's body; beyond: 413.
    pub body_bytes_max: usize,
    /// For the whole head to arrive, and the longest pause between two requests of a connection;
    /// beyond: closed.
    pub header_timeout: Duration,
    /// For the whole body to arrive; beyond: 408.
    pub body_timeout: Duration,
    /// How long a write may make no progress at all; beyond: closed, and the answer is aborted.
    pub write_timeout: Duration,
    /// A stream in which nothing flows for so long gets a comment, so that proxies keep it open.
    pub keep_alive: Duration,
    /// Bytes of prompt per token of the model's context; beyond: 400 before any tokenizing.
    pub prompt_bytes_per_token: usize,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            head_bytes_max: 32 * 1024,
            body_bytes_max: 32 * 1024 * 1024,
            header_timeout: Duration::from_secs(20),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(15),
            prompt_bytes_per_token: 16,
        }
    }
}
