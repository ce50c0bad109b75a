// Products of a few tokens: weights come from memory once and are used as they lie, by several
// tokens at a time. More than FEW_TOKENS are worth expanding the weights for.

#ifndef MATMUL_FEW_H
#define MATMUL_FEW_H

// Columns whose activations a worker has at hand at a time; whole spans.
#define FEW_COLUMNS 2048
// Most tokens whose sums are kept in registers at a time.
#if defined(__AVX512F__)
#define FEW_TILE 8
#else
#define FEW_TILE 4
#endif

MATMUL_TARGET_BEGIN

// The activation of one token as fours, and sums of its columns. The sums also keep the tokens of a
// tile from falling on the same lines of the cache.
typedef struct {
    uint fours[FEW_COLUMNS / 2];
    uint sums[FEW_COLUMNS / 32];
} FEW;

// Loops whose number of rounds the compiler knows before it knows the tile: PoCL unrolls no others.
#define EACH_OF(tile)                                     \
    UNROLL for (int token = 0; token < FEW_TILE; token++) \
        if (token < (tile))

// sum[token] = sum of q m over elements 4 begin to 4 end of the block at `block`; q unsigned. The
// block's activations begin at dword `index`. A token has two chains of accumulation, because one
// would wait for its own latency.
INLINE void few_dot(uint dtype, int tile, const GLOBAL uchar *block, const FEW *few, uint index,
                    int begin, int end, int16 *sum) {
    int16 other[FEW_TILE];
    EACH_OF(tile) sum[token] = other[token] = 0;
    UNROLL for (int t = 0; t < 8; t++) {
        if (t < begin || t >= end) continue;
        const uint16 q = weight_bytes(dtype, block, t);
#if DOT_VNNI
        EACH_OF(tile) {
            const uint *fours = few[token].fours + index + 2 * t;
            other[token] = dot_bytes(other[token], q, (uint16)(fours[0]));
            sum[token] = dot_bytes(sum[token], q, (uint16)(fours[1]));
        }
#else
        const uint16 even = even_pairs(q), odd = odd_pairs(q);
        EACH_OF(tile) {
            const uint *fours = few[token].fours + index + 2 * t;
            other[token] = dot_pairs(other[token], even, (uint16)(fours[0]));
            sum[token] = dot_pairs(sum[token], odd, (uint16)(fours[1]));
        }
#endif
    }
#if DOT_VNNI
    EACH_OF(tile) sum[token] = (other[token] << 4) + sum[token];
#else
    EACH_OF(tile) sum[token] = other[token] + sum[token];
#endif
}

// One segment of 32-blocks for 16 rows, before the activations' scales.
INLINE void few_blocks(uint dtype, int tile, const GLOBAL uchar *header, const GLOBAL uchar *body,
                       const FEW *few, uint column, uint blocks, bool ahead, float16 *value) {
    const uint16 ones = 0x00010001u, minus_offset = (uint)(-OFFSET(dtype) & 0xFFFF) * 0x00010001u;
    EACH_OF(tile) value[token] = 0.0f;
    for (uint b = column / 32; b < column / 32 + blocks; b++) {
        int16 sum[FEW_TILE];
        if (ahead) prefetch_after(header, 1);
        if (ahead) prefetch_after(body, BLOCK_VECTORS(dtype));
        few_dot(dtype, tile, body, few, 16 * b, 0, 8, sum);
        const float16 scale = load_scales(dtype, header);
        EACH_OF(tile) {
            const uint16 sums = few[token].sums[b];
            if (OFFSET(dtype)) sum[token] = dot_pairs(sum[token], minus_offset, sums);
            float16 term = scale * convert_float16(sum[token]);
            if (HAS_MINIMUM(dtype))
                term = term + load_minima(header) * convert_float16(dot_pairs(0, ones, sums));
            value[token] = value[token] + term;
        }
        header += UNIT_BYTES(dtype);
        body += BLOCK_VECTORS(dtype) * VECTOR_BYTES;
    }
}

// One super-block for 16 rows, before the activations' scales.
INLINE void few_super(uint dtype, int tile, const GLOBAL uchar *header, const GLOBAL uchar *body,
                      const FEW *few, uint column, bool ahead, float16 *value) {
    const SUB_SCALES scales = load_sub_scales(dtype, header, body);
    int16 scaled[FEW_TILE], minima[FEW_TILE];
    EACH_OF(tile) scaled[token] = minima[token] = 0;
    if (ahead) prefetch_after(header, 1);
    if (ahead) prefetch_after(body, SUB_SCALE_VECTORS(dtype));
    body += SUB_SCALE_VECTORS(dtype) * VECTOR_BYTES;
    for (int b = 0; b < 8; b++) {
        const uint index = column / 32 + b;
        int16 sum[FEW_TILE];
        if (ahead) prefetch_after(body, BLOCK_VECTORS(dtype));
        if (HAS_HALF_BLOCKS(dtype)) {
            const int16 low = sub_block_number(dtype, scales.scale, 2 * b);
            const int16 high = sub_block_number(dtype, scales.scale, 2 * b + 1);
            few_dot(dtype, tile, body, few, 16 * index, 0, 4, sum);
            EACH_OF(tile) scaled[token] += low * sum[token];
            few_dot(dtype, tile, body, few, 16 * index, 4, 8, sum);
            EACH_OF(tile) scaled[token] += high * sum[token];
        } else {
            const int16 scale = sub_block_number(dtype, scales.scale, b);
            few_dot(dtype, tile, body, few, 16 * index, 0, 8, sum);
            EACH_OF(tile) scaled[token] += scale * sum[token];
        }
        if (OFFSET(dtype)) {
            const uint16 pair = offset_pair(dtype, &scales, b);
            EACH_OF(tile)
                scaled[token] = dot_pairs(scaled[token], pair, (uint16)(few[token].sums[index]));
        }
        if (HAS_MINIMUM(dtype)) {
            const uint16 pair = minimum_pair(dtype, &scales, b);
            EACH_OF(tile)
                minima[token] = dot_pairs(minima[token], pair, (uint16)(few[token].sums[index]));
        }
        body += BLOCK_VECTORS(dtype) * VECTOR_BYTES;
    }
    const float16 scale = load_halves(header);
    EACH_OF(tile) {
        value[token] = scale * convert_float16(scaled[token]);
        if (HAS_MINIMUM(dtype))
            value[token] = value[token] - load_minima(header) * convert_float16(minima[token]);
    }
}

// One segment of 16 rows for `tile` tokens from `base` on, of which `kept` are wanted.
INLINE void few_segment(uint dtype, int tile, const MATMUL *p, const GLOBAL uchar *group,
                        const FEW *few, uint begin, uint column, uint end, uint base, uint kept,
                        float16 *span) {
    const GLOBAL uchar *header = group + column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype);
    const GLOBAL uchar *body =
        group + header_bytes(dtype, p->columns) + body_vectors(dtype, column) * VECTOR_BYTES;
    const bool ahead = base == 0;
    float16 value[FEW_TILE];
    if (IS_SUPER(dtype))
        few_super(dtype, tile, header, body, few + base, column - begin, ahead, value);
    else
        few_blocks(dtype, tile, header, body, few + base, column - begin,
                   min(end - column, (uint)SEGMENT) / 32, ahead, value);
    const uint segment = column / SEGMENT;
    EACH_OF(tile) {
        if (token < (int)kept) {
            const GLOBAL float *scale = p->scale + source_row(p, base + token) * p->scale_stride;
            span[base + token] = span[base + token] + value[token] * scale[segment];
        }
    }
}

// Tokens of the next tile: as few tiles as possible, and no token that nobody wants but beside a
// single one.
INLINE int few_tile(uint left) {
    if (left > 7) return FEW_TILE;
    return left > 5 || left == 4 ? 4 : left > 2 ? 3 : 2;
}

// Columns [begin, end) of 16 rows added to the `tokens` totals by rule R3; begin starts a span, end
// ends one or the row.
INLINE void few_group(uint dtype, const MATMUL *p, const GLOBAL uchar *group, const FEW *few,
                      uint begin, uint end, float16 *total) {
    float16 span[FEW_TOKENS];
    for (uint column = begin; column < end; column += SEGMENT) {
        const uint segment = column / SEGMENT;
        if (segment % SPAN_SEGMENTS == 0)
            for (uint token = 0; token < p->tokens; token++) span[token] = 0.0f;
        for (uint base = 0; base < p->tokens;) {
            const uint left = p->tokens - base;
            const int tile = few_tile(left);
            const uint kept = min(left, (uint)tile);
            if (tile == 8)
                few_segment(dtype, 8, p, group, few, begin, column, end, base, kept, span);
            else if (tile == 4)
                few_segment(dtype, 4, p, group, few, begin, column, end, base, kept, span);
            else if (tile == 3)
                few_segment(dtype, 3, p, group, few, begin, column, end, base, kept, span);
            else
                few_segment(dtype, 2, p, group, few, begin, column, end, base, kept, span);
            base += tile;
        }
        if (segment % SPAN_SEGMENTS == SPAN_SEGMENTS - 1 || column + SEGMENT >= end)
            for (uint token = 0; token < p->tokens; token++)
                total[token] = total[token] + span[token];
    }
}

INLINE void few_rows(uint dtype, const MATMUL *p, uint begin_row, uint end_row) {
    const uint stride = group_bytes(dtype, p->columns);
    // The tile of a single token has a second one; what it computes there is not kept.
    const uint arranged = (p->tokens + 1) / 2 * 2;
    FEW few[FEW_TOKENS];
    float16 total[FEW_TOKENS];
    for (uint begin = 0; begin < p->columns; begin += FEW_COLUMNS) {
        const uint end = min(p->columns, begin + FEW_COLUMNS);
        for (uint token = 0; token < arranged; token++) {
            const ulong source = source_row(p, min(token, p->tokens - 1));
            arrange_fours(DOT_VNNI, p->m + source * p->m_stride + begin, end - begin,
                          few[token].fours);
            const GLOBAL uint *sums = p->sums + source * p->sums_stride + begin / 32;
            for (uint b = 0; b < (end - begin) / 32; b++) few[token].sums[b] = sums[b];
        }
        for (uint row = begin_row; row < end_row; row += LANES) {
            const int count = (int)(end_row - row);
            for (uint token = 0; token < p->tokens; token++)
                total[token] =
                    begin ? load_padded(p->y + target_row(p, token) * p->y_stride + row, count)
                          : (float16)(0.0f);
            few_group(dtype, p, p->weight + (ulong)(row / LANES) * stride, few, begin, end, total);
            for (uint token = 0; token < p->tokens; token++)
                store_partial(total[token], p->y + target_row(p, token) * p->y_stride + row, count);
        }
    }
}

MATMUL_TARGET_END

#endif
