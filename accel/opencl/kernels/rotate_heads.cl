// ROTATE_HEADS: signs and a Walsh-Hadamard transform of the heads of keys, values and queries, or
// with `back` of the results of attention, whose signs come last (rule R13).
//
// operands: x, y
// sizes:    tokens, heads, head_dim, back
// Blocks of a head are the largest power of two that divides head_dim, at least 32. Tokens are split
// among workers.

MATMUL_TARGET_BEGIN

// Lanes i and i + apart, of those whose number has no bit `apart`, become their sum and difference.
INLINE float16 lane_stage(float16 x, float16 exchanged, int apart) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint16 negative = as_uint16((lane & apart) / apart) << 31;
    return exchanged + as_float16(as_uint16(x) ^ negative);
}

INLINE void rotate_lanes(float16 *v, uint vectors) {
    for (uint i = 0; i < vectors; i++) {
        v[i] = lane_stage(v[i], v[i].s1032547698badcfe, 1);
        v[i] = lane_stage(v[i], v[i].s23016745ab89efcd, 2);
        v[i] = lane_stage(v[i], v[i].s45670123cdef89ab, 4);
        v[i] = lane_stage(v[i], v[i].s89abcdef01234567, 8);
    }
}

// 1 / sqrt(block), rounded once.
INLINE float rotation_unit(uint block) {
    float unit = 1.0f;
    for (; block > 1; block /= 4) unit *= block == 2 ? as_float(0x3f3504f3u) : 0.5f;
    return unit;
}

// Signs of channels 16 n to 16 n + 15 of a head: bits of Philox4x32-10 with key 0.
INLINE float16 negated_channels(float16 x, uint n) {
    const uint words[HEAD_DIM_MAX / 32] = {
        0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u, 0xf8e4cca4u, 0x5cb200dbu,
        0xb1a574ebu, 0x097eff67u, 0x04faa329u, 0x51c732a6u, 0x241513adu, 0x459135e4u,
        0xc990ef29u, 0x6a4474a6u, 0x9ac9134fu, 0x6d413e04u, 0xef3dc354u, 0xb193f16eu};
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint16 bits = (uint16)(words[n / 2] >> 16 * (n % 2)) >> as_uint16(lane);
    return as_float16(as_uint16(x) ^ bits << 31);
}

OUTLINED void rotate_head(const GLOBAL float *x, GLOBAL float *y, uint head_dim, bool back) {
    float16 v[HEAD_DIM_MAX / 16];
    const uint vectors = head_dim / 16, block = head_dim & -head_dim;
    const float unit = rotation_unit(block);
    for (uint i = 0; i < vectors; i++) {
        const float16 some = vload16(i, x);
        v[i] = select(some, (float16)(0.0f), (int16)(fabs(some) < (float16)(0x1p-64f)));
        if (!back) v[i] = negated_channels(v[i], i);
    }
    rotate_lanes(v, vectors);
    for (uint apart = 1; apart < block / 16; apart *= 2)
        for (uint i = 0; i < vectors; i++) {
            const float16 a = v[i & ~apart], b = v[i | apart];
            if (i & apart) continue;
            v[i] = a + b;
            v[i | apart] = a - b;
        }
    for (uint i = 0; i < vectors; i++) {
        v[i] *= unit;
        vstore16(back ? negated_channels(v[i], i) : v[i], i, y);
    }
}

MATMUL_TARGET_END

void op_rotate_heads(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(rotate_heads);
    const uint head_dim = op.head_dim;
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *x = op.x + (ulong)token * op.x_stride;
        GLOBAL float *y = op.y + (ulong)token * op.y_stride;
        for (uint head = 0; head < op.heads; head++)
            rotate_head(x + head * head_dim, y + head * head_dim, head_dim, op.back);
    }
}
