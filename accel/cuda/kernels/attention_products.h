// Attention of 64 rows of queries to the tiles they see, by products of one warp group: the scores,
// what rule R6 computes from them, and the sums of values. A lane holds two rows.
// attention_supply.h prepares the operands of a tile.

#ifndef ATTENTION_PRODUCTS_H
#define ATTENTION_PRODUCTS_H

#include "attention_supply.h"

#define ROW_STEPS (HEAD_DIM / 32)  // of a product over a row
#define CHANNELS 64                // whose sums are computed at the same time
#define CHUNKS (BLOCK_CHANNELS / CHANNELS)
#define VALUES (BLOCK_CHANNELS / 2)  // sums of a thread
#define LOW_BITS 8

// The two rows of a lane. The low parts of wide queries are in shared memory, in the order of keys.
struct ROW_PAIR {
    unsigned high[ROW_STEPS][4];
#if HEAD_DIM < 256
    unsigned low[ROW_STEPS][4];
#else
    unsigned char *low;
#endif
    float unit[2];
    unsigned position[2], first[2];
    bool broken[2];
    SOFTMAX span[2], total[2];
    float sum[VALUES];
};

// The sums of some columns' parts, in the order of mma.m16n8k32, four for every eight columns.
template <int COLUMNS> struct PART_SUMS {
    int high[COLUMNS / 2], mixed[COLUMNS / 2], low[COLUMNS / 2];

    __device__ __forceinline__ void take() {
        take_sums(high), take_sums(mixed), take_sums(low);
    }
};

DEVICE void open_row(const float *q, float scale, int r, int t, ROW_PAIR &rows) {
    float x[HEAD_DIM / 4];
#pragma unroll
    for (int word = 0; word < HEAD_DIM / 16; word++) {
        const float4 v = q ? *(const float4 *)(q + 16 * word + 4 * t) : float4{};
        x[4 * word] = v.x, x[4 * word + 1] = v.y, x[4 * word + 2] = v.z, x[4 * word + 3] = v.w;
    }
    unsigned high[HEAD_DIM / 16], low[HEAD_DIM / 16];
    rows.unit[r] = split_row<LOW_BITS>(x, scale, high, low, rows.broken[r]);
#pragma unroll
    for (int word = 0; word < HEAD_DIM / 16; word++) {
        rows.high[word / 2][word % 2 * 2 + r] = high[word];
#if HEAD_DIM < 256
        rows.low[word / 2][word % 2 * 2 + r] = low[word];
#else
        const unsigned row = threadIdx.x / WARP_LANES % GROUP_WARPS * 16 +
                             threadIdx.x % WARP_LANES / 4 + 8 * r;
        *(unsigned *)(rows.low + row / 8 * KEY_EIGHT + word * KEYS_APART + row % 8 * 16 + 4 * t) =
            low[word];
#endif
    }
}

typedef PART_SUMS<KV_TILE> SCORE_SUMS;
typedef PART_SUMS<CHANNELS> VALUE_SUMS;

// Begins q.k of a tile.
DEVICE void begin_scores(const ROW_PAIR &rows, const unsigned char *planes, SCORE_SUMS &sum) {
    const U64 high = group_operand(planes + HIGH_KEYS, KEYS_APART, KEY_EIGHT);
    const U64 large = group_operand(planes + LARGE_LOW_KEYS, KEYS_APART, KEY_EIGHT);
    const U64 low = group_operand(planes + LOW_KEYS, KEYS_APART, KEY_EIGHT);
#if HEAD_DIM >= 256
    const U64 low_rows = group_operand(rows.low, KEYS_APART, KEY_EIGHT);
#endif
    begin_group_product();
#pragma unroll
    for (int k = 0; k < ROW_STEPS; k++) {
        const unsigned at = k * 2 * KEYS_APART;
#if HEAD_DIM < 256
        const unsigned(&low_of_rows)[4] = rows.low[k];
#else
        const U64 low_of_rows = operand_behind(low_rows, at);
#endif
        if (k == 0) {
            set_signed_sums(sum.high, rows.high[k], operand_behind(high, at));
            set_sums(sum.mixed, low_of_rows, operand_behind(high, at));
            set_unsigned_sums(sum.low, low_of_rows, operand_behind(low, at));
        } else {
            add_signed_sums(sum.high, rows.high[k], operand_behind(high, at));
            add_sums(sum.mixed, low_of_rows, operand_behind(high, at));
            add_unsigned_sums(sum.low, low_of_rows, operand_behind(low, at));
        }
        add_mixed_sums(sum.mixed, rows.high[k], operand_behind(large, at));
    }
    end_group_product();
}

// Begins the sums of a chunk of channels over all positions of a tile.
DEVICE void begin_values(const unsigned (&high)[2][4], const unsigned (&low)[2][4],
                         const unsigned char *records, const unsigned char *planes, int chunk,
                         VALUE_SUMS &sum) {
    const unsigned at = chunk * CHANNELS * PAGE_TOKENS, apart = 8 * PAGE_TOKENS;
    const unsigned page = VALUE_PAGE;
    const U64 stored = group_operand(records + I12_VALUES(HEAD_DIM) + at, RECORD_STRIDE, apart);
    const U64 large = group_operand(planes + LARGE_LOW_VALUES + at, page, apart);
    const U64 small = group_operand(planes + LOW_VALUES + at, page, apart);
    begin_group_product();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const U64 of_high = operand_behind(stored, k * 2 * RECORD_STRIDE);
        const U64 of_large = operand_behind(large, k * 2 * page);
        const U64 of_low = operand_behind(small, k * 2 * page);
        if (k == 0) {
            set_sums(sum.high, high[k], of_high);
            set_sums(sum.mixed, low[k], of_high);
            set_unsigned_sums(sum.low, low[k], of_low);
        } else {
            add_sums(sum.high, high[k], of_high);
            add_sums(sum.mixed, low[k], of_high);
            add_unsigned_sums(sum.low, low[k], of_low);
        }
        add_unsigned_sums(sum.mixed, high[k], of_large);
    }
    end_group_product();
}

// A lane's data of positions 4 t to 4 t + 3 of a page.
DEVICE void load_floats(const float *floats, int which, int page, int t, float (&value)[4]) {
    const float4 v = *(const float4 *)(floats + which * KV_TILE + page * PAGE_TOKENS + 4 * t);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

// Whether row r of the lane sees position number `column` of the tile that begins at `start`.
DEVICE bool sees(const ROW_PAIR &rows, int r, unsigned start, int page, int t, int column) {
    const unsigned position = start + page * PAGE_TOKENS + 4 * t + column;
    return position >= rows.first[r] && position <= rows.position[r];
}

// A lane's data of a tile: [row][page][position] of scores before the key's exponent, then of p.
typedef float LANE_SCORES[2][TILE_PAGES][4];

// Scores of a tile, and the largest that U has to reach.
DEVICE void end_scores(const ROW_PAIR &rows, const SCORE_SUMS &sum, const float *floats, int t,
                       LANE_SCORES &score, float (&most)[2]) {
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++) {
        float key[4], exponent[4];
        load_floats(floats, 0, page, t, key);
        load_floats(floats, 1, page, t, exponent);
#pragma unroll
        for (int column = 0; column < 4; column++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = 8 * page + column / 2 * 4 + 2 * r + column % 2;
                const int dot = (sum.high[i] * (1 << LOW_BITS) + sum.mixed[i]) * 16 + sum.low[i];
                score[r][page][column] = (float)dot * rows.unit[r];
                // One rounding: products with powers of two are exact.
                most[r] = fmaxf(most[r],
                                __fmaf_rn(score[r][page][column], key[column], exponent[column]));
            }
    }
}

// The same largest of the positions that a row sees.
DEVICE void find_most_seen(const ROW_PAIR &rows, const float *floats, unsigned start, int t,
                           const LANE_SCORES &score, float (&most)[2]) {
    most[0] = most[1] = NEGATIVE_INFINITY;
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++) {
        float key[4], exponent[4];
        load_floats(floats, 0, page, t, key);
        load_floats(floats, 1, page, t, exponent);
#pragma unroll
        for (int column = 0; column < 4; column++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (sees(rows, r, start, page, t, column))
                    most[r] = fmaxf(most[r], __fmaf_rn(score[r][page][column], key[column],
                                                       exponent[column]));
    }
}

DEVICE void forget_unseen(const ROW_PAIR &rows, unsigned start, int t, LANE_SCORES &p) {
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++)
#pragma unroll
        for (int column = 0; column < 4; column++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (!sees(rows, r, start, page, t, column)) p[r][page][column] = 0.0f;
}

// Of p weights as operands in two parts.
DEVICE void split_weights(const float *floats, int t, const LANE_SCORES &p,
                          unsigned (&high)[2][4], unsigned (&low)[2][4]) {
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++) {
        float scale[4];
        load_floats(floats, 2, page, t, scale);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned weight[4];
#pragma unroll
            for (int column = 0; column < 4; column++)
                weight[column] =
                    __float_as_uint(__fmaf_rn(p[r][page][column], scale[column], ROUNDER));
            const unsigned first = __byte_perm(weight[0], weight[1], 0x5140);
            const unsigned second = __byte_perm(weight[2], weight[3], 0x5140);
            low[page / 2][page % 2 * 2 + r] = __byte_perm(first, second, 0x5410);
            high[page / 2][page % 2 * 2 + r] = __byte_perm(first, second, 0x7632);
        }
    }
}

// Rule R4: positions 32, 16, 8, 4, 2 and 1 apart.
DEVICE float folded(const float (&p)[TILE_PAGES][4]) {
    float fold[4];
#pragma unroll
    for (int column = 0; column < 4; column++) {
        fold[column] = (p[0][column] + p[2][column]) + (p[1][column] + p[3][column]);
        fold[column] = fold[column] + __shfl_xor_sync(ALL_LANES, fold[column], 2);
        fold[column] = fold[column] + __shfl_xor_sync(ALL_LANES, fold[column], 1);
    }
    return (fold[0] + fold[2]) + (fold[1] + fold[3]);
}

// What the sums of a tile's values need of its scores: weights as operands in two parts, and
// factors.
struct TILE_WEIGHTS {
    unsigned high[2][4], low[2][4];
    FACTORS factors[2];
};

// Adds U and l of a tile to the span so far. At an `edge` a row sees only some of the tile.
DEVICE void weigh_tile(const SCORE_SUMS &sum, const float *floats, ROW_PAIR &rows, unsigned start,
                       bool edge, int t, TILE_WEIGHTS &weights) {
    LANE_SCORES score;
    float most[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, top[2];
    end_scores(rows, sum, floats, t, score, most);
    if (edge) find_most_seen(rows, floats, start, t, score, most);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 2));
        top[r] = rint_small(most[r]);
    }
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++) {
        float key[4];
        load_floats(floats, 0, page, t, key);
#pragma unroll
        for (int column = 0; column < 4; column++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float &x = score[r][page][column];
                x = exp2_of(fmaxf(__fmaf_rn(x, key[column], -top[r]), -80.0f));
            }
    }
    if (edge) forget_unseen(rows, start, t, score);
    split_weights(floats, t, score, weights.high, weights.low);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        SOFTMAX tile = softmax_of(top[r], folded(score[r]));
        if (!usable_top(top[r]))
            tile = softmax_of(NO_TOP, most[r] != NEGATIVE_INFINITY ? nan_value() : 0.0f);
        weights.factors[r] = merge_later(rows.span[r], tile);
    }
}

// Adds the sums of a tile's values; `records` are those of the tile, from the block's first channel on.
DEVICE void add_values(const unsigned char *records, const unsigned char *planes, ROW_PAIR &rows,
                       const TILE_WEIGHTS &weights) {
    VALUE_SUMS sum;
    begin_values(weights.high, weights.low, records, planes, 0, sum);
    const FACTORS(&factors)[2] = weights.factors;
    if (__ballot_sync(ALL_LANES, factors[0].keep != 1.0f || factors[1].keep != 1.0f))
#pragma unroll
        for (int i = 0; i < VALUES; i++) rows.sum[i] = rows.sum[i] * factors[i / 2 % 2].keep;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk) begin_values(weights.high, weights.low, records, planes, chunk, sum);
        await_operands<0>();
        sum.take();
#pragma unroll
        for (int i = 0; i < CHANNELS / 2; i++) {
            const int o = (sum.high[i] * (1 << LOW_BITS) + sum.mixed[i]) * 16 + sum.low[i];
            float &so_far = rows.sum[CHANNELS / 2 * chunk + i];
            so_far = __fmaf_rn((float)o, factors[i / 2 % 2].add, so_far);
        }
    }
}

#endif
