//! The running system on a Vulkan device: the same text and the same counts as on the CPU.

use std::sync::Mutex;

use pawl_shared::model_card::testing::{GgufWriter, default_model};
use serde_json::{Value, json};

use crate::harness::{Client, Frontend, Process, Run, skip};

/// Where the reference's best logit leads by less than this, half floats in the cache may choose
/// the other.
const NEAR_TIE: f64 = 0.05;
/// Tokens of each text.
const TOKENS: usize = 32;

/// Whether there is an adapter; if not, says that the test is skipped.
fn adapter() -> bool {
    let doctor = std::process::Command::new(env!("CARGO_BIN_EXE_pawl"))
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let findings: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let there = findings["Vulkan"]["value"].as_str().unwrap().starts_with("0: ");
    if !there {
        skip("Vulkan adapter");
    }
    there
}

/// A core on a Vulkan device with `extra` flags, and a frontend of it.
fn system(run: &Run, model: &std::path::Path, extra: &[&str]) -> (Process, Frontend) {
    let (address, path) = (run.core_address(), model.display().to_string());
    let mut args = vec!["engine-core", &path, "--listen", &address, "--device", "vulkan"];
    args.extend(extra);
    let core = run.pawl("core", &args);
    (core, run.frontend("api", &[]))
}

struct Golden {
    name: String,
    prompt: Value,
    /// Token, and the gap between the two best logits where it was chosen.
    steps: Vec<(u64, f64)>,
}

fn goldens(count: usize) -> Vec<Golden> {
    let list: Vec<Value> = serde_json::from_str(include_str!("../goldens/greedy.json")).unwrap();
    let step = |step: &Value| (step[0].as_u64().unwrap(), step[1].as_f64().unwrap());
    list.iter()
        .take(count)
        .map(|golden| Golden {
            name: golden["name"].as_str().unwrap().into(),
            prompt: golden["prompt_ids"].clone(),
            steps: golden["steps"].as_array().unwrap().iter().take(TOKENS).map(step).collect(),
        })
        .collect()
}

fn greedy(http: Client, prompt: &Value) -> Vec<u64> {
    let body = json!({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
                      "ignore_eos": true, "return_token_ids": true});
    let answer = http.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap()).collect()
}

/// The texts of all, `at_once` at a time.
fn texts(http: Client, goldens: &[Golden], at_once: usize) -> Vec<Vec<u64>> {
    let texts = Mutex::new(vec![Vec::new(); goldens.len()]);
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(golden) = goldens.get(index) else { return };
                    let text = greedy(http, &golden.prompt);
                    texts.lock().unwrap()[index] = text;
                }
            });
        }
    });
    texts.into_inner().unwrap()
}

/// The reference computes in full precision over the same weights: so does the device, but for the
/// cache. Alone, in a batch of eight and in chunks, the texts are the same to the last token.
#[test]
fn weights_greedy_text_on_vulkan_equals_the_reference() {
    let Some(model) = default_model() else { return };
    if !adapter() {
        return;
    }
    let goldens = goldens(20);
    let flags = ["--max-model-len", "512", "--no-enable-prefix-caching"];
    let (batch, alone) = {
        let run = Run::new();
        let (_core, frontend) = system(&run, &model, &flags);
        (texts(frontend.http, &goldens, 8), texts(frontend.http, &goldens[..3], 1))
    };
    let chunked = {
        let run = Run::new();
        let chunks = ["--max-num-batched-tokens", "12", "--max-num-seqs", "4"];
        let flags: Vec<_> = flags.into_iter().chain(chunks).collect();
        let (_core, frontend) = system(&run, &model, &flags);
        texts(frontend.http, &goldens[..4], 4)
    };
    assert_eq!(alone, batch[..3], "alone");
    assert_eq!(chunked, batch[..4], "in chunks");
    let mut wrong = Vec::new();
    for (golden, text) in goldens.iter().zip(&batch) {
        let differs = text.iter().zip(&golden.steps).position(|(ours, (token, _))| ours != token);
        if let Some(step) = differs {
            let (token, gap) = golden.steps[step];
            let line =
                format!("{}: step {step}: {}, not {token} (gap {gap})", golden.name, text[step]);
            eprintln!("{line}");
            if gap > NEAR_TIE {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A model that computes something, in a file of a few kilobytes.
fn tiny_model(run: &Run) -> std::path::PathBuf {
    let size = 32_u64;
    let mut seed = 1_u32;
    let mut values = |count: u64| -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    };
    let mut file = GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 256)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 32)
        .u32("llama.attention.head_count", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .byte_vocabulary()
        .f32_tensor("token_embd.weight", &[size, 263], &values(size * 263))
        .f32_tensor("output_norm.weight", &[size], &[1.0; 32])
        .f32_tensor("blk.0.attn_norm.weight", &[size], &[1.0; 32])
        .f32_tensor("blk.0.ffn_norm.weight", &[size], &[1.0; 32]);
    for part in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        let name = format!("blk.0.{part}.weight");
        file = file.f32_tensor(&name, &[size, size], &values(size * size));
    }
    let path = run.path("tiny.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

/// Each fate of a request, and what is counted for it.
#[test]
fn a_vulkan_core_counts_as_any_other() {
    if !adapter() {
        return;
    }
    let run = Run::new();
    let (_core, frontend) = system(&run, &tiny_model(&run), &[]);
    let http = frontend.http;
    let length = json!({"prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": true});
    let drawn = json!({"prompt": [7], "max_tokens": 4, "ignore_eos": true, "temperature": 1.0,
                       "logprobs": 2});
    std::thread::scope(|scope| {
        for body in [&length, &length, &drawn] {
            scope.spawn(move || {
                let answer = http.post("/v1/completions", body);
                assert_eq!(answer.status, 200, "{}", answer.text());
            });
        }
    });
    let refused = http.post("/v1/completions", &json!({"prompt": [7], "max_tokens": 100_000}));
    assert_eq!(refused.status, 400, "{}", refused.text());
    let endless = json!({"prompt": [5], "max_tokens": 250, "ignore_eos": true, "stream": true});
    let mut stream = http.stream("/v1/completions", &endless);
    assert!(stream.next().is_some(), "its first token");
    stream.close();
    let page = frontend.scrape_until("the aborted request", |s| s.ended("abort") == 1.0);
    assert_eq!(page.ended("length"), 3.0);
    assert_eq!(page.ended("error"), 0.0);
    let page = frontend.idle();
    let aborted = page.get("vllm:generation_tokens_total") - 14.0;
    assert!((1.0..250.0).contains(&aborted), "{aborted} tokens of the aborted request");
    assert_eq!(page.get("vllm:prompt_tokens_total"), 3.0 + 3.0 + 1.0 + 1.0);
    assert_eq!((page.running(), page.kv_usage()), (0.0, 0.0));
}
