//! `pawl model` on files that somebody brings: what is said of one that cannot be served.

use pawl_shared::model_card::testing::GgufWriter;

use crate::harness::Run;

/// A model of a family that the engine does not have.
fn foreign() -> GgufWriter {
    GgufWriter::new()
        .text("general.architecture", "gemma3")
        .text("general.name", "Stranger")
        .u32("gemma3.context_length", 64)
        .byte_vocabulary()
        .f32_tensor("token_embd.weight", &[4, 263], &[0.5; 4 * 263])
}

#[test]
fn a_model_of_another_family_can_be_looked_at_and_no_more() {
    let run = Run::new();
    let nameless = GgufWriter::new().text("general.name", "Stranger");
    for (file, model) in [("foreign.gguf", foreign()), ("nameless.gguf", nameless)] {
        std::fs::write(run.path(file), model.bytes()).unwrap();
    }
    let says = |name: &str, args: &[&str], code: i32| {
        let mut process = run.pawl(name, args);
        assert_eq!(process.wait().code(), Some(code), "{}", process.log());
        process.log()
    };
    let path = run.path("foreign.gguf").display().to_string();
    let shown = says("show", &["model", "show", &path, "--tensors"], 0);
    for line in [
        "architecture    gemma3",
        "context         64 tokens",
        "cannot serve    the file's architecture is \"gemma3\"; this version runs llama",
        "tensors         1 of F32, 1052 elements",
        "general.name = \"Stranger\"",
        "token_embd.weight F32 [4, 263] 4208 bytes",
    ] {
        assert!(shown.contains(line), "{line:?} is not in\n{shown}");
    }
    let nameless = run.path("nameless.gguf").display().to_string();
    let shown = says("nameless", &["model", "show", &nameless], 0);
    assert!(shown.contains("cannot serve    metadata key \"general.architecture\""), "{shown}");
    assert!(shown.contains("general.name = \"Stranger\""), "{shown}");

    let folder = run.path("exported").display().to_string();
    let refused = says("export", &["model", "export-hf", &path, &folder], 1);
    assert!(refused.contains("its architecture is \"gemma3\""), "{refused}");
    assert!(!run.path("exported").exists());
    let address = run.core_address();
    let refused = says("core", &["engine-core", &path, "--listen", &address], 1);
    assert!(refused.contains("gemma3"), "{refused}");
}

/// What vLLM's frontends read, out of a file and through the command.
#[test]
fn a_model_is_exported_for_other_frontends() {
    let run = Run::new();
    let model = GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 2048)
        .u32("llama.embedding_length", 64)
        .u32("llama.feed_forward_length", 128)
        .u32("llama.block_count", 2)
        .u32("llama.attention.head_count", 4)
        .text("tokenizer.chat_template", "{{ messages[0]['content'] }}")
        .byte_vocabulary();
    std::fs::write(run.path("model.gguf"), model.bytes()).unwrap();
    let path = |name: &str| run.path(name).display().to_string();
    let args = ["model", "export-hf", &path("model.gguf"), &path("exported")];
    let mut process = run.pawl("export", &args);
    assert!(process.wait().success(), "{}", process.log());
    let read = |name: &str| -> serde_json::Value {
        let text = std::fs::read_to_string(run.path("exported").join(name)).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let config = read("config.json");
    assert_eq!(config["architectures"], serde_json::json!(["LlamaForCausalLM"]));
    assert_eq!(
        (&config["head_dim"], &config["max_position_embeddings"]),
        (&16.into(), &2048.into())
    );
    let ends = &read("generation_config.json")["eos_token_id"];
    assert_eq!(ends[0], config["eos_token_id"], "{ends}");
    let tokenizer = read("tokenizer_config.json");
    assert_eq!(tokenizer["chat_template"], "{{ messages[0]['content'] }}");
    assert!(read("tokenizer.json")["model"]["vocab"].is_object());
    let mut again = run.pawl("again", &args);
    assert_eq!(again.wait().code(), Some(1));
    assert!(again.log().contains("name a new or an empty one"), "{}", again.log());
}
