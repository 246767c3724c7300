use std::path::PathBuf;

use pawl_shared::model_card::testing::GgufWriter;

use super::*;

/// A model in a folder of its own, and room to export it.
struct Fixture {
    folder: tempfile::TempDir,
}

fn llama() -> GgufWriter {
    GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 2048)
        .u32("llama.embedding_length", 64)
        .u32("llama.feed_forward_length", 128)
        .u32("llama.block_count", 2)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 100_000.0)
        .text("tokenizer.chat_template", "{{ messages[0]['content'] }}\n")
        .byte_vocabulary()
}

impl Fixture {
    fn new(model: &GgufWriter) -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(fixture.path("model.gguf"), model.bytes()).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn export(&self, to: &str) -> Result<Vec<&'static str>> {
        export(&self.path("model.gguf"), &self.path(to))
    }

    fn error(&self, to: &str) -> String {
        let error = format!("{:#}", self.export(to).unwrap_err());
        error.replace(&*self.folder.path().to_string_lossy(), "FOLDER")
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// The model that a folder of exported files describes: read with the exported
    /// `tokenizer.json` and `generation_config.json` beside it.
    fn card_beside(&self, folder: &str) -> ModelCard {
        let moved = self.path(folder).join("model.gguf");
        fs::copy(self.path("model.gguf"), &moved).unwrap();
        ModelCard::from_gguf(&GgufFile::open(&moved).unwrap()).unwrap()
    }
}

#[test]
fn what_is_written() {
    let model = llama()
        .u32("tokenizer.ggml.padding_token_id", 0)
        .text("llama.rope.scaling.type", "linear")
        .f32("llama.rope.scaling.factor", 4.0);
    let fixture = Fixture::new(&model);
    let advised = r#"{"temperature": 0.6, "top_k": 40, "eos_token_id": [2, 5]}"#;
    fs::write(fixture.path("generation_config.json"), advised).unwrap();
    let names = fixture.export("out/deep").unwrap();
    let shown: Vec<String> = names
        .iter()
        .filter(|name| **name != "tokenizer.json")
        .map(|name| format!("{name}\n{}", fixture.read(&format!("out/deep/{name}"))))
        .collect();
    insta::assert_snapshot!(shown.join("\n"));
}

#[test]
fn the_exported_tokenizer_is_the_models() {
    let models = [
        ("no begin of text", llama()),
        ("begin of text", llama().bool("tokenizer.ggml.add_bos_token", true)),
    ];
    for (case, model) in models {
        let fixture = Fixture::new(&model);
        fixture.export("out").unwrap();
        let file = GgufFile::open(&fixture.path("model.gguf")).unwrap();
        let ours = ModelCard::from_gguf(&file).unwrap();
        let theirs = fixture.card_beside("out");
        assert_eq!(ours, theirs, "{case}");
        // Without our own addition of begin-of-text, as another program reads it.
        let theirs = Tokenizer::from_card(&ModelCard { add_bos: false, ..theirs }).unwrap();
        let ours = Tokenizer::from_card(&ours).unwrap();
        for text in ["", "a", " the the\n", "<|im_start|>user\n~~ é 🙂<|im_end|>"] {
            for special in [true, false] {
                let (ours, theirs) = (ours.encode(text, special), theirs.encode(text, special));
                assert_eq!(ours.unwrap(), theirs.unwrap(), "{case}: {text:?}");
            }
        }
    }
}

#[test]
fn the_default_model_is_exported() {
    let Some(model) = pawl_shared::model_card::testing::default_model() else { return };
    let folder = tempfile::tempdir().unwrap();
    export(&model, folder.path()).unwrap();
    let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
    insta::assert_snapshot!(config);
}

#[test]
fn a_folder_that_cannot_be_used_is_refused() {
    let fixture = Fixture::new(&llama());
    fs::create_dir(fixture.path("full")).unwrap();
    fs::write(fixture.path("full/config.json"), "mine").unwrap();
    let errors = ["full", "model.gguf", "model.gguf/below"].map(|to| fixture.error(to));
    insta::assert_snapshot!(errors.join("\n"));
    assert_eq!(fixture.read("full/config.json"), "mine");
}

#[test]
fn nothing_is_left_where_a_file_cannot_be_written() {
    let fixture = Fixture::new(&llama());
    fs::create_dir(fixture.path("there")).unwrap();
    let text = || "text".to_owned();
    let files = [("first", text()), ("missing/second", text()), ("third", text())];
    for (folder, is_left) in [("new", false), ("there", true)] {
        let error = write_all(&fixture.path(folder), &files).unwrap_err();
        assert!(error.to_string().ends_with("missing/second"), "{error:#}");
        assert_eq!(fixture.path(folder).exists(), is_left);
    }
    assert_eq!(fs::read_dir(fixture.path("there")).unwrap().count(), 0);
}

#[test]
fn a_model_that_does_not_fit_the_files_is_refused() {
    let other = GgufWriter::new()
        .text("general.architecture", "gemma3")
        .u32("gemma3.context_length", 64)
        .byte_vocabulary();
    let nameless = GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 64)
        .byte_vocabulary();
    let mut errors = Vec::new();
    for model in [other, nameless] {
        let fixture = Fixture::new(&model);
        errors.push(fixture.error("out"));
        assert!(!fixture.path("out").exists());
    }
    // A tokenizer.json that leaves begin-of-text to its caller.
    let fixture = Fixture::new(&llama());
    fixture.export("without").unwrap();
    let wants_it = llama().bool("tokenizer.ggml.add_bos_token", true).bytes();
    fs::write(fixture.path("without/model.gguf"), wants_it).unwrap();
    let refused = export(&fixture.path("without/model.gguf"), &fixture.path("out")).unwrap_err();
    let refused = format!("{refused:#}");
    errors.push(refused.replace(&*fixture.folder.path().to_string_lossy(), "FOLDER"));
    insta::assert_snapshot!(errors.join("\n"));
}
