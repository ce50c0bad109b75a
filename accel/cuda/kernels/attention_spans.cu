// FLASH_ATTN of few tokens over I12 pages (rule R6). A block computes a span of 1,024 positions for
// up to four heads that read one KV head; each warp computes a tile of 64 positions.
//
// Compiled with these operand numbers (see packets.h): Q_AT, KV_AT, PAGES_AT, QUERY_AT, Y_AT and
// PARTS_AT, which stores U, l and o of spans. Sizes and reals are those of the first packet, a
// flash_attn_part. workspace has a counter for every token and group of heads; all are 0 between
// steps.

#define WARPS 16

#include "attention_span.h"

struct SPAN_RESULT {
    float *y;
    __device__ __forceinline__ void operator()(unsigned i, float value) const { y[i] = value; }
};

extern "C" __global__ void __launch_bounds__(512, 1)
    attention_spans(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *packet = packet_of(launch, 0);
    const unsigned tokens = count_of(launch, packet), heads = packet->size[FLASH_ATTN_PART_HEADS];
    const unsigned window = packet->size[FLASH_ATTN_PART_WINDOW];
    const float scale = packet->real[FLASH_ATTN_PART_SCALE];
    SPAN_WORK work;
    work.kv_heads = packet->size[FLASH_ATTN_PART_KV_HEADS];
    work.kv = (U64)operand_at(launch, KV_AT);
    const unsigned slots = packet->size[FLASH_ATTN_PART_MAX_PARTS];
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
        const unsigned begin = work.first / (KV_TILE * SPAN_TILES);
        const unsigned end = work.position / (KV_TILE * SPAN_TILES) + 1;
        const unsigned units = (end - begin) * work.kv_heads * groups;
        for (; unit < units; unit += gridDim.x) {
            const unsigned group = unit % (work.kv_heads * groups);
            work.span = begin + unit / (work.kv_heads * groups);
            work.take_group(group, sharing);
            work.q = (const float *)operand_at(launch, Q_AT) +
                     work.token * stride_at(launch, Q_AT) + work.head * HEAD_DIM;
            float *y = (float *)operand_at(launch, Y_AT) + work.token * stride_at(launch, Y_AT) +
                       work.head * HEAD_DIM;
            float *parts = (float *)operand_at(launch, PARTS_AT) +
                           (size_t)(work.token * heads + work.head) * slots * PART_FLOATS;
            const SPAN_RESULT result = {y};
            call_span(work);
            attend_all_spans(work, scale, shared, parts, slots, begin, end,
                             (unsigned *)workspace + work.token * work.kv_heads * groups + group,
                             result);
            __syncthreads();
        }
        unit -= units;
    }
}
