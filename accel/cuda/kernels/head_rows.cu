// What stands between the products of q, k and v and attention, in one launch: the norm of every
// head of q and k, their rotation, and the keys and values put into their pages (rules R4 and R6).
// A warp takes one head of one token: its row lies in shared memory.
//
// DTYPE is how pages are stored. Compiled with the places of the operands, 16 times a packet's
// number from the first one on plus the operand's place in it, or -1 where there is none: Q_AT,
// K_AT and V_AT, what the products wrote; Q_WEIGHT_AT and K_WEIGHT_AT; Q_RESULT_AT; TABLE_AT,
// QUERY_AT, PAGES_AT and KV_AT. Q_NORM, K_NORM, Q_ROPE and K_ROPE are numbers of packets, -1 for
// norms that are absent.

#include "heads.h"

#define ROW_FLOATS 512
#define Q_HEAD 0
#define K_HEAD 1
#define V_HEAD 2

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    head_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *q_rope = packet_of(launch, Q_ROPE), *k_rope = packet_of(launch, K_ROPE);
    const unsigned heads = q_rope->size[ROPE_HEADS], kv_heads = k_rope->size[ROPE_HEADS];
    const unsigned width = q_rope->size[ROPE_HEAD_DIM], all = heads + 2 * kv_heads;
    const unsigned tokens = count_of(launch, q_rope);
    const int lane = threadIdx.x % WARP_LANES;
    float *row = (float *)shared + threadIdx.x / WARP_LANES * ROW_FLOATS;
    PRECEDING_DONE;
    for (unsigned unit = blockIdx.x * WARPS + threadIdx.x / WARP_LANES; unit < tokens * all;
         unit += gridDim.x * WARPS) {
        const unsigned token = unit / all, kind = unit % all < heads              ? Q_HEAD
                                                  : unit % all < heads + kv_heads ? K_HEAD
                                                                                  : V_HEAD;
        const unsigned head = unit % all - (kind == Q_HEAD   ? 0
                                            : kind == K_HEAD ? heads
                                                             : heads + kv_heads);
        const int source = kind == Q_HEAD ? Q_AT : kind == K_HEAD ? K_AT : V_AT;
        const float *x = (const float *)operand_at(launch, source) +
                         token * stride_at(launch, source) + head * width;
        const unsigned *query =
            (const unsigned *)operand_at(launch, QUERY_AT) + token * stride_at(launch, QUERY_AT);
        const unsigned position = query[QUERY_POSITION];
        for (unsigned k = lane; k < width; k += WARP_LANES) row[k] = x[k];
        __syncwarp();
        if (kind != V_HEAD) {
            const PACKET *rope = kind == Q_HEAD ? q_rope : k_rope;
            const int norm = kind == Q_HEAD ? Q_NORM : K_NORM;
            const int weight = kind == Q_HEAD ? Q_WEIGHT_AT : K_WEIGHT_AT;
            if (norm >= 0)
                norm_row(row, width, (const float *)operand_at(launch, weight),
                         packet_of(launch, norm)->real[RMS_NORM_EPS], lane);
            const unsigned pairs = rope->size[ROPE_ROTARY_PAIRS];
            const float *cosine =
                (const float *)operand_at(launch, TABLE_AT) + (size_t)position * 2 * pairs;
            rotate_row(row, pairs, rope->size[ROPE_NEOX] != 0, cosine, lane);
        }
        if (kind == Q_HEAD) {
            float *y = (float *)operand_at(launch, Q_RESULT_AT) +
                       token * stride_at(launch, Q_RESULT_AT) + head * width;
            for (unsigned k = lane; k < width; k += WARP_LANES) y[k] = row[k];
        } else {
            const unsigned *pages = (const unsigned *)operand_at(launch, PAGES_AT) +
                                    query[QUERY_SLOT] * stride_at(launch, PAGES_AT);
            store_row(row, width, kind == V_HEAD, (U64)operand_at(launch, KV_AT),
                      pages[position / PAGE_TOKENS], position, kv_heads, head, lane);
        }
        __syncwarp();
    }
}
