// All that one token sees, of one group of heads: a block passes over its tiles, four warps a tile,
// and copies the records of the next tiles while it is at these.

#ifndef ATTENTION_ROUNDS_H
#define ATTENTION_ROUNDS_H

#define STAGES 2
#define RESULTS GROUPS

#include "attention_group.h"

// Of the warps that take the token.
#ifndef TOKEN_BARRIER
#define TOKEN_BARRIER __syncthreads()
#endif

#define BLOCK_THREADS (WARPS * WARP_LANES)
#define THREAD_CHANNELS ((HEADS * HEAD_DIM + BLOCK_THREADS - 1) / BLOCK_THREADS)

// Begins to copy a page that is seen, by the warp whose page it is.
DEVICE void begin_page(const SPAN_WORK &work, unsigned position, unsigned char *to, int lane) {
    if (position <= work.position && position + PAGE_TOKENS > work.first) {
        const unsigned char *from = record_of(work, position);
#pragma unroll 4
        for (unsigned at = 16 * lane; at < RECORD; at += 16 * WARP_LANES)
            begin_part(to + at, from + at);
    }
    end_parts();
}

// Tiles `tile` to end - 1 of those the groups had.
DEVICE void add_tiles(const unsigned char *memory, unsigned tile, unsigned end, unsigned i,
                      CHANNEL_SUM &channel) {
#pragma unroll
    for (unsigned group = 0; group < GROUPS; group++) {
        if (tile + group >= end) break;
        channel.add_tile(softmax_at(group_top(memory, group, i)), *group_sum(memory, group, i));
        if ((tile + group + 1) % SPAN_TILES == 0) channel.end_span();
    }
}

// `y` are the rows of the group's heads. All threads of the block call.
DEVICE void attend_token(const SPAN_WORK &work, float scale, unsigned char *memory, float *y) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned group = warp / TILE_WARPS, page = warp % TILE_WARPS;
    const unsigned begin = work.first / KV_TILE, end = work.position / KV_TILE + 1;
    const unsigned own = group * KV_TILE + page * PAGE_TOKENS;
    begin_page(work, begin * KV_TILE + own, group_record(memory, group, page), lane);
    split_queries(work, scale, memory, warp, lane);
    CHANNEL_SUM channel[THREAD_CHANNELS];
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) channel[n].begin();
    unsigned stage = 0;
#pragma unroll 1
    for (unsigned tile = begin; tile < end; tile += GROUPS, stage = 1 - stage) {
        await_parts<0>();
        TOKEN_BARRIER;
        const unsigned next = (tile + GROUPS) * KV_TILE + own;
        begin_page(work, next, group_record(memory, (1 - stage) * GROUPS + group, page), lane);
        if (tile + group < end)
            attend_copied_tile(work, (tile + group) * KV_TILE, memory, stage, group, group, page,
                               lane);
        TOKEN_BARRIER;
#pragma unroll
        for (int n = 0; n < THREAD_CHANNELS; n++) {
            const unsigned i = threadIdx.x + n * BLOCK_THREADS;
            if (i < work.heads * HEAD_DIM) add_tiles(memory, tile, end, i, channel[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) {
        const unsigned i = threadIdx.x + n * BLOCK_THREADS;
        if (i >= work.heads * HEAD_DIM) break;
        channel[n].end_span();
        if (broken_query(memory, i / HEAD_DIM)) channel[n].all.total = nan_value();
        y[i] = attention_output(channel[n].sum, channel[n].all.total);
    }
    TOKEN_BARRIER;
}

#endif
