// FLASH_ATTN_BATCHED of tokens that are mostly of different slots, over I12 pages (rule R6). A
// block computes one token and up to four heads that read one KV head.
//
// Compiled with WARPS, four for every tile that is computed at the same time, and BLOCKS (blocks of
// a multiprocessor); with these operand numbers (see packets.h): Q_AT, KV_AT, PAGES_AT, QUERY_AT
// and Y_AT. If there is M_AT, the kernel writes rows as unit_pack.cu does instead, where all heads
// of a group are whole units: M_AT, SCALE_AT and SUMS_AT. With PEERS other devices (sending.h) it
// writes them on all, among ROW_UNITS units of a row; GATHER is the packet number of what would
// gather the results. Otherwise results may be sent.

#include "attention_rounds.h"
#if M_AT >= 0
#include "activations.h"

// A row of ROW_UNITS or `units` units, on this device or so many bytes apart.
DEVICE ACTIVATIONS packed_row(const LAUNCH &launch, unsigned token, unsigned units, long long m = 0,
                              long long sums = 0, long long scale = 0) {
    return among_eights(operand_at(launch, M_AT) + m, (short *)(operand_at(launch, SUMS_AT) + sums),
                        (float *)(operand_at(launch, SCALE_AT) + scale), token, units);
}

// The rows of a group's heads, which lie in shared memory.
DEVICE void pack_heads(const LAUNCH &launch, const SPAN_WORK &work, const float *row, unsigned units) {
    const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned own = work.heads * HEAD_DIM / UNIT_COLUMNS;
    unsigned first = work.head * HEAD_DIM / UNIT_COLUMNS;
#if PEERS
    units = ROW_UNITS, first += packet_of(launch, GATHER)->size[GATHER_FIRST] / UNIT_COLUMNS;
#endif
    const ACTIVATIONS x = packed_row(launch, work.token, units);
    for (unsigned unit = warp; unit < own; unit += WARPS) {
        const EIGHT v = load_eight(row, unit, own * UNIT_COLUMNS, lane);
        quantize_unit(x, first + unit, lane, v);
#if PEERS
        for (unsigned peer = 0; peer < PEERS; peer++) {
            const auto &apart = others_of(launch).of[peer].apart;
            quantize_unit(packed_row(launch, work.token, units, apart[TO_M], apart[TO_SUMS],
                                     apart[TO_SCALE]),
                          first + unit, lane, v);
        }
#endif
    }
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, BLOCKS)
    attention_tokens(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *packet = packet_of(launch, 0);
    const unsigned tokens = count_of(launch, packet);
    const unsigned window = packet->size[FLASH_ATTN_BATCHED_WINDOW];
    const float scale = packet->real[FLASH_ATTN_BATCHED_SCALE];
    SENT sent;
    sent.open(launch, TO_Y_AT);
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
        const int lane = threadIdx.x % WARP_LANES;
        PAGE_LIST pages;
        pages.read(work, own_positions(), 0, lane);
        PRECEDING_DONE;
        begin_page(work, pages, 0, 0, shared, lane);
#if M_AT >= 0
        float *row = (float *)(shared + AT_RECORDS);
        attend_token(work, pages, scale, shared, row, sent);
        pack_heads(launch, work, row, each * work.heads * HEAD_DIM / UNIT_COLUMNS);
        __syncthreads();
#else
        float *y = (float *)operand_at(launch, Y_AT) + work.token * stride_at(launch, Y_AT);
        attend_token(work, pages, scale, shared, y + work.head * HEAD_DIM, sent);
#endif
    }
    PRECEDING_DONE;
    meet_others(launch);
}
