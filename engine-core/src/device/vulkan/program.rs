//! From a program of operations to dispatches, made once: which matrices share a buffer, which
//! operations share a kernel, and where each activation lies.
//!
//! Nothing here touches a device: it is a function of the program and the shapes.

use std::collections::BTreeMap;

use super::kernels::{Epilogue, Kernel, PRODUCT_ROWS};
use super::weights::{Rows, TILE};
use crate::device::cpu::packed::{BLOCK, Kind};
use crate::device::{
    Activation, DeviceError, MatmulPart, Op, Program, Rows as RowsOf, TensorId, TensorTable,
    WeightId,
};

/// Where an activation lies: in a buffer of rows that it may share with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which buffer of activations.
    pub buffer: usize,
    /// Its first value in a row.
    pub at: usize,
    /// Values of a row of the buffer.
    pub stride: usize,
}

/// What a kernel is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The constants of the dispatch.
    Shape,
    /// What the host tells of a step.
    Step,
    /// The tokens sampled, by slot.
    Sampled,
    /// The tokens sampled, for the host.
    Told,
    /// The rotary embedding's table.
    Angles,
    /// A buffer of activations.
    Activations(usize),
    /// Values of a part of a matrix.
    Values { matrix: usize, part: usize },
    /// Its scales.
    Scales { matrix: usize, part: usize },
    /// A vector of the model.
    Vector(WeightId),
    /// The keys of a layer.
    Keys(usize),
    /// The values of a layer.
    KvValues(usize),
}

/// How many workgroups a dispatch has, for `n` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Groups {
    /// `(x, n / rows of the kernel)`, by one of the kernels for 1, 4 or 8 rows.
    Product { x: u32 },
    /// `(x, n)`
    Rows { x: u32 },
    /// `(n, 1)`
    EachRow,
}

/// One dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// The kernel; of a product, the one for a single row.
    pub kernel: Kernel,
    /// Words of its uniform buffer.
    pub shape: Vec<u32>,
    /// In the order of the kernel's bindings.
    pub bound: Vec<Bound>,
    /// Workgroups.
    pub groups: Groups,
}

impl Dispatch {
    /// The kernels that it may run.
    pub fn kernels(&self) -> Vec<Kernel> {
        match self.kernel {
            Kernel::Product { kind, vectors, epilogue, .. } => {
                PRODUCT_ROWS.map(|rows| Kernel::Product { kind, vectors, rows, epilogue }).to_vec()
            }
            kernel => vec![kernel],
        }
    }
}

/// A matrix as the device holds it, cut by tiles into parts under the binding limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Where its rows come from.
    pub rows: Rows,
    /// Encoding.
    pub kind: Kind,
    /// All of them.
    pub count: usize,
    /// Input width.
    pub cols: usize,
    /// First tile and number of tiles of each part.
    pub parts: Vec<(usize, usize)>,
}

/// Shape of one weight.
#[derive(Clone, Copy, Debug)]
pub struct WeightShape {
    /// Encoding.
    pub kind: Kind,
    /// Output width.
    pub rows: usize,
    /// Input width.
    pub cols: usize,
}

/// The shapes that dispatches are made from.
pub struct Shapes<'a> {
    /// Of the weights.
    pub weights: &'a [WeightShape],
    /// Of the activations.
    pub tensors: &'a TensorTable,
    /// Of attention.
    pub attention: crate::device::AttentionSpec,
    /// Rotated pairs of a head.
    pub rotated: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Bytes that a kernel can see at once.
    pub binding_bytes: u64,
}

/// Everything that is made once.
#[derive(Debug)]
pub struct Compiled {
    /// Over the tokens.
    pub body: Vec<Dispatch>,
    /// Over the rows that sample.
    pub head: Vec<Dispatch>,
    /// Matrices to upload.
    pub matrices: Vec<Matrix>,
    /// Values of a row of each buffer of activations that is used, and what its rows are.
    pub buffers: Vec<Option<(usize, RowsOf)>>,
    /// Where the logits lie.
    pub logits: Place,
}

fn unsupported(what: &str) -> DeviceError {
    DeviceError::Vulkan(format!("the model's program has {what}, which no kernel does"))
}

/// Compiles both programs of a model.
///
/// # Errors
/// [`DeviceError`] for an order of operations that the kernels do not cover, and for shapes.
pub fn compile(
    body: &Program,
    head: &Program,
    logits: TensorId,
    shapes: &Shapes<'_>,
) -> Result<Compiled, DeviceError> {
    let (places, buffers) = place(&[body, head], shapes);
    let mut compiler = Compiler {
        shapes,
        places,
        matrices: Vec::new(),
        by_rows: BTreeMap::new(),
        used: vec![false; buffers.len()],
        taken_from: BTreeMap::new(),
        dispatches: Vec::new(),
    };
    compiler.run(body)?;
    let of_body = std::mem::take(&mut compiler.dispatches);
    compiler.run(head)?;
    let logits = compiler.places[logits.0];
    let argmax = Dispatch {
        kernel: Kernel::Argmax,
        shape: vec![logits.stride as u32, 0, 0, 0],
        bound: vec![
            Bound::Shape,
            Bound::Step,
            Bound::Activations(logits.buffer),
            Bound::Sampled,
            Bound::Told,
        ],
        groups: Groups::EachRow,
    };
    compiler.dispatches.push(argmax);
    let used = &compiler.used;
    let buffers = buffers.into_iter().zip(used).map(|(b, used)| used.then_some(b)).collect();
    let (head, matrices) = (compiler.dispatches, compiler.matrices);
    Ok(Compiled { body: of_body, head, matrices, buffers, logits })
}

/// Whether `next` makes one value of the pair that `parts` compute.
fn gate_of(parts: &[MatmulPart], next: Option<&Op>) -> Option<Activation> {
    let (Some(Op::Gate { activation, gate, up }), [a, b]) = (next, parts) else { return None };
    (a.out == *gate && b.out == *up && !a.add && !b.add).then_some(*activation)
}

/// Products of one input lie side by side, so that one dispatch can write them.
fn place(programs: &[&Program], shapes: &Shapes<'_>) -> (Vec<Place>, Vec<(usize, RowsOf)>) {
    let table = &shapes.tensors.shapes;
    let mut places: Vec<Option<Place>> = vec![None; table.len()];
    let mut buffers = Vec::new();
    let ops = programs.iter().flat_map(|program| &program.ops);
    for op in ops {
        let Op::Matmul { parts, .. } = op else { continue };
        if parts.iter().any(|part| part.add || places[part.out.0].is_some()) {
            continue;
        }
        let stride = parts.iter().map(|part| table[part.out.0].0).sum();
        let mut at = 0;
        for part in parts {
            places[part.out.0] = Some(Place { buffer: buffers.len(), at, stride });
            at += table[part.out.0].0;
        }
        buffers.push((stride, table[parts[0].out.0].1));
    }
    let alone = |(place, &(width, rows)): (Option<Place>, &(usize, RowsOf))| {
        place.unwrap_or_else(|| {
            buffers.push((width, rows));
            Place { buffer: buffers.len() - 1, at: 0, stride: width }
        })
    };
    (places.into_iter().zip(table).map(alone).collect(), buffers)
}

struct Compiler<'a> {
    shapes: &'a Shapes<'a>,
    places: Vec<Place>,
    matrices: Vec<Matrix>,
    by_rows: BTreeMap<(Vec<usize>, bool), usize>,
    used: Vec<bool>,
    /// Rows taken, which the norm that follows reads where they lie.
    taken_from: BTreeMap<usize, TensorId>,
    dispatches: Vec<Dispatch>,
}

impl Compiler<'_> {
    fn run(&mut self, program: &Program) -> Result<(), DeviceError> {
        let mut at = 0;
        while at < program.ops.len() {
            at += self.op(program, at)?;
        }
        Ok(())
    }

    fn place(&mut self, tensor: TensorId) -> Place {
        let place = self.places[tensor.0];
        self.used[place.buffer] = true;
        place
    }

    fn width(&self, tensor: TensorId) -> usize {
        self.shapes.tensors.shapes[tensor.0].0
    }

    /// Compiles the operation at `at`, with those after it that share its kernel; returns how many.
    fn op(&mut self, program: &Program, at: usize) -> Result<usize, DeviceError> {
        let ops = &program.ops[at..];
        match &ops[0] {
            Op::Embed { table, out } => self.embed(*table, *out),
            Op::RmsNorm { x, weight, eps, out } => self.norm(*x, *weight, *eps, *out),
            Op::Matmul { x, parts } => {
                if let Some(activation) = gate_of(parts, ops.get(1))
                    && self.kind(&parts[0]) == self.kind(&parts[1])
                {
                    let rows = Rows {
                        weights: parts.iter().map(|part| part.weight.0).collect(),
                        interleaved: true,
                    };
                    self.product(*x, rows, parts[0].out, activation.into(), program.rows);
                    return Ok(2);
                }
                self.products(*x, parts, program.rows);
            }
            Op::AddBias { x, bias } => {
                let (place, width) = (self.place(*x), self.width(*x));
                self.dispatches.push(Dispatch {
                    kernel: Kernel::AddBias,
                    shape: words(&[width, place.stride, place.at, 0]),
                    bound: vec![
                        Bound::Shape,
                        Bound::Vector(*bias),
                        Bound::Activations(place.buffer),
                    ],
                    groups: Groups::Rows { x: width.div_ceil(64) as u32 },
                });
            }
            // The table of all positions was made at the start.
            Op::RopeAngles { .. } => {}
            Op::Rope { x: q, .. } => {
                let [Op::Rope { x: rotated, .. }, Op::KvWrite { layer, k, v }] =
                    ops[1..].get(..2).ok_or_else(|| unsupported("a rotation without keys"))?
                else {
                    return Err(unsupported("a rotation of something else than queries and keys"));
                };
                if rotated != k {
                    return Err(unsupported("keys that are not rotated"));
                }
                self.rope_kv(*layer, *q, *k, *v)?;
                return Ok(3);
            }
            Op::KvWrite { .. } => return Err(unsupported("keys that are not rotated")),
            Op::Attention { layer, q, out } => self.attention(*layer, *q, *out),
            Op::Gate { activation, gate, up } => {
                let (gate_at, up_at) = (self.place(*gate), self.place(*up));
                if gate_at.buffer != up_at.buffer {
                    return Err(unsupported("a gate of two inputs"));
                }
                let width = self.width(*gate);
                self.dispatches.push(Dispatch {
                    kernel: Kernel::Gate { gelu: *activation == Activation::Gelu },
                    shape: words(&[width, gate_at.stride, gate_at.at, up_at.at]),
                    bound: vec![Bound::Shape, Bound::Activations(gate_at.buffer)],
                    groups: Groups::Rows { x: width.div_ceil(64) as u32 },
                });
            }
            Op::Take { x, out } => {
                if !matches!(ops.get(1), Some(Op::RmsNorm { x, .. }) if x == out) {
                    return Err(unsupported("rows taken for something else than a norm"));
                }
                self.taken_from.insert(out.0, *x);
            }
        }
        Ok(1)
    }

    fn embed(&mut self, table: WeightId, out: TensorId) {
        let matrix = self.matrix(Rows { weights: vec![table.0], interleaved: false });
        let place = self.place(out);
        let Matrix { kind, cols, ref parts, count, .. } = self.matrices[matrix];
        let blocks = cols / BLOCK;
        for (part, &(tile, tiles)) in parts.clone().iter().enumerate() {
            let first = tile * TILE;
            let held = (tiles * TILE).min(count - first);
            self.dispatches.push(Dispatch {
                kernel: Kernel::embed(kind),
                shape: words(&[blocks, held, first, 0, 0, place.stride, place.at, 0]),
                bound: vec![
                    Bound::Shape,
                    Bound::Step,
                    Bound::Values { matrix, part },
                    Bound::Scales { matrix, part },
                    Bound::Activations(place.buffer),
                    Bound::Sampled,
                ],
                groups: Groups::Rows { x: blocks.div_ceil(64) as u32 },
            });
        }
    }

    fn norm(&mut self, x: TensorId, weight: WeightId, eps: f32, out: TensorId) {
        let taken_from = self.taken_from.get(&x.0).copied();
        let (from, to) = (self.place(taken_from.unwrap_or(x)), self.place(out));
        let width = self.width(out);
        let mut shape =
            words(&[width / 4, from.stride / 4, from.at / 4, to.stride / 4, to.at / 4, 0, 0, 0]);
        shape[5] = eps.to_bits();
        self.dispatches.push(Dispatch {
            kernel: Kernel::Norm { taken: taken_from.is_some() },
            shape,
            bound: vec![
                Bound::Shape,
                Bound::Step,
                Bound::Vector(weight),
                Bound::Activations(from.buffer),
                Bound::Activations(to.buffer),
            ],
            groups: Groups::EachRow,
        });
    }

    fn kind(&self, part: &MatmulPart) -> Kind {
        self.shapes.weights[part.weight.0].kind
    }

    /// Neighbours of one kind are one dispatch.
    fn products(&mut self, x: TensorId, parts: &[MatmulPart], rows_of: RowsOf) {
        let mut from = 0;
        while from < parts.len() {
            let first = &parts[from];
            let mut to = from + 1;
            let mut end = self.places[first.out.0].at + self.width(first.out);
            while let Some(part) = parts.get(to) {
                let place = self.places[part.out.0];
                let beside = place.buffer == self.places[first.out.0].buffer && place.at == end;
                if !beside || part.add != first.add || self.kind(part) != self.kind(first) {
                    break;
                }
                end += self.width(part.out);
                to += 1;
            }
            let weights = parts[from..to].iter().map(|part| part.weight.0).collect();
            let epilogue = if first.add { Epilogue::Add } else { Epilogue::Store };
            let rows = Rows { weights, interleaved: false };
            self.product(x, rows, first.out, epilogue, rows_of);
            from = to;
        }
    }

    fn product(
        &mut self,
        x: TensorId,
        rows: Rows,
        out: TensorId,
        epilogue: Epilogue,
        rows_of: RowsOf,
    ) {
        let (from, to) = (self.place(x), self.place(out));
        let matrix = self.matrix(rows);
        let Matrix { kind, cols, count, ref parts, .. } = self.matrices[matrix];
        let rows_at = match rows_of {
            RowsOf::Tokens => 0,
            RowsOf::Taken => 1,
        };
        for (part, &(tile, tiles)) in parts.clone().iter().enumerate() {
            let first = tile * TILE;
            let held = (tiles * TILE).min(count - first);
            self.dispatches.push(Dispatch {
                kernel: Kernel::product(kind, 1, epilogue),
                shape: words(&[
                    cols / BLOCK,
                    held,
                    first,
                    from.stride / 4,
                    from.at / 4,
                    to.stride,
                    to.at,
                    rows_at,
                ]),
                bound: vec![
                    Bound::Shape,
                    Bound::Step,
                    Bound::Values { matrix, part },
                    Bound::Scales { matrix, part },
                    Bound::Activations(from.buffer),
                    Bound::Activations(to.buffer),
                ],
                groups: Groups::Product { x: tiles as u32 },
            });
        }
    }

    /// The matrix of `rows`, which is made when it is first asked for.
    fn matrix(&mut self, rows: Rows) -> usize {
        let key = (rows.weights.clone(), rows.interleaved);
        if let Some(&matrix) = self.by_rows.get(&key) {
            return matrix;
        }
        let WeightShape { kind, cols, .. } = self.shapes.weights[rows.weights[0]];
        let count = rows.weights.iter().map(|&weight| self.shapes.weights[weight].rows).sum();
        let tile_bytes = super::weights::value_bytes(kind, cols / BLOCK) as u64;
        let tiles_max = (self.shapes.binding_bytes / tile_bytes).clamp(1, 65_535) as usize;
        let tiles = usize::div_ceil(count, TILE);
        let parts = (0..tiles)
            .step_by(tiles_max)
            .map(|first| (first, tiles_max.min(tiles - first)))
            .collect();
        self.matrices.push(Matrix { rows, kind, count, cols, parts });
        self.by_rows.insert(key, self.matrices.len() - 1);
        self.matrices.len() - 1
    }

    fn rope_kv(
        &mut self,
        layer: usize,
        q: TensorId,
        k: TensorId,
        v: TensorId,
    ) -> Result<(), DeviceError> {
        let (q_at, k_at, v_at) = (self.place(q), self.place(k), self.place(v));
        if k_at.buffer != q_at.buffer || v_at.buffer != q_at.buffer {
            return Err(unsupported("queries, keys and values of different inputs"));
        }
        let pairs = self.width(q) / 2;
        let kv_pairs = self.width(k) / 2;
        self.dispatches.push(Dispatch {
            kernel: Kernel::RopeKv,
            shape: words(&[
                pairs,
                kv_pairs,
                self.shapes.attention.head_dim / 2,
                self.shapes.rotated,
                self.shapes.block_size,
                q_at.stride,
                q_at.at,
                k_at.at,
                v_at.at,
                0,
                0,
                0,
            ]),
            bound: vec![
                Bound::Shape,
                Bound::Step,
                Bound::Angles,
                Bound::Activations(q_at.buffer),
                Bound::Keys(layer),
                Bound::KvValues(layer),
            ],
            groups: Groups::Rows { x: (pairs + 2 * kv_pairs).div_ceil(64) as u32 },
        });
        Ok(())
    }

    fn attention(&mut self, layer: usize, q: TensorId, out: TensorId) {
        let (q_at, to) = (self.place(q), self.place(out));
        let spec = self.shapes.attention;
        let mut shape = words(&[
            spec.heads,
            spec.kv_heads,
            self.shapes.block_size,
            q_at.stride / 4,
            q_at.at / 4,
            to.stride / 4,
            to.at / 4,
            0,
        ]);
        shape[7] = (1.0 / (spec.head_dim as f32).sqrt()).to_bits();
        self.dispatches.push(Dispatch {
            kernel: Kernel::Attention { head_dim: spec.head_dim as u32 },
            shape,
            bound: vec![
                Bound::Shape,
                Bound::Step,
                Bound::Activations(q_at.buffer),
                Bound::Keys(layer),
                Bound::KvValues(layer),
                Bound::Activations(to.buffer),
            ],
            groups: Groups::Rows { x: spec.heads as u32 },
        });
    }
}

fn words(values: &[usize]) -> Vec<u32> {
    values.iter().map(|&value| value as u32).collect()
}
