// y = residual + sigmoid(gate) * x, one gate for each token; without a gate, residual + x.
//
// operands: residual, gate [tokens, 1] (may be absent), x, y
// sizes:    tokens, width

INLINE float opened_gate(MEMORY memory, const GLOBAL PACKET *packet, uint token) {
    if (packet->operand[1] == ABSENT) return 1.0f;
    return sigmoid1(OPERAND(float, 1)[(ulong)token * packet->stride[1]]);
}

DEFINE_BY_COLUMNS(gated_add, 3, const float gate = opened_gate(memory, packet, token),
                  A(0) + gate * A(2))
