// RMS_NORM: r = 1 / sqrt(sum(x x) / width + eps); y = (x r) weight, in each group (rule R4).
//
// operands: x, weight (may be absent), y
// sizes:    tokens, groups, width
// reals:    eps
// Tokens are split among workers; or a work-group takes a (token, group) at a time.

#if GROUP_SIZE == 1

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

#else

void op_rms_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(rms_norm);
    const bool weighted = op.weight != 0;
    FOR_GROUP_UNITS(unit, op.tokens * op.groups) {
        const uint token = unit / op.groups, first = unit % op.groups * op.width;
        const GLOBAL float *x = op.x + (ulong)token * op.x_stride + first;
        GLOBAL float *y = op.y + (ulong)token * op.y_stride + first;
        const float mean = divide1(group_sum_of_squares(memory, x, op.width), (float)op.width);
        const float r = divide1(1.0f, sqrt1(mean + op.eps));
        for (uint k = get_local_id(0); k < op.width; k += GROUP_SIZE) {
            const float value = x[k] * r;
            y[k] = weighted ? value * op.weight[k] : value;
        }
    }
}

#endif
