//! Tiny random models for tests: files made in memory.

use pawl_shared::model_card::testing::GgufWriter;
use pawl_shared::model_card::{GgmlType, GgufFile};

use crate::device::cpu::testing::Random;

/// Shape of a tiny Llama model.
#[derive(Clone, Copy, Debug)]
pub struct TinyLlama {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Deliberately not `hidden / heads`.
    pub head_dim: usize,
    pub feed_forward: usize,
    pub vocab_size: usize,
    pub context_len: u32,
    pub dtype: GgmlType,
    pub tied: bool,
}

impl Default for TinyLlama {
    fn default() -> Self {
        Self {
            layers: 2,
            hidden: 96,
            heads: 6,
            kv_heads: 2,
            head_dim: 32,
            feed_forward: 160,
            vocab_size: 203,
            context_len: 1024,
            dtype: GgmlType::Q4_1,
            tied: true,
        }
    }
}

impl TinyLlama {
    /// The file's writer, to be changed by tests.
    pub fn writer(&self) -> GgufWriter {
        let Self { hidden, heads, kv_heads, head_dim, feed_forward, vocab_size, .. } = *self;
        let mut writer = GgufWriter::new()
            .text("general.architecture", "llama")
            .u32("llama.block_count", self.layers as u32)
            .u32("llama.context_length", self.context_len)
            .u32("llama.embedding_length", hidden as u32)
            .u32("llama.feed_forward_length", feed_forward as u32)
            .u32("llama.attention.head_count", heads as u32)
            .u32("llama.attention.head_count_kv", kv_heads as u32)
            .u32("llama.attention.key_length", head_dim as u32)
            .u32("llama.attention.value_length", head_dim as u32)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .f32("llama.rope.freq_base", 100_000.0)
            .u32("llama.rope.dimension_count", head_dim as u32);
        let mut random = Random(42);
        let mut matrix = |writer: GgufWriter, name: &str, rows: usize, cols: usize, dtype| {
            let data = random.weights(dtype, rows, cols);
            writer.tensor(name, dtype, &[cols as u64, rows as u64], data)
        };
        // Large enough for the logits to be apart.
        writer = matrix(writer, "token_embd.weight", vocab_size, hidden, GgmlType::Q8_0);
        if !self.tied {
            writer = matrix(writer, "output.weight", vocab_size, hidden, self.dtype);
        }
        for layer in 0..self.layers {
            let (q, kv) = (heads * head_dim, kv_heads * head_dim);
            for (part, rows, cols) in [
                ("attn_q", q, hidden),
                ("attn_k", kv, hidden),
                ("attn_v", kv, hidden),
                ("attn_output", hidden, q),
                ("ffn_gate", feed_forward, hidden),
                ("ffn_up", feed_forward, hidden),
                ("ffn_down", hidden, feed_forward),
            ] {
                let name = format!("blk.{layer}.{part}.weight");
                writer = matrix(writer, &name, rows, cols, self.dtype);
            }
            for part in ["attn_norm", "ffn_norm"] {
                let name = format!("blk.{layer}.{part}.weight");
                writer = writer.f32_tensor(&name, &[hidden as u64], &vec![1.0; hidden]);
            }
        }
        writer.f32_tensor("output_norm.weight", &[hidden as u64], &vec![3.0; hidden])
    }

    /// The file.
    pub fn file(&self) -> GgufFile {
        GgufFile::from_bytes(self.writer().bytes()).unwrap()
    }
}
