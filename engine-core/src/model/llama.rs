//! The Llama family: pre-norm blocks of grouped-query attention with rotary embedding and a gated
//! feed-forward block, no biases unless the file has them. Queries and keys are in the order that
//! GGUF gives this architecture: rotated values are neighbours.

use std::collections::BTreeSet;

use pawl_shared::model_card::GgufFile;

use super::{Hyper, ModelPlan, PlanError};
use crate::device::{
    Activation, AttentionSpec, MatmulPart, Op, Program, RopeSpec, Rows, TensorId, TensorTable,
    WeightId, WeightSource,
};

const ARCHITECTURE: &str = "llama";

/// Collects weights by name, and what is missing or left over.
struct Weights<'a> {
    file: &'a GgufFile,
    sources: Vec<WeightSource<'a>>,
    used: BTreeSet<String>,
    missing: Vec<String>,
}

impl<'a> Weights<'a> {
    /// The tensor `name`, of `shape` innermost first, if the file has it.
    fn optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<WeightId>, PlanError> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        let need: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        if tensor.shape != need {
            let (name, found) = (name.to_owned(), tensor.shape.clone());
            return Err(PlanError::TensorShape { name, found, need });
        }
        self.used.insert(name.to_owned());
        self.sources.push(WeightSource {
            name: name.to_owned(),
            dtype: tensor.dtype,
            rows: shape.get(1).copied().unwrap_or(1),
            cols: shape[0],
            data: self.file.data(tensor)?,
        });
        Ok(Some(WeightId(self.sources.len() - 1)))
    }

    /// The same; a missing one is noted, and all of them reported at the end.
    fn required(&mut self, name: &str, shape: &[usize]) -> Result<WeightId, PlanError> {
        Ok(self.optional(name, shape)?.unwrap_or_else(|| {
            self.missing.push(name.to_owned());
            WeightId(usize::MAX)
        }))
    }

    fn finish(self) -> Result<Vec<WeightSource<'a>>, PlanError> {
        let architecture = ARCHITECTURE.to_owned();
        if !self.missing.is_empty() {
            return Err(PlanError::MissingTensors { names: self.missing.join(", "), architecture });
        }
        // Read with the hyper-parameters.
        let known = |name: &str| self.used.contains(name) || name == "rope_freqs.weight";
        let names: Vec<_> = self.file.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        let unknown: Vec<_> = names.into_iter().filter(|name| !known(name)).collect();
        if !unknown.is_empty() {
            return Err(PlanError::UnknownTensors { names: unknown.join(", "), architecture });
        }
        Ok(self.sources)
    }
}

/// Activations of the body; all layers use the same.
struct Tensors {
    /// `[hidden]`, the residual stream.
    hidden: TensorId,
    /// `[hidden]`
    normed: TensorId,
    /// `[rotated]`
    angles: TensorId,
    /// `[heads · head_dim]`
    q: TensorId,
    /// `[kv_heads · head_dim]`
    k: TensorId,
    /// `[kv_heads · head_dim]`
    v: TensorId,
    /// `[heads · head_dim]`
    attended: TensorId,
    /// `[feed_forward]`
    gate: TensorId,
    /// `[feed_forward]`
    up: TensorId,
}

pub(super) fn plan(file: &GgufFile) -> Result<ModelPlan<'_>, PlanError> {
    let vocab_size = match file.tensor("token_embd.weight") {
        Some(tensor) => tensor.rows() as usize,
        None => 0,
    };
    let hyper = Hyper::read(file, ARCHITECTURE, vocab_size)?;
    if file.u32("llama.expert_count")?.is_some_and(|experts| experts > 0) {
        return Err(PlanError::Hyper {
            key: "llama.expert_count".to_owned(),
            found: "more than 0".to_owned(),
            need: "mixtures of experts are not supported".to_owned(),
        });
    }
    let (hidden, kv_width) = (hyper.hidden, hyper.kv_heads * hyper.head_dim);
    let mut weights =
        Weights { file, sources: Vec::new(), used: BTreeSet::new(), missing: Vec::new() };
    let mut tensors = TensorTable::default();
    let t = Tensors {
        hidden: tensors.add(hidden, Rows::Tokens),
        normed: tensors.add(hidden, Rows::Tokens),
        angles: tensors.add(2 * hyper.rope_frequencies.len(), Rows::Tokens),
        q: tensors.add(hyper.heads * hyper.head_dim, Rows::Tokens),
        k: tensors.add(kv_width, Rows::Tokens),
        v: tensors.add(kv_width, Rows::Tokens),
        attended: tensors.add(hyper.heads * hyper.head_dim, Rows::Tokens),
        gate: tensors.add(hyper.feed_forward, Rows::Tokens),
        up: tensors.add(hyper.feed_forward, Rows::Tokens),
    };
    let taken = tensors.add(hidden, Rows::Taken);
    let taken_normed = tensors.add(hidden, Rows::Taken);
    let logits = tensors.add(vocab_size, Rows::Taken);

    let separate_head = file.tensor("output.weight").is_some();
    // A table that is also the head is laid out as the head: it is read whole at the end of a step.
    let mut table = None;
    if separate_head {
        table = Some(weights.required("token_embd.weight", &[hidden, vocab_size])?);
    }
    let mut ops = Vec::new();
    for layer in 0..hyper.layers {
        record_layer(&mut ops, &mut weights, &hyper, &t, layer)?;
    }
    let norm = weights.required("output_norm.weight", &[hidden])?;
    let head_name = if separate_head { "output.weight" } else { "token_embd.weight" };
    let head = weights.required(head_name, &[hidden, vocab_size])?;
    let table = table.unwrap_or(head);

    let start = [Op::Embed { table, out: t.hidden }, Op::RopeAngles { out: t.angles }];
    let body = Program { rows: Rows::Tokens, ops: start.into_iter().chain(ops).collect() };
    let eps = hyper.norm_eps;
    let head = Program {
        rows: Rows::Taken,
        ops: vec![
            Op::Take { x: t.hidden, out: taken },
            Op::RmsNorm { x: taken, weight: norm, eps, out: taken_normed },
            Op::Matmul {
                x: taken_normed,
                parts: vec![MatmulPart { weight: head, out: logits, add: false }],
            },
        ],
    };
    let attention = AttentionSpec {
        layers: hyper.layers,
        heads: hyper.heads,
        kv_heads: hyper.kv_heads,
        head_dim: hyper.head_dim,
    };
    let rope = RopeSpec { frequencies: hyper.rope_frequencies.clone() };
    let weights = weights.finish()?;
    Ok(ModelPlan { hyper, weights, tensors, attention, rope, body, head, logits })
}

fn record_layer(
    ops: &mut Vec<Op>,
    weights: &mut Weights<'_>,
    hyper: &Hyper,
    t: &Tensors,
    layer: usize,
) -> Result<(), PlanError> {
    let (hidden, eps, head_dim) = (hyper.hidden, hyper.norm_eps, hyper.head_dim);
    let (q_width, kv_width) = (hyper.heads * head_dim, hyper.kv_heads * head_dim);
    let name = |part: &str| format!("blk.{layer}.{part}");
    let weight = name("attn_norm.weight");
    let attn_norm = weights.required(&weight, &[hidden])?;
    let mut parts = Vec::new();
    let mut biases = Vec::new();
    for (part, out, width) in
        [("attn_q", t.q, q_width), ("attn_k", t.k, kv_width), ("attn_v", t.v, kv_width)]
    {
        let weight = weights.required(&name(&format!("{part}.weight")), &[hidden, width])?;
        parts.push(MatmulPart { weight, out, add: false });
        if let Some(bias) = weights.optional(&name(&format!("{part}.bias")), &[width])? {
            biases.push(Op::AddBias { x: out, bias });
        }
    }
    let output = weights.required(&name("attn_output.weight"), &[q_width, hidden])?;
    let ffn_norm = weights.required(&name("ffn_norm.weight"), &[hidden])?;
    let gate = weights.required(&name("ffn_gate.weight"), &[hidden, hyper.feed_forward])?;
    let up = weights.required(&name("ffn_up.weight"), &[hidden, hyper.feed_forward])?;
    let down = weights.required(&name("ffn_down.weight"), &[hyper.feed_forward, hidden])?;

    ops.push(Op::RmsNorm { x: t.hidden, weight: attn_norm, eps, out: t.normed });
    ops.push(Op::Matmul { x: t.normed, parts });
    ops.extend(biases);
    ops.push(Op::Rope { x: t.q, angles: t.angles, head_dim });
    ops.push(Op::Rope { x: t.k, angles: t.angles, head_dim });
    ops.push(Op::KvWrite { layer, k: t.k, v: t.v });
    ops.push(Op::Attention { layer, q: t.q, out: t.attended });
    let residual = |weight| MatmulPart { weight, out: t.hidden, add: true };
    ops.push(Op::Matmul { x: t.attended, parts: vec![residual(output)] });
    ops.push(Op::RmsNorm { x: t.hidden, weight: ffn_norm, eps, out: t.normed });
    let parts = vec![
        MatmulPart { weight: gate, out: t.gate, add: false },
        MatmulPart { weight: up, out: t.up, add: false },
    ];
    ops.push(Op::Matmul { x: t.normed, parts });
    let activation = Activation::Silu;
    // In place: each value depends on its own gate alone.
    ops.push(Op::Gate { activation, gate: t.gate, up: t.up });
    ops.push(Op::Matmul { x: t.gate, parts: vec![residual(down)] });
    Ok(())
}
