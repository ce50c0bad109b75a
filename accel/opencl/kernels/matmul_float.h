// Products with float weights (rule R4), stored as in the model file.

#ifndef MATMUL_FLOAT_H
#define MATMUL_FLOAT_H

// Vectors of 16 floats in a segment.
#define SEGMENT_VECTORS (SEGMENT / 16)
// Tokens whose running sums a worker keeps while it goes along its rows.
#define FLOAT_TOKENS 32
// Up to this many tokens are computed one by one, along whole spans.
#define FLOAT_SPAN_TOKENS 4

MATMUL_TARGET_BEGIN

// 16 elements from `first`; the rest of a short row +0.
INLINE float16 float_weights(uint dtype, const GLOBAL uchar *row, uint first, int count) {
    if (dtype == F32) return load_padded((const GLOBAL float *)row + first, count);
    const GLOBAL ushort *bits = (const GLOBAL ushort *)row + first;
    if (count >= 16)
        return dtype == F16 ? load_halves((const GLOBAL uchar *)bits)
                            : as_float16(convert_uint16(vload16(0, bits)) << 16);
    float lane[16];
    for (int i = 0; i < 16; i++) {
        lane[i] = 0.0f;
        if (i < count)
            lane[i] = dtype == F16 ? vload_half(i, (const GLOBAL half *)bits)
                                   : as_float((uint)bits[i] << 16);
    }
    return vload16(0, lane);
}

// A segment of one row; a short one is padded with +0, so that its products are +0 too.
INLINE void load_weight_segment(uint dtype, const GLOBAL uchar *row, uint first, uint columns,
                                float16 *w) {
    if (columns - first >= SEGMENT) {
        UNROLL for (int i = 0; i < SEGMENT_VECTORS; i++)
            w[i] = float_weights(dtype, row, first + 16 * i, 16);
        return;
    }
    for (int i = 0; i < SEGMENT_VECTORS; i++) {
        const int count = (int)(columns - first) - 16 * i;
        w[i] = count > 0 ? float_weights(dtype, row, first + 16 * i, count) : (float16)(0.0f);
    }
}

INLINE void load_float_segment(const GLOBAL float *x, uint first, uint columns, float16 *v) {
    load_weight_segment(F32, (const GLOBAL uchar *)x, first, columns, v);
}

// R4's products and its halvings down to 16.
INLINE float16 halved_products(const float16 *w, const float16 *x) {
    float16 v[4];
    UNROLL for (int i = 0; i < 4; i++) {
        float16 a = w[i] * x[i] + w[i + 8] * x[i + 8];
        float16 b = w[i + 4] * x[i + 4] + w[i + 12] * x[i + 12];
        v[i] = a + b;
    }
    return (v[0] + v[2]) + (v[1] + v[3]);
}

// Few tokens: a row is read along a whole span before the next one, as memory likes it.
INLINE void float_decode_rows(uint dtype, const MATMUL *p, uint begin_row, uint end_row) {
    float16 w[SEGMENT_VECTORS], v[SEGMENT_VECTORS], halved[SPAN_SEGMENTS][LANES];
    for (uint row = begin_row; row < end_row; row += LANES) {
        for (uint token = 0; token < p->tokens; token++) {
            const GLOBAL float *x = p->x + source_row(p, token) * p->x_stride;
            float16 total = 0.0f;
            for (uint first = 0; first < p->columns; first += SPAN_SEGMENTS * SEGMENT) {
                const uint left = p->columns - first;
                const uint segments = min((left + SEGMENT - 1) / SEGMENT, (uint)SPAN_SEGMENTS);
                for (uint i = 0; i < LANES; i++) {
                    const ulong index = min(row + i, end_row - 1);
                    const GLOBAL uchar *weight = p->weight + index * p->weight_stride;
                    for (uint s = 0; s < segments; s++) {
                        const uint k = first + s * SEGMENT;
                        load_weight_segment(dtype, weight, k, p->columns, w);
                        load_float_segment(x, k, p->columns, v);
                        halved[s][i] = halved_products(w, v);
                    }
                }
                float16 span = 0.0f;
                for (uint s = 0; s < segments; s++) span = span + fold_rows(halved[s]);
                total = total + span;
            }
            store_partial(total, p->y + target_row(p, token) * p->y_stride + row,
                          (int)(end_row - row));
        }
    }
}

INLINE void float_rows(uint dtype, const MATMUL *p, uint begin_row, uint end_row) {
    float16 w[LANES][SEGMENT_VECTORS], span[FLOAT_TOKENS], total[FLOAT_TOKENS];
    if (p->tokens <= FLOAT_SPAN_TOKENS) {
        float_decode_rows(dtype, p, begin_row, end_row);
        return;
    }
    for (uint row = begin_row; row < end_row; row += LANES) {
        for (uint first = 0; first < p->tokens; first += FLOAT_TOKENS) {
            const uint count = min(p->tokens - first, (uint)FLOAT_TOKENS);
            for (uint t = 0; t < count; t++) span[t] = total[t] = 0.0f;
            for (uint k = 0; k < p->columns; k += SEGMENT) {
                const bool ends = k / SEGMENT % SPAN_SEGMENTS == SPAN_SEGMENTS - 1 ||
                                  k + SEGMENT >= p->columns;
                for (uint i = 0; i < LANES; i++) {
                    const ulong index = min(row + i, end_row - 1);
                    load_weight_segment(dtype, p->weight + index * p->weight_stride, k, p->columns,
                                        w[i]);
                }
                for (uint t = 0; t < count; t++) {
                    float16 x[SEGMENT_VECTORS], halved[LANES];
                    load_float_segment(p->x + source_row(p, first + t) * p->x_stride, k,
                                       p->columns, x);
                    for (int i = 0; i < LANES; i++) halved[i] = halved_products(w[i], x);
                    span[t] = span[t] + fold_rows(halved);
                    if (!ends) continue;
                    total[t] = total[t] + span[t];
                    span[t] = 0.0f;
                }
            }
            for (uint t = 0; t < count; t++)
                store_partial(total[t], p->y + target_row(p, first + t) * p->y_stride + row,
                              (int)(end_row - row));
        }
    }
}

MATMUL_TARGET_END

#endif
