// FLASH_ATTN_BATCHED of tokens that are mostly of different slots, over I12 pages (rule R6): a block
// takes one token and up to four heads that read one KV head.
//
// Compiled with WARPS, four for every tile of a round, and BLOCKS a multiprocessor; with the places of
// the operands as packets.h has them: Q_AT, KV_AT, PAGES_AT, QUERY_AT and Y_AT.

#include "attention_rounds.h"

// The first position of a slot that this step has a token of.
DEVICE unsigned first_written(const unsigned *queries, size_t stride, unsigned tokens, unsigned slot,
                              int lane) {
    unsigned first = ~0u;
    for (unsigned token = lane; token < tokens; token += WARP_LANES)
        if (queries[token * stride + QUERY_SLOT] == slot)
            first = min(first, queries[token * stride + QUERY_POSITION]);
    return ~largest_of_warp(~first);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, BLOCKS)
    attention_tokens(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *packet = packet_of(launch, 0);
    const unsigned tokens = count_of(launch, packet);
    const unsigned window = packet->size[FLASH_ATTN_BATCHED_WINDOW];
    const float scale = packet->real[FLASH_ATTN_BATCHED_SCALE];
    SPAN_WORK work;
    work.kv_heads = packet->size[FLASH_ATTN_BATCHED_KV_HEADS];
    work.kv = (U64)operand_at(launch, KV_AT);
    const unsigned sharing = packet->size[FLASH_ATTN_BATCHED_HEADS] / work.kv_heads;
    const unsigned groups = (sharing + HEADS - 1) / HEADS, each = work.kv_heads * groups;
    const unsigned *queries = (const unsigned *)operand_at(launch, QUERY_AT);
    for (unsigned unit = blockIdx.x; unit < tokens * each; unit += gridDim.x) {
        work.token = unit / each;
        work.take_group(unit % each, sharing);
        const unsigned *query = queries + work.token * stride_at(launch, QUERY_AT);
        work.position = query[QUERY_POSITION];
        work.first = first_visible(work.position, window);
        work.pages = (const unsigned *)operand_at(launch, PAGES_AT) +
                     query[QUERY_SLOT] * stride_at(launch, PAGES_AT);
        work.q = (const float *)operand_at(launch, Q_AT) + work.token * stride_at(launch, Q_AT) +
                 work.head * HEAD_DIM;
        float *y = (float *)operand_at(launch, Y_AT) + work.token * stride_at(launch, Y_AT);
        const int lane = threadIdx.x % WARP_LANES;
        PAGE_LIST pages;
        pages.read(work, own_positions(), 0, lane);
        // What this step does not write is on its way before the kernel in front is done.
        const unsigned written =
            first_written(queries, stride_at(launch, QUERY_AT), tokens, query[QUERY_SLOT], lane);
        const bool early =
            pages.position_of(work, own_positions(), 0) + PAGE_TOKENS <= written;
        if (early) begin_page(work, pages, 0, 0, shared, lane);
        PRECEDING_DONE;
        if (!early) begin_page(work, pages, 0, 0, shared, lane);
        attend_token(work, pages, scale, shared, y + work.head * HEAD_DIM);
    }
    PRECEDING_DONE;
}
