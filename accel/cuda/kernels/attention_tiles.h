// Attention of one token, and up to four heads that read one KV head, to tiles of 64 positions of
// I12 pages (rule R6); a warp computes a tile. Both products are integer products on tensor cores.
// Keys and values are split into 16 high + low, queries and weights into 128 high + low, and the
// eight columns of a product are the two parts of the four heads.
//
// HEAD_DIM is 64, 128 or 256, WARPS the number of warps of a block.

#ifndef ATTENTION_TILES_H
#define ATTENTION_TILES_H

#include "packets.h"
#include "warp.h"
#include "attention_rows.k"
#include "pages.k"
#include "pages_coded.k"

#define HEADS 4
#define HALF_DIM (HEAD_DIM / 2)
#define LANE_BYTES (HEAD_DIM / 8)  // of half a row, which four lanes share
#define LANE_WORDS (LANE_BYTES / 4)
#define TILE_PAGES (KV_TILE / PAGE_TOKENS)
#define RECORD \
    (IS_CODED ? CODED_EXPONENTS(HEAD_DIM) + 2 * PAGE_TOKENS : PAGE_TOKENS * (3 * HEAD_DIM + 2))
// The distance between parts of queries; words of different ones are in different banks for codes.
#define QUERY_BYTES (HEAD_DIM + (IS_CODED ? 16 : 0))
#define Q_SHIFT 7  // bits of the low part of queries and weights
// Registers of a lane for the data of a tile that it reads before it computes.
#define HELD_WORDS (WARPS > 8 ? 48 : 96)
#define KEY_WORDS (6 * LANE_WORDS)  // of a page
#define KEY_PAGES (KEY_WORDS * TILE_PAGES <= HELD_WORDS ? TILE_PAGES : HELD_WORDS / KEY_WORDS)
#define VALUE_WORDS 24  // of 32 channels
#define VALUE_GROUPS (HELD_WORDS / VALUE_WORDS)

// Shared memory, in bytes.
#define AT_QUERIES 0                                        // [head][high, low][QUERY_BYTES]
#define AT_UNITS (AT_QUERIES + HEADS * 2 * QUERY_BYTES)     // [head] factor, 1 if broken
#define AT_WEIGHTS (AT_UNITS + 32)                          // [warp][head][high, low][KV_TILE]
#define AT_TOPS (AT_WEIGHTS + WARPS * HEADS * 2 * KV_TILE)  // [tile of a span][head] U, l
#define AT_SUMS (AT_TOPS + SPAN_TILES * HEADS * 8)          // [tile of a span][head][HEAD_DIM] o
#define AT_TILES_END (AT_SUMS + SPAN_TILES * HEADS * HEAD_DIM * 4)

// The work of a block. `q` is the row of its first head.
struct SPAN_WORK {
    const unsigned *pages;
    const float *q;
    U64 kv;
    unsigned token, position, first, span, kv_heads, kv_head, head, heads;

    // Finds the work among the groups of heads of all KV heads; `sharing` groups read one KV head.
    __device__ __forceinline__ void take_group(unsigned group, unsigned sharing) {
        const unsigned groups = (sharing + HEADS - 1) / HEADS;
        kv_head = group / groups;
        head = kv_head * sharing + group % groups * HEADS;
        heads = min((unsigned)HEADS, (kv_head + 1) * sharing - head);
    }
};

template <int N> DEVICE void load_words(const unsigned char *from, unsigned (&word)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if (N % 4 == 0) {
            const uint4 four = *(const uint4 *)(from + 4 * i);
            word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
        } else {
            const uint2 two = *(const uint2 *)(from + 4 * i);
            word[i] = two.x, word[i + 1] = two.y;
        }
    }
}

// Converts a query row to two bytes an element, by a warp; writes zeros if the head does not exist.
DEVICE void split_query(const float *q, bool exists, float scale, unsigned char *memory,
                        unsigned head, int lane) {
    unsigned most = 0;
    for (int d = lane; d < HEAD_DIM && exists; d += WARP_LANES)
        most = max(most, __float_as_uint(q[d]) & MAGNITUDE);
    most = largest_of_warp(most);
    const int bits = query_bits(HEAD_DIM), exponent = row_exponent(most);
    const float factor = row_factor(most, bits);
    unsigned char *high = memory + AT_QUERIES + head * 2 * QUERY_BYTES;
    unsigned char *low = high + QUERY_BYTES;
    for (int d = lane; d < HEAD_DIM; d += WARP_LANES) {
        const int m = exists && factor != 0.0f ? row_integer(q[d], factor, (2 << bits) - 1) : 0;
        high[d] = (unsigned char)(m >> Q_SHIFT);
        low[d] = (unsigned char)(m & ((1 << Q_SHIFT) - 1));
    }
    if (lane == 0) {
        float *unit = (float *)(memory + AT_UNITS) + 2 * head;
        const bool broken = exponent == BROKEN_ROW;
        unit[0] = broken ? 0.0f : scale * LOG2E * two_to(exponent - bits - KV_BITS);
        unit[1] = broken ? 1.0f : 0.0f;
    }
}

// Rows of queries, by a warp a head.
DEVICE void split_queries(const SPAN_WORK &work, float scale, unsigned char *memory, int warp,
                          int lane) {
    if (warp < HEADS)
        split_query(work.q + warp * HEAD_DIM, warp < work.heads, scale, memory, warp, lane);
}

DEVICE const unsigned char *record_of(const SPAN_WORK &work, unsigned position) {
    const unsigned page = work.pages[min(position, work.position) / PAGE_TOKENS];
    const unsigned record = page * work.kv_heads + work.kv_head;
    return (const unsigned char *)work.kv + (size_t)record * RECORD;
}

// Prefetches the tile's records while the queries are prepared.
DEVICE void call_tile(const SPAN_WORK &work, unsigned start, int lane) {
    const unsigned char *record = record_of(work, start + lane / 8 * PAGE_TOKENS);
#pragma unroll
    for (unsigned at = lane % 8 * 128; at < RECORD; at += 8 * 128) call_near(record + at);
}

DEVICE unsigned low_part(unsigned word, int half) {
    return (half ? word >> 4 : word) & 0x0F0F0F0Fu;
}

// The sums of (16 high + low) (128 high + low): columns 2 t and 2 t + 1 are the parts of head t.
DEVICE int joined(const int (&high)[4], const int (&low)[4], int row) {
    return 16 * ((high[2 * row] * (1 << Q_SHIFT)) + high[2 * row + 1]) +
           low[2 * row] * (1 << Q_SHIFT) + low[2 * row + 1];
}

// Positions g and g + 8 of a page: a lane's part of their keys, and the exponents of both rows.
struct PAGE_KEYS {
    unsigned low[2][LANE_WORDS], high[2][2][LANE_WORDS];
    int key[2], value[2];

    __device__ __forceinline__ void load(const unsigned char *record, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = g + 8 * r;
            load_words(record + I12_LOW(HEAD_DIM) + row * HALF_DIM + t * LANE_BYTES, low[r]);
            load_words(record + row * HEAD_DIM + t * LANE_BYTES, high[0][r]);
            load_words(record + row * HEAD_DIM + HALF_DIM + t * LANE_BYTES, high[1][r]);
            const signed char *exponents = (const signed char *)record + I12_EXPONENTS(HEAD_DIM);
            key[r] = exponents[row], value[r] = exponents[PAGE_TOKENS + row];
        }
    }
    // q.k with the query of head t.
    __device__ __forceinline__ void scores(const unsigned (&query)[2][LANE_WORDS],
                                           int (&dot)[2]) const {
        int of_high[4] = {0, 0, 0, 0}, of_low[4] = {0, 0, 0, 0};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < LANE_WORDS; i += 2) {
                const unsigned b0 = query[half][i], b1 = query[half][i + 1];
                const unsigned a[4] = {high[half][0][i], high[half][1][i], high[half][0][i + 1],
                                       high[half][1][i + 1]};
                const unsigned c[4] = {low_part(low[0][i], half), low_part(low[1][i], half),
                                       low_part(low[0][i + 1], half),
                                       low_part(low[1][i + 1], half)};
                multiply_32<true>(of_high, a, b0, b1);
                multiply_32<false>(of_low, c, b0, b1);
            }
        dot[0] = joined(of_high, of_low, 0);
        dot[1] = joined(of_high, of_low, 1);
    }
};

DEVICE bool usable_top(float top) { return magnitude_of(top) < 1048576.0f; }

// p of a position with this score, -infinity if it is not seen; its weight is written in two parts,
// to `to` and KV_TILE after it.
DEVICE float put_weight(unsigned char *to, float score, float value, float top) {
    const float difference = score - top;
    const bool seen = usable_top(top) && score != NEGATIVE_INFINITY;
    const float p = seen ? exp2_of(difference < -80.0f ? -80.0f : difference) : 0.0f;
    const int weight = seen ? rounded(p * value) : 0;
    to[0] = (unsigned char)(weight >> Q_SHIFT);
    to[KV_TILE] = (unsigned char)(weight & ((1 << Q_SHIFT) - 1));
    return p;
}

// U and l of a tile for head t, and its weights, which are written to shared memory in two parts.
DEVICE SOFTMAX tile_weights(const SPAN_WORK &work, unsigned start, float unit,
                            const unsigned (&query)[2][LANE_WORDS], unsigned char *weights,
                            int lane) {
    const int g = lane / 4, t = lane % 4;
    float score[TILE_PAGES][2], value[TILE_PAGES][2], most = NEGATIVE_INFINITY;
#pragma unroll
    for (int first = 0; first < TILE_PAGES; first += KEY_PAGES) {
        PAGE_KEYS keys[KEY_PAGES];
#pragma unroll
        for (int n = 0; n < KEY_PAGES; n++)
            keys[n].load(record_of(work, start + (first + n) * PAGE_TOKENS), lane);
#pragma unroll
        for (int n = 0; n < KEY_PAGES; n++) {
            const int page = first + n;
            int dot[2];
            keys[n].scores(query, dot);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const unsigned position = start + page * PAGE_TOKENS + g + 8 * r;
                const int key = keys[n].key[r], of_value = keys[n].value[r];
                const bool seen = position >= work.first && position <= work.position;
                score[page][r] = seen ? (float)dot[r] * unit * key_scale(key) : NEGATIVE_INFINITY;
                value[page][r] = value_scale(of_value);
                if (seen) most = larger(most, score[page][r] + tile_exponent(key, of_value));
            }
        }
    }
#pragma unroll
    for (int lanes = 4; lanes < WARP_LANES; lanes *= 2)
        most = larger(most, __shfl_xor_sync(ALL_LANES, most, lanes));
    const float top = rint_small(most);
    float p[TILE_PAGES][2];
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned char *to = weights + t * 2 * KV_TILE + page * PAGE_TOKENS + g + 8 * r;
            p[page][r] = put_weight(to, score[page][r], value[page][r], top);
        }
    float total =
        ((p[0][0] + p[2][0]) + (p[1][0] + p[3][0])) + ((p[0][1] + p[2][1]) + (p[1][1] + p[3][1]));
#pragma unroll
    for (int lanes = 16; lanes > 2; lanes /= 2)
        total = total + __shfl_xor_sync(ALL_LANES, total, lanes);
    __syncwarp();
    return usable_top(top) ? softmax_of(top, total) : softmax_of(NO_TOP, nan_value());
}

// Channels `channel` to channel + 15 and as many of the other half of a row: a lane's part of the
// values of 16 positions.
struct GROUP_VALUES {
    unsigned low[2][4], high[2][2][4];

    __device__ __forceinline__ void load(const unsigned char *values, int channel) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = channel + 8 * r;
            load_words(values + I12_LOW(HEAD_DIM) + row * PAGE_TOKENS, low[r]);
            load_words(values + row * PAGE_TOKENS, high[0][r]);
            load_words(values + (row + HALF_DIM) * PAGE_TOKENS, high[1][r]);
        }
    }
    // o of channels g and g + 8 of one half.
    __device__ __forceinline__ void sums(const unsigned (&weight)[4], int half, float &first,
                                         float &second) const {
        int of_high[4] = {0, 0, 0, 0}, of_low[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned a[4] = {high[half][0][i], high[half][1][i], high[half][0][i + 1],
                                   high[half][1][i + 1]};
            const unsigned c[4] = {low_part(low[0][i], half), low_part(low[1][i], half),
                                   low_part(low[0][i + 1], half), low_part(low[1][i + 1], half)};
            multiply_32<true>(of_high, a, weight[i], weight[i + 1]);
            multiply_32<false>(of_low, c, weight[i], weight[i + 1]);
        }
        first = (float)joined(of_high, of_low, 0);
        second = (float)joined(of_high, of_low, 1);
    }
};

// o of a tile for head t. A lane has the positions of page t.
DEVICE void tile_values(const SPAN_WORK &work, unsigned start, const unsigned char *weights,
                        float *sums, int lane) {
    const int g = lane / 4, t = lane % 4;
    unsigned weight[4];
    load_words(weights + g * KV_TILE + t * PAGE_TOKENS, weight);
    const unsigned char *values =
        record_of(work, start + t * PAGE_TOKENS) + I12_VALUES(HEAD_DIM) + g * PAGE_TOKENS;
    constexpr int groups = HALF_DIM / 16, held = groups < VALUE_GROUPS ? groups : VALUE_GROUPS;
#pragma unroll 1
    for (int first = 0; first < groups; first += held) {
        GROUP_VALUES group[held];
#pragma unroll
        for (int n = 0; n < held; n++) group[n].load(values, 16 * (first + n));
#pragma unroll
        for (int n = 0; n < held; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float *of_head = sums + t * HEAD_DIM + 16 * (first + n) + half * HALF_DIM + g;
                group[n].sums(weight, half, of_head[0], of_head[8]);
            }
    }
}

// Folds the tiles of the span from the left, for one channel of one head.
DEVICE SOFTMAX merged_tiles(const unsigned char *memory, unsigned first, unsigned end,
                            unsigned head, unsigned channel, float &sum) {
    SOFTMAX all = no_softmax();
    sum = 0.0f;
    for (unsigned tile = first; tile < end; tile++) {
        const float *top = (const float *)(memory + AT_TOPS) + (tile * HEADS + head) * 2;
        const FACTORS factors = merge_later(all, softmax_of(top[0], top[1]));
        const float *sums = (const float *)(memory + AT_SUMS) + (tile * HEADS + head) * HEAD_DIM;
        sum = sum * factors.keep + sums[channel] * factors.add;
    }
    return all;
}

// Tiles `first` to `end` - 1 of the span, a warp one at a time: U, l and o of each.
DEVICE void attend_tiles(const SPAN_WORK &work, unsigned first, unsigned end,
                         unsigned char *memory) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int g = lane / 4, t = lane % 4;
    const float *units = (const float *)(memory + AT_UNITS);
    unsigned char *weights = memory + AT_WEIGHTS + warp * HEADS * 2 * KV_TILE;
#pragma unroll 1
    for (unsigned tile = first + warp; tile < end; tile += WARPS) {
        unsigned query[2][LANE_WORDS];
        const unsigned char *column = memory + AT_QUERIES + g * QUERY_BYTES + t * LANE_BYTES;
        load_words(column, query[0]);
        load_words(column + HALF_DIM, query[1]);
        const unsigned start = (work.span * SPAN_TILES + tile) * KV_TILE;
        const SOFTMAX part = tile_weights(work, start, units[2 * t], query, weights, lane);
        float *top = (float *)(memory + AT_TOPS) + (tile * HEADS + t) * 2;
        if (g == 0) top[0] = part.top, top[1] = part.total;
        tile_values(work, start, weights, (float *)(memory + AT_SUMS) + tile * HEADS * HEAD_DIM,
                    lane);
        __syncwarp();
    }
}

#endif
