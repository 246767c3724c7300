use std::fmt::Write as _;
use std::path::Path;

use super::testing::{GgufWriter, default_model};
use super::{GgufFile, ModelCard, ModelError};
use crate::protocol::Value;
use crate::tokenizer::Tokenizer;

fn tiny() -> GgufWriter {
    GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 128)
        .byte_vocabulary()
}

fn card(writer: &GgufWriter) -> Result<ModelCard, ModelError> {
    ModelCard::from_gguf(&GgufFile::from_bytes(writer.bytes())?)
}

/// The card without its tokenizer, which has tests of its own.
fn render(card: &ModelCard) -> String {
    format!("{:#?}", ModelCard { tokenizer_json: "…".into(), ..card.clone() })
}

#[test]
fn a_card_is_read_from_a_file() {
    let writer = tiny().text("tokenizer.chat_template", "{{ messages }}");
    insta::assert_snapshot!(render(&card(&writer).unwrap()));
}

#[test]
fn the_default_model_has_this_card() {
    let Some(path) = default_model() else { return };
    insta::assert_snapshot!(render(
        &ModelCard::from_gguf(&GgufFile::open(&path).unwrap()).unwrap()
    ));
}

#[test]
fn a_card_survives_the_wire() {
    for card in [ModelCard::mock(), card(&tiny()).unwrap()] {
        assert_eq!(ModelCard::from_value(&card.to_value()).unwrap(), card);
        Tokenizer::from_card(&card).unwrap();
    }
}

#[test]
fn a_card_that_is_none_is_refused() {
    let broken = |change: fn(&mut ModelCard)| {
        let mut card = ModelCard::mock();
        change(&mut card);
        ModelCard::from_value(&card.to_value()).unwrap_err().to_string()
    };
    let mut text = String::new();
    for error in [
        ModelCard::from_value(&Value::Nil).unwrap_err().to_string(),
        ModelCard::from_value(&Value::Text("{}".into())).unwrap_err().to_string(),
        broken(|card| card.eos_token_id = Some(512)),
        broken(|card| card.stop_token_ids = vec![1, 600]),
        broken(|card| card.max_model_len = 0),
    ] {
        writeln!(text, "{error}").unwrap();
    }
    insta::assert_snapshot!(text);
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let base = || GgufWriter::new().text("general.architecture", "llama");
    let sized = || base().u32("llama.context_length", 8);
    let gpt2 = |pre: &str| {
        let writer = sized().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", pre);
        writer.texts("tokenizer.ggml.tokens", &["a", "b", "ab"])
    };
    let merges = |merge: &str| gpt2("gpt-2").texts("tokenizer.ggml.merges", &[merge]);
    let cases = [
        ("no architecture", GgufWriter::new()),
        ("no context length", base()),
        ("context length 0", base().u32("llama.context_length", 0)),
        ("context length a text", base().text("llama.context_length", "8k")),
        ("split", base().u32("split.count", 3)),
        ("no tokenizer", sized()),
        ("no tokens", sized().text("tokenizer.ggml.model", "gpt2")),
        ("tokenizer kind", gpt2("x").text("unused", "")),
        ("pre-tokenizer", gpt2("tekken").texts("tokenizer.ggml.merges", &["a b"])),
        ("no merges", gpt2("gpt-2")),
        ("merge of one", merges("ab")),
        ("merge of nothing", merges("")),
        ("merge with an unknown token", merges("a c")),
        ("merge into an unknown token", merges("b a")),
        ("same token twice", {
            let writer = sized().text("tokenizer.ggml.model", "gpt2");
            writer.texts("tokenizer.ggml.tokens", &["a", "b", "a"])
        }),
        ("end of text out of range", merges("a b").u32("tokenizer.ggml.eos_token_id", 3)),
        ("types of other tokens", merges("a b").i32s("tokenizer.ggml.token_type", &[1, 1])),
        ("unknown type", merges("a b").i32s("tokenizer.ggml.token_type", &[1, 1, 9])),
        ("begin without a token", merges("a b").bool("tokenizer.ggml.add_bos_token", true)),
        ("fewer embeddings than tokens", {
            merges("a b").f32_tensor("token_embd.weight", &[4, 2], &[0.0; 8])
        }),
        ("word pieces", {
            let writer = sized().text("tokenizer.ggml.model", "bert");
            writer.texts("tokenizer.ggml.tokens", &["a"])
        }),
    ];
    let mut text = String::new();
    for (name, writer) in &cases {
        writeln!(text, "{name}: {}", card(writer).expect_err(name)).unwrap();
    }
    insta::assert_snapshot!(text);
}

#[test]
fn a_damaged_tokenizer_is_an_error_or_a_card_never_a_panic() {
    let bytes = tiny().bytes();
    for at in (0..bytes.len()).step_by(3) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        if let Ok(file) = GgufFile::from_bytes(flipped) {
            let _ = ModelCard::from_gguf(&file);
        }
    }
}

/// The card of the tiny model in a folder with these files beside it.
fn beside(files: &[(&str, &str)]) -> Result<ModelCard, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("Tiny-1M.Q4_K_M.gguf");
    std::fs::write(&path, tiny().bytes()).unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let shown =
        |error: ModelError| error.to_string().replace(&*folder.path().to_string_lossy(), "FOLDER");
    ModelCard::from_gguf(&GgufFile::open(Path::new(&path)).unwrap()).map_err(shown)
}

#[test]
fn generation_defaults_lie_beside_the_model() {
    let config = r#"{"temperature": 0.7, "top_k": 40, "top_p": null, "eos_token_id": [2, 5]}"#;
    let card = beside(&[("generation_config.json", config)]).unwrap();
    insta::assert_snapshot!(render(&card));
    let mut text = String::new();
    for config in [
        "[]",
        r#"{"temperature": -1}"#,
        r#"{"top_p": 1.5}"#,
        r#"{"top_k": 2.5}"#,
        r#"{"eos_token_id": "x"}"#,
        r#"{"eos_token_id": 5000}"#,
    ] {
        writeln!(text, "{}", beside(&[("generation_config.json", config)]).unwrap_err()).unwrap();
    }
    insta::assert_snapshot!("generation_config_refused", text);
}

#[test]
fn a_tokenizer_beside_the_model_is_taken_if_it_is_the_models() {
    let built = card(&tiny()).unwrap().tokenizer_json;
    let own = built.replace("\"individual_digits\":true", "\"individual_digits\":false");
    assert_ne!(own, built);
    let taken = beside(&[("tokenizer.json", &own)]).unwrap();
    assert_eq!(taken.tokenizer_json, own);

    let other = built.replace("\"Ġthe\":261", "\"Ġthx\":261").replace("[\"Ġt\",\"he\"]", "");
    let other = other.replace("],]", "]]");
    let mut text = String::new();
    for tokenizer in [other.as_str(), "{}"] {
        writeln!(text, "{}", beside(&[("tokenizer.json", tokenizer)]).unwrap_err()).unwrap();
    }
    insta::assert_snapshot!(text);
}
