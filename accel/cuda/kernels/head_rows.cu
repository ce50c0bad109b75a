// Everything between the products of q, k and v and attention in one launch: the norm of every head
// of q and k, their rotation, and the write of keys and values to their pages (rules R4 and R6). A
// warp computes one head of one token, whose row is in shared memory. DTYPE is the storage type of
// pages, WIDTH the number of channels of a head. Of coded pages rows are also rotated by rule R13.
//
// Compiled with these operand numbers (see packets.h): Q_AT, K_AT and V_AT, the results of the
// products; Q_WEIGHT_AT and K_WEIGHT_AT; Q_RESULT_AT; TABLE_AT, QUERY_AT, PAGES_AT and KV_AT.
// Q_NORM, K_NORM, Q_ROPE and K_ROPE are packet numbers, -1 for absent norms. If unit_groups.cu
// wrote SPANS spans of the products to the workspace, those of q before those of k and v, the
// kernel adds them up with the biases of Q_BIAS_AT, K_BIAS_AT and V_BIAS_AT; otherwise SPANS is 0.

#include "heads.h"
#define HEAD_DIM WIDTH
#include "pages_coded.k"
#if IS_CODED
#include "rotated_rows.h"
#endif

#define MAX_UNROLLED 16
#define Q_HEAD 0
#define K_HEAD 1
#define V_HEAD 2
#define LANE_CHANNELS ((WIDTH + WARP_LANES - 1) / WARP_LANES)
#define LANE_PAIRS ((WIDTH / 2 + WARP_LANES - 1) / WARP_LANES)

// A head of a token, and its data that no kernel of a step writes: all of it is requested at once,
// before the previous products have ended.
struct HEAD_ROW {
    unsigned token, kind, head, position, page;
    float weight[LANE_CHANNELS], cosine[LANE_PAIRS], sine[LANE_PAIRS];

    __device__ __forceinline__ void read(const LAUNCH &launch, unsigned unit, unsigned heads,
                                         unsigned kv_heads, int lane) {
        const unsigned all = heads + 2 * kv_heads;
        token = unit / all, head = unit % all;
        kind = head < heads ? Q_HEAD : head < heads + kv_heads ? K_HEAD : V_HEAD;
        head -= kind == Q_HEAD ? 0 : kind == K_HEAD ? heads : heads + kv_heads;
        const int of_weight = kind == Q_HEAD ? Q_WEIGHT_AT : K_WEIGHT_AT;
        const float *weights = (const float *)operand_at(launch, kind == V_HEAD ? -1 : of_weight);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const unsigned k = lane + i * WARP_LANES;
            weight[i] = weights && k < WIDTH ? weights[k] : 1.0f;
        }
        const unsigned *query =
            (const unsigned *)operand_at(launch, QUERY_AT) + token * stride_at(launch, QUERY_AT);
        const unsigned slot = query[QUERY_SLOT];
        position = query[QUERY_POSITION];
        if (kind != Q_HEAD)
            page = ((const unsigned *)operand_at(launch, PAGES_AT) +
                    slot * stride_at(launch, PAGES_AT))[position / PAGE_TOKENS];
        const unsigned pairs = packet_of(launch, Q_ROPE)->size[ROPE_ROTARY_PAIRS];
        const float *angles =
            (const float *)operand_at(launch, TABLE_AT) + (size_t)position * 2 * pairs;
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++) {
            const unsigned m = lane + i * WARP_LANES;
            const bool turned = kind != V_HEAD && m < pairs;
            cosine[i] = turned ? angles[m] : 0.0f, sine[i] = turned ? angles[pairs + m] : 0.0f;
        }
    }
};

// A row of the products' results: its values or, if there are SPANS, those of every span, which are
// folded in order with the bias after them (rule R3).
DEVICE void read_row(const LAUNCH &launch, const HEAD_ROW &own, const float *spans, unsigned heads,
                     unsigned kv_heads, unsigned tokens, float *row, int lane) {
    const int source = own.kind == Q_HEAD ? Q_AT : own.kind == K_HEAD ? K_AT : V_AT;
    const float *x = (const float *)operand_at(launch, source) +
                     own.token * stride_at(launch, source) + own.head * WIDTH;
#if SPANS > 0
    const int of_bias = own.kind == Q_HEAD ? Q_BIAS_AT : own.kind == K_HEAD ? K_BIAS_AT : V_BIAS_AT;
    const float *bias = (const float *)operand_at(launch, of_bias);
    const unsigned rows = (own.kind == Q_HEAD ? heads : kv_heads) * WIDTH;
    const unsigned in_front = own.kind == Q_HEAD   ? 0
                              : own.kind == K_HEAD ? heads * WIDTH
                                                   : (heads + kv_heads) * WIDTH;
    x = spans + (size_t)in_front * SPANS * tokens + (size_t)own.token * rows + own.head * WIDTH;
    if (bias) bias += own.head * WIDTH;
#endif
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const unsigned k = lane + i * WARP_LANES;
        if (k >= WIDTH) continue;
#if SPANS > 0
        float total = 0.0f;
#pragma unroll(SPANS < MAX_UNROLLED ? SPANS : MAX_UNROLLED)
        for (int span = 0; span < SPANS; span++)
            total = total + x[(size_t)span * tokens * rows + k];
        row[k] = bias ? total + bias[k] : total;
#else
        row[k] = x[k];
#endif
    }
    __syncwarp();
}

// Rules R3 and R4, see rotate_row, with what was read ahead.
DEVICE void norm_own_row(float *row, const float (&weight)[LANE_CHANNELS], float eps, int lane) {
    const float mean = __fdiv_rn(squares_of_row(row, WIDTH, lane), (float)WIDTH);
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const unsigned k = lane + i * WARP_LANES;
        if (k < WIDTH) row[k] = row[k] * r * weight[i];
    }
    __syncwarp();
}
DEVICE void rotate_own_row(float *row, const HEAD_ROW &own, unsigned pairs, bool neox, int lane) {
#pragma unroll
    for (int n = 0; n < LANE_PAIRS; n++) {
        const unsigned m = lane + n * WARP_LANES;
        if (m >= pairs) continue;
        const unsigned i = neox ? m : 2 * m, j = neox ? pairs + m : 2 * m + 1;
        const float a = row[i], b = row[j];
        row[i] = a * own.cosine[n] - b * own.sine[n];
        row[j] = a * own.sine[n] + b * own.cosine[n];
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    head_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *q_rope = packet_of(launch, Q_ROPE), *k_rope = packet_of(launch, K_ROPE);
    const unsigned heads = q_rope->size[ROPE_HEADS], kv_heads = k_rope->size[ROPE_HEADS];
    const unsigned tokens = count_of(launch, q_rope), units = tokens * (heads + 2 * kv_heads);
    const U64 kv = (U64)operand_at(launch, KV_AT);
    const int lane = threadIdx.x % WARP_LANES;
    float *row = (float *)shared + threadIdx.x / WARP_LANES * WIDTH;
    for (unsigned unit = blockIdx.x * WARPS + threadIdx.x / WARP_LANES; unit < units;
         unit += gridDim.x * WARPS) {
        HEAD_ROW own;
        own.read(launch, unit, heads, kv_heads, lane);
        PRECEDING_DONE;
        read_row(launch, own, (const float *)workspace, heads, kv_heads, tokens, row, lane);
        if (own.kind != V_HEAD) {
            const PACKET *rope = own.kind == Q_HEAD ? q_rope : k_rope;
            const int norm = own.kind == Q_HEAD ? Q_NORM : K_NORM;
            if (norm >= 0)
                norm_own_row(row, own.weight, packet_of(launch, norm)->real[RMS_NORM_EPS], lane);
            rotate_own_row(row, own, rope->size[ROPE_ROTARY_PAIRS], rope->size[ROPE_NEOX] != 0,
                           lane);
        }
        unsigned char *record = 0;
        if (own.kind != Q_HEAD)
            record = (unsigned char *)(IS_CODED ? coded_record(kv, own.page, kv_heads, own.head, WIDTH)
                                                : i12_record(kv, own.page, kv_heads, own.head, WIDTH));
        const unsigned of_page = own.position % PAGE_TOKENS;
#if IS_CODED
        float mixed[LANE_CHANNELS];
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) mixed[i] = row[lane + i * WARP_LANES];
        rotate_channels(mixed, lane);
        if (record) store_codes(mixed, own.kind == V_HEAD, {record, 0}, of_page, lane);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) row[lane + i * WARP_LANES] = mixed[i];
#else
        if (record) store_integers_of(row, WIDTH, own.kind == V_HEAD, record, of_page, lane);
#endif
        if (own.kind == Q_HEAD) {
            float *y = (float *)operand_at(launch, Q_RESULT_AT) +
                       own.token * stride_at(launch, Q_RESULT_AT) + own.head * WIDTH;
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) {
                const unsigned k = lane + i * WARP_LANES;
                if (k < WIDTH) y[k] = row[k];
            }
        }
        __syncwarp();
    }
    PRECEDING_DONE;
}
