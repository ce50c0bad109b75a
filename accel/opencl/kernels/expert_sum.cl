// The experts of each token added up in order (rule R7):
// y = residual or 0; y += weights[t, e] * (products[t, e] * expert_scale[ids[t, e]]), e in order.
//
// operands: products [tokens * used, hidden], ids, weights [tokens, used], expert_scale [experts]
//           (may be absent), residual (may be absent), y
// sizes:    tokens, hidden, used

INLINE float16 expert_sum(MEMORY memory, const GLOBAL PACKET *packet, uint token, uint k,
                          int count) {
    const uint used = packet->size[2];
    const bool scaled = packet->operand[3] != ABSENT;
    const GLOBAL float *products = OPERAND(float, 0) + (ulong)token * used * packet->stride[0] + k;
    const GLOBAL int *ids = OPERAND(int, 1) + (ulong)token * packet->stride[1];
    const GLOBAL float *weights = OPERAND(float, 2) + (ulong)token * packet->stride[2];
    float16 sum = packet->operand[4] != ABSENT ? A(4) : (float16)(0.0f);
    for (uint place = 0; place < used; place++) {
        float16 product = load_padded(products + (ulong)place * packet->stride[0], count);
        if (scaled) product = product * OPERAND(float, 3)[ids[place]];
        sum = sum + weights[place] * product;
    }
    return sum;
}

DEFINE_BY_COLUMNS(expert_sum, 5, , expert_sum(memory, packet, token, k, count))
