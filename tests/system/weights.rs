//! Real weights: the default model's greedy text, against references made with other software and
//! (in `cuts`) against itself however its steps are cut.

mod cuts;

use pawl_shared::model_card::testing::{GgufWriter, default_model};
use serde_json::{Value, json};

use crate::harness::{Client, Frontend, Process, Run};

/// A difference from the reference counts only where the reference's best logit leads by this.
const GAP_THAT_COUNTS: f64 = 0.5;

/// A core on real weights with `extra` flags, and a frontend of it.
fn system(run: &Run, model: &std::path::Path, extra: &[&str]) -> (Process, Frontend) {
    let (address, path) = (run.core_address(), model.display().to_string());
    let mut args = vec!["engine-core", &path, "--listen", &address];
    if !extra.contains(&"--max-model-len") {
        args.extend(["--max-model-len", "4096"]);
    }
    args.extend(extra);
    let core = run.pawl("core", &args);
    (core, run.frontend("api", &[]))
}

/// Which request it was is in the core's log; not each of them, as a broken model fails all.
#[test]
fn a_model_that_computes_what_is_no_number_is_told_in_the_log() {
    let run = Run::new();
    let size = 32_u64;
    let mut file = GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 32)
        .u32("llama.attention.head_count", 1)
        .u32("llama.attention.head_count_kv", 1)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 10_000.0)
        .u32("llama.rope.dimension_count", 32)
        .byte_vocabulary()
        .f32_tensor("token_embd.weight", &[size, 263], &[0.5; 32 * 263])
        .f32_tensor("output_norm.weight", &[size], &[f32::NAN; 32])
        .f32_tensor("blk.0.attn_norm.weight", &[size], &[1.0; 32])
        .f32_tensor("blk.0.ffn_norm.weight", &[size], &[1.0; 32]);
    for part in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        let name = format!("blk.0.{part}.weight");
        file = file.f32_tensor(&name, &[size, size], &[0.1; 32 * 32]);
    }
    let path = run.path("nan.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let (core, frontend) = system(&run, &path, &["--max-model-len", "64", "--threads", "1024"]);
    for _ in 0..5 {
        let answer =
            frontend.http.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 3}));
        assert_eq!(answer.status, 500, "{}", answer.text());
        assert!(answer.text().contains("not numbers"), "{}", answer.text());
    }
    let log = core.log();
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("ERROR")).collect();
    assert_eq!(errors.len(), 3, "of the first, the second and the fourth: {log}");
    assert!(errors[0].contains("nan_in_logits") && errors[0].contains("cmpl-"), "{log}");
    // While here: more threads than processors are worth a word.
    assert!(log.contains("--threads 1024 is more than the"), "{log}");
}

#[derive(Clone)]
struct Golden {
    name: String,
    prompt: Vec<u32>,
    /// Token, and the gap between the two best logits where it was chosen.
    steps: Vec<(u32, f64)>,
}

fn goldens() -> Vec<Golden> {
    let text = include_str!("../goldens/greedy.json");
    let list: Vec<Value> = serde_json::from_str(text).unwrap();
    let id = |v: &Value| u32::try_from(v.as_u64().unwrap()).unwrap();
    list.iter()
        .map(|golden| Golden {
            name: golden["name"].as_str().unwrap().into(),
            prompt: golden["prompt_ids"].as_array().unwrap().iter().map(id).collect(),
            steps: golden["steps"]
                .as_array()
                .unwrap()
                .iter()
                .map(|step| (id(&step[0]), step[1].as_f64().unwrap()))
                .collect(),
        })
        .collect()
}

/// Greedy continuation of `prompt` by `count` tokens.
fn greedy(http: Client, prompt: &[u32], count: usize) -> Vec<u32> {
    let body = json!({"prompt": prompt, "max_tokens": count, "temperature": 0,
                      "ignore_eos": true, "return_token_ids": true});
    let answer = http.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let ids = answer["choices"][0]["token_ids"].as_array().unwrap().iter();
    let ids: Vec<u32> = ids.map(|v| u32::try_from(v.as_u64().unwrap()).unwrap()).collect();
    assert_eq!(ids.len(), count, "{answer}");
    ids
}

/// The reference's own tokens are fed wherever the two differ at a gap too small to count, so that
/// every step is compared.
#[test]
fn weights_greedy_text_equals_the_reference() {
    let Some(model) = default_model() else { return };
    let run = Run::new();
    let (_core, frontend) = system(&run, &model, &[]);
    let (mut compared, mut near_ties) = (0, 0);
    let mut wrong = Vec::new();
    for golden in goldens() {
        let mut at = 0;
        while at < golden.steps.len() {
            let mut prompt = golden.prompt.clone();
            prompt.extend(golden.steps[..at].iter().map(|(token, _)| token));
            let tokens = greedy(frontend.http, &prompt, golden.steps.len() - at);
            let same =
                tokens.iter().zip(&golden.steps[at..]).take_while(|(t, (r, _))| *t == r).count();
            let counting = |steps: &[(u32, f64)]| {
                steps.iter().filter(|(_, gap)| *gap > GAP_THAT_COUNTS).count()
            };
            let upto = (at + same + 1).min(golden.steps.len());
            compared += counting(&golden.steps[at..upto]);
            if at + same < golden.steps.len() {
                let (reference, gap) = golden.steps[at + same];
                near_ties += 1;
                if gap > GAP_THAT_COUNTS {
                    let step = at + same;
                    let ours = tokens[same];
                    wrong.push(format!(
                        "{}: step {step}: {ours}, not {reference} (gap {gap})",
                        golden.name
                    ));
                }
            }
            at = upto;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(compared >= 300, "only {compared} steps with a gap that counts");
    eprintln!("{compared} steps compared, {near_ties} near ties chosen otherwise");
}
