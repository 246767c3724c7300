// gate[r] = activation(gate[r]) · up[r], where the products of the two could not be one dispatch.

// 0: SiLU, 1: GELU by its tanh approximation
override ACTIVATION: u32 = 0;

struct Shape {
    width: u32,
    stride: u32,
    gate_at: u32,
    up_at: u32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read_write> values: array<f32>;

@compute @workgroup_size(64)
fn gate(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= shape.width {
        return;
    }
    let at = shape.gate_at + id.y * shape.stride + id.x;
    let value = values[at];
    let up = values[shape.up_at + id.y * shape.stride + id.x];
    if ACTIVATION == 0u {
        values[at] = value / (1.0 + exp(-value)) * up;
    } else {
        let twice = 1.595769 * value * fma(0.044715 * value, value, 1.0);
        values[at] = value * (1.0 - 1.0 / (exp(twice) + 1.0)) * up;
    }
}
