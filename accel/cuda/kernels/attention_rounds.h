// Attention of one token and one group of heads to all positions the token sees. A block passes
// over the tiles, with four warps for each tile, and copies the page records of the next tiles
// while it computes these.

#ifndef ATTENTION_ROUNDS_H
#define ATTENTION_ROUNDS_H

#define STAGES 2
#define RESULTS GROUPS

#include "attention_group.h"
#include "sending.h"

// Of the warps that take the token.
#ifndef TOKEN_BARRIER
#define TOKEN_BARRIER __syncthreads()
#endif

#define BLOCK_THREADS (WARPS * WARP_LANES)
#define THREAD_CHANNELS ((HEADS * HEAD_DIM + BLOCK_THREADS - 1) / BLOCK_THREADS)

// The pages of a warp, one for every round: lane l holds the page number of round `first` + l.
struct PAGE_LIST {
    unsigned number, first;

    // The positions of the warp's page of `round`: `own` after the first tile that is seen, plus
    // whole rounds.
    static __device__ __forceinline__ unsigned position_of(const SPAN_WORK &work, unsigned own,
                                                           unsigned round) {
        return (work.first / KV_TILE + round * GROUPS) * KV_TILE + own;
    }
    __device__ __forceinline__ void read(const SPAN_WORK &work, unsigned own, unsigned round,
                                         int lane) {
        const unsigned position = position_of(work, own, round + lane);
        first = round;
        number = position <= work.position ? work.pages[position / PAGE_TOKENS] : 0;
    }
    __device__ __forceinline__ unsigned of(const SPAN_WORK &work, unsigned own, unsigned round,
                                           int lane) {
        if (round - first >= WARP_LANES) read(work, own, round, lane);
        return __shfl_sync(ALL_LANES, number, round - first);
    }
};

// The first position of a thread's page within the positions of a round.
DEVICE unsigned own_positions() {
    const unsigned warp = threadIdx.x / WARP_LANES;
    return warp / TILE_WARPS * KV_TILE + warp % TILE_WARPS * PAGE_TOKENS;
}

// Begins to copy the warp's page of a round to its address in stage `stage`, if any position of it
// is seen.
DEVICE void begin_page(const SPAN_WORK &work, PAGE_LIST &pages, unsigned round, unsigned stage,
                       unsigned char *memory, int lane) {
    const unsigned warp = threadIdx.x / WARP_LANES;
    unsigned char *to =
        group_record(memory, stage * GROUPS + warp / TILE_WARPS, warp % TILE_WARPS);
    const unsigned own = own_positions(), position = pages.position_of(work, own, round);
    if (position <= work.position && position + PAGE_TOKENS > work.first) {
        const unsigned page = pages.of(work, own, round, lane);
        const unsigned char *from = (const unsigned char *)i12_record(
            work.kv, page, work.kv_heads, work.kv_head, HEAD_DIM);
#pragma unroll 4
        for (unsigned at = 16 * lane; at < RECORD; at += 16 * WARP_LANES)
            begin_part(to + at, from + at);
    }
    end_parts();
}

// Folds tiles `tile` to end - 1, which the groups have computed.
DEVICE void add_tiles(const unsigned char *memory, unsigned tile, unsigned end, unsigned i,
                      CHANNEL_SUM &channel) {
#pragma unroll
    for (unsigned group = 0; group < GROUPS; group++) {
        if (tile + group >= end) break;
        channel.add_tile(softmax_at(group_top(memory, group, i)), *group_sum(memory, group, i));
        if ((tile + group + 1) % SPAN_TILES == 0) channel.end_span();
    }
}

// The pages of the first round are being copied; `y` are the rows of the group's heads, which are also
// `sent`. All threads of the block must call this.
DEVICE void attend_token(const SPAN_WORK &work, PAGE_LIST &pages, float scale, unsigned char *memory,
                         float *y, const SENT &sent) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned group = warp / TILE_WARPS, page = warp % TILE_WARPS;
    const unsigned begin = work.first / KV_TILE, end = work.position / KV_TILE + 1;
    split_queries(work, scale, memory, warp, lane);
    CHANNEL_SUM channel[THREAD_CHANNELS];
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) channel[n].begin();
    unsigned round = 0;
#pragma unroll 1
    for (unsigned tile = begin; tile < end; tile += GROUPS) {
        await_parts<0>();
        TOKEN_BARRIER;
        const unsigned stage = round++ % STAGES;
        begin_page(work, pages, round, round % STAGES, memory, lane);
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
        sent.store(y + i, attention_output(channel[n].sum, channel[n].all.total));
    }
    TOKEN_BARRIER;
}

#endif
