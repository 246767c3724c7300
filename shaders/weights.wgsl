// The two operations that read encoded weights: products with rows of activations, and rows of a
// table. They share a file because they share the decoding of a block.
//
// A tile is 64 rows of a matrix, a block 32 of its columns. A thread owns 4 neighbouring rows of a
// tile. Every output is summed in one order, whatever ROWS is: blocks segment, segment + SEGMENTS,
// ... of each segment in order, each of their 32 columns in order, then the segments in order.

// 0: 4 bits, 1: 8 bits, 2: 6 bits, 3: f16, 4: bf16, 5: f32
override KIND: u32 = 0;
// Vectors that the values of a block take.
override VECTORS: u32 = 1;
// Rows of activations of a workgroup, at most 8.
override ROWS: u32 = 1;
// Parts that the columns are split into.
override SEGMENTS: u32 = 1;
// 0: store, 1: add to what is there, 2 and 3: SiLU and GELU of even columns, times odd ones
override EPILOGUE: u32 = 0;

const TILE = 64u;
const LANES = 16u;

struct Shape {
    // Blocks of a row of the matrix.
    blocks: u32,
    // Rows of the matrix in this buffer, and the first of them.
    count: u32,
    first: u32,
    // Of the rows of x, in vectors; of the rows of out, in values.
    x_stride: u32,
    x_at: u32,
    out_stride: u32,
    out_at: u32,
    // Where the step says how many rows there are.
    rows_at: u32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<storage, read> sampled: array<u32>;

var<workgroup> partials: array<vec4<f32>, LANES * SEGMENTS>;

struct Block {
    a: vec4<u32>,
    b: vec4<u32>,
    scale: u32,
}

// What a block of one row holds besides its values where those are more than two vectors.
fn load(index: u32, lane: u32) -> Block {
    var block: Block;
    if KIND <= 2u {
        let at = index * VECTORS * TILE + lane;
        block.a = values[at];
        if KIND != 0u {
            block.b = values[at + TILE];
        }
        if KIND <= 1u {
            block.scale = scales[index * TILE + lane];
        }
    }
    return block;
}

// Columns 4q to 4q + 3 of a block.
fn four(block: Block, index: u32, lane: u32, q: u32) -> vec4<f32> {
    let at = index * VECTORS * TILE + lane;
    if KIND == 0u {
        let nibbles = (block.a[q & 3u] >> ((q >> 2u) << 2u)) & 0x0f0f0f0fu;
        let scale = unpack2x16float(block.scale);
        return fma(vec4<f32>(unpack4xU8(nibbles)), vec4(scale.x), vec4(scale.y));
    } else if KIND == 1u {
        var word = block.a[q & 3u];
        if q > 3u {
            word = block.b[q & 3u];
        }
        return vec4<f32>(unpack4xI8(word)) * unpack2x16float(block.scale).x;
    } else if KIND == 2u {
        let low = (block.a[q & 3u] >> ((q >> 2u) << 2u)) & 0x0f0f0f0fu;
        let high = (block.b[q >> 2u] >> ((q & 3u) << 1u)) & 0x03030303u;
        let scale = unpack2x16float(block.b[2u + (q >> 2u)]);
        return fma(vec4<f32>(unpack4xU8(low | (high << 4u))), vec4(scale.x), vec4(scale.y));
    } else if KIND == 3u {
        let words = values[at + (q >> 1u) * TILE];
        let pair = select(words.xy, words.zw, (q & 1u) == 1u);
        return vec4(unpack2x16float(pair.x), unpack2x16float(pair.y));
    } else if KIND == 4u {
        let words = values[at + (q >> 1u) * TILE];
        let pair = select(words.xy, words.zw, (q & 1u) == 1u);
        let bits = vec4(pair.x << 16u, pair.x, pair.y << 16u, pair.y);
        return bitcast<vec4<f32>>(bits & vec4(0xffff0000u));
    }
    return bitcast<vec4<f32>>(values[at + q * TILE]);
}

fn activated(value: f32) -> f32 {
    if EPILOGUE == 2u {
        return value / (1.0 + exp(-value));
    }
    let twice = 1.595769 * value * fma(0.044715 * value, value, 1.0);
    return value * (1.0 - 1.0 / (exp(twice) + 1.0));
}

fn finish(sum: vec4<f32>, row: u32, column: u32) {
    if EPILOGUE >= 2u {
        let at = shape.out_at + row * shape.out_stride + (shape.first + column) / 2u;
        for (var i = 0u; i < 2u; i++) {
            if column + 2u * i < shape.count {
                out[at + i] = activated(sum[2u * i]) * sum[2u * i + 1u];
            }
        }
        return;
    }
    let at = shape.out_at + row * shape.out_stride + shape.first + column;
    for (var i = 0u; i < 4u; i++) {
        if column + i < shape.count {
            if EPILOGUE == 1u {
                out[at + i] += sum[i];
            } else {
                out[at + i] = sum[i];
            }
        }
    }
}

@compute @workgroup_size(16, SEGMENTS)
fn product(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let rows = step[shape.rows_at];
    let first_row = group.y * ROWS;
    let lane = local.x;
    var segment = 0u;
    if SEGMENTS > 1u {
        segment = local.y;
    }
    var sums: array<vec4<f32>, 8>;
    // Rows beyond the last are the last again, and not written.
    var x_at: array<u32, 8>;
    for (var r = 0u; r < ROWS; r++) {
        x_at[r] = shape.x_at + min(first_row + r, rows - 1u) * shape.x_stride;
    }
    for (var b = segment; b < shape.blocks; b += SEGMENTS) {
        let index = group.x * shape.blocks + b;
        let block0 = load(index, lane);
        let block1 = load(index, LANES + lane);
        let block2 = load(index, 2u * LANES + lane);
        let block3 = load(index, 3u * LANES + lane);
        for (var q = 0u; q < 8u; q++) {
            let w0 = four(block0, index, lane, q);
            let w1 = four(block1, index, LANES + lane, q);
            let w2 = four(block2, index, 2u * LANES + lane, q);
            let w3 = four(block3, index, 3u * LANES + lane, q);
            for (var r = 0u; r < ROWS; r++) {
                let v = x[x_at[r] + 8u * b + q];
                var sum = sums[r];
                sum = fma(vec4(v.x), vec4(w0.x, w1.x, w2.x, w3.x), sum);
                sum = fma(vec4(v.y), vec4(w0.y, w1.y, w2.y, w3.y), sum);
                sum = fma(vec4(v.z), vec4(w0.z, w1.z, w2.z, w3.z), sum);
                sums[r] = fma(vec4(v.w), vec4(w0.w, w1.w, w2.w, w3.w), sum);
            }
        }
    }
    let column = group.x * TILE + 4u * lane;
    for (var r = 0u; r < ROWS; r++) {
        var sum = sums[r];
        if SEGMENTS > 1u {
            workgroupBarrier();
            partials[segment * LANES + lane] = sum;
            workgroupBarrier();
            for (var s = 1u; s < SEGMENTS; s++) {
                sum += partials[s * LANES + lane];
            }
        }
        if segment == 0u && first_row + r < rows {
            finish(sum, first_row + r, column);
        }
    }
}

// One thread for each block of a row of the step. A token with its highest bit set is in a slot of
// `sampled`: the step before chose it, and the host need not know it yet.
@compute @workgroup_size(64)
fn embed(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = id.y;
    if id.x >= shape.blocks || row >= step[shape.rows_at] {
        return;
    }
    var token = step[4u + 4u * row];
    if (token & 0x80000000u) != 0u {
        token = sampled[token & 0x7fffffffu];
    }
    // The table may be split; each part writes the rows of its own tokens.
    if token < shape.first || token - shape.first >= shape.count {
        return;
    }
    token -= shape.first;
    let index = (token / TILE) * shape.blocks + id.x;
    let lane = (token % 4u) * LANES + (token % TILE) / 4u;
    let block = load(index, lane);
    let at = shape.out_at + row * shape.out_stride + 32u * id.x;
    for (var q = 0u; q < 8u; q++) {
        let value = four(block, index, lane, q);
        for (var i = 0u; i < 4u; i++) {
            out[at + 4u * q + i] = value[i];
        }
    }
}
