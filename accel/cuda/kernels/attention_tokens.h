// Attention of one token and one group of heads to all positions the token sees. A block passes
// over the spans, with one warp for each tile.

#ifndef ATTENTION_TOKENS_H
#define ATTENTION_TOKENS_H

#include "attention_tiles.h"

#define THREAD_CHANNELS (HEADS * HEAD_DIM / (WARPS * WARP_LANES))

// Adds a span to those before it, or starts with it if it is the only one.
DEVICE void add_span(const unsigned char *memory, unsigned first, unsigned end, unsigned i,
                     bool only, SOFTMAX &all, float &sum) {
    const float *units = (const float *)(memory + AT_UNITS);
    float part;
    SOFTMAX span = merged_tiles(memory, first, end, i / HEAD_DIM, i % HEAD_DIM, part);
    if (units[2 * (i / HEAD_DIM) + 1] != 0.0f) span.total = nan_value();
    if (only) {
        all = span, sum = part;
        return;
    }
    const FACTORS factors = merge_later(all, span);
    sum = sum * factors.keep + part * factors.add;
}

// `y` are the rows of the group's heads. All threads of the block must call this.
DEVICE void attend_token(SPAN_WORK &work, float scale, unsigned char *memory, float *y) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned begin = work.first / KV_TILE, end = work.position / KV_TILE + 1;
    const bool only = begin / SPAN_TILES == (end - 1) / SPAN_TILES;
    if (begin + warp < end) call_tile(work, (begin + warp) * KV_TILE, lane);
    split_queries(work, scale, memory, warp, lane);
    __syncthreads();
    SOFTMAX all[THREAD_CHANNELS];
    float sum[THREAD_CHANNELS];
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) all[n] = no_softmax(), sum[n] = 0.0f;
#pragma unroll 1
    for (unsigned tile = begin; tile < end;) {
        work.span = tile / SPAN_TILES;
        const unsigned of_span = work.span * SPAN_TILES, stop = min(end, of_span + SPAN_TILES);
        attend_tiles(work, tile - of_span, stop - of_span, memory);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < THREAD_CHANNELS; n++) {
            const unsigned i = threadIdx.x + n * WARPS * WARP_LANES;
            if (i < work.heads * HEAD_DIM)
                add_span(memory, tile - of_span, stop - of_span, i, only, all[n], sum[n]);
        }
        __syncthreads();
        tile = stop;
    }
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) {
        const unsigned i = threadIdx.x + n * WARPS * WARP_LANES;
        if (i < work.heads * HEAD_DIM) y[i] = attention_output(sum[n], all[n].total);
    }
}

#endif
