// Rule R6, version 2, on devices where a work-group shares a few queries of a KV head.

#ifndef ATTENTION_GROUP_H
#define ATTENTION_GROUP_H

#if GROUP_SIZE > 1

// Sixteen items weigh the tile of a query.
#define GROUP_QUERIES (GROUP_SIZE / 16)
// Channels of all queries of a group.
#define GROUP_CHANNELS 1024
// Queries an item multiplies with its key, of which there are KV_TILE.
#define ITEM_QUERIES (GROUP_QUERIES * KV_TILE / GROUP_SIZE)

// Channels of a row that are an item's. Loops of items that differ in length are avoided: PoCL 3.1
// takes the number of rounds from one item for all of them.
#define FOR_ITEM_CHANNELS(d, first, step, head_dim)                   \
    for (uint base = 0, d = (first); base < (head_dim);               \
         base += (step), d += (step)) if (d < (head_dim))

// Queries n are `heads` neighbouring heads of each of a few tokens of one slot.
typedef struct {
    uint count;
    uint heads;
    const GLOBAL int *query;
    uint query_stride;
    const GLOBAL float *q;
    uint q_stride;
    GLOBAL float *y;
    uint y_stride;
} GROUP_ROWS;

INLINE GLOBAL float *row_output(const GROUP_ROWS *rows, uint n, uint head_dim) {
    return rows->y + (ulong)(n / rows->heads) * rows->y_stride + n % rows->heads * head_dim;
}

typedef struct {
    short q[GROUP_CHANNELS];                // [queries][head_dim]
    float output[GROUP_CHANNELS];           // o of the span so far
    float score[GROUP_QUERIES][KV_TILE];    // -infinity: not visible
    int weight[GROUP_QUERIES][KV_TILE];
    float found[GROUP_SIZE];
    int most[2][GROUP_SIZE];
    float factor[2][KV_TILE];               // of the integers of keys and of values
    float key_scale[KV_TILE];
    float exponent[KV_TILE];                // of the value; infinite: a broken row
    float value_scale[KV_TILE];
    float query_factor[GROUP_QUERIES];      // multiplies q.k
    uint first[GROUP_QUERIES];
    uint end[GROUP_QUERIES];
    SOFTMAX span[GROUP_QUERIES];
    SOFTMAX all[GROUP_QUERIES];
    FACTORS factors[GROUP_QUERIES];         // of the latest tile
    FACTORS folds[GROUP_QUERIES];           // of the latest span
} TILE_MEMORY;

typedef char TILE_MEMORY_FITS[sizeof(TILE_MEMORY) <= 4 * GROUP_WORDS ? 1 : -1];

INLINE int group_integer(float x, float factor, int limit) {
    return clamp(as_int(x * factor + ROUNDER) - as_int(ROUNDER), -limit, limit);
}

INLINE float kv_element(const KV_HEAD *head, ulong element) {
    if (head->dtype == F32) return ((const GLOBAL float *)head->kv)[element];
    if (head->dtype == Q8_0) {
        const GLOBAL uchar *block = head->kv + element / Q8_0_ELEMENTS * Q8_0_BYTES;
        return (float)((const GLOBAL char *)block)[2 + element % Q8_0_ELEMENTS] * half_at(block);
    }
    return vload_half(element, (const GLOBAL half *)head->kv);
}

// Queries a group takes at a time.
INLINE uint group_queries(uint head_dim) {
    return min((uint)GROUP_QUERIES, GROUP_CHANNELS / head_dim);
}

// Integers of the queries, which positions they see, and nothing merged so far.
INLINE void begin_rows(__local TILE_MEMORY *tile, const KV_HEAD *head, const GROUP_ROWS *rows) {
    const uint item = get_local_id(0), n = item / 16, lane = item % 16;
    const bool exists = n < rows->count;
    const uint token = exists ? n / rows->heads : 0, h = exists ? n % rows->heads : 0;
    const GLOBAL float *q = rows->q + (ulong)token * rows->q_stride + h * head->head_dim;
    const int bits = query_bits(head->head_dim);
    const SOFTMAX none = NO_SOFTMAX;
    int most = 0;
    LOCAL_BARRIER;
    FOR_ITEM_CHANNELS(d, lane, 16, head->head_dim)
        if (exists) most = max(most, as_int(q[d]) & 0x7FFFFFFF);
    tile->most[0][item] = most;
    LOCAL_BARRIER;
    for (uint i = 0; i < 16; i++) most = max(most, tile->most[0][n * 16 + i]);
    const int exponent = row_exponent(most);
    const float factor = row_factor(most, bits);
    FOR_ITEM_CHANNELS(d, lane, 16, head->head_dim)
        if (exists)
            tile->q[n * head->head_dim + d] =
                (short)group_integer(q[d], factor, (2 << bits) - 1);
    if (lane == 0) {
        const uint position = rows->query[token * rows->query_stride + 2];
        tile->query_factor[n] = exponent == BROKEN_ROW ? 0.0f : score_factor(head, exponent);
        tile->first[n] = first_visible(position, head->window);
        tile->end[n] = exists ? position + 1 : 0;
        tile->span[n] = none;
        tile->all[n] = none;
        if (exponent == BROKEN_ROW) tile->span[n].total = as_float(QUIET_NAN);
    }
    LOCAL_BARRIER;
}

// Exponents of the keys and values from position `start` on, of which [from, to) exist.
INLINE void group_exponents(__local TILE_MEMORY *tile, const KV_HEAD *head, uint start, uint from,
                            uint to) {
    const uint item = get_local_id(0), place = item % KV_TILE, which = item / KV_TILE;
    const uint position = start + place;
    const bool exists = position >= from && position < to;
    const uint head_dim = head->head_dim;
    UNROLL for (uint side = 0; side < 2; side++) {
        // Two items share a row: its neighbouring elements are read together.
        const uint other = start + item / 2;
        int most = 0;
        if (head->dtype != I12 && other >= from && other < to) {
            const ulong row = kv_row(head, other, side);
            FOR_ITEM_CHANNELS(d, item % 2, 2, head_dim)
                most = max(most, as_int(kv_element(head, row + d)) & 0x7FFFFFFF);
        }
        tile->most[side][item] = most;
    }
    LOCAL_BARRIER;
    if (which) {
        int exponent[2];
        UNROLL for (uint side = 0; side < 2; side++) {
            const int most = max(tile->most[side][2 * place], tile->most[side][2 * place + 1]);
            exponent[side] = exists ? row_exponent(most) : LEAST_EXPONENT;
            tile->factor[side][place] = row_factor(most, KV_BITS);
            if (exists && head->dtype == I12)
                exponent[side] = (char)i12_page(head, position)[I12_EXPONENTS + side * PAGE_TOKENS +
                                                                position % PAGE_TOKENS];
        }
        tile->key_scale[place] = key_scale(exponent[0]);
        tile->exponent[place] = tile_exponent(exponent[0], exponent[1]);
        tile->value_scale[place] = value_scale(exponent[1]);
    }
    LOCAL_BARRIER;
}

// Scores of the tile from position `start` on for all queries: an item has one key.
INLINE void group_scores(__local TILE_MEMORY *tile, const KV_HEAD *head, uint start, uint from,
                         uint to) {
    const uint place = get_local_id(0) % KV_TILE;
    const uint begin = get_local_id(0) / KV_TILE * ITEM_QUERIES;
    const uint position = start + place, head_dim = head->head_dim, half_dim = head_dim / 2;
    const bool exists = position >= from && position < to;
    const __local short *q = tile->q + begin * head_dim;
    int dot[ITEM_QUERIES];
    UNROLL for (uint n = 0; n < ITEM_QUERIES; n++) dot[n] = 0;
    if (exists && head->dtype == I12) {
        const GLOBAL uchar *record = i12_page(head, position);
        const GLOBAL char *high =
            (const GLOBAL char *)record + position % PAGE_TOKENS * head_dim;
        const GLOBAL uchar *low = record + I12_LOW + position % PAGE_TOKENS * half_dim;
        for (uint d = 0; d < half_dim; d++) {
            const int a = high[d] * 16 | (low[d] & 15);
            const int b = high[d + half_dim] * 16 | low[d] >> 4;
            UNROLL for (uint n = 0; n < ITEM_QUERIES; n++)
                dot[n] += q[n * head_dim + d] * a + q[n * head_dim + d + half_dim] * b;
        }
    } else if (exists) {
        const ulong row = kv_row(head, position, 0);
        const float factor = tile->factor[0][place];
        for (uint d = 0; d < head_dim; d++) {
            const int key = group_integer(kv_element(head, row + d), factor, KV_MOST);
            UNROLL for (uint n = 0; n < ITEM_QUERIES; n++) dot[n] += q[n * head_dim + d] * key;
        }
    }
    UNROLL for (uint n = 0; n < ITEM_QUERIES; n++) {
        float score = ((float)dot[n] * tile->query_factor[begin + n]) * tile->key_scale[place];
        if (head->soft_cap > 0.0f) score = soft_cap1(score, head->soft_cap) * LOG2E;
        const bool seen = position >= tile->first[begin + n] && position < tile->end[begin + n];
        tile->score[begin + n][place] = seen ? score : -INFINITY;
    }
    LOCAL_BARRIER;
}

// Weights of the tile, its U and l merged. A query that sees none of it keeps what it has.
INLINE void group_weights(__local TILE_MEMORY *tile) {
    const uint item = get_local_id(0), n = item / 16, lane = item % 16;
    float most = -INFINITY, weight[4];
    UNROLL for (uint i = 0; i < 4; i++) {
        const uint place = lane + 16 * i;
        if (tile->score[n][place] != -INFINITY)
            most = fmax(most, tile->score[n][place] + tile->exponent[place]);
    }
    tile->found[item] = most;
    LOCAL_BARRIER;
    for (uint i = 0; i < 16; i++) most = fmax(most, tile->found[n * 16 + i]);
    const float top = rint_small1(most);
    const bool usable = fabs(top) < 0x1p20f;
    LOCAL_BARRIER;
    UNROLL for (uint i = 0; i < 4; i++) {
        const uint place = lane + 16 * i;
        weight[i] = 0.0f;
        if (usable && tile->score[n][place] != -INFINITY) {
            const float difference = tile->score[n][place] - top;
            weight[i] = exp2_1(difference < -80.0f ? -80.0f : difference);
        }
        tile->weight[n][place] =
            as_int(weight[i] * tile->value_scale[place] + ROUNDER) - as_int(ROUNDER);
    }
    tile->found[item] = (weight[0] + weight[2]) + (weight[1] + weight[3]);
    LOCAL_BARRIER;
    if (lane == 0) {
        float sums[16];
        UNROLL for (uint i = 0; i < 16; i++) sums[i] = tile->found[n * 16 + i];
        const SOFTMAX found = {top, fold16(vload16(0, sums))};
        const FACTORS same = {1.0f, 0.0f};
        SOFTMAX span = tile->span[n];
        tile->factors[n] = same;
        if (usable)
            tile->factors[n] = merge_later(&span, found);
        else if (most != -INFINITY)
            span.total = as_float(QUIET_NAN);
        tile->span[n] = span;
    }
    LOCAL_BARRIER;
}

// Adds the weighted values of the tile to o.
INLINE void group_values(__local TILE_MEMORY *tile, const KV_HEAD *head, uint start, uint from,
                         uint to, uint count) {
    const uint head_dim = head->head_dim, half_dim = head_dim / 2;
    const uint stop = min(to - start, (uint)KV_TILE);
    FOR_ITEM_CHANNELS(d, get_local_id(0), GROUP_SIZE, head_dim) {
        const uint pair = d < half_dim ? d : d - half_dim, shift = d < half_dim ? 0 : 4;
        int sum[GROUP_QUERIES];
        UNROLL for (uint n = 0; n < GROUP_QUERIES; n++) sum[n] = 0;
        for (uint j = from > start ? from - start : 0; j < stop; j++) {
            const uint position = start + j;
            int value;
            if (head->dtype == I12) {
                const GLOBAL uchar *values = i12_page(head, position) + I12_VALUES;
                const uint place = position % PAGE_TOKENS;
                value = (char)values[d * PAGE_TOKENS + place] * 16 |
                        (values[I12_LOW + pair * PAGE_TOKENS + place] >> shift & 15);
            } else {
                value = group_integer(kv_element(head, kv_row(head, position, 1) + d),
                                      tile->factor[1][j], KV_MOST);
            }
            UNROLL for (uint n = 0; n < GROUP_QUERIES; n++) sum[n] += tile->weight[n][j] * value;
        }
        UNROLL for (uint n = 0; n < GROUP_QUERIES; n++) {
            if (n >= count) continue;
            __local float *output = tile->output + n * head_dim + d;
            *output = *output * tile->factors[n].keep + (float)sum[n] * tile->factors[n].add;
        }
    }
}

// Adds the span so far to y, where the `spans` before are, and begins another. Its items have
// merged U and l.
INLINE void fold_output(__local TILE_MEMORY *tile, const KV_HEAD *head, const GROUP_ROWS *rows,
                        uint spans) {
    FOR_ITEM_CHANNELS(d, get_local_id(0), GROUP_SIZE, head->head_dim)
        for (uint n = 0; n < rows->count; n++) {
        __local float *output = tile->output + n * head->head_dim + d;
        GLOBAL float *y = row_output(rows, n, head->head_dim) + d;
        const float sum = *output * tile->folds[n].add;
        *y = spans ? *y * tile->folds[n].keep + sum : sum;
        *output = 0.0f;
    }
}

INLINE void fold_softmax(__local TILE_MEMORY *tile) {
    const uint item = get_local_id(0);
    const SOFTMAX none = NO_SOFTMAX;
    if (item >= GROUP_QUERIES) return;
    SOFTMAX all = tile->all[item];
    tile->folds[item] = merge_later(&all, tile->span[item]);
    tile->all[item] = all;
    tile->span[item] = none;
}

// All tiles from `start` to before `stop` that a query sees: the sum is in tile->output or, if
// there are several spans, in y. Returns how many were before the last. There is no barrier in a
// branch: a compiler for processors would copy all that follows.
INLINE uint attend_group(__local TILE_MEMORY *tile, const KV_HEAD *head, const GROUP_ROWS *rows,
                         uint start, uint stop) {
    uint from = tile->first[0], to = tile->end[0], spans = 0;
    FOR_ITEM_CHANNELS(d, get_local_id(0), GROUP_SIZE, head->head_dim)
        for (uint n = 0; n < rows->count; n++) tile->output[n * head->head_dim + d] = 0.0f;
    for (uint n = 1; n < rows->count; n++) {
        from = min(from, tile->first[n]);
        to = max(to, tile->end[n]);
    }
    start = max(start, from / KV_TILE);
    stop = min(stop, (to + KV_TILE - 1) / KV_TILE);
    for (uint number = start; number < stop; number++) {
        const bool folds = number > start && number % SPAN_TILES == 0;
        if (folds) fold_softmax(tile);
        group_exponents(tile, head, number * KV_TILE, from, to);
        if (folds) fold_output(tile, head, rows, spans++);
        group_scores(tile, head, number * KV_TILE, from, to);
        group_weights(tile);
        group_values(tile, head, number * KV_TILE, from, to, rows->count);
    }
    if (spans) fold_softmax(tile);
    LOCAL_BARRIER;
    if (spans) fold_output(tile, head, rows, spans);
    return spans;
}

#endif

#endif
