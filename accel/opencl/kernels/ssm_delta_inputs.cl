// What SSM_DELTA_NET needs of each token besides its values (rule R8): normed queries and keys, the
// decay g = exp(softplus(alpha + dt_bias) decay) and the strength b = sigmoid(beta).
//
// operands: x (queries, keys, ...), alpha, beta, decay, dt_bias,
//           qk [tokens, 2 key_heads state_size], gates [tokens, 2 value_heads]: g, then b
// sizes:    tokens, key_heads, value_heads, state_size
// reals:    eps, 1 / sqrt(state_size)
// Tokens are split among workers.

void op_ssm_delta_inputs(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_delta_inputs);
    const uint size = op.state_size;
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        for (uint head = 0; head < 2 * op.key_heads; head++) {
            const GLOBAL float *x =
                op.x + (ulong)token * op.x_stride + head * size;
            GLOBAL float *y = op.qk + (ulong)token * op.qk_stride + head * size;
            const float r = divide1(1.0f, sqrt1(sum_of_squares(x, size) + op.eps));
            const bool is_query = head < op.key_heads;
            for (uint k = 0; k < size; k += 16) {
                const int count = (int)(size - k);
                float16 value = load_padded(x + k, count) * r;
                if (is_query) value = value * op.query_scale;
                store_partial(value, y + k, count);
            }
        }
        const GLOBAL float *alpha = op.alpha + (ulong)token * op.alpha_stride;
        const GLOBAL float *beta = op.beta + (ulong)token * op.beta_stride;
        GLOBAL float *gates = op.gates + (ulong)token * op.gates_stride;
        for (uint head = 0; head < op.value_heads; head += 16) {
            const int count = (int)(op.value_heads - head);
            const float16 rate = softplus16(load_padded(alpha + head, count) +
                                            load_padded(op.dt_bias + head, count));
            const float16 decay = load_padded(op.decay + head, count);
            store_partial(exp16(rate * decay), gates + head, count);
            store_partial(sigmoid16(load_padded(beta + head, count)), gates + op.value_heads + head,
                          count);
        }
    }
}

