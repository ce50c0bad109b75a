// SSM_GATED_NORM: y = rms_norm(x, weight) * silu(gate), in each head (rule R4).
//
// operands: x, gate, weight, y
// sizes:    tokens, heads, width
// reals:    eps
// Tokens are split among workers.

void op_ssm_gated_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_gated_norm);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        for (uint head = 0; head < op.heads; head++) {
            const uint first = head * op.width;
            const GLOBAL float *x = op.x + (ulong)token * op.x_stride + first;
            const GLOBAL float *gate = op.gate + (ulong)token * op.gate_stride + first;
            GLOBAL float *y = op.y + (ulong)token * op.y_stride + first;
            const float mean = divide1(sum_of_squares(x, op.width), (float)op.width);
            const float r = divide1(1.0f, sqrt1(mean + op.eps));
            for (uint k = 0; k < op.width; k += 16) {
                const int count = (int)(op.width - k);
                const float16 normed =
                    (load_padded(x + k, count) * r) * load_padded(op.weight + k, count);
                store_partial(normed * silu16(load_padded(gate + k, count)), y + k, count);
            }
        }
    }
}

