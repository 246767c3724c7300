// Rotates the queries in place, and writes rotated keys, and values, into the paged cache.
//
// A thread for each pair of neighbours: first the queries', then the keys', then the values'. The
// cache holds two half floats a word: [block][head][position in the block][pair].

struct Shape {
    // Pairs of the queries of a row, and of its keys.
    q_pairs: u32,
    kv_pairs: u32,
    // Pairs of a head, and how many of them are rotated.
    head_pairs: u32,
    rotated: u32,
    block_size: u32,
    // Of the rows of all three, in values, and where each starts.
    stride: u32,
    q_at: u32,
    k_at: u32,
    v_at: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> step: array<u32>;
// Cosine and sine: [position][rotated pair].
@group(0) @binding(2) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(4) var<storage, read_write> keys: array<u32>;
@group(0) @binding(5) var<storage, read_write> values: array<u32>;

fn rotated(at: u32, pair: u32, position: u32) -> vec2<f32> {
    let value = vec2(qkv[at], qkv[at + 1u]);
    if pair >= shape.rotated {
        return value;
    }
    let angle = angles[position * shape.rotated + pair];
    return vec2(
        fma(value.x, angle.x, -(value.y * angle.y)),
        fma(value.x, angle.y, value.y * angle.x),
    );
}

@compute @workgroup_size(64)
fn rope_kv(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = id.y;
    let position = step[4u + 4u * row + 1u];
    var index = id.x;
    if index < shape.q_pairs {
        let at = shape.q_at + row * shape.stride + 2u * index;
        let value = rotated(at, index % shape.head_pairs, position);
        qkv[at] = value.x;
        qkv[at + 1u] = value.y;
        return;
    }
    index -= shape.q_pairs;
    if index >= 2u * shape.kv_pairs {
        return;
    }
    let table = step[3] + step[4u + 4u * row + 2u];
    let block = step[table + position / shape.block_size];
    let pair = index % shape.kv_pairs;
    let head = pair / shape.head_pairs;
    let heads = shape.kv_pairs / shape.head_pairs;
    let slot = (block * heads + head) * shape.block_size + position % shape.block_size;
    let to = slot * shape.head_pairs + pair % shape.head_pairs;
    if index < shape.kv_pairs {
        let at = shape.k_at + row * shape.stride + 2u * pair;
        keys[to] = pack2x16float(rotated(at, pair % shape.head_pairs, position));
    } else {
        let at = shape.v_at + row * shape.stride + 2u * pair;
        values[to] = pack2x16float(vec2(qkv[at], qkv[at + 1u]));
    }
}
