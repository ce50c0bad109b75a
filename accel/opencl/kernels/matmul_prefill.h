// Products of many tokens: a tile of weights is expanded once to 16-bit pairs and used for all.

#ifndef MATMUL_PREFILL_H
#define MATMUL_PREFILL_H

// Row groups and tokens whose sums are kept in registers at a time.
#define TILE_GROUPS 2
#define TILE_ROWS (TILE_GROUPS * LANES)
#if defined(__AVX512F__)
#define TILE_TOKENS 6
#else
#define TILE_TOKENS 2
#endif
// Tokens a tile is expanded for, and whose span sums a worker keeps.
#define PASS_TOKENS 96

MATMUL_TARGET_BEGIN

// One segment of TILE_ROWS rows. 32-blocks: pairs are q - OFFSET, scale and minimum those of each
// block. Super-blocks: pairs are sc (q - OFFSET), scale[0] and minimum[0] those of the super-block,
// and minimum_pairs holds for each block the mn of its two halves.
typedef struct {
    uint16 pairs[SEGMENT / 2][TILE_GROUPS];
    float16 scale[8][TILE_GROUPS];
    float16 minimum[8][TILE_GROUPS];
    uint16 minimum_pairs[8][TILE_GROUPS];
} WEIGHT_TILE;

// Both 16-bit halves of each lane minus a small number, modulo 2^16.
INLINE uint16 subtract_halves(uint16 pairs, uint number) {
    return ((pairs | 0x80008000u) - number * 0x00010001u) ^ 0x80008000u;
}

INLINE uint16 multiply_halves(uint16 a, uint16 b) {
    return make_uint16(as_uint8(as_short16(a.lo) * as_short16(b.lo)),
                    as_uint8(as_short16(a.hi) * as_short16(b.hi)));
}

INLINE void expand_block(uint dtype, const GLOBAL uchar *block, uint b, uint group,
                         const SUB_SCALES *scales, WEIGHT_TILE *tile) {
    UNROLL for (int t = 0; t < 8; t++) {
        uint16 q = weight_bytes(dtype, block, t);
        uint16 even = even_pairs(q), odd = odd_pairs(q);
        if (OFFSET(dtype)) {
            even = subtract_halves(even, OFFSET(dtype));
            odd = subtract_halves(odd, OFFSET(dtype));
        }
        if (IS_SUPER(dtype)) {
            int s = HAS_HALF_BLOCKS(dtype) ? 2 * b + t / 4 : b;
            uint16 scale = twice(sub_block_number(dtype, scales->scale, s));
            even = multiply_halves(even, scale);
            odd = multiply_halves(odd, scale);
        }
        tile->pairs[16 * b + 2 * t][group] = even;
        tile->pairs[16 * b + 2 * t + 1][group] = odd;
    }
}

// The segment that begins at `column` of the 16 rows that begin at `source`.
INLINE void expand_segment(uint dtype, const GLOBAL uchar *source, uint columns, uint column,
                           uint blocks, uint group, WEIGHT_TILE *tile) {
    const GLOBAL uchar *unit = source + column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype);
    const GLOBAL uchar *body =
        source + header_bytes(dtype, columns) + body_vectors(dtype, column) * VECTOR_BYTES;
    SUB_SCALES scales;
    if (IS_SUPER(dtype)) {
        scales = load_sub_scales(dtype, unit, body);
        body += SUB_SCALE_VECTORS(dtype) * VECTOR_BYTES;
    }
    for (uint u = 0; u < (IS_SUPER(dtype) ? 1 : blocks); u++, unit += UNIT_BYTES(dtype)) {
        tile->scale[u][group] = load_scales(dtype, unit);
        if (HAS_MINIMUM(dtype)) tile->minimum[u][group] = load_minima(unit);
    }
    for (uint b = 0; b < blocks; b++, body += BLOCK_VECTORS(dtype) * VECTOR_BYTES) {
        expand_block(dtype, body, b, group, &scales, tile);
        if (IS_SUPER(dtype) && HAS_MINIMUM(dtype))
            tile->minimum_pairs[b][group] = minimum_pair(dtype, &scales, b);
    }
}

// acc[token][group] += the products of 2 `count` columns.
INLINE void multiply_pairs(const uint16 (*pairs)[TILE_GROUPS], const GLOBAL uint *const *m,
                           uint first, uint count, int16 (*acc)[TILE_GROUPS]) {
    for (uint p = first; p < first + count; p++) {
        UNROLL for (int token = 0; token < TILE_TOKENS; token++) {
            const uint16 pair = m[token][p];
            UNROLL for (int group = 0; group < TILE_GROUPS; group++)
                acc[token][group] = dot_pairs(acc[token][group], pairs[p][group], pair);
        }
    }
}

#define EACH_SUM                                               \
    UNROLL for (int token = 0; token < TILE_TOKENS; token++)   \
        UNROLL for (int group = 0; group < TILE_GROUPS; group++)

// Segment values of TILE_TOKENS tokens, before the activation's scale.
INLINE void tile_segment(uint dtype, const WEIGHT_TILE *tile, const GLOBAL uint *const *m,
                         const GLOBAL uint *const *sums, uint blocks,
                         float16 (*value)[TILE_GROUPS]) {
    if (IS_SUPER(dtype)) {
        int16 acc[TILE_TOKENS][TILE_GROUPS];
        EACH_SUM acc[token][group] = 0;
        multiply_pairs(tile->pairs, m, 0, SEGMENT / 2, acc);
        EACH_SUM value[token][group] = tile->scale[0][group] * convert_float16(acc[token][group]);
        if (!HAS_MINIMUM(dtype)) return;
        EACH_SUM acc[token][group] = 0;
        multiply_pairs(tile->minimum_pairs, sums, 0, 8, acc);
        EACH_SUM value[token][group] =
            value[token][group] - tile->minimum[0][group] * convert_float16(acc[token][group]);
        return;
    }
    EACH_SUM value[token][group] = 0.0f;
    for (uint b = 0; b < blocks; b++) {
        int16 acc[TILE_TOKENS][TILE_GROUPS];
        EACH_SUM acc[token][group] = 0;
        multiply_pairs(tile->pairs, m, 16 * b, 16, acc);
        EACH_SUM {
            float16 term = tile->scale[b][group] * convert_float16(acc[token][group]);
            if (HAS_MINIMUM(dtype)) {
                int16 sum = dot_pairs(0, 0x00010001u, (uint16)(sums[token][b]));
                term = term + tile->minimum[b][group] * convert_float16(sum);
            }
            value[token][group] = value[token][group] + term;
        }
    }
}

// Rows [row, row + TILE_ROWS) of `pass` tokens. Tokens beyond the last repeat it and are not kept.
INLINE void prefill_tile(uint dtype, const MATMUL *p, uint row, uint end_row, uint first_token,
                         uint pass, WEIGHT_TILE *tile, float16 (*span)[TILE_GROUPS]) {
    const uint stride = group_bytes(dtype, p->columns);
    for (uint column = 0; column < p->columns; column += SEGMENT) {
        const uint blocks = min(p->columns - column, (uint)SEGMENT) / 32;
        const uint segment = column / SEGMENT;
        const bool ends = segment % SPAN_SEGMENTS == SPAN_SEGMENTS - 1 ||
                          column + SEGMENT >= p->columns;
        for (uint group = 0; group < TILE_GROUPS; group++) {
            // A second group beyond the last row repeats the first and is not kept.
            uint index = row / LANES + (row + group * LANES < end_row ? group : 0);
            expand_segment(dtype, p->weight + (ulong)index * stride, p->columns, column, blocks,
                           group, tile);
        }
        for (uint base = 0; base < pass; base += TILE_TOKENS) {
            const GLOBAL uint *m[TILE_TOKENS], *sums[TILE_TOKENS];
            float16 value[TILE_TOKENS][TILE_GROUPS];
            UNROLL for (int token = 0; token < TILE_TOKENS; token++) {
                ulong t = source_row(p, first_token + min(base + token, pass - 1));
                m[token] = (const GLOBAL uint *)(p->m + t * p->m_stride + column);
                sums[token] = p->sums + t * p->sums_stride + column / 32;
            }
            tile_segment(dtype, tile, m, sums, blocks, value);
            const uint kept = min((uint)TILE_TOKENS, pass - base);
            for (uint token = 0; token < kept; token++) {
                const uint t = first_token + base + token;
                float scale = p->scale[source_row(p, t) * p->scale_stride + segment];
                UNROLL for (int group = 0; group < TILE_GROUPS; group++) {
                    float16 sum = segment % SPAN_SEGMENTS ? span[base + token][group] : 0.0f;
                    sum = sum + value[token][group] * scale;
                    span[base + token][group] = sum;
                    const int count = (int)(end_row - row) - group * LANES;
                    if (!ends || count <= 0) continue;
                    GLOBAL float *y =
                        p->y + target_row(p, t) * p->y_stride + row + group * LANES;
                    if (segment >= SPAN_SEGMENTS) sum = load_padded(y, count) + sum;
                    store_partial(sum, y, count);
                }
            }
        }
    }
}

INLINE void prefill_rows(uint dtype, const MATMUL *p, uint begin_row, uint end_row) {
    WEIGHT_TILE tile;
    float16 span[PASS_TOKENS][TILE_GROUPS];
    for (uint row = begin_row; row < end_row; row += TILE_ROWS)
        for (uint token = 0; token < p->tokens; token += PASS_TOKENS)
            prefill_tile(dtype, p, row, end_row, token, min(p->tokens - token, (uint)PASS_TOKENS),
                         &tile, span);
}

MATMUL_TARGET_END

#endif
