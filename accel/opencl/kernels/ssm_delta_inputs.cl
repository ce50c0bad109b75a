// What SSM_DELTA_NET needs of each token besides its values (rule R8): normed queries and keys, the
// decay g = exp(softplus(alpha + dt_bias) decay) and the strength b = sigmoid(beta).
//
// operands: x (queries, keys, ...), alpha, beta, decay, dt_bias,
//           qk [tokens, 2 key_heads state_size], gates [tokens, 2 value_heads]: g, then b
// sizes:    tokens, key_heads, value_heads, state_size
// reals:    eps, 1 / sqrt(state_size)
// Tokens are split among workers; or a work-group takes a head of a token at a time.

#if GROUP_SIZE == 1

void op_ssm_delta_inputs(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], key_heads = packet->size[1];
    const uint value_heads = packet->size[2], size = packet->size[3];
    const SHARE mine = share(tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        for (uint head = 0; head < 2 * key_heads; head++) {
            const GLOBAL float *x =
                OPERAND(float, 0) + (ulong)token * packet->stride[0] + head * size;
            GLOBAL float *y = OPERAND(float, 5) + (ulong)token * packet->stride[5] + head * size;
            const float r = divide1(1.0f, sqrt1(sum_of_squares(x, size) + packet->real[0]));
            const bool is_query = head < key_heads;
            for (uint k = 0; k < size; k += 16) {
                const int count = (int)(size - k);
                float16 value = load_padded(x + k, count) * r;
                if (is_query) value = value * packet->real[1];
                store_partial(value, y + k, count);
            }
        }
        const GLOBAL float *alpha = OPERAND(float, 1) + (ulong)token * packet->stride[1];
        const GLOBAL float *beta = OPERAND(float, 2) + (ulong)token * packet->stride[2];
        GLOBAL float *gates = OPERAND(float, 6) + (ulong)token * packet->stride[6];
        for (uint head = 0; head < value_heads; head += 16) {
            const int count = (int)(value_heads - head);
            const float16 rate = softplus16(load_padded(alpha + head, count) +
                                            load_padded(OPERAND(float, 4) + head, count));
            const float16 decay = load_padded(OPERAND(float, 3) + head, count);
            store_partial(exp16(rate * decay), gates + head, count);
            store_partial(sigmoid16(load_padded(beta + head, count)), gates + value_heads + head,
                          count);
        }
    }
}

#else

void op_ssm_delta_inputs(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], key_heads = packet->size[1];
    const uint value_heads = packet->size[2], size = packet->size[3];
    FOR_GROUP_UNITS(unit, tokens * 2 * key_heads) {
        const uint token = unit / (2 * key_heads), head = unit % (2 * key_heads);
        const GLOBAL float *x = OPERAND(float, 0) + (ulong)token * packet->stride[0] + head * size;
        GLOBAL float *y = OPERAND(float, 5) + (ulong)token * packet->stride[5] + head * size;
        const float sum = group_sum_of_squares(memory, x, size);
        const float r = divide1(1.0f, sqrt1(sum + packet->real[0]));
        for (uint k = get_local_id(0); k < size; k += GROUP_SIZE) {
            const float value = x[k] * r;
            y[k] = head < key_heads ? value * packet->real[1] : value;
        }
        if (head) continue;
        const GLOBAL float *alpha = OPERAND(float, 1) + (ulong)token * packet->stride[1];
        const GLOBAL float *beta = OPERAND(float, 2) + (ulong)token * packet->stride[2];
        GLOBAL float *gates = OPERAND(float, 6) + (ulong)token * packet->stride[6];
        for (uint j = get_local_id(0); j < value_heads; j += GROUP_SIZE) {
            gates[j] = exp1(softplus1(alpha[j] + OPERAND(float, 4)[j]) * OPERAND(float, 3)[j]);
            gates[value_heads + j] = sigmoid1(beta[j]);
        }
    }
}

#endif
