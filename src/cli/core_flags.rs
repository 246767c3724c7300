//! Flags of the engine-core, also taken by `serve`, which passes them on.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::units::{Bytes, Count};

/// `--runner`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunnerKind {
    /// A model on a device
    #[default]
    Model,
    /// Made-up tokens and settable step time: no model, no device
    Mock,
}

/// `--device`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// A GPU, if there is one, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// This Vulkan adapter, or the best there is.
    Vulkan(Option<usize>),
}

impl FromStr for DeviceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "vulkan" => Ok(Self::Vulkan(None)),
            _ => {
                let index = text.strip_prefix("vulkan:").and_then(|index| index.parse().ok());
                index.map(|index| Self::Vulkan(Some(index))).ok_or_else(|| {
                    "write auto, cpu, vulkan, or vulkan:0 for the first adapter that `pawl doctor` \
                     lists"
                        .into()
                })
            }
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Vulkan(None) => f.write_str("vulkan"),
            Self::Vulkan(Some(index)) => write!(f, "vulkan:{index}"),
        }
    }
}

impl Serialize for DeviceKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// `--scheduling-policy`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulingPolicy {
    /// In order of arrival
    #[default]
    Fcfs,
    /// By (priority, arrival), smaller first
    Priority,
}

/// `--kv-cache-dtype`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvCacheDtype {
    /// f16
    #[default]
    Auto,
    F16,
    Bf16,
    F32,
    /// Eight bits, with a scale for each head and token.
    Int8,
}

impl From<KvCacheDtype> for pawl_engine_core::runner::cpu::KvCacheDtype {
    fn from(flag: KvCacheDtype) -> Self {
        match flag {
            KvCacheDtype::Auto => Self::Auto,
            KvCacheDtype::F16 => Self::F16,
            KvCacheDtype::Bf16 => Self::BF16,
            KvCacheDtype::F32 => Self::F32,
            KvCacheDtype::Int8 => Self::Int8,
        }
    }
}

#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CoreFlags {
    /// What runs the steps
    #[arg(long, value_enum, default_value_t, env = "PAWL_RUNNER", help_heading = "Model")]
    pub runner: RunnerKind,
    /// Device the model runs on: cpu, vulkan or vulkan:INDEX, or auto, which is a GPU if there is
    /// one
    #[arg(
        long,
        value_name = "DEVICE",
        default_value_t,
        env = "PAWL_DEVICE",
        help_heading = "Model"
    )]
    pub device: DeviceKind,
    /// Longest sequence, prompt and output together; auto or -1 is the model's own [default: auto]
    #[arg(long, value_name = "TOKENS", env = "PAWL_MAX_MODEL_LEN", help_heading = "Model",
          value_parser = model_len)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<Count>,
    /// Seed for requests that bring none [default: drawn at start]
    #[arg(long, env = "PAWL_SEED", help_heading = "Model", value_parser = seed)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Instruction set of the CPU kernels: scalar, avx2 or avx512 [default: the best there is]
    #[arg(long, value_name = "ISA", env = "PAWL_CPU_ISA", help_heading = "Model",
          value_parser = ["scalar", "avx2", "avx512"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_isa: Option<String>,
    /// Compute threads [default: one for each physical core that this process may use]
    #[arg(long, env = "PAWL_THREADS", help_heading = "Model", value_parser = threads)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,

    /// Type of the cached keys and values
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "PAWL_KV_CACHE_DTYPE",
        help_heading = "KV cache"
    )]
    pub kv_cache_dtype: KvCacheDtype,
    /// Memory for cached keys and values, as 2GiB [default: enough for a few full sequences]
    #[arg(
        long,
        value_name = "BYTES",
        env = "PAWL_KV_CACHE_MEMORY_BYTES",
        help_heading = "KV cache"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Share of a GPU's memory for weights, activations and KV cache; nothing on a CPU
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 0.9,
        env = "PAWL_GPU_MEMORY_UTILIZATION",
        help_heading = "KV cache",
        value_parser = whole_share
    )]
    pub gpu_memory_utilization: f64,
    /// Number of KV blocks, instead of a size in bytes
    #[arg(
        long,
        value_name = "BLOCKS",
        env = "PAWL_NUM_GPU_BLOCKS_OVERRIDE",
        help_heading = "KV cache"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_gpu_blocks_override: Option<u32>,
    /// Tokens a KV block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, env = "PAWL_BLOCK_SIZE",
          help_heading = "KV cache", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub block_size: u32,
    /// Reuse the KV blocks of equal prompt beginnings [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", overrides_with = "no_enable_prefix_caching",
          env = "PAWL_ENABLE_PREFIX_CACHING", help_heading = "KV cache")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_prefix_caching: Option<bool>,
    /// Compute every prompt anew
    #[arg(long, overrides_with = "enable_prefix_caching", help_heading = "KV cache")]
    #[serde(skip)]
    pub no_enable_prefix_caching: bool,

    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 128, env = "PAWL_MAX_NUM_SEQS",
          help_heading = "Scheduler", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_seqs: u32,
    /// Token budget of a step
    #[arg(
        long,
        value_name = "TOKENS",
        default_value = "2048",
        env = "PAWL_MAX_NUM_BATCHED_TOKENS",
        help_heading = "Scheduler"
    )]
    pub max_num_batched_tokens: Count,
    /// A step's token budget is also capped so that it takes about this long, by measured speed;
    /// 0 is no cap
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 500,
        env = "PAWL_MAX_STEP_MS",
        help_heading = "Scheduler"
    )]
    pub max_step_ms: u64,
    /// The same while other requests are there, so that streams go on beside long prompts: about
    /// this long, or twice what the tokens of the running requests take; 0 leaves --max-step-ms
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 50,
        env = "PAWL_MAX_SHARED_STEP_MS",
        help_heading = "Scheduler"
    )]
    pub max_shared_step_ms: u64,
    /// Most prompt tokens of one request in a step while others run [default: no such cap]
    #[arg(
        long,
        value_name = "TOKENS",
        env = "PAWL_LONG_PREFILL_TOKEN_THRESHOLD",
        help_heading = "Scheduler"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_prefill_token_threshold: Option<Count>,
    /// Order of waiting requests
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "PAWL_SCHEDULING_POLICY",
        help_heading = "Scheduler"
    )]
    pub scheduling_policy: SchedulingPolicy,
    /// Cut long prompts into chunks [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", overrides_with = "no_enable_chunked_prefill",
          env = "PAWL_ENABLE_CHUNKED_PREFILL", help_heading = "Scheduler")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_chunked_prefill: Option<bool>,
    /// Run a prompt in one step, or not at all
    #[arg(long, overrides_with = "enable_chunked_prefill", help_heading = "Scheduler")]
    #[serde(skip)]
    pub no_enable_chunked_prefill: bool,
    /// Plan a step while the one before runs: two in flight [default: where the runner can]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", overrides_with = "no_async_scheduling",
          env = "PAWL_ASYNC_SCHEDULING", help_heading = "Scheduler")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub async_scheduling: Option<bool>,
    /// One step at a time
    #[arg(long, overrides_with = "async_scheduling", help_heading = "Scheduler")]
    #[serde(skip)]
    pub no_async_scheduling: bool,
    /// Share of KV blocks kept free when a request is admitted beside others, 0 to 1
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 0.0,
        env = "PAWL_WATERMARK",
        help_heading = "Scheduler",
        value_parser = share
    )]
    pub watermark: f64,

    /// Time a mock step takes, besides its tokens
    #[arg(long, value_name = "MS", default_value_t = 0.0, env = "PAWL_MOCK_STEP_MS",
          help_heading = "Mock runner", value_parser = mock_time)]
    pub mock_step_ms: f64,
    /// Time each token adds to a mock step
    #[arg(long, value_name = "US", default_value_t = 0.0, env = "PAWL_MOCK_TOKEN_US",
          help_heading = "Mock runner", value_parser = mock_time)]
    pub mock_token_us: f64,
    /// Token ids that every mock answer goes round in, as 300,301,302 [default: made up]
    #[arg(long, value_name = "IDS", value_delimiter = ',', num_args = 1..,
          env = "PAWL_MOCK_SCRIPT", help_heading = "Mock runner")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mock_script: Vec<u32>,
    /// Mock answers end with EOS at this output token, counted from 0
    #[arg(long, value_name = "N", env = "PAWL_MOCK_EOS_AT", help_heading = "Mock runner")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mock_eos_at: Option<u32>,
    /// The mock device fails in this step
    #[arg(long, value_name = "STEP", env = "PAWL_MOCK_FAIL_AT", help_heading = "Mock runner")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mock_fail_at: Option<u64>,
}

/// `--max-model-len auto`, as vLLM takes it.
const MODELS_OWN: Count = Count(0);

fn model_len(text: &str) -> Result<Count, String> {
    match text {
        "auto" | "-1" => Ok(MODELS_OWN),
        _ => match text.parse::<Count>() {
            Ok(MODELS_OWN) => Err("write at least 2 tokens, or auto for the model's own".into()),
            parsed => parsed,
        },
    }
}

fn share(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..1.0).contains(value));
    value.ok_or_else(|| "write a number from 0 to below 1".into())
}

/// A time of the mock runner, in milliseconds or microseconds: what tests call a hang is shorter.
fn mock_time(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=1e7).contains(value));
    value.ok_or_else(|| "write a number from 0 to 10000000".into())
}

/// `--seed`
fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| {
        "write a whole number from 0 to 18446744073709551615, or leave it out for one that is drawn"
            .to_owned()
    })
}

fn whole_share(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "write a number above 0, up to 1".into())
}

/// Compute threads at most: no machine has more processors that would help one model, and each
/// thread costs time at the start and at every step.
const THREADS_MAX: usize = 1024;

/// `--threads`
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads) if (1..=THREADS_MAX).contains(&threads) => Ok(threads),
        _ => Err(format!(
            "write a number from 1 to {THREADS_MAX}, or leave it out for one thread a physical core"
        )),
    }
}

/// Says so where there are more threads than processors: they only wait for one another.
pub fn warn_of_threads(threads: Option<usize>) {
    let processors = pawl_engine_core::device::cpu::allowed_cores().len();
    if let Some(threads) = threads.filter(|threads| processors > 0 && *threads > processors) {
        tracing::warn!(
            "--threads {threads} is more than the {processors} processors that this process may \
             use: steps will be slow; lower it, or leave it out"
        );
    }
}

impl CoreFlags {
    /// Folds each `--no-x` into its `x`, so that there is one place to read it from, and a length
    /// that is the model's own into none.
    pub fn fold_negations(&mut self) {
        self.max_model_len = self.max_model_len.filter(|len| *len != MODELS_OWN);
        for (value, negated) in [
            (&mut self.enable_prefix_caching, &mut self.no_enable_prefix_caching),
            (&mut self.enable_chunked_prefill, &mut self.no_enable_chunked_prefill),
            (&mut self.async_scheduling, &mut self.no_async_scheduling),
        ] {
            if std::mem::take(negated) {
                *value = Some(false);
            }
        }
    }

    /// Steps in flight; `None` leaves it to what the runner can do.
    pub fn depth(&self) -> Option<u32> {
        self.async_scheduling.map(|overlap| if overlap { 2 } else { 1 })
    }
}
