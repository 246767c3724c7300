//! Settings of the CPU runner, and the sizes that follow from them and from the machine.

use crate::device::cpu::{KvDtype, allowed_cores, block_bytes, physical_cores};
use crate::device::{AttentionSpec, DeviceError};
use crate::model::{Hyper, PlanError};

/// `--kv-cache-dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvCacheDtype {
    /// Half floats: what models are trained for, and half the memory of f32.
    #[default]
    Auto,
    /// Half floats.
    F16,
    /// bfloat16
    BF16,
    /// As computed.
    F32,
    /// Integers of eight bits, with a scale for each head and token.
    Int8,
}

impl std::str::FromStr for KvCacheDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "f16" | "float16" => Ok(Self::F16),
            "bf16" | "bfloat16" => Ok(Self::BF16),
            "f32" | "float32" => Ok(Self::F32),
            "int8" => Ok(Self::Int8),
            other => Err(format!(
                "kv-cache-dtype {other:?} is unknown; choose auto, float16, bfloat16, float32 or \
                 int8"
            )),
        }
    }
}

/// Settings; the default is what suits the machine and the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute. Default: physical cores that this process may use.
    pub threads: Option<usize>,
    /// Encoding of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Tokens a block; a multiple of 16.
    pub block_size: u32,
    /// Blocks, instead of what the memory gives; block 0, which is never used, included.
    pub num_blocks: Option<u32>,
    /// Memory for the KV cache. Default: see [`KV_SEQUENCES_DEFAULT`].
    pub kv_cache_bytes: Option<u64>,
    /// Longest sequence. Default: the model's.
    pub max_model_len: Option<u32>,
    /// `scalar`, `avx2` or `avx512`. Default: `PAWL_CPU_ISA`, else the best of this machine.
    pub isa: Option<String>,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self {
            threads: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            block_size: 16,
            num_blocks: None,
            kv_cache_bytes: None,
            max_model_len: None,
            isa: None,
        }
    }
}

/// Without a setting, the KV cache holds this many sequences of full length, or as many as fit in
/// [`FREE_MEMORY_SHARE`] of the memory that is free now. Memory is taken as blocks are first used.
pub const KV_SEQUENCES_DEFAULT: u64 = 8;
/// See [`KV_SEQUENCES_DEFAULT`].
pub const FREE_MEMORY_SHARE: f64 = 0.25;

/// Why a runner could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The model.
    #[error(transparent)]
    Model(#[from] PlanError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A setting; the text names it and the way out.
    #[error("{0}")]
    Setting(String),
}

/// What follows from the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub kv_dtype: KvDtype,
    pub block_size: u32,
    pub num_blocks: u32,
    pub max_model_len: u32,
}

impl CpuConfig {
    /// Threads that compute.
    #[must_use]
    pub fn threads(&self) -> usize {
        let cores = || physical_cores(&allowed_cores()).len();
        self.threads.unwrap_or_else(cores).max(1)
    }

    pub(super) fn sizes(
        &self,
        hyper: &Hyper,
        attention: &AttentionSpec,
    ) -> Result<Sizes, LoadError> {
        let kv_dtype = match self.kv_cache_dtype {
            KvCacheDtype::Auto | KvCacheDtype::F16 => KvDtype::F16,
            KvCacheDtype::BF16 => KvDtype::BF16,
            KvCacheDtype::F32 => KvDtype::F32,
            KvCacheDtype::Int8 => KvDtype::Int8,
        };
        let context_len = u32::try_from(hyper.context_len).unwrap_or(u32::MAX);
        let max_model_len = self.max_model_len.unwrap_or(context_len);
        if max_model_len == 0 || max_model_len > context_len {
            return Err(LoadError::Setting(format!(
                "--max-model-len is {max_model_len}, but the model was made for up to \
                 {context_len} tokens; choose 1 to {context_len}"
            )));
        }
        let block_size = self.block_size.max(1);
        // One more block than the tokens need: block 0 is never handed out.
        let blocks_for = |tokens: u64| tokens.div_ceil(u64::from(block_size)) + 1;
        let bytes_of_block = block_bytes(attention, block_size as usize, kv_dtype) as u64;
        let need = blocks_for(u64::from(max_model_len));
        let blocks = match (self.num_blocks, self.kv_cache_bytes) {
            (Some(blocks), _) => u64::from(blocks),
            (None, Some(bytes)) => bytes / bytes_of_block,
            (None, None) => {
                let wanted = blocks_for(KV_SEQUENCES_DEFAULT * u64::from(max_model_len));
                let free = (free_memory_bytes() as f64 * FREE_MEMORY_SHARE) as u64;
                wanted.min(free / bytes_of_block)
            }
        };
        if blocks < need {
            return Err(LoadError::Setting(format!(
                "the KV cache has {blocks} blocks of {block_size} tokens ({bytes_of_block} bytes \
                 each), but one sequence of --max-model-len {max_model_len} needs {need}; give it \
                 more memory or lower --max-model-len"
            )));
        }
        let (bytes, free) = (blocks.saturating_mul(bytes_of_block), free_memory_bytes());
        if bytes > free {
            let flag = match self.num_blocks {
                Some(_) => "--num-gpu-blocks-override",
                None => "--kv-cache-memory-bytes",
            };
            return Err(LoadError::Setting(format!(
                "{flag} asks for {} of memory for the KV cache, but {} are free here; lower it, \
                 or leave it out",
                gib(bytes),
                gib(free)
            )));
        }
        let num_blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Ok(Sizes { kv_dtype, block_size, num_blocks, max_model_len })
    }
}

pub(in crate::runner) fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

/// Memory that could be taken now without pushing others out: what the system and, where there is
/// one, the container's limit leave.
pub(in crate::runner) fn free_memory_bytes() -> u64 {
    let read_number =
        |path: &str| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let system = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    });
    let limit = read_number("/sys/fs/cgroup/memory.max")
        .zip(read_number("/sys/fs/cgroup/memory.current"))
        .map(|(max, current)| max.saturating_sub(current));
    system.unwrap_or(1 << 30).min(limit.unwrap_or(u64::MAX))
}
