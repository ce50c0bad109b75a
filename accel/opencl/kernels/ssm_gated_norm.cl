// SSM_GATED_NORM: y = rms_norm(x, weight) * silu(gate), in each head (rule R4).
//
// operands: x, gate, weight, y
// sizes:    tokens, heads, width
// reals:    eps
// Tokens are split among workers; or a work-group takes a (token, head) at a time.

#if GROUP_SIZE == 1

void op_ssm_gated_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], heads = packet->size[1], width = packet->size[2];
    const SHARE mine = share(tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        for (uint head = 0; head < heads; head++) {
            const uint first = head * width;
            const GLOBAL float *x = OPERAND(float, 0) + (ulong)token * packet->stride[0] + first;
            const GLOBAL float *gate = OPERAND(float, 1) + (ulong)token * packet->stride[1] + first;
            GLOBAL float *y = OPERAND(float, 3) + (ulong)token * packet->stride[3] + first;
            const float mean = divide1(sum_of_squares(x, width), (float)width);
            const float r = divide1(1.0f, sqrt1(mean + packet->real[0]));
            for (uint k = 0; k < width; k += 16) {
                const int count = (int)(width - k);
                const float16 normed =
                    (load_padded(x + k, count) * r) * load_padded(OPERAND(float, 2) + k, count);
                store_partial(normed * silu16(load_padded(gate + k, count)), y + k, count);
            }
        }
    }
}

#else

void op_ssm_gated_norm(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], heads = packet->size[1], width = packet->size[2];
    FOR_GROUP_UNITS(unit, tokens * heads) {
        const uint token = unit / heads, first = unit % heads * width;
        const GLOBAL float *x = OPERAND(float, 0) + (ulong)token * packet->stride[0] + first;
        const GLOBAL float *gate = OPERAND(float, 1) + (ulong)token * packet->stride[1] + first;
        GLOBAL float *y = OPERAND(float, 3) + (ulong)token * packet->stride[3] + first;
        const float mean = divide1(group_sum_of_squares(memory, x, width), (float)width);
        const float r = divide1(1.0f, sqrt1(mean + packet->real[0]));
        for (uint k = get_local_id(0); k < width; k += GROUP_SIZE)
            y[k] = ((x[k] * r) * OPERAND(float, 2)[k]) * silu1(gate[k]);
    }
}

#endif
