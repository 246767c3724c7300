//! What a model file says of itself, as lines to read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use pawl_shared::model_card::{GgufFile, ModelCard};

/// The card, the metadata and the tensors of the file at `path`.
pub(super) fn describe(path: &Path, every_tensor: bool) -> Result<String> {
    let file = GgufFile::open(path)?;
    let mut out = String::new();
    writeln!(out, "file            {}", path.display())?;
    writeln!(out, "size            {} bytes, GGUF version {}", file.len(), file.version())?;
    // A file whose tokenizer is unknown can still be looked at.
    match ModelCard::from_gguf(&file) {
        Ok(card) => {
            describe_card(&card, &mut out)?;
            if let Err(error) = check_runs(&file) {
                writeln!(out, "cannot serve    {error}")?;
            }
        }
        Err(error) => writeln!(out, "cannot serve    {error}")?,
    }
    let mut kinds: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for tensor in file.tensors() {
        let kind = kinds.entry(tensor.dtype.name()).or_default();
        *kind = (kind.0 + 1, kind.1 + tensor.elements());
    }
    for (name, (tensors, elements)) in kinds {
        writeln!(out, "tensors         {tensors} of {name}, {elements} elements")?;
    }
    for key in file.metadata_keys() {
        if let Some(value) = file.metadata(key) {
            writeln!(out, "  {key} = {value}")?;
        }
    }
    if every_tensor {
        for tensor in file.tensors() {
            let (name, dtype) = (&tensor.name, tensor.dtype);
            writeln!(out, "  {name} {dtype} {:?} {} bytes", tensor.shape, tensor.bytes_len())?;
        }
    }
    Ok(out)
}

/// Whether the engine can run it: its architecture, its tensors and their encodings.
fn check_runs(file: &GgufFile) -> Result<()> {
    let plan = pawl_engine_core::model::plan(file)?;
    Ok(pawl_engine_core::device::cpu::check_weights(&plan.weights)?)
}

fn describe_card(card: &ModelCard, out: &mut String) -> std::fmt::Result {
    writeln!(out, "names           {}", card.names.join(", "))?;
    writeln!(out, "architecture    {}", card.architecture)?;
    writeln!(out, "vocabulary      {} tokens", card.vocab_size)?;
    writeln!(out, "context         {} tokens", card.max_model_len)?;
    let ends = card.eos_token_id.into_iter().chain(card.stop_token_ids.iter().copied());
    let ends: Vec<String> = ends.map(|id| id.to_string()).collect();
    writeln!(out, "ends at         token {}", ends.join(", "))?;
    let template = if card.chat_template.is_some() { "yes" } else { "no" };
    writeln!(out, "chat template   {template}")
}
