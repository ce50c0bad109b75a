// RMS_NORM: r = 1 / sqrt(sum(x x) / width + eps); y = (x r) weight, in each group (rule R4).
//
// operands: x, weight (may be absent), y
// sizes:    tokens, groups, width
// reals:    eps
// Tokens are split among workers.

void op_rms_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(rms_norm);
    const bool weighted = op.weight != 0;
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        for (uint group = 0; group < op.groups; group++) {
            const GLOBAL float *x =
                op.x + (ulong)token * op.x_stride + group * op.width;
            GLOBAL float *y = op.y + (ulong)token * op.y_stride + group * op.width;
            float mean = divide1(sum_of_squares(x, op.width), (float)op.width);
            float r = divide1(1.0f, sqrt1(mean + op.eps));
            for (uint k = 0; k < op.width; k += 16) {
                int count = (int)(op.width - k);
                float16 value = load_padded(x + k, count) * r;
                if (weighted) value = value * load_padded(op.weight + k, count);
                store_partial(value, y + k, count);
            }
        }
    }
}

