// The first token whose logit is the largest, of each row that samples; 0 if there is no number.
//
// A workgroup for each row. The token goes to the row's slot, where the next step's embedding finds
// it, and with the row's count of NaNs to what the host reads.

struct Shape {
    vocab_size: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> sampled: array<u32>;
@group(0) @binding(4) var<storage, read_write> told: array<vec2<u32>>;

const THREADS = 256u;
const NONE = 0xffffffffu;
var<workgroup> best_value: array<f32, THREADS>;
var<workgroup> best_token: array<u32, THREADS>;
var<workgroup> nans: array<u32, THREADS>;

@compute @workgroup_size(256)
fn argmax(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group.x * shape.vocab_size;
    var best = 0.0;
    var token = NONE;
    var found_nans = 0u;
    for (var i = thread; i < shape.vocab_size; i += THREADS) {
        let value = logits[at + i];
        // By its bits: a compiler may take for granted that a value equals itself.
        if (bitcast<u32>(value) & 0x7fffffffu) > 0x7f800000u {
            found_nans += 1u;
        } else if token == NONE || value > best {
            best = value;
            token = i;
        }
    }
    best_value[thread] = best;
    best_token[thread] = token;
    nans[thread] = found_nans;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if thread < half {
            let other = best_token[thread + half];
            let value = best_value[thread + half];
            let mine = best_token[thread];
            let here = best_value[thread];
            let better = value > here || (value == here && other < mine);
            if other != NONE && (mine == NONE || better) {
                best_token[thread] = other;
                best_value[thread] = value;
            }
            nans[thread] += nans[thread + half];
        }
    }
    if thread == 0u {
        let chosen = select(best_token[0], 0u, best_token[0] == NONE);
        sampled[step[step[2] + 2u * group.x + 1u]] = chosen;
        told[group.x] = vec2(chosen, nans[0]);
    }
}
