// Rule R6, version 2, on a processor: a block of queries that share a slot and a KV head.

#ifndef ATTENTION_H
#define ATTENTION_H

#define BLOCK_ROWS 256
// Pair vectors of all rows of a block: 256 rows of 128 channels or fewer longer ones.
#define QUERY_VECTORS (BLOCK_ROWS * 4)

// (token, head) pairs. A pair attends positions [first, end).
typedef struct {
    uint count;
    uint vectors;                          // pair vectors of a row
    uint spans;                            // folded into y so far
    uint first[BLOCK_ROWS];
    uint end[BLOCK_ROWS];
    float factor[BLOCK_ROWS];              // multiplies q.k
    SOFTMAX span[BLOCK_ROWS];              // of the span so far
    SOFTMAX all[BLOCK_ROWS];               // of the spans before
    FACTORS factors[BLOCK_ROWS];           // of the latest tile
    float sink[BLOCK_ROWS];
    GLOBAL float *y[BLOCK_ROWS];           // o of the spans before, in the end the result
    uint16 q[QUERY_VECTORS];               // pairs of channels
    float16 output[2 * QUERY_VECTORS];     // o of the span so far
} QUERY_BLOCK;

// Rows a block holds.
static inline uint block_capacity(uint head_dim) {
    return min((uint)BLOCK_ROWS, QUERY_VECTORS / pair_vectors(head_dim));
}

static void clear_block(QUERY_BLOCK *block, uint head_dim) {
    block->count = 0;
    block->spans = 0;
    block->vectors = pair_vectors(head_dim);
}

MATMUL_TARGET_BEGIN

INLINE void begin_span(QUERY_BLOCK *block, uint n) {
    const SOFTMAX none = NO_SOFTMAX;
    block->span[n] = none;
    for (uint i = 0; i < 2 * block->vectors; i++)
        block->output[n * 2 * block->vectors + i] = (float16)(0.0f);
}

OUTLINED void add_query(QUERY_BLOCK *block, const KV_HEAD *head, const GLOBAL float *q,
                        uint position, GLOBAL float *y) {
    const uint n = block->count++;
    const int bits = query_bits(head->head_dim), channels = (int)head->head_dim;
    int16 most = (int16)(0);
    for (int d = 0; d < channels; d += 16)
        most = max(most, magnitude_bits(load_padded(q + d, channels - d)));
    const int exponent = row_exponent(max_of_16(most));
    const float factor = row_factor(max_of_16(most), bits);
    for (uint i = 0; i < block->vectors; i++) {
        const int d = 32 * (int)i;
        const uint16 low = row_integers(load_padded(q + d, channels - d), factor);
        uint16 high = (uint16)(0);
        if (channels > d + 16)
            high = row_integers(load_padded(q + d + 16, channels - d - 16), factor);
        const uint16 pairs = clamp_pairs(pairs_of(low, high), (short)((2 << bits) - 1));
        block->q[n * block->vectors + i] = head->dtype == I12 ? neighbour_pairs(pairs) : pairs;
    }
    begin_span(block, n);
    if (exponent == BROKEN_ROW) block->span[n].total = as_float(QUIET_NAN);
    block->factor[n] = exponent == BROKEN_ROW ? 0.0f : score_factor(head, exponent);
    block->first[n] = first_visible(position, head->window);
    block->end[n] = position + 1;
    block->y[n] = y;
}

// Weights of the positions of a tile, of which [begin, end) are visible, for row n of the block;
// merges U and l.
INLINE void weigh_tile(const KV_HEAD *head, const KV_INTEGERS *tile, const int16 *dots, uint begin,
                       uint end, bool masked, QUERY_BLOCK *block, uint n, short16 *weights) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float16 score[TILE_VECTORS], weight[TILE_VECTORS], most;
    int16 kept[TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
        score[i] = (convert_float16(dots[i]) * block->factor[n]) * tile->key_scale[i];
        if (head->soft_cap > 0.0f)
            score[i] = soft_cap16(score[i], (float16)(head->soft_cap)) * LOG2E;
        float16 height = score[i] + tile->exponent[i];
        if (masked) {
            const int16 key = lane + 16 * i;
            kept[i] = (key >= (int16)(int)begin) & (key < (int16)(int)end);
            height = select((float16)(-INFINITY), height, kept[i]);
        }
        most = i ? select(most, height, (int16)(height > most)) : height;
    }
    const float8 a = select(most.lo, most.hi, (int8)(most.hi > most.lo));
    const float4 b = select(a.lo, a.hi, (int4)(a.hi > a.lo));
    const float2 c = select(b.lo, b.hi, (int2)(b.hi > b.lo));
    const float top = rint_small1(c.y > c.x ? c.y : c.x);
    if (!(fabs(top) < 0x1p20f)) {
        block->span[n].total = as_float(QUIET_NAN);
        block->factors[n].keep = block->factors[n].add = 0.0f;
        UNROLL for (int i = 0; i < TILE_VECTORS; i++) weights[i] = (short16)(0);
        return;
    }
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
        const float16 difference = score[i] - top;
        weight[i] = exp2_16(select(difference, (float16)(-80.0f),
                                   (int16)(difference < (float16)(-80.0f))));
        if (masked) weight[i] = select((float16)(0.0f), weight[i], kept[i]);
        weights[i] = convert_short16(as_int16(weight[i] * tile->value_scale[i] + ROUNDER));
    }
    const SOFTMAX found = {top, fold16((weight[0] + weight[2]) + (weight[1] + weight[3]))};
    block->factors[n] = merge_later(&block->span[n], found);
}

// o of `rows` rows of the block from n on, with the tile's pairs of positions [from, to).
INLINE void add_values(const KV_INTEGERS *tile, const uint *weights, uint from, uint to, uint rows,
                       QUERY_BLOCK *block, uint n) {
    const uint vectors = 2 * block->vectors;
    float16 *output = block->output + n * vectors;
    const uint16 *values = tile->values + from * vectors;
    const FACTORS *factors = block->factors + n;
    int16 sum[STEP_ROWS][STEP_VECTORS];
    uint i = 0;
#define ADD_VECTORS(count)                                                                    \
    tile_products(weights + from, TILE_PAIRS, values + i, vectors, to - from, rows, count,    \
                  sum);                                                                       \
    UNROLL for (uint r = 0; r < rows; r++) {                                                  \
        float16 *sums = output + r * vectors + i;                                             \
        UNROLL for (uint k = 0; k < count; k++)                                               \
            sums[k] = sums[k] * factors[r].keep + convert_float16(sum[r][k]) * factors[r].add; \
    }
    for (; i + STEP_VECTORS <= vectors; i += STEP_VECTORS) { ADD_VECTORS(STEP_VECTORS) }
    for (; i < vectors; i++) { ADD_VECTORS(1) }
#undef ADD_VECTORS
}

// One tile for `rows` rows of the block from n on. `dots` are their products with the keys where
// there are few rows, else absent.
INLINE void attend_step(const KV_HEAD *head, const KV_INTEGERS *tile, uint start,
                        const int16 (*dots)[TILE_VECTORS], uint rows, QUERY_BLOCK *block, uint n) {
    uint begin[STEP_ROWS], end[STEP_ROWS], from = KV_TILE, to = 0;
    int16 sum[STEP_ROWS][STEP_VECTORS], found[STEP_ROWS][TILE_VECTORS];
    short16 weights[STEP_ROWS][TILE_VECTORS];
    UNROLL for (uint r = 0; r < rows; r++) {
        begin[r] = max(block->first[n + r], start) - start;
        end[r] = block->end[n + r] > start ? min(block->end[n + r] - start, (uint)KV_TILE) : 0;
        if (begin[r] >= end[r]) continue;
        from = min(from, begin[r]);
        to = max(to, end[r]);
    }
    if (from >= to) return;
    if (!dots) {
        const uint *q = (const uint *)(block->q + n * block->vectors);
        UNROLL for (uint i = 0; i < TILE_VECTORS; i += STEP_VECTORS) {
            tile_products(q, 16 * block->vectors, tile->keys[0] + i, TILE_VECTORS,
                          16 * block->vectors, rows, STEP_VECTORS, sum);
            UNROLL for (uint r = 0; r < rows; r++)
                UNROLL for (uint k = 0; k < STEP_VECTORS; k++) found[r][i + k] = sum[r][k];
        }
        dots = (const int16 (*)[TILE_VECTORS])found;
    }
    for (uint r = 0; r < rows; r++) {
        if (begin[r] >= end[r]) {
            block->factors[n + r].keep = 1.0f;
            block->factors[n + r].add = 0.0f;
            UNROLL for (int i = 0; i < TILE_VECTORS; i++) weights[r][i] = (short16)(0);
        } else if (begin[r] == 0 && end[r] == KV_TILE) {
            weigh_tile(head, tile, dots[r], 0, KV_TILE, false, block, n + r, weights[r]);
        } else {
            weigh_tile(head, tile, dots[r], begin[r], end[r], true, block, n + r, weights[r]);
        }
    }
    add_values(tile, (const uint *)weights[0], from / 2, (to + 1) / 2, rows, block, n);
}

OUTLINED void attend_one(const KV_HEAD *head, const KV_INTEGERS *tile, uint start,
                         const int16 (*dots)[TILE_VECTORS], QUERY_BLOCK *block, uint n) {
    attend_step(head, tile, start, dots, 1, block, n);
}

OUTLINED void attend_some(const KV_HEAD *head, const KV_INTEGERS *tile, uint start,
                          const int16 (*dots)[TILE_VECTORS], QUERY_BLOCK *block, uint n) {
    attend_step(head, tile, start, dots, STEP_ROWS, block, n);
}

// The positions [begin, end) of a page; `next` is that of the page to come, or 0.
OUTLINED void load_page(const KV_HEAD *head, uint position, uint begin, uint end, uint next,
                        KV_INTEGERS *tile) {
    const uint page = position % KV_TILE / PAGE_TOKENS;
    uint16 *values = tile->values + page * PAGE_TOKENS * pair_vectors(head->head_dim);
    int key[PAGE_TOKENS], value[PAGE_TOKENS];
    if (begin >= end) {  // nobody sees the page, and there may be none
        tile->key_scale[page] = tile->exponent[page] = tile->value_scale[page] = (float16)(0.0f);
        return;
    }
#define CALL(dtype, whole)                                                          \
    {                                                                               \
        load_keys(head, dtype, whole, position, begin, end, next, tile, key);       \
        load_values(head, dtype, whole, position, begin, end, next, values, value); \
    }
    if (head->dtype == I12) {
        const bool whole = head->head_dim % 32 == 0;
        load_keys_i12(head, whole, position, begin, end, next, tile, key);
        load_values_i12(head, whole, position, begin, end, next, values, value);
    } else if (head->dtype == I4R) {
        load_keys_coded(head, I4R, position, begin, end, next, tile, key);
        load_values_coded(head, I4R, position, begin, end, next, values, value);
    } else if (head->dtype == I3R) {
        load_keys_coded(head, I3R, position, begin, end, next, tile, key);
        load_values_coded(head, I3R, position, begin, end, next, values, value);
    } else {
        FOR_KV_TYPE(head, CALL)
    }
#undef CALL
    const int16 keys = vload16(0, key), values_of = vload16(0, value);
    tile->key_scale[page] = key_scales(keys);
    tile->exponent[page] = tile_exponents(keys, values_of);
    tile->value_scale[page] = value_scales(values_of);
}

// Adds the spans' sums so far to y and begins another span.
OUTLINED void fold_span(QUERY_BLOCK *block, uint head_dim) {
    for (uint n = 0; n < block->count; n++) {
        const float16 *output = block->output + n * 2 * block->vectors;
        const SOFTMAX none = NO_SOFTMAX;
        if (!block->spans) block->all[n] = none;
        const FACTORS factors = merge_later(&block->all[n], block->span[n]);
        for (uint d = 0; d < head_dim; d += 16) {
            const int left = (int)(head_dim - d);
            float16 sum = output[d / 16] * factors.add;
            if (block->spans) sum = load_padded(block->y[n] + d, left) * factors.keep + sum;
            store_partial(sum, block->y[n] + d, left);
        }
        begin_span(block, n);
    }
    block->spans++;
}

// All tiles that begin before tile `stop` and that a row of the block sees, from tile `start` on.
OUTLINED void attend_tiles(const KV_HEAD *head, QUERY_BLOCK *block, uint start, uint stop) {
    KV_INTEGERS tile;
    int16 dots[MANY_ROWS][TILE_VECTORS];
    uint from = block->first[0], to = block->end[0];
    for (uint n = 0; n < block->count; n++) {
        from = min(from, block->first[n]);
        to = max(to, block->end[n]);
    }
    start = max(start, from / KV_TILE);
    stop = min(stop, (to + KV_TILE - 1) / KV_TILE);
    const bool few = block->count < MANY_ROWS;
    for (uint number = start; number < stop; number++) {
        if (number > start && number % SPAN_TILES == 0) fold_span(block, head->head_dim);
        for (uint page = 0; page < KV_TILE / PAGE_TOKENS; page++) {
            const uint position = number * KV_TILE + page * PAGE_TOKENS;
            const uint begin = from > position ? min(from - position, (uint)PAGE_TOKENS) : 0;
            const uint end = to > position ? min(to - position, (uint)PAGE_TOKENS) : 0;
            const uint next = position + PAGE_TOKENS < to ? position + PAGE_TOKENS : 0;
            load_page(head, position, begin, end, next, &tile);
            if (!few) keys_to_lanes(&tile, block->vectors, page);
            for (uint n = 0; few && n < block->count; n++)
                dots[n][page] = page_dots(&tile, block->q + n * block->vectors, block->vectors);
        }
        uint n = 0;
        for (; n + STEP_ROWS <= block->count; n += STEP_ROWS)
            attend_some(head, &tile, number * KV_TILE, few ? dots + n : 0, block, n);
        for (; n < block->count; n++)
            attend_one(head, &tile, number * KV_TILE, few ? dots + n : 0, block, n);
    }
}

// y of every row of the block, of which some may have `sinks`.
static void store_attention(QUERY_BLOCK *block, uint head_dim, bool sinks) {
    if (block->spans) fold_span(block, head_dim);
    for (uint n = 0; n < block->count; n++) {
        const float *output = (const float *)(block->output + n * 2 * block->vectors);
        SOFTMAX all = block->spans ? block->all[n] : block->span[n];
        const float keep = sinks ? merge_sink(&all, block->sink[n]) : 1.0f;
        for (uint d = 0; d < head_dim; d++)
            block->y[n][d] =
                attention_output((block->spans ? block->y[n][d] : output[d]) * keep, all.total);
    }
}

MATMUL_TARGET_END

#endif
