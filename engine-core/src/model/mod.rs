//! Models: what is computed, in which order, as programs of device operations.
//!
//! A model file names its architecture; each architecture is a file here that reads its
//! hyper-parameters, lists the weights it needs and records two programs: the *body*, over all
//! tokens of a step up to the last hidden state, and the *head*, over only those rows whose logits
//! are wanted. No kernel and no layout is known here.

mod hyper;
mod llama;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use pawl_shared::model_card::{GgufFile, ModelError};

use crate::device::{AttentionSpec, Program, RopeSpec, TensorId, TensorTable, WeightSource};
pub use hyper::Hyper;

/// A model, recorded and not yet on a device.
#[derive(Debug)]
pub struct ModelPlan<'a> {
    /// Its sizes.
    pub hyper: Hyper,
    /// In the order of their use; programs name them by index.
    pub weights: Vec<WeightSource<'a>>,
    /// Activations that the programs name.
    pub tensors: TensorTable,
    /// Shape of attention.
    pub attention: AttentionSpec,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Tokens to hidden states, which stay on the device.
    pub body: Program,
    /// Rows taken of the hidden states to logits.
    pub head: Program,
    /// `[vocab_size]` for each row taken.
    pub logits: TensorId,
}

/// Why a file cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file contradicts itself or its format.
    #[error(transparent)]
    File(#[from] ModelError),
    /// No such architecture.
    #[error("the file's architecture is {found:?}; this version runs {known}")]
    Architecture {
        /// What the file says.
        found: String,
        /// What there is.
        known: String,
    },
    /// A hyper-parameter that the model code cannot honour.
    #[error("{key} is {found}, but {need}")]
    Hyper {
        /// The metadata key.
        key: String,
        /// What the file says.
        found: String,
        /// What would do.
        need: String,
    },
    /// Tensors that the architecture needs.
    #[error("the file lacks the tensors {names}; it is not a whole {architecture} model")]
    MissingTensors {
        /// All of them.
        names: String,
        /// Which.
        architecture: String,
    },
    /// Tensors that nothing here reads: the model would compute something else.
    #[error("the file has tensors that a {architecture} model does not use: {names}")]
    UnknownTensors {
        /// All of them.
        names: String,
        /// Which.
        architecture: String,
    },
    /// A tensor of another shape.
    #[error("tensor {name} has shape {found:?}, but the hyper-parameters say {need:?}")]
    TensorShape {
        /// Which.
        name: String,
        /// Innermost dimension first.
        found: Vec<u64>,
        /// Innermost dimension first.
        need: Vec<u64>,
    },
}

/// Records the model of `file`.
///
/// # Errors
/// [`PlanError`], naming the key or the tensor.
pub fn plan(file: &GgufFile) -> Result<ModelPlan<'_>, PlanError> {
    let architecture = file
        .text("general.architecture")?
        .ok_or_else(|| GgufFile::missing("general.architecture"))?;
    match architecture {
        "llama" => llama::plan(file),
        found => {
            Err(PlanError::Architecture { found: found.to_owned(), known: "llama".to_owned() })
        }
    }
}
