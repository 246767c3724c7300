//! Writing small GGUF files, for tests of this and other crates.

use std::path::PathBuf;

use super::{DEFAULT_MODEL, GgmlType};
use crate::tokenizer::byte_alphabet;

/// The default model's file, for tests on real weights: the one that `PAWL_TEST_MODEL` names, else
/// the one in the cache. Where there is none, `None` and a loud line; with `PAWL_TEST_NO_SKIP`,
/// where no test may be left out, a panic.
pub fn default_model() -> Option<PathBuf> {
    let named = std::env::var_os("PAWL_TEST_MODEL").filter(|name| !name.is_empty());
    let path = named.map(PathBuf::from).or_else(|| DEFAULT_MODEL.cached_path());
    let path = path.filter(|path| path.is_file());
    if path.is_none() {
        let remedy = "the default model is not in the cache: run `cargo run -- model fetch`";
        assert!(std::env::var_os("PAWL_TEST_NO_SKIP").is_none(), "{remedy}");
        eprintln!("SKIPPED: {remedy}");
    }
    path
}

/// Builds a GGUF file in memory, as version 3 or as a wrong file on purpose.
///
/// ```
/// use pawl_shared::model_card::{GgmlType, GgufFile, testing::GgufWriter};
///
/// let bytes = GgufWriter::new()
///     .text("general.architecture", "llama")
///     .u32("llama.block_count", 1)
///     .f32_tensor("output_norm.weight", &[4], &[1.0; 4])
///     .bytes();
/// let file = GgufFile::from_bytes(bytes).unwrap();
/// assert_eq!(file.tensor("output_norm.weight").unwrap().dtype, GgmlType::F32);
/// ```
#[derive(Clone, Default)]
pub struct GgufWriter {
    metadata: Vec<u8>,
    keys: u64,
    tensors: Vec<(String, u32, Vec<u64>, Vec<u8>)>,
}

/// Data begins at a multiple of this: the format's default.
const ALIGNMENT: usize = 32;

impl GgufWriter {
    /// No keys, no tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// A key with the number of its type and its value as bytes, right or wrong.
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        put_text(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(value);
        self.keys += 1;
        self
    }

    /// A uint32.
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    /// A float32.
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    /// A boolean.
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[value.into()])
    }

    /// A string.
    pub fn text(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        put_text(&mut bytes, value);
        self.raw(key, 8, &bytes)
    }

    /// An array of strings.
    pub fn texts<T: AsRef<str>>(self, key: &str, values: &[T]) -> Self {
        let mut bytes = array_head(8, values.len());
        values.iter().for_each(|value| put_text(&mut bytes, value.as_ref()));
        self.raw(key, 9, &bytes)
    }

    /// An array of int32.
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let mut bytes = array_head(5, values.len());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, 9, &bytes)
    }

    /// An array of float32.
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let mut bytes = array_head(6, values.len());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, 9, &bytes)
    }

    /// A byte-level tokenizer of 263 tokens: 0 to 2 are `<|endoftext|>`, `<|im_start|>` (begin) and
    /// `<|im_end|>` (end), then the 256 bytes, then the words ` t`, `he` and ` the` and `~~`, which
    /// is found whole.
    pub fn byte_vocabulary(self) -> Self {
        let mut tokens: Vec<String> =
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from).into();
        tokens.extend(byte_alphabet().iter().map(char::to_string));
        tokens.extend(["Ġt", "he", "Ġthe", "~~"].map(String::from));
        let kinds: Vec<i32> = (0..tokens.len())
            .map(|id| match id {
                0..3 => 3,
                262 => 4,
                _ => 1,
            })
            .collect();
        self.text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .texts("tokenizer.ggml.tokens", &tokens)
            .i32s("tokenizer.ggml.token_type", &kinds)
            .texts("tokenizer.ggml.merges", &["Ġ t", "h e", "Ġt he"])
            .u32("tokenizer.ggml.bos_token_id", 1)
            .u32("tokenizer.ggml.eos_token_id", 2)
    }

    /// A tensor: shape innermost first, data as it is to be in the file.
    pub fn tensor(self, name: &str, dtype: GgmlType, shape: &[u64], data: Vec<u8>) -> Self {
        self.raw_tensor(name, dtype.id(), shape, data)
    }

    /// A float32 tensor.
    pub fn f32_tensor(self, name: &str, shape: &[u64], data: &[f32]) -> Self {
        let bytes = data.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, GgmlType::F32, shape, bytes)
    }

    /// A tensor with the number of its type, right or wrong.
    pub fn raw_tensor(mut self, name: &str, type_id: u32, shape: &[u64], data: Vec<u8>) -> Self {
        self.tensors.push((name.into(), type_id, shape.into(), data));
        self
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend(self.keys.to_le_bytes());
        file.extend(&self.metadata);
        let mut data = Vec::new();
        for (name, type_id, shape, bytes) in &self.tensors {
            put_text(&mut file, name);
            file.extend((shape.len() as u32).to_le_bytes());
            file.extend(shape.iter().flat_map(|n| n.to_le_bytes()));
            file.extend(type_id.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(data);
        file
    }
}

fn array_head(kind: u32, len: usize) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend((len as u64).to_le_bytes());
    bytes
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
