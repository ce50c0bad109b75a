// Products where a worker is one of thousands of work-items: one row and one token at a time.
// Neighbouring items have neighbouring rows, whose dwords lie side by side.

#ifndef MATMUL_ROW_H
#define MATMUL_ROW_H

// Sum of q m over 4 begin to 4 end of the 32 elements whose vectors begin at `vector`.
INLINE int row_block_dot(uint dtype, const GLOBAL uint *lane, uint vector, const GLOBAL short *m,
                         int begin, int end) {
    const uint nibbles = vector + UPPER_VECTORS(dtype);
    int sum = 0;
    UNROLL for (int t = begin; t < end; t++) {
        uint q;
        if (dtype == Q8_0) {
            q = lane[(nibbles + t) * LANES];
        } else {
            q = (lane[(nibbles + t / 2) * LANES] >> (4 * (t & 1))) & 0x0F0F0F0Fu;
            if (UPPER_VECTORS(dtype) == 1)
                q |= (lane[vector * LANES] >> t & 0x01010101u) << 4;
            else if (UPPER_VECTORS(dtype) == 2)
                q |= (lane[(vector + t / 4) * LANES] >> (2 * (t & 3)) & 0x03030303u) << 4;
        }
        const short4 a = vload4(t, m);
        const int4 four = (int4)(q & 0xFF, q >> 16 & 0xFF, q >> 8 & 0xFF, q >> 24) - OFFSET(dtype);
        sum += four.x * a.x + four.y * a.y + four.z * a.z + four.w * a.w;
    }
    return sum;
}

INLINE int pair_sum(uint sums) { return (short)(sums & 0xFFFFu) + (short)(sums >> 16); }

// Byte i of the sub-scales a lane holds, unpacked as load_sub_scales does.
INLINE int row_sub_scale(uint dtype, const GLOBAL uint *lane, uint vector, int s) {
    const uint place = 8 * (s & 3);
    if (dtype == Q6_K) return (char)(lane[(vector + s / 4) * LANES] >> place);
    uint a = lane[vector * LANES] >> place, c = lane[(vector + 2) * LANES] >> place;
    return s < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
}

INLINE int row_sub_minimum(const GLOBAL uint *lane, uint vector, int s) {
    const uint place = 8 * (s & 3);
    uint b = lane[(vector + 1) * LANES] >> place, c = lane[(vector + 2) * LANES] >> place;
    return s < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
}

// One segment before the activation's scale; `unit` is the row's first scale, `vector` where the
// segment begins in the body.
INLINE float row_segment(uint dtype, const GLOBAL half *unit, const GLOBAL uint *lane, uint vector,
                         const GLOBAL short *m, const GLOBAL uint *sums, uint blocks) {
    float value = 0.0f;
    if (IS_SUPER(dtype)) {
        const uint scales = vector;
        int scaled = 0, minima = 0;
        vector += SUB_SCALE_VECTORS(dtype);
        for (int b = 0; b < 8; b++, vector += BLOCK_VECTORS(dtype), m += 32) {
            if (dtype == Q6_K) {
                scaled += row_sub_scale(dtype, lane, scales, 2 * b) *
                          row_block_dot(dtype, lane, vector, m, 0, 4);
                scaled += row_sub_scale(dtype, lane, scales, 2 * b + 1) *
                          row_block_dot(dtype, lane, vector, m, 4, 8);
            } else {
                scaled += row_sub_scale(dtype, lane, scales, b) *
                          row_block_dot(dtype, lane, vector, m, 0, 8);
                minima += row_sub_minimum(lane, scales, b) * pair_sum(sums[b]);
            }
        }
        value = vload_half(0, unit) * (float)scaled;
        if (HAS_MINIMUM(dtype)) value = value - vload_half(LANES, unit) * (float)minima;
        return value;
    }
    for (uint b = 0; b < blocks; b++, vector += BLOCK_VECTORS(dtype), m += 32) {
        float term = vload_half(0, unit) * (float)row_block_dot(dtype, lane, vector, m, 0, 8);
        if (HAS_MINIMUM(dtype))
            term = term + vload_half(LANES, unit) * (float)pair_sum(sums[b]);
        value = value + term;
        unit += UNIT_BYTES(dtype) / 2;
    }
    return value;
}

INLINE float row_dot(uint dtype, const MATMUL *p, uint row, uint token) {
    const GLOBAL uchar *group =
        p->weight + (ulong)(row / LANES) * group_bytes(dtype, p->columns);
    const GLOBAL uint *lane =
        (const GLOBAL uint *)(group + header_bytes(dtype, p->columns)) + row % LANES;
    const GLOBAL half *unit = (const GLOBAL half *)group + row % LANES;
    const GLOBAL short *m = p->m + (ulong)token * p->m_stride;
    const GLOBAL uint *sums = p->sums + (ulong)token * p->sums_stride;
    const GLOBAL float *scale = p->scale + (ulong)token * p->scale_stride;
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint column = 0; column < p->columns; column += SEGMENT) {
        const uint blocks = min(p->columns - column, (uint)SEGMENT) / 32;
        const uint halves = column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype) / 2;
        float value = row_segment(dtype, unit + halves, lane, body_vectors(dtype, column),
                                  m + column, sums + column / 32, blocks);
        fold_next(&fold, value * scale[column / SEGMENT]);
    }
    return fold_end(&fold);
}

INLINE void single_rows(uint dtype, const MATMUL *p, uint begin_row, uint end_row) {
    for (uint row = begin_row; row < end_row; row++)
        for (uint token = 0; token < p->tokens; token++)
            p->y[(ulong)token * p->y_stride + row] = row_dot(dtype, p, row, token);
}

#endif
