// Attention of one token, and up to four heads that read one KV head, to a span of 1,024 positions,
// by one block. The last block of a token to end merges the spans.

#ifndef ATTENTION_SPAN_H
#define ATTENTION_SPAN_H

#include "attention_tiles.h"

#define PART_FLOATS (PART_HEADER + HEAD_DIM)
#define AT_LAST AT_TILES_END  // whether the block ended last

// The tiles of a span that the token sees.
struct SPAN_RANGE {
    unsigned first, end;
    __device__ __forceinline__ SPAN_RANGE(const SPAN_WORK &work) {
        const unsigned begin = work.span * SPAN_TILES;
        first = max(begin, work.first / KV_TILE) - begin;
        end = min(begin + SPAN_TILES, work.position / KV_TILE + 1) - begin;
    }
};

// Prefetches the records of the span.
DEVICE void call_span(const SPAN_WORK &work) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const SPAN_RANGE tiles(work);
    if (tiles.first + warp < tiles.end)
        call_tile(work, (work.span * SPAN_TILES + tiles.first + warp) * KV_TILE, lane);
}

// One span of a group of heads: U, l and o of it or, if it is the only one, result(channel of all
// heads, y).
template <class RESULT>
DEVICE void attend_span(const SPAN_WORK &work, float scale, unsigned char *memory, float *parts,
                        unsigned first_span, unsigned slots, bool only, const RESULT &result) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const SPAN_RANGE tiles(work);
    const unsigned first = tiles.first, end = tiles.end;
    split_queries(work, scale, memory, warp, lane);
    __syncthreads();
    attend_tiles(work, first, end, memory);
    const float *units = (const float *)(memory + AT_UNITS);
    __syncthreads();
    for (unsigned i = threadIdx.x; i < work.heads * HEAD_DIM; i += blockDim.x) {
        const unsigned head = i / HEAD_DIM, channel = i % HEAD_DIM;
        float sum;
        SOFTMAX all = merged_tiles(memory, first, end, head, channel, sum);
        if (units[2 * head + 1] != 0.0f) all.total = nan_value();
        if (only) {
            result(i, attention_output(sum, all.total));
            continue;
        }
        float *part = parts + ((size_t)head * slots + work.span - first_span) * PART_FLOATS;
        part[PART_HEADER + channel] = sum;
        if (channel == 0) part[0] = all.top, part[1] = all.total;
    }
}

// Folds the spans from the left into y; the last block to end calls this.
template <class RESULT>
DEVICE void merge_spans(const SPAN_WORK &work, const float *parts, unsigned slots, unsigned spans,
                        const RESULT &result) {
    for (unsigned i = threadIdx.x; i < work.heads * HEAD_DIM; i += blockDim.x) {
        const float *part = parts + (size_t)(i / HEAD_DIM) * slots * PART_FLOATS;
        SOFTMAX all = no_softmax();
        float sum = 0.0f;
        for (unsigned span = 0; span < spans; span++) {
            const float *one = part + (size_t)span * PART_FLOATS;
            const FACTORS factors = merge_later(all, softmax_of(__ldcg(one), __ldcg(one + 1)));
            sum = sum * factors.keep + __ldcg(one + PART_HEADER + i % HEAD_DIM) * factors.add;
        }
        result(i, attention_output(sum, all.total));
    }
}

// Computes span work.span of spans `begin` to `end` - 1 of the token, whose parts have `slots`
// slots each; `counter` is 0 before the first and after the last span. All threads of the block
// must call this.
template <class RESULT>
DEVICE void attend_all_spans(const SPAN_WORK &work, float scale, unsigned char *memory,
                             float *parts, unsigned slots, unsigned begin, unsigned end,
                             unsigned *counter, const RESULT &result) {
    unsigned *last = (unsigned *)(memory + AT_LAST);
    attend_span(work, scale, memory, parts, begin, slots, end == begin + 1, result);
    if (end == begin + 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last[0] = atomicAdd(counter, 1) + 1 == end - begin;
    __syncthreads();
    if (!last[0]) return;
    __threadfence();
    merge_spans(work, parts, slots, end - begin, result);
    if (threadIdx.x == 0) *counter = 0;
}

#endif
