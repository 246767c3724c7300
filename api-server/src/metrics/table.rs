//! Every series `/metrics` can show, in one table: registration, priming, the page's order and the
//! reference page all come from it.

/// One metric family.
#[derive(Clone, Copy, Debug)]
pub struct MetricSpec {
    /// As it appears on the page; counters with their `_total`.
    pub name: &'static str,
    /// Counter, gauge, histogram or summary.
    pub kind: Kind,
    /// Label names, in the page's order.
    pub labels: &'static [&'static str],
    /// What it tells, in one sentence.
    pub help: &'static str,
    /// When it moves, for the reference page.
    pub moves: &'static str,
    /// What the page of several frontends shows.
    pub across: Across,
}

/// How the series of several frontends become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Across {
    /// Added up. What accumulates keeps what frontends had counted that are gone.
    Sum,
    /// The core's own, of which all are told the same: of the frontend that heard last.
    Freshest,
    /// The least.
    Least,
    /// The greatest.
    Greatest,
}

impl Across {
    /// The word on the reference page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Freshest => "the core's",
            Self::Least => "least",
            Self::Greatest => "greatest",
        }
    }
}

impl MetricSpec {
    const fn across(self, across: Across) -> Self {
        Self { across, ..self }
    }
}

impl Kind {
    /// Whether it only grows, so that a process that ends leaves something behind.
    #[must_use]
    pub fn accumulates(self) -> bool {
        match self {
            Self::Counter | Self::Histogram(_) | Self::Summary | Self::ProcessCounter => true,
            Self::Gauge | Self::ProcessGauge => false,
        }
    }
}

/// What a family is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// The current value.
    Gauge,
    /// Buckets, sum and count.
    Histogram(Buckets),
    /// Sum and count.
    Summary,
    /// Kept by the metrics crate's process collector.
    ProcessCounter,
    /// The same, as a gauge.
    ProcessGauge,
}

/// A family of bucket bounds. The names are those `--custom-histogram-buckets` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buckets {
    /// Whole requests and their phases, seconds.
    RequestLatency,
    /// Time to first token, seconds.
    TimeToFirstToken,
    /// Between tokens, seconds.
    InterTokenLatency,
    /// Tokens in one step.
    IterationTokens,
    /// `n`.
    RequestParamsN,
    /// Preemptions of one request.
    RequestNumPreemptions,
    /// Tokens of one request: 1, 2, 5 times powers of ten, up to the model's length.
    RequestTokens,
    /// HTTP requests by route, seconds.
    HttpDuration,
    /// HTTP requests together, and gRPC calls, seconds.
    HttpDurationHighResolution,
    /// Parts of an engine step, seconds.
    StepPhase,
}

impl Buckets {
    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestLatency => "request_latency",
            Self::TimeToFirstToken => "time_to_first_token",
            Self::InterTokenLatency => "inter_token_latency",
            Self::IterationTokens => "iteration_tokens",
            Self::RequestParamsN => "request_params_n",
            Self::RequestNumPreemptions => "request_num_preemptions",
            Self::RequestTokens => "request_tokens",
            Self::HttpDuration => "http_request_duration",
            Self::HttpDurationHighResolution => "http_request_duration_highr",
            Self::StepPhase => "step_phase",
        }
    }

    /// Every family.
    pub const ALL: [Self; 10] = [
        Self::RequestLatency,
        Self::TimeToFirstToken,
        Self::InterTokenLatency,
        Self::IterationTokens,
        Self::RequestParamsN,
        Self::RequestNumPreemptions,
        Self::RequestTokens,
        Self::HttpDuration,
        Self::HttpDurationHighResolution,
        Self::StepPhase,
    ];

    /// The upper bounds, without `+Inf`.
    #[must_use]
    pub fn bounds(self, max_model_len: u32) -> Vec<f64> {
        let fixed: &[f64] = match self {
            Self::RequestLatency => &[
                0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
                120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
            ],
            Self::TimeToFirstToken => &[
                0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
            ],
            Self::InterTokenLatency => &[
                0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                10.0, 20.0, 40.0, 80.0,
            ],
            Self::IterationTokens => &[
                1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
                16384.0,
            ],
            Self::RequestParamsN => &[1.0, 2.0, 5.0, 10.0, 20.0],
            Self::RequestNumPreemptions => &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0],
            Self::HttpDuration => &[0.1, 0.5, 1.0],
            Self::HttpDurationHighResolution => &[
                0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0,
                4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
            ],
            Self::StepPhase => &[
                1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1,
                0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
            ],
            Self::RequestTokens => return one_two_five(max_model_len),
        };
        fixed.to_vec()
    }
}

/// 1, 2, 5, 10, 20, 50, … while not above `max`.
fn one_two_five(max: u32) -> Vec<f64> {
    let max = u64::from(max.max(1));
    let mut bounds = Vec::new();
    let mut power = 1u64;
    loop {
        for mantissa in [1, 2, 5] {
            let bound = mantissa * power;
            if bound > max {
                return bounds;
            }
            bounds.push(bound as f64);
        }
        power *= 10;
    }
}

const ENGINE: &[&str] = &["model_name", "engine"];
const GRPC: &[&str] = &["grpc_type", "grpc_service", "grpc_method"];

const fn counter(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    moves: &'static str,
) -> MetricSpec {
    MetricSpec { name, kind: Kind::Counter, labels, help, moves, across: Across::Sum }
}

const fn gauge(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    moves: &'static str,
) -> MetricSpec {
    MetricSpec { name, kind: Kind::Gauge, labels, help, moves, across: Across::Freshest }
}

const fn histogram(
    name: &'static str,
    buckets: Buckets,
    labels: &'static [&'static str],
    help: &'static str,
    moves: &'static str,
) -> MetricSpec {
    MetricSpec { name, kind: Kind::Histogram(buckets), labels, help, moves, across: Across::Sum }
}

const fn summary(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    moves: &'static str,
) -> MetricSpec {
    MetricSpec { name, kind: Kind::Summary, labels, help, moves, across: Across::Sum }
}

const fn process(name: &'static str, kind: Kind, help: &'static str) -> MetricSpec {
    let moves = "read from the system at each scrape";
    MetricSpec { name, kind, labels: &[], help, moves, across: Across::Sum }
}

/// Declares each family as a constant and gathers all of them in [`TABLE`].
macro_rules! table {
    ($($id:ident = $spec:expr;)*) => {
        $(pub(super) const $id: MetricSpec = $spec;)*
        /// Every family of the page.
        pub const TABLE: &[MetricSpec] = &[$($id),*];
    };
}

const STEP: &str = "each frame with scheduler stats";
const OUT: &str = "each frame with outputs";
const FIN: &str = "each completed request (stop, length, repetition)";

table! {
    NUM_REQUESTS_RUNNING = gauge("vllm:num_requests_running", ENGINE,
        "Requests in the engine's running list, over all frontends.", STEP);
    NUM_REQUESTS_WAITING = gauge("vllm:num_requests_waiting", ENGINE,
        "Requests that wait in the engine, deferred ones included.", STEP);
    NUM_REQUESTS_WAITING_BY_REASON = gauge("vllm:num_requests_waiting_by_reason",
        &["model_name", "engine", "reason"],
        "Requests that wait in the engine: for capacity, or deferred for something else.", STEP);
    KV_CACHE_USAGE = gauge("vllm:kv_cache_usage_perc", ENGINE,
        "Share of the KV-cache blocks in use; 1 means all of them.", STEP);
    ENGINE_SLEEP_STATE = gauge("vllm:engine_sleep_state", &["model_name", "engine", "sleep_state"],
        "1 at the state of the engine's weights, 0 at the others. They stay in memory, also while \
         the engine sleeps.", "at start");
    CACHE_CONFIG_INFO = gauge("vllm:cache_config_info",
        &["engine", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching",
          "prefix_caching_hash_algo", "gpu_memory_utilization", "kv_cache_size_tokens"],
        "How the engine's KV cache is set up, as labels; always 1.", "when a core joins");
    PREFIX_CACHE_QUERIES = counter("vllm:prefix_cache_queries_total", ENGINE,
        "Prompt tokens looked up in the prefix cache by this frontend's requests; \
         those that come back after a preemption are not counted.", STEP);
    PREFIX_CACHE_HITS = counter("vllm:prefix_cache_hits_total", ENGINE,
        "Of those, tokens found.", STEP);
    EXTERNAL_PREFIX_CACHE_QUERIES = counter("vllm:external_prefix_cache_queries_total", ENGINE,
        "Tokens looked up in a cache outside the engine.", "needs a KV connector");
    EXTERNAL_PREFIX_CACHE_HITS = counter("vllm:external_prefix_cache_hits_total", ENGINE,
        "Of those, tokens found.", "needs a KV connector");
    PROMPT_TOKENS_CACHED_BY_SOURCE = counter("vllm:prompt_tokens_cached_by_source_total",
        &["model_name", "engine", "source"],
        "Prefix-cache hits in tokens, by the medium they were found on.", STEP);
    MM_CACHE_QUERIES = counter("vllm:mm_cache_queries_total", ENGINE,
        "Multimodal items looked up in the frontend's cache.", "needs a multimodal model");
    MM_CACHE_HITS = counter("vllm:mm_cache_hits_total", ENGINE,
        "Of those, items found.", "needs a multimodal model");
    NUM_PREEMPTIONS = counter("vllm:num_preemptions_total", ENGINE,
        "Preemptions of this frontend's requests, told by the requests' own events.", OUT);
    PROMPT_TOKENS = counter("vllm:prompt_tokens_total", ENGINE,
        "Prompt tokens of requests that got a first token.", "a request's first token");
    PROMPT_TOKENS_BY_SOURCE = counter("vllm:prompt_tokens_by_source_total",
        &["model_name", "engine", "source"],
        "The same, by where their KV entries came from.", "a request's first token");
    PROMPT_TOKENS_CACHED = counter("vllm:prompt_tokens_cached_total", ENGINE,
        "Of the prompt tokens, those found in a cache.", "a request's first token");
    GENERATION_TOKENS = counter("vllm:generation_tokens_total", ENGINE,
        "Tokens generated and kept: nothing after a stop string, nothing after an abort.", OUT);
    REQUEST_SUCCESS = counter("vllm:request_success_total",
        &["model_name", "engine", "finished_reason"],
        "Requests that ended, by reason; each one exactly once.", "each request's end");
    ADMISSION_REJECTIONS = counter("vllm:admission_rejections_total", &["model_name", "reason"],
        "Requests refused for want of room or of an engine, by this frontend or by the engine.",
        "each refusal with 503");
    ITERATION_TOKENS = histogram("vllm:iteration_tokens_total", Buckets::IterationTokens, ENGINE,
        "Tokens in one frame: computed prompt tokens of first tokens, and new tokens.", OUT);
    REQUEST_PROMPT_TOKENS = histogram("vllm:request_prompt_tokens", Buckets::RequestTokens, ENGINE,
        "Prompt tokens of one request.", FIN);
    REQUEST_GENERATION_TOKENS = histogram("vllm:request_generation_tokens", Buckets::RequestTokens,
        ENGINE, "Generated tokens of one request.", FIN);
    REQUEST_MAX_NUM_GENERATION_TOKENS = histogram("vllm:request_max_num_generation_tokens",
        Buckets::RequestTokens, ENGINE,
        "The longest of a request's n choices, in tokens.", "when all n choices have completed");
    REQUEST_PARAMS_N = histogram("vllm:request_params_n", Buckets::RequestParamsN, ENGINE,
        "The n of a request.", "when all n choices have completed");
    REQUEST_PARAMS_MAX_TOKENS = histogram("vllm:request_params_max_tokens", Buckets::RequestTokens,
        ENGINE, "The max_tokens of a request, or what the model leaves.", FIN);
    REQUEST_PREFILL_KV_COMPUTED_TOKENS = histogram("vllm:request_prefill_kv_computed_tokens",
        Buckets::RequestTokens, ENGINE, "Prompt tokens that no cache held.", FIN);
    REQUEST_NUM_PREEMPTIONS = histogram("vllm:request_num_preemptions",
        Buckets::RequestNumPreemptions, ENGINE, "Preemptions of one request.", FIN);
    TIME_TO_FIRST_TOKEN = histogram("vllm:time_to_first_token_seconds", Buckets::TimeToFirstToken,
        ENGINE, "From a request's arrival here to its first token here (this process's clock).",
        "a request's first token");
    INTER_TOKEN_LATENCY = histogram("vllm:inter_token_latency_seconds", Buckets::InterTokenLatency,
        ENGINE, "Between two outputs with tokens of one request (engine's clock).",
        "each later output with tokens");
    REQUEST_TIME_PER_OUTPUT_TOKEN = histogram("vllm:request_time_per_output_token_seconds",
        Buckets::InterTokenLatency, ENGINE,
        "Decode time over tokens after the first; 0 with a single token.", FIN);
    E2E_REQUEST_LATENCY = histogram("vllm:e2e_request_latency_seconds", Buckets::RequestLatency,
        ENGINE, "From a request's arrival here to its last token here (this process's clock).",
        FIN);
    REQUEST_QUEUE_TIME = histogram("vllm:request_queue_time_seconds", Buckets::RequestLatency,
        ENGINE, "From queued to first scheduled (engine's clock).", FIN);
    REQUEST_PREFILL_TIME = histogram("vllm:request_prefill_time_seconds", Buckets::RequestLatency,
        ENGINE, "From first scheduled to first token (engine's clock).", FIN);
    REQUEST_DECODE_TIME = histogram("vllm:request_decode_time_seconds", Buckets::RequestLatency,
        ENGINE, "From first to last token (engine's clock).", FIN);
    REQUEST_INFERENCE_TIME = histogram("vllm:request_inference_time_seconds",
        Buckets::RequestLatency, ENGINE,
        "From first scheduled to last token (engine's clock).", FIN);
    ESTIMATED_FLOPS = counter("vllm:estimated_flops_per_gpu_total", ENGINE,
        "Estimated floating-point operations.", "needs an engine that estimates");
    ESTIMATED_READ_BYTES = counter("vllm:estimated_read_bytes_per_gpu_total", ENGINE,
        "Estimated bytes read.", "needs an engine that estimates");
    ESTIMATED_WRITE_BYTES = counter("vllm:estimated_write_bytes_per_gpu_total", ENGINE,
        "Estimated bytes written.", "needs an engine that estimates");

    HTTP_REQUESTS = counter("http_requests_total", &["method", "status", "handler"],
        "HTTP requests by method, class of status (2xx, 4xx, …) and route.", "each answer");
    HTTP_REQUEST_SIZE = summary("http_request_size_bytes", &["handler"],
        "Bytes of request bodies by route.", "each answer");
    HTTP_RESPONSE_SIZE = summary("http_response_size_bytes", &["handler"],
        "Bytes of answers by route.", "each answer");
    HTTP_DURATION = histogram("http_request_duration_seconds", Buckets::HttpDuration,
        &["method", "handler"], "Time to answer by method and route.", "each answer");
    HTTP_DURATION_HIGHR = histogram("http_request_duration_highr_seconds",
        Buckets::HttpDurationHighResolution, &[],
        "Time to answer, all routes together, in fine steps.", "each answer");

    GRPC_STARTED = counter("grpc_server_started_total", GRPC,
        "gRPC calls by method whose head was read.", "each call");
    GRPC_HANDLED = counter("grpc_server_handled_total",
        &["grpc_type", "grpc_service", "grpc_method", "grpc_code"],
        "gRPC calls by method and code, health checks and refusals included; Canceled where the \
         client left.", "each call's end");
    GRPC_HANDLING = histogram("grpc_server_handling_seconds", Buckets::HttpDurationHighResolution,
        GRPC, "From a gRPC call's head to its end, by method.", "each call's end");

    CORE_UP = gauge("pawl:core_up", &["engine"],
        "1 while the core serves, 0 while it is away, stops, hangs or has not told its model.",
        "each change").across(Across::Greatest);
    STATS_AGE = gauge("pawl:stats_age_seconds", &["engine"],
        "Time since scheduler stats last came; since the start before the first ones.",
        "computed at each scrape").across(Across::Least);
    CORE_SESSIONS = counter("pawl:core_sessions_total", &["engine"],
        "Times a core has joined.", "each join");
    FRAMES = counter("pawl:frames_total", &["kind"],
        "Messages from the core by kind.", "each message");
    FRAME_BYTES = counter("pawl:frame_bytes_total", &["kind"],
        "Bytes of messages from the core by kind.", "each message");
    DECODE_ERRORS = counter("pawl:decode_errors_total", &["kind"],
        "Messages from the core that could not be read, by what was wrong.", "each such message");
    WIRE_VIOLATIONS = counter("pawl:wire_violations_total", &["kind"],
        "Connections over tcp that were closed because their peer broke ZMTP's rules or a bound, \
         by which (docs/wire.md).", "each such connection, seen at each scrape");
    UNKNOWN_REQUEST_OUTPUTS = counter("pawl:unknown_request_outputs_total", &["engine"],
        "Outputs for requests that have already ended here, dropped.", "each such output");
    STEP_PHASE = histogram("pawl:step_phase_seconds", Buckets::StepPhase, &["engine", "phase"],
        "Parts of the engine's steps that carried outputs for this frontend.",
        "each frame with outputs and phases");
    SCHEDULER_PREEMPTIONS = counter("pawl:scheduler_preemptions_total", &["engine"],
        "Preemptions told in scheduler stats: also those of requests that end without a \
         further output.", STEP);
    REQUESTS_IN_FLIGHT = gauge("pawl:requests_in_flight", &[],
        "Choices of requests that are open in the core.", "computed at each scrape")
        .across(Across::Sum);
    SLOW_READER_ABORTS = counter("pawl:slow_reader_aborts_total", &[],
        "Requests aborted because their client did not read on.", "each such abort");
    NEGATIVE_INTERVALS = counter("pawl:negative_intervals_total", &["engine"],
        "Intervals that came out negative (stamps out of order) and were taken as 0: \
         an internal error.", "each such interval");
    HTTP_STARTED = counter("pawl:http_requests_started_total", &[],
        "HTTP requests whose head was read, also those that http_requests_total leaves out \
         (probes and the page itself).", "each request");
    RECORDING = gauge("pawl:recording", &[],
        "1 while anything is recorded, 0 with --disable-log-stats or after the switch.",
        "each switch").across(Across::Greatest);

    PROCESS_CPU = process("process_cpu_seconds_total", Kind::ProcessCounter,
        "CPU time of this process.");
    PROCESS_MAX_FDS = process("process_max_fds", Kind::ProcessGauge,
        "Descriptors this process may open.");
    PROCESS_OPEN_FDS = process("process_open_fds", Kind::ProcessGauge,
        "Descriptors this process has open.");
    PROCESS_RESIDENT = process("process_resident_memory_bytes", Kind::ProcessGauge,
        "Resident memory of this process.");
    PROCESS_START_TIME = process("process_start_time_seconds", Kind::ProcessGauge,
        "When this process started, seconds since 1970.")
        .across(Across::Least);
    PROCESS_THREADS = process("process_threads", Kind::ProcessGauge,
        "Threads of this process.");
    PROCESS_VIRTUAL = process("process_virtual_memory_bytes", Kind::ProcessGauge,
        "Virtual memory of this process.");
}
