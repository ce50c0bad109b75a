// y = residual + sigmoid(gate) * x, one gate [tokens, 1] for each token; without a gate,
// residual + x.

INLINE float opened_gate(const gated_add_fields *op, uint token) {
    return op->gate ? sigmoid1(op->gate[(ulong)token * op->gate_stride]) : 1.0f;
}

DEFINE_BY_COLUMNS(gated_add, const float gate = opened_gate(&op, token),
                  A(residual) + gate * A(x))
