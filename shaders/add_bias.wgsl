// x[r][i] += bias[i]

struct Shape {
    width: u32,
    stride: u32,
    x_at: u32,
    pad: u32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> bias: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn add_bias(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < shape.width {
        x[shape.x_at + id.y * shape.stride + id.x] += bias[id.x];
    }
}
