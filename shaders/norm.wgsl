// out[r] = x[r] / sqrt(mean(x[r]²) + eps) · weight; with TAKEN, of the rows that sample.
//
// A workgroup for each row. A thread sums every 64th vector in order, and the threads meet in one
// fixed tree.

override TAKEN: bool = false;

struct Shape {
    // Vectors of a row.
    width: u32,
    x_stride: u32,
    x_at: u32,
    out_stride: u32,
    out_at: u32,
    eps: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;

const THREADS = 64u;
var<workgroup> partials: array<f32, THREADS>;

@compute @workgroup_size(64)
fn norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    var source = group.x;
    if TAKEN {
        source = step[step[2] + 2u * group.x];
    }
    let x_at = shape.x_at + source * shape.x_stride;
    var squares = vec4<f32>();
    for (var i = thread; i < shape.width; i += THREADS) {
        let value = x[x_at + i];
        squares = fma(value, value, squares);
    }
    partials[thread] = (squares.x + squares.y) + (squares.z + squares.w);
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if thread < half {
            partials[thread] += partials[thread + half];
        }
    }
    workgroupBarrier();
    let factor = 1.0 / sqrt(partials[0] / f32(4u * shape.width) + shape.eps);
    let out_at = shape.out_at + group.x * shape.out_stride;
    for (var i = thread; i < shape.width; i += THREADS) {
        out[out_at + i] = x[x_at + i] * factor * weight[i];
    }
}
