// The gated activations of SWIGLU (rule R2).

#ifndef GATE_H
#define GATE_H

#define GATE_LIMIT 7.0f
#define GATE_STEEPNESS 1.702f

// A comparison with NaN is false, so NaN passes the bounds.
static __device__ __forceinline__ float clamped_gate(float gate, float up) {
    const float g = gate > GATE_LIMIT ? GATE_LIMIT : gate;
    const float least = up < -GATE_LIMIT ? -GATE_LIMIT : up;
    const float u = up > GATE_LIMIT ? GATE_LIMIT : least;
    return DIVIDE(g, 1.0f + exp_of(-(GATE_STEEPNESS * g))) * (u + 1.0f);
}

static __device__ __forceinline__ float gated(uint activation, float gate, float up) {
    if (activation == 3) return clamped_gate(gate, up);
    if (activation == 4) return (gate <= 0.0f ? 0.0f : gate) * up;
    return (activation == 2   ? sigmoid_of(gate)
            : activation == 1 ? gelu_of(gate)
                              : silu_of(gate)) *
           up;
}

#endif
