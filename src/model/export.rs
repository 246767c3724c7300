//! The folder of small files that vLLM's frontends want beside an engine that runs elsewhere: how
//! to tokenise, how to template, where an answer ends. There are no weights in it.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use anyhow::{Context, Result, bail};
use pawl_shared::model_card::{GgufFile, ModelCard, ModelError};
use pawl_shared::tokenizer::Tokenizer;
use serde_json::{Map, Value as Json, json};

/// Names and texts, in the order in which they are written.
type Files = [(&'static str, String); 4];

/// Writes the files of the model at `model` into `folder`, which is made where it is missing and
/// must be empty; the names of the files.
///
/// # Errors
/// A model whose tokenizer or architecture cannot be put in these files, a folder with something in
/// it, and whatever the system refuses, naming the path.
pub(super) fn export(model: &Path, folder: &Path) -> Result<Vec<&'static str>> {
    let file = GgufFile::open(model)?;
    let files = files(&file).with_context(|| format!("cannot export {}", model.display()))?;
    write_all(folder, &files)?;
    Ok(files.iter().map(|(name, _)| *name).collect())
}

/// All of them or, where one cannot be written, none.
fn write_all(folder: &Path, files: &[(&str, String)]) -> Result<()> {
    let made = make_folder(folder)?;
    for (index, (name, text)) in files.iter().enumerate() {
        if let Err(error) = write_new(&folder.join(name), text) {
            // What goes wrong here says less than the error at hand.
            for (name, _) in &files[..=index] {
                let _ = fs::remove_file(folder.join(name));
            }
            if made {
                let _ = fs::remove_dir(folder);
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Whether the folder was missing and has been made.
fn make_folder(folder: &Path) -> Result<bool> {
    let found = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next(),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            fs::create_dir_all(folder)
                .with_context(|| format!("while making the folder {}", folder.display()))?;
            return Ok(true);
        }
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            bail!("{} is not a folder; name a new or an empty one", folder.display())
        }
        Err(error) => {
            return Err(error)
                .with_context(|| format!("while looking into the folder {}", folder.display()));
        }
    };
    if let Some(entry) = found.transpose()? {
        bail!(
            "the folder {} is not empty, {:?} is in it; name a new or an empty one",
            folder.display(),
            entry.file_name()
        );
    }
    Ok(false)
}

fn write_new(path: &Path, text: &str) -> Result<()> {
    let about = || format!("while writing {}", path.display());
    let mut file =
        OpenOptions::new().write(true).create_new(true).open(path).with_context(about)?;
    file.write_all(text.as_bytes()).with_context(about)?;
    file.sync_all().with_context(about)
}

fn files(file: &GgufFile) -> Result<Files> {
    let card = ModelCard::from_gguf(file)?;
    if card.architecture != "llama" {
        bail!(
            "its architecture is {:?}, and only llama can be put into a config.json",
            card.architecture
        );
    }
    check_begin_of_text(&card)?;
    Ok([
        ("config.json", pretty(&config(file, &card)?)),
        ("tokenizer.json", card.tokenizer_json.clone()),
        ("tokenizer_config.json", pretty(&tokenizer_config(file, &card)?)),
        ("generation_config.json", pretty(&generation_config(&card))),
    ])
}

fn pretty(json: &Json) -> String {
    format!("{json:#}\n")
}

/// vLLM's frontends have nothing but the `tokenizer.json` to put begin-of-text first.
fn check_begin_of_text(card: &ModelCard) -> Result<()> {
    let by_itself = ModelCard { add_bos: false, ..card.clone() };
    let ids = |card: &ModelCard| Tokenizer::from_card(card)?.encode("a", true);
    if ids(card)? != ids(&by_itself)? {
        bail!(
            "the tokenizer.json beside it does not put begin-of-text first, which the model wants; \
             move it away to have one made from the model"
        );
    }
    Ok(())
}

fn config(file: &GgufFile, card: &ModelCard) -> Result<Json, ModelError> {
    let key = |name: &str| format!("llama.{name}");
    let required = |name: &str| file.u32(&key(name))?.ok_or_else(|| GgufFile::missing(&key(name)));
    let hidden = required("embedding_length")?;
    let heads = required("attention.head_count")?;
    let head_dim = match file.u32(&key("attention.key_length"))? {
        Some(explicit) => explicit,
        None => hidden.checked_div(heads).ok_or_else(|| {
            let field = format!("metadata key {:?}", key("attention.head_count"));
            ModelError::Field { field, expected: "at least 1".into(), found: "0".into() }
        })?,
    };
    let norm_eps = file.f32(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-5);
    // A table of embeddings may have more rows than there are tokens.
    let rows = file.tensor("token_embd.weight").map_or(card.vocab_size.into(), |t| t.rows());
    let scaling = match file.text(&key("rope.scaling.type"))? {
        Some("linear") => {
            let factor = file.f32(&key("rope.scaling.factor"))?.unwrap_or(1.0);
            json!({"rope_type": "linear", "factor": number(factor)})
        }
        _ => Json::Null,
    };
    let kv_heads = file.u32(&key("attention.head_count_kv"))?.unwrap_or(heads);
    Ok(json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length")?,
        "num_hidden_layers": required("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": card.max_model_len,
        "rms_norm_eps": number(norm_eps),
        "rope_theta": number(file.f32(&key("rope.freq_base"))?.unwrap_or(10_000.0)),
        "rope_scaling": scaling,
        "vocab_size": rows,
        "tie_word_embeddings": file.tensor("output.weight").is_none(),
        "bos_token_id": card.bos_token_id,
        "eos_token_id": card.eos_token_id,
        "pad_token_id": card.pad_token_id,
    }))
}

fn tokenizer_config(file: &GgufFile, card: &ModelCard) -> Result<Json, ModelError> {
    let tokenizer = Tokenizer::from_card(card)?;
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.piece(id));
    let unknown = file.u32("tokenizer.ggml.unknown_token_id")?;
    let mut config = Map::new();
    let mut put = |key: &str, value: Json| config.insert(key.to_owned(), value);
    put("tokenizer_class", json!("PreTrainedTokenizerFast"));
    put("model_max_length", json!(card.max_model_len));
    put("clean_up_tokenization_spaces", json!(false));
    put("add_bos_token", json!(card.add_bos));
    let tokens = [
        ("bos_token", card.bos_token.clone()),
        ("eos_token", card.eos_token.clone()),
        ("pad_token", text(card.pad_token_id)),
        ("unk_token", text(unknown)),
        ("chat_template", card.chat_template.clone()),
    ];
    for (key, value) in tokens {
        if let Some(value) = value {
            put(key, json!(value));
        }
    }
    Ok(Json::Object(config))
}

fn generation_config(card: &ModelCard) -> Json {
    // The first is what the tokenizer calls its end; frontends stop at the others as well.
    let ends: Vec<u32> =
        card.eos_token_id.into_iter().chain(card.stop_token_ids.iter().copied()).collect();
    let advised = &card.generation_defaults;
    let values = [
        ("bos_token_id", card.bos_token_id.map(|id| json!(id))),
        ("eos_token_id", (!ends.is_empty()).then(|| json!(ends))),
        ("pad_token_id", card.pad_token_id.map(|id| json!(id))),
        ("temperature", advised.temperature.map(number)),
        ("top_p", advised.top_p.map(number)),
        ("top_k", advised.top_k.map(|k| json!(k))),
        ("min_p", advised.min_p.map(number)),
        ("repetition_penalty", advised.repetition_penalty.map(number)),
        ("max_new_tokens", advised.max_new_tokens.map(|tokens| json!(tokens))),
    ];
    let said = values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    Json::Object(said.collect())
}

/// As short as the value allows: widened to 64 bits, 1e-5 would become 0.000009999999747378752.
fn number(value: f32) -> Json {
    json!(value.to_string().parse::<f64>().expect("a number that was just written"))
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
