// RMS_NORM: r = 1 / sqrt(sum(x x) / width + eps); y = (x r) weight, in each group (rule R4).
//
// operands: x, weight (may be absent), y
// sizes:    tokens, groups, width
// reals:    eps
// Tokens are split among workers; or a work-group takes a (token, group) at a time.

#if GROUP_SIZE == 1

static float sum_of_squares(const GLOBAL float *x, uint width) {
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint first = 0; first < width; first += SEGMENT) {
        float16 squares[16];
        if (first + SEGMENT <= width) {
            UNROLL for (int i = 0; i < 16; i++) squares[i] = vload16(i, x + first);
        } else {
            for (int i = 0; i < 16; i++) {
                int k = first + 16 * i;
                squares[i] = k < (int)width ? load_padded(x + k, (int)width - k) : (float16)(0.0f);
            }
        }
        UNROLL for (int i = 0; i < 16; i++) squares[i] = squares[i] * squares[i];
        fold_next(&fold, fold_segment(squares));
    }
    return fold_end(&fold);
}

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

INLINE float group_sum_of_squares(MEMORY memory, const GLOBAL float *x, uint width) {
    const uint segments = (width + SEGMENT - 1) / SEGMENT;
    const uint mine = get_local_id(0) / 16 * SEGMENT + get_local_id(0) % 16;
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint first = 0; first < segments; first += GROUP_SEGMENTS) {
        float squares[16];
        UNROLL for (int i = 0; i < 16; i++) {
            const uint k = first * SEGMENT + mine + 16 * i;
            const float value = k < width ? x[k] : 0.0f;
            squares[i] = value * value;
        }
        fold_group_segments(memory, halved_sixteen(squares),
                            min(segments - first, (uint)GROUP_SEGMENTS), &fold);
    }
    return fold_end(&fold);
}

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
