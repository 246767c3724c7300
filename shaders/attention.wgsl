// Causal attention of one row's head over its sequence's cache.
//
// A workgroup for each row and head takes 64 positions at a time, in order, and rescales what it
// has when the largest score grows. Nothing depends on the other rows of the step, nor on where a
// prompt was cut. Scores: a thread for each position. Values: a thread for 8 of the head's
// dimensions and every SHARES-th of the positions; the shares are added in order at the end.

// Values of a head: a multiple of 8, at most 256.
override HEAD_DIM: u32 = 64;

const THREADS = 64u;

struct Shape {
    heads: u32,
    kv_heads: u32,
    block_size: u32,
    // Of the rows of the queries, in vectors, and where they start.
    q_stride: u32,
    q_at: u32,
    out_stride: u32,
    out_at: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
// Eight half floats a vector: [block][head][position in the block][vector].
@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;

var<workgroup> query: array<vec4<f32>, HEAD_DIM / 4u>;
var<workgroup> weights: array<f32, THREADS>;
var<workgroup> reduced: array<f32, THREADS>;
var<workgroup> gathered: array<vec4<f32>, 2u * THREADS>;

// Instead of minus infinity, which is no constant.
const LEAST = -3.0e38;

// Where the vectors of `position` start.
fn slot(table: u32, position: u32, head: u32) -> u32 {
    let block = step[table + position / shape.block_size];
    let of_head = (block * shape.kv_heads + head) * shape.block_size;
    return (of_head + position % shape.block_size) * (HEAD_DIM / 8u);
}

@compute @workgroup_size(64)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group.x;
    let row = group.y;
    let kv_head = head / (shape.heads / shape.kv_heads);
    let count = step[4u + 4u * row + 1u] + 1u;
    let table = step[3] + step[4u + 4u * row + 2u];
    let vectors = HEAD_DIM / 8u;
    let shares = THREADS / vectors;
    let share = thread / vectors;
    let vector = thread % vectors;

    let q_at = shape.q_at + row * shape.q_stride + head * (HEAD_DIM / 4u);
    for (var i = thread; i < HEAD_DIM / 4u; i += THREADS) {
        query[i] = q[q_at + i] * shape.scale;
    }
    workgroupBarrier();

    var largest = LEAST;
    var weight_sum = 0.0;
    var low = vec4<f32>();
    var high = vec4<f32>();
    for (var first = 0u; first < count; first += THREADS) {
        let position = first + thread;
        var score = LEAST;
        if position < count {
            let at = slot(table, position, kv_head);
            var sum = vec4<f32>();
            for (var i = 0u; i < vectors; i++) {
                let k = keys[at + i];
                sum = fma(query[2u * i], vec4(unpack2x16float(k.x), unpack2x16float(k.y)), sum);
                sum = fma(query[2u * i + 1u], vec4(unpack2x16float(k.z), unpack2x16float(k.w)), sum);
            }
            score = (sum.x + sum.y) + (sum.z + sum.w);
        }
        reduced[thread] = score;
        for (var half = THREADS / 2u; half > 0u; half /= 2u) {
            workgroupBarrier();
            if thread < half {
                reduced[thread] = max(reduced[thread], reduced[thread + half]);
            }
        }
        workgroupBarrier();
        let now = max(largest, reduced[0]);
        let kept = exp(largest - now);
        largest = now;
        var weight = 0.0;
        if position < count {
            weight = exp(score - now);
        }
        weight_sum = fma(weight_sum, kept, weight);
        weights[thread] = weight;
        workgroupBarrier();
        if share < shares {
            low *= kept;
            high *= kept;
            let here = min(THREADS, count - first);
            for (var i = share; i < here; i += shares) {
                let v = values[slot(table, first + i, kv_head) + vector];
                let w = vec4(weights[i]);
                low = fma(w, vec4(unpack2x16float(v.x), unpack2x16float(v.y)), low);
                high = fma(w, vec4(unpack2x16float(v.z), unpack2x16float(v.w)), high);
            }
        }
    }

    workgroupBarrier();
    reduced[thread] = weight_sum;
    gathered[2u * thread] = low;
    gathered[2u * thread + 1u] = high;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if thread < half {
            reduced[thread] += reduced[thread + half];
        }
    }
    workgroupBarrier();
    if share == 0u {
        for (var s = 1u; s < shares; s++) {
            low += gathered[2u * (s * vectors + vector)];
            high += gathered[2u * (s * vectors + vector) + 1u];
        }
        let factor = 1.0 / reduced[0];
        let at = shape.out_at + row * shape.out_stride + head * (HEAD_DIM / 4u) + 2u * vector;
        out[at] = low * factor;
        out[at + 1u] = high * factor;
    }
}
