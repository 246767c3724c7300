//! Settings of the Vulkan runner, and the sizes that follow from them and from the adapter.

use crate::device::cpu::{KvDtype, block_bytes};
use crate::device::vulkan::{AdapterKind, Offer, Wanted, blocks_max};
use crate::model::ModelPlan;
use crate::runner::cpu::LoadError;
use crate::runner::cpu::config::{FREE_MEMORY_SHARE, KV_SEQUENCES_DEFAULT, free_memory_bytes, gib};

/// Settings; the default is what suits the adapter and the model.
#[derive(Clone, Debug, PartialEq)]
pub struct VulkanConfig {
    /// Which adapter.
    pub adapter: Wanted,
    /// Share of the adapter's memory that weights, activations and cache may take.
    pub memory_share: f64,
    /// Tokens a block.
    pub block_size: u32,
    /// Blocks, instead of what the memory gives; block 0, which is never used, included.
    pub num_blocks: Option<u32>,
    /// Memory for the KV cache, instead of what the share leaves.
    pub kv_cache_bytes: Option<u64>,
    /// Longest sequence. Default: the model's.
    pub max_model_len: Option<u32>,
}

impl Default for VulkanConfig {
    fn default() -> Self {
        Self {
            adapter: Wanted::Best,
            memory_share: 0.9,
            block_size: 16,
            num_blocks: None,
            kv_cache_bytes: None,
            max_model_len: None,
        }
    }
}

/// What follows from the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub block_size: u32,
    pub num_blocks: u32,
    pub max_model_len: u32,
}

impl VulkanConfig {
    pub(super) fn sizes(&self, plan: &ModelPlan<'_>, offer: &Offer) -> Result<Sizes, LoadError> {
        let context_len = u32::try_from(plan.hyper.context_len).unwrap_or(u32::MAX);
        let max_model_len = self.max_model_len.unwrap_or(context_len);
        if max_model_len == 0 || max_model_len > context_len {
            return Err(LoadError::Setting(format!(
                "--max-model-len is {max_model_len}, but the model was made for up to \
                 {context_len} tokens; choose 1 to {context_len}"
            )));
        }
        let block_size = self.block_size.max(1);
        let bytes_of_block = block_bytes(&plan.attention, block_size as usize, KvDtype::F16) as u64;
        let weights: u64 = plan.weights.iter().map(|weight| weight.data.len() as u64).sum();
        let left = self.memory_left(offer).saturating_sub(weights);
        // One more block than the tokens need: block 0 is never handed out.
        let blocks_for = |tokens: u64| tokens.div_ceil(u64::from(block_size)) + 1;
        let most = blocks_max(&plan.attention, block_size as usize, offer);
        let blocks = match (self.num_blocks, self.kv_cache_bytes) {
            (Some(blocks), _) => u64::from(blocks),
            (None, Some(bytes)) => bytes / bytes_of_block,
            (None, None) => {
                let shared = !matches!(offer.kind, AdapterKind::Discrete | AdapterKind::Virtual);
                let wanted = blocks_for(KV_SEQUENCES_DEFAULT * u64::from(max_model_len));
                let fit = (left / bytes_of_block).min(most);
                // What the processor shares is left to others where it is not needed.
                if shared { fit.min(wanted) } else { fit }
            }
        };
        let need = blocks_for(u64::from(max_model_len));
        if blocks < need {
            return Err(LoadError::Setting(format!(
                "the KV cache has {blocks} blocks of {block_size} tokens ({bytes_of_block} bytes \
                 each), but one sequence of --max-model-len {max_model_len} needs {need}; give it \
                 more memory (--gpu-memory-utilization, --kv-cache-memory-bytes) or lower \
                 --max-model-len"
            )));
        }
        if blocks > most {
            return Err(LoadError::Setting(format!(
                "the KV cache has {blocks} blocks, but this adapter's kernels can see {most} of a \
                 layer; lower --num-gpu-blocks-override or --kv-cache-memory-bytes"
            )));
        }
        if blocks.saturating_mul(bytes_of_block) > left {
            return Err(LoadError::Setting(format!(
                "the KV cache asks for {}, but the weights leave {} of the adapter's memory; \
                 lower --num-gpu-blocks-override or --kv-cache-memory-bytes, or leave them out",
                gib(blocks.saturating_mul(bytes_of_block)),
                gib(left)
            )));
        }
        let num_blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Ok(Sizes { block_size, num_blocks, max_model_len })
    }

    /// Bytes that the model may take.
    fn memory_left(&self, offer: &Offer) -> u64 {
        let share = (offer.memory_bytes as f64 * self.memory_share) as u64;
        match offer.kind {
            // Its memory is the processor's.
            AdapterKind::Software => {
                share.min((free_memory_bytes() as f64 * FREE_MEMORY_SHARE) as u64)
            }
            _ => share,
        }
    }
}
