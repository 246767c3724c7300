//! The card of a model that has no file.

use serde_json::{Map, Value as Json, json};

use super::{GenerationDefaults, ModelCard};
use crate::tokenizer::byte_alphabet;

/// Bytes, three control tokens, and words that only the mock runner ever says.
const VOCAB_SIZE: u32 = 512;
const END_OF_TEXT: u32 = 256;
const TURN_END: u32 = 258;
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const CHAT_TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

impl ModelCard {
    /// A card for the mock runner: 512 tokens, of which 0 to 255 are the bytes, so that any text
    /// can be encoded; 256 to 258 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, and the others
    /// say their own number. ChatML template.
    pub fn mock() -> Self {
        let mut vocab = Map::new();
        for (byte, letter) in byte_alphabet().into_iter().enumerate() {
            vocab.insert(letter.to_string(), json!(byte));
        }
        for (id, text) in (END_OF_TEXT..).zip(CONTROL) {
            vocab.insert(text.into(), json!(id));
        }
        for id in TURN_END + 1..VOCAB_SIZE {
            // `Ġ` is a space in the alphabet of bytes.
            vocab.insert(format!("Ġt{id}"), json!(id));
        }
        let added: Vec<Json> = (END_OF_TEXT..)
            .zip(CONTROL)
            .map(|(id, text)| {
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true,
                })
            })
            .collect();
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
        });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [],
            },
        });
        Self {
            names: vec!["mock".into()],
            architecture: "mock".into(),
            vocab_size: VOCAB_SIZE,
            max_model_len: 8192,
            tokenizer_json: tokenizer.to_string(),
            chat_template: Some(CHAT_TEMPLATE.into()),
            bos_token_id: None,
            eos_token_id: Some(TURN_END),
            stop_token_ids: vec![END_OF_TEXT],
            pad_token_id: None,
            add_bos: false,
            bos_token: None,
            eos_token: Some("<|im_end|>".into()),
            generation_defaults: GenerationDefaults::default(),
        }
    }
}
