// FLASH_ATTN of few tokens over I12 pages (rule R6): a block takes a span of 1,024 positions of up
// to four heads that read one KV head, each warp a tile of 64 positions.
//
// Compiled with the places of the operands as packets.h has them: Q_AT, KV_AT, PAGES_AT, QUERY_AT,
// Y_AT and PARTS_AT, where U, l and o of spans wait. Sizes and reals are those of the first packet, a
// flash_attn_part. workspace has a counter for every token and group of heads, 0 between steps.

#define WARPS 16

#include "attention_tiles.h"

#define PART_FLOATS (PART_HEADER + HEAD_DIM)
#define AT_LAST AT_TILES_END  // whether the block came last

// One span of a group of heads: U, l and o of it or, where there is no other, y.
DEVICE void attend_span(const SPAN_WORK &work, float scale, unsigned char *memory, float *parts,
                        float *y, unsigned first_span, unsigned slots, bool only) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned begin = work.span * SPAN_TILES;
    const unsigned first = max(begin, work.first / KV_TILE) - begin;
    const unsigned end = min(begin + SPAN_TILES, work.position / KV_TILE + 1) - begin;
    if (first + warp < end) call_tile(work, (begin + first + warp) * KV_TILE, lane);
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
            y[i] = attention_output(sum, all.total);
            continue;
        }
        float *part = parts + ((size_t)head * slots + work.span - first_span) * PART_FLOATS;
        part[PART_HEADER + channel] = sum;
        if (channel == 0) part[0] = all.top, part[1] = all.total;
    }
}

// Spans from the left into y, by the block that came last.
DEVICE void merge_spans(const SPAN_WORK &work, const float *parts, float *y, unsigned slots,
                        unsigned spans) {
    for (unsigned i = threadIdx.x; i < work.heads * HEAD_DIM; i += blockDim.x) {
        const float *part = parts + (size_t)(i / HEAD_DIM) * slots * PART_FLOATS;
        SOFTMAX all = no_softmax();
        float sum = 0.0f;
        for (unsigned span = 0; span < spans; span++) {
            const float *one = part + (size_t)span * PART_FLOATS;
            const FACTORS factors = merge_later(all, softmax_of(__ldcg(one), __ldcg(one + 1)));
            sum = sum * factors.keep + __ldcg(one + PART_HEADER + i % HEAD_DIM) * factors.add;
        }
        y[i] = attention_output(sum, all.total);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    attention_spans(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned *last = (unsigned *)(shared + AT_LAST);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *packet = packet_of(launch, 0);
    const unsigned tokens = count_of(launch, packet), heads = packet->size[FLASH_ATTN_PART_HEADS];
    const unsigned window = packet->size[FLASH_ATTN_PART_WINDOW];
    const float scale = packet->real[FLASH_ATTN_PART_SCALE];
    SPAN_WORK work;
    work.kv_heads = packet->size[FLASH_ATTN_PART_KV_HEADS];
    work.kv = (U64)operand_at(launch, KV_AT);
    const unsigned slots = packet->size[FLASH_ATTN_PART_MOST_PARTS];
    const unsigned sharing = heads / work.kv_heads, groups = (sharing + HEADS - 1) / HEADS;
    const unsigned *queries = (const unsigned *)operand_at(launch, QUERY_AT);
    PRECEDING_DONE;
    unsigned unit = blockIdx.x;
    for (work.token = 0; work.token < tokens; work.token++) {
        const unsigned *query = queries + work.token * stride_at(launch, QUERY_AT);
        work.position = query[QUERY_POSITION];
        work.first = first_visible(work.position, window);
        work.pages = (const unsigned *)operand_at(launch, PAGES_AT) +
                     query[QUERY_SLOT] * stride_at(launch, PAGES_AT);
        work.q = (const float *)operand_at(launch, Q_AT) + work.token * stride_at(launch, Q_AT);
        const unsigned begin = work.first / (KV_TILE * SPAN_TILES);
        const unsigned end = work.position / (KV_TILE * SPAN_TILES) + 1;
        const unsigned units = (end - begin) * work.kv_heads * groups;
        for (; unit < units; unit += gridDim.x) {
            const unsigned group = unit % (work.kv_heads * groups);
            work.span = begin + unit / (work.kv_heads * groups);
            work.kv_head = group / groups;
            work.head = work.kv_head * sharing + group % groups * HEADS;
            work.heads = min((unsigned)HEADS, (work.kv_head + 1) * sharing - work.head);
            float *y = (float *)operand_at(launch, Y_AT) + work.token * stride_at(launch, Y_AT) +
                       work.head * HEAD_DIM;
            float *parts = (float *)operand_at(launch, PARTS_AT) +
                           (size_t)(work.token * heads + work.head) * slots * PART_FLOATS;
            attend_span(work, scale, shared, parts, y, begin, slots, end == begin + 1);
            if (end > begin + 1) {
                unsigned *counter =
                    (unsigned *)workspace + work.token * work.kv_heads * groups + group;
                __threadfence();
                __syncthreads();
                if (threadIdx.x == 0) last[0] = atomicAdd(counter, 1) + 1 == end - begin;
                __syncthreads();
                if (last[0]) {
                    __threadfence();
                    merge_spans(work, parts, y, slots, end - begin);
                    if (threadIdx.x == 0) *counter = 0;
                }
            }
            __syncthreads();
        }
        unit -= units;
    }
}
