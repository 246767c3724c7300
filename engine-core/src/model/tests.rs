use pawl_shared::model_card::{GgmlType, GgufFile};

use super::testing::TinyLlama;
use super::*;

fn refusal(bytes: Vec<u8>) -> String {
    plan(&GgufFile::from_bytes(bytes).unwrap()).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    let tiny = TinyLlama { layers: 1, ..TinyLlama::default() };
    let zeros = |len: usize| vec![0_u8; len];
    let experts = tiny.writer().u32("llama.expert_count", 8).bytes();
    let extra = tiny.writer().tensor("blk.0.extra.weight", GgmlType::F32, &[4], zeros(16)).bytes();
    let scaled = tiny.writer().text("llama.rope.scaling.type", "yarn").bytes();
    let heads = TinyLlama { kv_heads: 4, ..tiny }.writer().bytes();
    let shape = tiny.writer().tensor("rope_freqs.weight", GgmlType::F32, &[4], zeros(16)).bytes();
    let other = pawl_shared::model_card::testing::GgufWriter::new()
        .text("general.architecture", "mamba")
        .bytes();
    let fewer = TinyLlama { layers: 1, ..tiny };
    let missing = {
        // Two layers are promised, one is there.
        let text = String::from("llama.block_count");
        let mut bytes = fewer.writer().bytes();
        let at = bytes.windows(text.len()).position(|w| w == text.as_bytes()).unwrap();
        bytes[at + text.len() + 4] = 2;
        bytes
    };
    insta::assert_snapshot!(
        // The long list, a line for each.
        [experts, extra, scaled, heads, shape, other, missing]
            .map(|file| refusal(file).replace(", blk", ",\nblk"))
            .join("\n"),
        @r#"
    llama.expert_count is more than 0, but mixtures of experts are not supported
    the file has tensors that a llama model does not use: blk.0.extra.weight
    llama.rope.scaling.type is yarn, but only none and linear are known
    llama.attention.head_count_kv is 4, but the 6 query heads must be a multiple of it
    tensor rope_freqs.weight has shape [4], but the hyper-parameters say [16]
    the file's architecture is "mamba"; this version runs llama
    the file lacks the tensors blk.1.attn_norm.weight,
    blk.1.attn_q.weight,
    blk.1.attn_k.weight,
    blk.1.attn_v.weight,
    blk.1.attn_output.weight,
    blk.1.ffn_norm.weight,
    blk.1.ffn_gate.weight,
    blk.1.ffn_up.weight,
    blk.1.ffn_down.weight; it is not a whole llama model
    "#
    );
}

#[test]
fn the_head_dimension_is_the_files_own() {
    let file = TinyLlama::default().file();
    let hyper = plan(&file).unwrap().hyper;
    assert_eq!((hyper.hidden / hyper.heads, hyper.head_dim), (16, 32));
}

#[test]
fn frequencies_follow_the_base_the_factor_and_the_tensor() {
    let tiny = TinyLlama { layers: 1, ..TinyLlama::default() };
    let frequencies = |bytes| {
        let file = GgufFile::from_bytes(bytes).unwrap();
        plan(&file).unwrap().rope.frequencies
    };
    let plain = frequencies(tiny.writer().bytes());
    assert_eq!((plain.len(), plain[0]), (16, 1.0));
    assert!((plain[8] - 100_000_f32.powf(-0.5)).abs() < 1e-8);
    let linear = tiny.writer().text("llama.rope.scaling.type", "linear");
    let linear = frequencies(linear.f32("llama.rope.scaling.factor", 4.0).bytes());
    let factors =
        frequencies(tiny.writer().f32_tensor("rope_freqs.weight", &[16], &[4.0; 16]).bytes());
    for ((plain, linear), factors) in plain.iter().zip(linear).zip(factors) {
        assert_eq!((plain / 4.0, plain / 4.0), (linear, factors));
    }
}
