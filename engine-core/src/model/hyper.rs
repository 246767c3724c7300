//! Hyper-parameters, as a file's metadata gives them.

use pawl_shared::model_card::GgufFile;

use super::PlanError;

/// Sizes of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyper {
    /// Layers.
    pub layers: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Width of the feed-forward block.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values in a head; not always `hidden / heads`.
    pub head_dim: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Radians a position of each rotated pair; see [`crate::device::RopeSpec`].
    pub rope_frequencies: Vec<f32>,
    /// Longest sequence that the model was made for.
    pub context_len: usize,
    /// Token ids are below this.
    pub vocab_size: usize,
}

impl Hyper {
    /// Reads the keys below `architecture`; `vocab_size` is the embedding table's.
    ///
    /// # Errors
    /// [`PlanError`] for a missing key, and for values that contradict each other.
    pub fn read(file: &GgufFile, architecture: &str, vocab_size: usize) -> Result<Self, PlanError> {
        let key = |name: &str| format!("{architecture}.{name}");
        let optional = |name: &str| -> Result<Option<usize>, PlanError> {
            let value = file.u32(&key(name))?;
            match value {
                Some(0) => Err(PlanError::Hyper {
                    key: key(name),
                    found: "0".to_owned(),
                    need: "a model has at least 1".to_owned(),
                }),
                value => Ok(value.map(|value| value as usize)),
            }
        };
        let required = |name: &str| -> Result<usize, PlanError> {
            Ok(optional(name)?.ok_or_else(|| GgufFile::missing(&key(name)))?)
        };
        let hidden = required("embedding_length")?;
        let heads = required("attention.head_count")?;
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(PlanError::Hyper {
                key: key("attention.head_count_kv"),
                found: kv_heads.to_string(),
                need: format!("the {heads} query heads must be a multiple of it"),
            });
        }
        let head_dim = match optional("attention.key_length")? {
            Some(explicit) => explicit,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(GgufFile::missing(&key("attention.key_length")).into()),
        };
        let value_dim = optional("attention.value_length")?.unwrap_or(head_dim);
        if value_dim != head_dim {
            return Err(PlanError::Hyper {
                key: key("attention.value_length"),
                found: value_dim.to_string(),
                need: format!("it must equal the key length {head_dim}"),
            });
        }
        let norm_eps = file
            .f32(&key("attention.layer_norm_rms_epsilon"))?
            .ok_or_else(|| GgufFile::missing(&key("attention.layer_norm_rms_epsilon")))?;
        Ok(Self {
            layers: required("block_count")?,
            hidden,
            feed_forward: required("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            norm_eps,
            rope_frequencies: rope_frequencies(file, architecture, head_dim)?,
            context_len: required("context_length")?,
            vocab_size,
        })
    }
}

fn rope_frequencies(
    file: &GgufFile,
    architecture: &str,
    head_dim: usize,
) -> Result<Vec<f32>, PlanError> {
    let key = |name: &str| format!("{architecture}.rope.{name}");
    // The format defines this default.
    let theta = f64::from(file.f32(&key("freq_base"))?.unwrap_or(10_000.0));
    let rotated = file.u32(&key("dimension_count"))?.map_or(head_dim, |n| n as usize);
    if rotated == 0 || rotated % 2 != 0 || rotated > head_dim {
        return Err(PlanError::Hyper {
            key: key("dimension_count"),
            found: rotated.to_string(),
            need: format!("an even number up to the head's {head_dim} can be rotated"),
        });
    }
    let factor = match file.text(&key("scaling.type"))? {
        None | Some("none") => 1.0,
        Some("linear") => f64::from(file.f32(&key("scaling.factor"))?.unwrap_or(1.0)),
        Some(other) => {
            return Err(PlanError::Hyper {
                key: key("scaling.type"),
                found: other.to_owned(),
                need: "only none and linear are known".to_owned(),
            });
        }
    };
    let mut frequencies: Vec<f64> = (0..rotated / 2)
        .map(|pair| theta.powf(-2.0 * pair as f64 / rotated as f64) / factor)
        .collect();
    if let Some(tensor) = file.tensor("rope_freqs.weight") {
        let data = file.data(tensor)?;
        if data.len() != 4 * frequencies.len() {
            return Err(PlanError::TensorShape {
                name: tensor.name.clone(),
                found: tensor.shape.clone(),
                need: vec![frequencies.len() as u64],
            });
        }
        for (frequency, factor) in frequencies.iter_mut().zip(data.chunks_exact(4)) {
            *frequency /=
                f64::from(f32::from_le_bytes([factor[0], factor[1], factor[2], factor[3]]));
        }
    }
    Ok(frequencies.into_iter().map(|frequency| frequency as f32).collect())
}
