// Products of one token: weights come from memory once and are used as they lie.

#ifndef MATMUL_DECODE_H
#define MATMUL_DECODE_H

// Columns whose activations a worker rearranges at a time; whole spans.
#define DECODE_COLUMNS 4096
// How far ahead of the arithmetic weights are fetched: what memory delivers during its latency.
#define PREFETCH_BYTES 8192

// Loads that are met again for every block are fetched ahead by the processor itself, those of an
// unrolled super-block hardly: a core of AVX2 reads twice as much from memory. VNNI gains nothing.
#if BYTE_PRODUCTS
#define BLOCK_LOOP _Pragma("nounroll")
#else
#define BLOCK_LOOP UNROLL
#endif

MATMUL_TARGET_BEGIN

// Activations as weight_bytes wants them are "fours": for four columns a first and a second dword.
// For products of `bytes` m = 16 first + second, a signed and an unsigned byte each; else they are
// the pairs (m0, m1) and (m2, m3). Here those of four columns whose pairs are a and b.
INLINE uint first_dword(bool bytes, uint a, uint b) {
    return bytes ? (a >> 4 & 0x00FF00FFu) | (b >> 4 & 0x00FF00FFu) << 8 : a;
}

INLINE uint second_dword(bool bytes, uint a, uint b) {
    return bytes ? (a & 0x000F000Fu) | (b & 0x000F000Fu) << 8 : b;
}

INLINE void arrange_fours(bool bytes, const GLOBAL short *m, uint count, uint *fours) {
    const GLOBAL uint *pairs = (const GLOBAL uint *)m;
    for (uint i = 0; i < count / 2; i += 2) {
        fours[i] = first_dword(bytes, pairs[i], pairs[i + 1]);
        fours[i + 1] = second_dword(bytes, pairs[i], pairs[i + 1]);
    }
}

// start + number times the sum of q m over elements 4 begin to 4 end of a block; q unsigned. Two
// chains of accumulation, because one would wait for its own latency.
INLINE int16 block_dot(uint dtype, const GLOBAL uchar *block, const uint *fours, int16 start,
                       int16 number, int begin, int end) {
    int16 x[2] = {0, 0}, y[2] = {0, 0};
    UNROLL for (int t = begin; t < end; t++) {
        uint16 q = weight_bytes(dtype, block, t);
#if DOT_VNNI
        x[t & 1] = dot_bytes(x[t & 1], q, (uint16)(fours[2 * t]));
        y[t & 1] = dot_bytes(y[t & 1], q, (uint16)(fours[2 * t + 1]));
#else
        x[t & 1] = dot_pairs(x[t & 1], even_pairs(q), (uint16)(fours[2 * t]));
        y[t & 1] = dot_pairs(y[t & 1], odd_pairs(q), (uint16)(fours[2 * t + 1]));
#endif
    }
#if DOT_VNNI
    return start + number * (((x[0] + x[1]) << 4) + (y[0] + y[1]));
#else
    return start + number * ((x[0] + x[1]) + (y[0] + y[1]));
#endif
}

#if BYTE_PRODUCTS
// The same by products of bytes. Those of first dwords are added as 16-bit numbers as long as they
// fit, those of second ones always fit.
INLINE int16 byte_dot(uint dtype, const GLOBAL uchar *block, const uint *fours, int16 start,
                      int16 number, int begin, int end) {
    const int rounds = 32767 / (2 * 128 * MAX_INTEGER(dtype));
    const uint16 sixteen_times = twice(number << 4);
    uint16 first = 0u, second = 0u;
    UNROLL for (int t = begin; t < end; t++) {
        const uint16 q = weight_bytes(dtype, block, t);
        first = add_pairs(first, byte_products(q, (uint16)(fours[2 * t])));
        second = add_pairs(second, byte_products(q, (uint16)(fours[2 * t + 1])));
        if ((t - begin) % rounds < rounds - 1 && t < end - 1) continue;
        start = dot_pairs(start, first, sixteen_times);
        first = 0u;
    }
    return dot_pairs(start, second, twice(number));
}
#endif

// One of these, whichever is faster for the format.
INLINE int16 scaled_dot(uint dtype, const GLOBAL uchar *block, const uint *fours, int16 start,
                        int16 number, int begin, int end) {
#if BYTE_PRODUCTS
    if (MULTIPLIES_BYTES(dtype))
        return byte_dot(dtype, block, fours, start, number, begin, end);
#endif
    return block_dot(dtype, block, fours, start, number, begin, end);
}

// Asks for the lines that lie PREFETCH_BYTES after `vectors` vectors about to be read. Those of
// headers and sub-block scales count: a line left out is waited for.
INLINE void prefetch_after(const GLOBAL uchar *bytes, int vectors) {
    UNROLL for (int v = 0; v < vectors; v++)
        prefetch_line(bytes + PREFETCH_BYTES + v * VECTOR_BYTES);
}

// Where the block of `column` would lie if header and body were interleaved. A header of blocks is
// a fifth of a group: with it, lines are fetched in the order of addresses, and none comes late.
INLINE const GLOBAL uchar *in_order(uint dtype, const GLOBAL uchar *group, uint column) {
    return group + column / UNIT_ELEMENTS(dtype) * STORED_BYTES(dtype);
}

// The same for a block that would lie at `ordered`. Each line is asked for once: another request
// while the first is under way takes as long as arithmetic.
INLINE void prefetch_block(uint dtype, const GLOBAL uchar *ordered) {
    const int lines = STORED_BYTES(dtype) / VECTOR_BYTES, rest = STORED_BYTES(dtype) % VECTOR_BYTES;
    prefetch_after(ordered, lines);
    // The block ends in a line that the next one does not begin in.
    if (rest && (int)((size_t)ordered % VECTOR_BYTES) + rest >= VECTOR_BYTES)
        prefetch_line(ordered + PREFETCH_BYTES + lines * VECTOR_BYTES);
}

// One segment of 32-blocks for 16 rows, before the activation's scale.
INLINE float16 blocks_segment(uint dtype, const GLOBAL uchar *header, const GLOBAL uchar *body,
                              const GLOBAL uchar *ordered, const uint *fours,
                              const GLOBAL uint *sums, uint blocks) {
    const uint16 ones = 0x00010001u, minus_offset = (uint)(-OFFSET(dtype) & 0xFFFF) * 0x00010001u;
    float16 value = 0.0f;
    for (uint b = 0; b < blocks; b++) {
        prefetch_block(dtype, ordered);
        int16 start = OFFSET(dtype) ? dot_pairs(0, minus_offset, (uint16)(sums[b])) : 0;
        int16 sum = scaled_dot(dtype, body, fours, start, 1, 0, 8);
        float16 term = load_scales(dtype, header) * convert_float16(sum);
        if (HAS_MINIMUM(dtype)) {
            int16 m = dot_pairs(0, ones, (uint16)(sums[b]));
            term = term + load_minima(header) * convert_float16(m);
        }
        value = value + term;
        header += UNIT_BYTES(dtype);
        body += BLOCK_VECTORS(dtype) * VECTOR_BYTES;
        ordered += STORED_BYTES(dtype);
        fours += 16;
    }
    return value;
}

// One super-block for 16 rows, before the activation's scale.
INLINE float16 super_segment(uint dtype, const GLOBAL uchar *header, const GLOBAL uchar *body,
                             const uint *fours, const GLOBAL uint *sums) {
    const SUB_SCALES scales = load_sub_scales(dtype, header, body);
    int16 scaled = 0, minima = 0;
    prefetch_after(header, 1);
    prefetch_after(body, SUB_SCALE_VECTORS(dtype));
    body += SUB_SCALE_VECTORS(dtype) * VECTOR_BYTES;
    BLOCK_LOOP for (int s = 0; s < 8; s++) {
        const uint16 sum = sums[s];
        if (HAS_HALF_BLOCKS(dtype)) {
            const int16 low = sub_block_number(dtype, scales.scale, 2 * s);
            const int16 high = sub_block_number(dtype, scales.scale, 2 * s + 1);
            scaled = scaled_dot(dtype, body, fours, scaled, low, 0, 4);
            scaled = scaled_dot(dtype, body, fours, scaled, high, 4, 8);
        } else {
            const int16 number = sub_block_number(dtype, scales.scale, s);
            scaled = scaled_dot(dtype, body, fours, scaled, number, 0, 8);
        }
        if (OFFSET(dtype)) scaled = dot_pairs(scaled, offset_pair(dtype, &scales, s), sum);
        if (HAS_MINIMUM(dtype)) minima = dot_pairs(minima, minimum_pair(dtype, &scales, s), sum);
        prefetch_after(body, BLOCK_VECTORS(dtype));
        body += BLOCK_VECTORS(dtype) * VECTOR_BYTES;
        fours += 16;
    }
    float16 value = load_halves(header) * convert_float16(scaled);
    if (!HAS_MINIMUM(dtype)) return value;
    return value - load_minima(header) * convert_float16(minima);
}

// Columns [begin, end) of 16 rows added to `total` by rule R3; begin starts a span, end ends one or
// the row. `group` is where the rows begin.
INLINE float16 group_dot(uint dtype, const GLOBAL uchar *group, uint columns, uint begin, uint end,
                         const uint *fours, const GLOBAL uint *sums, const GLOBAL float *scale,
                         float16 total) {
    const GLOBAL uchar *body = group + header_bytes(dtype, columns);
    float16 span = 0.0f;
    for (uint column = begin; column < end; column += SEGMENT) {
        const GLOBAL uchar *unit = group + column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype);
        const GLOBAL uchar *vectors = body + body_vectors(dtype, column) * VECTOR_BYTES;
        const uint *own = fours + (column - begin) / 2;
        float16 value;
        if (IS_SUPER(dtype))
            value = super_segment(dtype, unit, vectors, own, sums + column / 32);
        else
            value = blocks_segment(dtype, unit, vectors, in_order(dtype, group, column), own,
                                   sums + column / 32, min(end - column, (uint)SEGMENT) / 32);
        span = span + value * scale[column / SEGMENT];
        if (column / SEGMENT % SPAN_SEGMENTS == SPAN_SEGMENTS - 1 || column + SEGMENT >= end) {
            total = total + span;
            span = 0.0f;
        }
    }
    return total;
}

INLINE void decode_rows(uint dtype, const MATMUL *p, uint begin_row, uint end_row) {
    const uint stride = group_bytes(dtype, p->columns);
    const ulong source = source_row(p, 0);
    uint fours[DECODE_COLUMNS / 2];
    for (uint begin = 0; begin < p->columns; begin += DECODE_COLUMNS) {
        const uint end = min(p->columns, begin + DECODE_COLUMNS);
        arrange_fours(DOT_VNNI || MULTIPLIES_BYTES(dtype),
                      p->m + source * p->m_stride + begin, end - begin, fours);
        for (uint row = begin_row; row < end_row; row += LANES) {
            GLOBAL float *y = p->y + target_row(p, 0) * p->y_stride + row;
            const int count = (int)(end_row - row);
            float16 total = begin ? load_padded(y, count) : (float16)(0.0f);
            total = group_dot(dtype, p->weight + (ulong)(row / LANES) * stride, p->columns, begin,
                              end, fours, p->sums + source * p->sums_stride,
                              p->scale + source * p->scale_stride, total);
            store_partial(total, y, count);
        }
    }
}

MATMUL_TARGET_END

#endif
