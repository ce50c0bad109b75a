// What SSM_DELTA_NET needs of each token besides its values (rule R8): normed queries and keys, the
// decay g = exp(softplus(alpha + dt_bias) decay) and the strength b = sigmoid(beta).
//
// operands: x (queries, keys, ...), alpha, beta, decay, dt_bias,
//           qk [tokens, 2 key_heads state_size], gates: g, one a head or one a head and key,
//           then b of every head
// sizes:    tokens, key_heads, value_heads, state_size
// reals:    eps, 1 / sqrt(state_size)
// Tokens are split among workers.

// g of `count` rates from `first` on, with these decays.
INLINE void make_gates(const GLOBAL float *alpha, const GLOBAL float *dt_bias, float16 decay,
                       GLOBAL float *gates, uint first, int count) {
    const float16 rate =
        softplus16(load_padded(alpha + first, count) + load_padded(dt_bias + first, count));
    store_partial(exp16(rate * decay), gates + first, count);
}

void op_ssm_delta_inputs(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_delta_inputs);
    const uint size = op.state_size, decays = op.gates_stride / op.value_heads - 1;
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
        for (uint head = 0; decays > 1 && head < op.value_heads; head++) {
            for (uint k = 0; k < decays; k += 16)
                make_gates(alpha, op.dt_bias, (float16)(op.decay[head]), gates,
                           head * decays + k, (int)(decays - k));
        }
        for (uint head = 0; head < op.value_heads; head += 16) {
            const int count = (int)(op.value_heads - head);
            if (decays == 1)
                make_gates(alpha, op.dt_bias, load_padded(op.decay + head, count), gates, head,
                           count);
            store_partial(sigmoid16(load_padded(beta + head, count)),
                          gates + op.value_heads * decays + head, count);
        }
    }
}

