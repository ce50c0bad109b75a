// Tiles of 64 positions as in attention_tiles.h, of I12 pages or coded ones, computed by four warps
// each. A warp computes the scores of one page, then the sums of a quarter of the channels. Shared memory holds
// the page records of STAGES tiles for every group, and the results of RESULTS tiles.

#ifndef ATTENTION_GROUP_H
#define ATTENTION_GROUP_H

#include "attention_tiles.h"
#include "attention_codes.h"

#define TILE_WARPS 4
#ifdef TILE_GROUPS
#define GROUPS TILE_GROUPS
#else
#define GROUPS (WARPS / TILE_WARPS)
#endif
// The distance between heads, so that the heads of a warp are in different banks.
#define WEIGHT_BYTES (2 * KV_TILE + 16)
#define SHARE_FLOATS (KV_TILE + 8)
#define SUM_FLOATS (HEAD_DIM + 8)

// Shared memory behind the queries, in bytes.
#define AT_GROUP_WEIGHTS AT_WEIGHTS                                         // [group][head]
#define AT_SHARES (AT_GROUP_WEIGHTS + GROUPS * HEADS * WEIGHT_BYTES)        // [group][head] p
#define AT_PAGE_TOPS (AT_SHARES + GROUPS * HEADS * SHARE_FLOATS * 4)        // [group][head][page]
#define AT_GROUP_TOPS (AT_PAGE_TOPS + GROUPS * HEADS * TILE_PAGES * 4)      // [result][head] U, l
#define AT_GROUP_SUMS (AT_GROUP_TOPS + RESULTS * HEADS * 8)                 // [result][head] o
#define AT_RECORDS (AT_GROUP_SUMS + RESULTS * HEADS * SUM_FLOATS * 4)       // [group][page]
#define AT_GROUPS_END (AT_RECORDS + STAGES * GROUPS * TILE_PAGES * RECORD)

DEVICE unsigned char *group_record(unsigned char *memory, unsigned group, unsigned page) {
    return memory + AT_RECORDS + (group * TILE_PAGES + page) * RECORD;
}

DEVICE float4 page_tops(const unsigned char *memory, int group, int head) {
    return ((const float4 *)(memory + AT_PAGE_TOPS))[group * HEADS + head];
}

DEVICE float largest_of(const float4 &v) { return larger(larger(v.x, v.y), larger(v.z, v.w)); }

// Scores of page `page`, -infinity for positions that are not seen, and the factors that the
// exponents of values give weights; the largest one, which the tile's U must reach, is written to
// shared memory.
DEVICE void score_page(const SPAN_WORK &work, unsigned start, unsigned char *memory,
                       const unsigned char *record, int group, int page, int lane,
                       float (&score)[2], float (&value)[2]) {
    const int g = lane / 4, t = lane % 4;
    const unsigned char *column = memory + AT_QUERIES + g * QUERY_BYTES;
    const float unit = ((const float *)(memory + AT_UNITS))[2 * t];
    int dot[2];
#if IS_CODED
    PAGE_CODES keys;
    keys.load(record, lane);
    keys.scores(column + 4 * t, dot);
#else
    unsigned query[2][LANE_WORDS];
    load_words(column + t * LANE_BYTES, query[0]);
    load_words(column + t * LANE_BYTES + HALF_DIM, query[1]);
    PAGE_KEYS keys;
    keys.load(record, lane);
    keys.scores(query, dot);
#endif
    float most = NEGATIVE_INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const unsigned position = start + page * PAGE_TOKENS + g + 8 * r;
        const bool seen = position >= work.first && position <= work.position;
        score[r] = seen ? (float)dot[r] * unit * key_scale(keys.key[r]) : NEGATIVE_INFINITY;
        value[r] = value_scale(keys.value[r]);
        if (seen) most = larger(most, score[r] + tile_exponent(keys.key[r], keys.value[r]));
    }
#pragma unroll
    for (int lanes = 4; lanes < WARP_LANES; lanes *= 2)
        most = larger(most, __shfl_xor_sync(ALL_LANES, most, lanes));
    float *tops = (float *)(memory + AT_PAGE_TOPS) + (group * HEADS + t) * TILE_PAGES;
    if (g == 0) tops[page] = most;
}

// The R4 fold of a head's p over the tile.
DEVICE float share_total(const float *share, int lane) {
    float total = share[lane] + share[lane + WARP_LANES];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        total = total + __shfl_xor_sync(ALL_LANES, total, lanes);
    return total;
}

// U, l and o of the tile that begins at position `start`, computed by four warps; the caller
// computes page `page`. `keys` is the record of that page, `values` that of page lane % 4.
DEVICE void attend_group_tile(const SPAN_WORK &work, unsigned start, unsigned char *memory,
                              const unsigned char *keys, const unsigned char *values, int group,
                              int result, int page, int lane) {
    const int g = lane / 4, t = lane % 4;
    float score[2], value[2];
    score_page(work, start, memory, keys, group, page, lane, score, value);
    group_barrier(1 + group);
    unsigned char *weights = memory + AT_GROUP_WEIGHTS + group * HEADS * WEIGHT_BYTES;
    float *shares = (float *)(memory + AT_SHARES) + group * HEADS * SHARE_FLOATS;
    const float top = rint_small(largest_of(page_tops(memory, group, t)));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int of_tile = page * PAGE_TOKENS + g + 8 * r;
        shares[t * SHARE_FLOATS + of_tile] =
            put_weight(weights + t * WEIGHT_BYTES + of_tile, score[r], value[r], top);
    }
    group_barrier(1 + group);
    float *sums = (float *)(memory + AT_GROUP_SUMS) + (result * HEADS + t) * SUM_FLOATS + g;
#if IS_CODED
    // Half or more of a group of channels.
    constexpr int each = 2 * CODED_GROUPS / TILE_WARPS, halves = each < 2 ? each : 2;
#pragma unroll 1
    for (int half = each * page; half < each * (page + 1); half += halves) {
        const int of_group = half / 2;
        SCALED_WEIGHTS weight;
        weight.load(weights + g / 2 * WEIGHT_BYTES + t * PAGE_TOKENS,
                    values + CODED_VALUE_SCALES(HEAD_DIM) + of_group * PAGE_TOKENS, g);
#pragma unroll
        for (int n = 0; n < halves; n++) {
            const int channel = (half + n) % 2 * 8;
            GROUP_CODES part;
            part.load(values, of_group, g + channel);
            float *of_half = sums + of_group * 32 + channel;
            part.sums(weight, of_half[0], of_half[16]);
        }
    }
#else
    unsigned weight[4];
    load_words(weights + g / 2 * WEIGHT_BYTES + g % 2 * KV_TILE + t * PAGE_TOKENS, weight);
    const unsigned char *of_lane = values + I12_VALUES(HEAD_DIM) + g * PAGE_TOKENS;
#pragma unroll 1
    for (int channel = 16 * page; channel < HALF_DIM; channel += 16 * TILE_WARPS) {
        GROUP_VALUES part;
        part.load(of_lane, channel);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *of_half = sums + channel + half * HALF_DIM;
            part.sums(weight, half, of_half[0], of_half[8]);
        }
    }
#endif
    // Warp `page` computes the rest for head `page`.
    const float total = share_total(shares + page * SHARE_FLOATS, lane);
    const float own = rint_small(largest_of(page_tops(memory, group, page)));
    float *tops = (float *)(memory + AT_GROUP_TOPS) + (result * HEADS + page) * 2;
    if (lane == 0) {
        tops[0] = usable_top(own) ? own : NO_TOP;
        tops[1] = usable_top(own) ? total : nan_value();
    }
}

// The same of records that were copied, in stage `stage`.
DEVICE void attend_copied_tile(const SPAN_WORK &work, unsigned start, unsigned char *memory,
                               unsigned stage, int group, int result, int page, int lane) {
    const unsigned index = stage * GROUPS + group;
    attend_group_tile(work, start, memory, group_record(memory, index, page),
                      group_record(memory, index, lane % 4), group, result, page, lane);
}

// One channel of a head: U, l and o of the spans so far, and of the tiles of the current span.
struct CHANNEL_SUM {
    SOFTMAX all, span;
    float sum, part;

    __device__ __forceinline__ void begin_span() { span = no_softmax(), part = 0.0f; }
    __device__ __forceinline__ void begin() {
        all = no_softmax(), sum = 0.0f;
        begin_span();
    }
    __device__ __forceinline__ void add_tile(const SOFTMAX &tile, float o) {
        const FACTORS factors = merge_later(span, tile);
        part = part * factors.keep + o * factors.add;
    }
    __device__ __forceinline__ void end_span() {
        const FACTORS factors = merge_later(all, span);
        sum = sum * factors.keep + part * factors.add;
        begin_span();
    }
};

// The results of a tile for channel i of all heads.
DEVICE const float *group_top(const unsigned char *memory, unsigned result, unsigned i) {
    return (const float *)(memory + AT_GROUP_TOPS) + (result * HEADS + i / HEAD_DIM) * 2;
}
DEVICE const float *group_sum(const unsigned char *memory, unsigned result, unsigned i) {
    const float *sums = (const float *)(memory + AT_GROUP_SUMS);
    return sums + (result * HEADS + i / HEAD_DIM) * SUM_FLOATS + i % HEAD_DIM;
}
DEVICE SOFTMAX softmax_at(const float *top) { return softmax_of(top[0], top[1]); }

DEVICE bool broken_query(const unsigned char *memory, unsigned head) {
    return ((const float *)(memory + AT_UNITS))[2 * head + 1] != 0.0f;
}

#endif
