// Products of encoded weights with rows of activations, as in `../weights.wgsl`, where the columns
// are one segment and a subgroup has at least 8 invocations: each of eight neighbours loads one of
// the eight vectors of a row's block, and they tell each other. The sums are the same, bit for bit.

// 0: 4 bits, 1: 8 bits, 2: 6 bits, 3: f16, 4: bf16, 5: f32
override KIND: u32 = 0;
// Vectors that the values of a block take.
override VECTORS: u32 = 1;
// Rows of activations of a workgroup, at most 8.
override ROWS: u32 = 1;
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

// Columns 4q to 4q + 3 of a thread's four rows: a column of the matrix is a column of the block.
fn columns(
    block0: Block,
    block1: Block,
    block2: Block,
    block3: Block,
    index: u32,
    lane: u32,
    q: u32,
) -> mat4x4<f32> {
    let rows = mat4x4(
        four(block0, index, lane, q),
        four(block1, index, LANES + lane, q),
        four(block2, index, 2u * LANES + lane, q),
        four(block3, index, 3u * LANES + lane, q),
    );
    return transpose(rows);
}

fn add(v: vec4<f32>, weights: mat4x4<f32>, before: vec4<f32>) -> vec4<f32> {
    var sum = fma(vec4(v.x), weights[0], before);
    sum = fma(vec4(v.y), weights[1], sum);
    sum = fma(vec4(v.z), weights[2], sum);
    return fma(vec4(v.w), weights[3], sum);
}

@compute @workgroup_size(16)
fn product(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_invocation_id) neighbour: u32,
) {
    let rows = step[shape.rows_at];
    let first_row = group.y * ROWS;
    var sums: array<vec4<f32>, 8>;
    // Rows beyond the last are the last again, and not written.
    var x_at: array<u32, 8>;
    for (var r = 0u; r < ROWS; r++) {
        x_at[r] = shape.x_at + min(first_row + r, rows - 1u) * shape.x_stride + neighbour % 8u;
    }
    for (var b = 0u; b < shape.blocks; b++) {
        let index = group.x * shape.blocks + b;
        let block0 = load(index, lane);
        let block1 = load(index, LANES + lane);
        let block2 = load(index, 2u * LANES + lane);
        let block3 = load(index, 3u * LANES + lane);
        var mine: array<vec4<f32>, 8>;
        for (var r = 0u; r < ROWS; r++) {
            mine[r] = x[x_at[r] + 8u * b];
        }
        var weights: mat4x4<f32>;
        weights = columns(block0, block1, block2, block3, index, lane, 0u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 0u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 1u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 1u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 2u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 2u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 3u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 3u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 4u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 4u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 5u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 5u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 6u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 6u), weights, sums[r]);
        }
        weights = columns(block0, block1, block2, block3, index, lane, 7u);
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = add(subgroupBroadcast(mine[r], 7u), weights, sums[r]);
        }
    }
    let column = group.x * TILE + 4u * lane;
    for (var r = 0u; r < ROWS; r++) {
        if first_row + r < rows {
            finish(sums[r], first_row + r, column);
        }
    }
}
