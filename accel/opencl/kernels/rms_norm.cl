// RMS_NORM: r = 1 / sqrt(sum(x x) / width + eps); y = (x r) weight, in each group (rule R4).
//
// operands: x, weight (may be absent), y
// sizes:    tokens, groups, width
// reals:    eps
// Tokens are split among workers; or a work-group takes a (token, group) at a time.

#if GROUP_SIZE == 1

void op_rms_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], groups = packet->size[1], width = packet->size[2];
    const bool weighted = packet->operand[1] != ABSENT;
    const SHARE mine = share(tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        for (uint group = 0; group < groups; group++) {
            const GLOBAL float *x =
                OPERAND(float, 0) + (ulong)token * packet->stride[0] + group * width;
            GLOBAL float *y = OPERAND(float, 2) + (ulong)token * packet->stride[2] + group * width;
            float mean = divide1(sum_of_squares(x, width), (float)width);
            float r = divide1(1.0f, sqrt1(mean + packet->real[0]));
            for (uint k = 0; k < width; k += 16) {
                int count = (int)(width - k);
                float16 value = load_padded(x + k, count) * r;
                if (weighted) value = value * load_padded(OPERAND(float, 1) + k, count);
                store_partial(value, y + k, count);
            }
        }
    }
}

#else

void op_rms_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], groups = packet->size[1], width = packet->size[2];
    const bool weighted = packet->operand[1] != ABSENT;
    FOR_GROUP_UNITS(unit, tokens * groups) {
        const uint token = unit / groups, first = unit % groups * width;
        const GLOBAL float *x = OPERAND(float, 0) + (ulong)token * packet->stride[0] + first;
        GLOBAL float *y = OPERAND(float, 2) + (ulong)token * packet->stride[2] + first;
        const float mean = divide1(group_sum_of_squares(memory, x, width), (float)width);
        const float r = divide1(1.0f, sqrt1(mean + packet->real[0]));
        for (uint k = get_local_id(0); k < width; k += GROUP_SIZE) {
            const float value = x[k] * r;
            y[k] = weighted ? value * OPERAND(float, 1)[k] : value;
        }
    }
}

#endif
