//! Every kernel against the CPU's scalar twin: the same program over the same batch on both.

use std::sync::atomic::AtomicU64;

use pawl_shared::model_card::GgmlType;

use super::*;
use crate::device::cpu::testing::Random;
use crate::device::cpu::{CpuDevice, CpuDeviceConfig, Isa};
use crate::device::{Activation, Batch, Device, MatmulPart, Op, Sequence, WeightId};

/// Of the largest value of a row: sums in another order, and half floats in the cache.
const TOLERANCE: f32 = 2e-3;
/// The same where the CPU's twin rounds its activations to eight bits.
const QUANTISED_TOLERANCE: f32 = 3e-2;

struct Weight {
    dtype: GgmlType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
}

/// A program in the making, with its random weights.
struct Case {
    random: Random,
    weights: Vec<Weight>,
    tensors: TensorTable,
    ops: Vec<Op>,
    attention: AttentionSpec,
}

const TOKENS: usize = 70;

impl Case {
    fn new(seed: u64) -> Self {
        let attention = AttentionSpec { layers: 1, heads: 6, kv_heads: 2, head_dim: 32 };
        let (random, tensors) = (Random(seed), TensorTable::default());
        Self { random, weights: Vec::new(), tensors, ops: Vec::new(), attention }
    }

    fn weight(&mut self, dtype: GgmlType, rows: usize, cols: usize) -> WeightId {
        let data = self.random.weights(dtype, rows, cols);
        self.weights.push(Weight { dtype, rows, cols, data });
        WeightId(self.weights.len() - 1)
    }

    /// Rows of random values: those of a table, by their tokens.
    fn input(&mut self, width: usize) -> TensorId {
        let table = self.weight(GgmlType::F32, TOKENS, width);
        let out = self.tensors.add(width, Rows::Tokens);
        self.ops.push(Op::Embed { table, out });
        out
    }

    fn product(&mut self, x: TensorId, dtype: GgmlType, widths: &[usize]) -> Vec<TensorId> {
        let cols = self.tensors.shapes[x.0].0;
        let parts: Vec<_> = widths
            .iter()
            .map(|&width| MatmulPart {
                weight: self.weight(dtype, width, cols),
                out: self.tensors.add(width, Rows::Tokens),
                add: false,
            })
            .collect();
        let outs = parts.iter().map(|part| part.out).collect();
        self.ops.push(Op::Matmul { x, parts });
        outs
    }

    /// A head over the last tensor, as every model has one.
    fn head(&mut self, x: TensorId) -> (Program, TensorId) {
        let width = self.tensors.shapes[x.0].0;
        let norm = self.weight(GgmlType::F32, 1, width);
        let weight = self.weight(GgmlType::F32, 96, width);
        let taken = self.tensors.add(width, Rows::Taken);
        let normed = self.tensors.add(width, Rows::Taken);
        let logits = self.tensors.add(96, Rows::Taken);
        let ops = vec![
            Op::Take { x, out: taken },
            Op::RmsNorm { x: taken, weight: norm, eps: 1e-5, out: normed },
            Op::Matmul { x: normed, parts: vec![MatmulPart { weight, out: logits, add: false }] },
        ];
        (Program { rows: Rows::Taken, ops }, logits)
    }

    /// Runs `batches` one after another on both devices; after each, the logits of all rows taken
    /// must agree, and the device's largest logit must be the one that is told.
    fn check(mut self, last: TensorId, batches: &[Tokens], tolerance: f32, mask: &Mask) {
        let Some(mut gpu) = gpu() else { return };
        mask(&mut gpu.offer);
        let (head, logits) = self.head(last);
        let body = Program { rows: Rows::Tokens, ops: self.ops };
        let named = self.weights.iter().enumerate().map(|(index, weight)| WeightSource {
            name: format!("weight {index}"),
            dtype: weight.dtype,
            rows: weight.rows,
            cols: weight.cols,
            data: &weight.data,
        });
        let sources: Vec<_> = named.collect();
        let frequencies: Vec<f32> = (0..14).map(|i| 1.0 / (1.0 + i as f32)).collect();
        let rope = RopeSpec { frequencies };
        let cpu_config = CpuDeviceConfig {
            threads: 1,
            isa: Isa::Scalar,
            attention: self.attention,
            rope: rope.clone(),
            tensors: self.tensors.clone(),
            kv_dtype: KvDtype::F16,
            block_size: 16,
            num_blocks: 64,
        };
        let config = VulkanDeviceConfig {
            attention: self.attention,
            rope,
            tensors: self.tensors,
            block_size: 16,
            num_blocks: 64,
            max_model_len: 512,
            slots: 256,
        };
        let mut cpu = CpuDevice::load(cpu_config, &sources, &mut |_| ()).unwrap();
        let programs = Programs { body: &body, head: &head, logits };
        let mut device = VulkanDevice::load(gpu, &config, programs, &sources, &mut |_| ()).unwrap();
        let progress = AtomicU64::new(0);
        for batch in batches {
            let (batch, taken) = (batch.batch(), batch.taken.len());
            cpu.run(&body, &batch, &progress).unwrap();
            cpu.run(&head, &batch, &progress).unwrap();
            let (slots, wanted): (Vec<u32>, Vec<usize>) = (0..taken).map(|i| (i as u32, i)).unzip();
            device.submit(&Submission { batch, slots: &slots, wanted: &wanted }).unwrap();
            let told = loop {
                if let Some(told) = device.collect(std::time::Duration::from_secs(1)).unwrap() {
                    break told;
                }
            };
            for row in 0..taken {
                let expected = cpu.row(logits, row);
                let found = &told.logits[96 * row..][..96];
                assert_close(found, expected, tolerance, row);
                let largest = found.iter().copied().fold(f32::MIN, f32::max);
                let token = found.iter().position(|value| *value == largest).unwrap();
                assert_eq!(told.tokens[row], (token as u32, 0));
            }
        }
    }
}

type Mask = dyn Fn(&mut Offer);

fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, row: usize) {
    let scale = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "row {row}, logit {i}: {a}, expected {b}");
    }
}

/// The rows of a batch.
struct Tokens {
    tokens: Vec<u32>,
    sequences: Vec<Sequence>,
    tables: Vec<u32>,
    taken: Vec<u32>,
}

impl Tokens {
    /// Sequences of (rows, first position, blocks), whose last rows sample.
    fn new(sequences: &[(usize, usize, &[u32])]) -> Self {
        let mut new = Self { tokens: vec![], sequences: vec![], tables: vec![], taken: vec![] };
        for &(num_rows, first_position, blocks) in sequences {
            let first_row = new.tokens.len();
            let blocks_start = new.tables.len();
            new.sequences.push(Sequence { first_row, num_rows, first_position, blocks_start });
            let token = |row| ((first_position + row) * 7 + blocks[0] as usize) % TOKENS;
            new.tokens.extend((0..num_rows).map(|row| token(row) as u32));
            new.tables.extend(blocks);
            new.taken.push((new.tokens.len() - 1) as u32);
        }
        new
    }

    /// `count` rows, all of which sample.
    fn rows(count: usize) -> Self {
        let blocks: Vec<[u32; 1]> = (0..count).map(|index| [1 + index as u32]).collect();
        let sequences: Vec<_> = blocks.iter().map(|block| (1, 0, &block[..])).collect();
        Self::new(&sequences)
    }

    fn batch(&self) -> Batch<'_> {
        Batch {
            tokens: &self.tokens,
            sequences: &self.sequences,
            block_tables: &self.tables,
            taken: &self.taken,
        }
    }
}

fn nothing(_: &mut Offer) {}

/// As a GPU would be: several segments and no subgroups, and buffers so small that matrices and
/// tables are split.
fn masked(offer: &mut Offer) {
    offer.kind = AdapterKind::Unknown;
    offer.subgroup = None;
    offer.binding_bytes = 48 << 10;
}

#[test]
fn products_of_every_encoding() {
    for (dtype, cols) in [
        (GgmlType::Q4_0, 96),
        (GgmlType::Q4_1, 352),
        (GgmlType::Q5_1, 96),
        (GgmlType::Q8_0, 160),
        (GgmlType::Q4_K, 256),
        (GgmlType::Q6_K, 512),
        (GgmlType::F16, 96),
        (GgmlType::BF16, 96),
        (GgmlType::F32, 288),
    ] {
        for mask in [nothing as fn(&mut Offer), masked] {
            let mut case = Case::new(cols as u64);
            let x = case.input(cols);
            // The head's rows are whole blocks.
            let y = case.product(x, dtype, &[96, 160])[1];
            let batches = [1, 3, 7, 19].map(Tokens::rows);
            let exact = matches!(dtype, GgmlType::F16 | GgmlType::BF16 | GgmlType::F32);
            let tolerance = if exact { TOLERANCE } else { QUANTISED_TOLERANCE };
            case.check(y, &batches, tolerance, &mask);
        }
    }
}

#[test]
fn norms_biases_residuals_and_gates() {
    for activation in [Activation::Silu, Activation::Gelu] {
        for up_dtype in [GgmlType::F32, GgmlType::F16] {
            let mut case = Case::new(5);
            let x = case.input(96);
            let normed = case.tensors.add(96, Rows::Tokens);
            let weight = case.weight(GgmlType::F32, 1, 96);
            case.ops.push(Op::RmsNorm { x, weight, eps: 1e-5, out: normed });
            let gate = case.tensors.add(160, Rows::Tokens);
            let up = case.tensors.add(160, Rows::Tokens);
            let parts = vec![
                MatmulPart { weight: case.weight(GgmlType::F32, 160, 96), out: gate, add: false },
                MatmulPart { weight: case.weight(up_dtype, 160, 96), out: up, add: false },
            ];
            case.ops.push(Op::Matmul { x: normed, parts });
            case.ops.push(Op::Gate { activation, gate, up });
            let weight = case.weight(GgmlType::F32, 96, 160);
            let parts = vec![MatmulPart { weight, out: x, add: true }];
            case.ops.push(Op::Matmul { x: gate, parts });
            let bias = case.weight(GgmlType::F32, 1, 96);
            case.ops.push(Op::AddBias { x, bias });
            case.check(x, &[Tokens::rows(1), Tokens::rows(9)], TOLERANCE, &nothing);
        }
    }
}

/// Grouped heads, scattered and shared blocks, chunks of prompts beside decodes; a head of which
/// only a part is rotated.
#[test]
fn attention_over_mixed_batches() {
    let chunk: Vec<u32> = vec![9, 3, 17, 5, 40, 41, 42, 43];
    let other: Vec<u32> = vec![9, 3, 50, 51, 52];
    for mask in [nothing as fn(&mut Offer), masked] {
        let mut case = Case::new(11);
        let x = case.input(192);
        let outs = case.product(x, GgmlType::F32, &[192, 64, 64]);
        let [q, k, v] = outs[..] else { unreachable!("three parts") };
        let angles = case.tensors.add(28, Rows::Tokens);
        let attended = case.tensors.add(192, Rows::Tokens);
        case.ops.extend([
            Op::RopeAngles { out: angles },
            Op::Rope { x: q, angles, head_dim: 32 },
            Op::Rope { x: k, angles, head_dim: 32 },
            Op::KvWrite { layer: 0, k, v },
            Op::Attention { layer: 0, q, out: attended },
        ]);
        let batches = [
            Tokens::new(&[(30, 0, &chunk[..])]),
            Tokens::new(&[(24, 30, &chunk[..]), (1, 32, &other[..])]),
            Tokens::new(&[(1, 54, &chunk[..]), (3, 33, &other[..]), (1, 0, &[60][..])]),
        ];
        case.check(attended, &batches, TOLERANCE, &mask);
    }
}
