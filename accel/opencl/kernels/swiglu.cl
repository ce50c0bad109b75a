// SWIGLU: y = f(gate) * up; f is silu (0), gelu (1), sigmoid (2) or relu (4). Activation 3 is the clamped
// gate.

#define GATE_LIMIT ((float16)(7.0f))
#define GATE_STEEPNESS ((float16)(1.702f))

// Comparisons, not fmin and fmax: a NaN stays a NaN.
INLINE float16 clamped_gate16(float16 gate, float16 up) {
    const float16 g = select(gate, GATE_LIMIT, (int16)(gate > GATE_LIMIT));
    const float16 least = select(up, -GATE_LIMIT, (int16)(up < -GATE_LIMIT));
    const float16 u = select(least, GATE_LIMIT, (int16)(up > GATE_LIMIT));
    const float16 one = (float16)(1.0f);
    return divide16(g, one + exp16(-(GATE_STEEPNESS * g))) * (u + one);
}

INLINE float16 relu16(float16 x) {
    return select(x, (float16)(0.0f), (int16)(x <= (float16)(0.0f)));
}

INLINE float16 activated16(float16 gate, float16 up, uint activation) {
    if (activation == 3) return clamped_gate16(gate, up);
    if (activation == 4) return relu16(gate) * up;
    return (activation == 2 ? sigmoid16(gate) : activation == 1 ? gelu16(gate) : silu16(gate)) * up;
}

DEFINE_ELEMENTWISE(swiglu, , activated16(A(gate), A(up), op.activation))
