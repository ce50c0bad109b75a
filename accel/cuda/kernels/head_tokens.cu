// What head_rows.cu does, of many tokens and to pages of I12, where channels m and HEAD_DIM / 2 + m are
// turned together, all of them: a block takes a token, a warp HELD of its heads at once. A lane has
// channels lane + 32 i of a row in registers.
//
// Compiled with HEAD_DIM, WARPS and HELD, and with what head_rows.cu is compiled with.

#include "heads.h"

#define CHANNELS (HEAD_DIM / WARP_LANES)
#define HALF (CHANNELS / 2)

// Channels of a row, of weights or of what a row is turned by.
template <int count> DEVICE void load_channels(float (&v)[count], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < count; i++) v[i] = row[lane + WARP_LANES * i];
}

// Rules R3 and R4: a row is one segment.
DEVICE void norm_channels(float (&v)[CHANNELS], bool queries, const float (&q_weight)[CHANNELS],
                          const float (&k_weight)[CHANNELS], bool weighted, float eps) {
    float square[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) square[i] = v[i] * v[i];
#pragma unroll
    for (int half = HALF; half; half /= 2)
#pragma unroll
        for (int i = 0; i < HALF; i++)
            if (i < half) square[i] = square[i] + square[i + half];
#pragma unroll
    for (int lanes = WARP_LANES / 2; lanes; lanes /= 2)
        square[0] = square[0] + __shfl_xor_sync(ALL_LANES, square[0], lanes);
    const float mean = __fdiv_rn(square[0], (float)HEAD_DIM);
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        v[i] = v[i] * r;
        if (weighted) v[i] = v[i] * (queries ? q_weight[i] : k_weight[i]);
    }
}

DEVICE void turn_channels(float (&v)[CHANNELS], const float (&cosine)[HALF],
                          const float (&sine)[HALF]) {
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float a = v[i], b = v[i + HALF];
        v[i] = a * cosine[i] - b * sine[i];
        v[i + HALF] = a * sine[i] + b * cosine[i];
    }
}

// See store_integers_of in heads.h.
DEVICE void store_channels(const float (&v)[CHANNELS], bool values, unsigned char *record,
                           unsigned i, int lane) {
    const unsigned step = values ? PAGE_TOKENS : 1, first = values ? I12_VALUES(HEAD_DIM) : 0;
    unsigned char *high = record + first + (values ? i : i * HEAD_DIM) + lane * step;
    unsigned char *low =
        record + first + I12_LOW(HEAD_DIM) + (values ? i : i * (HEAD_DIM / 2)) + lane * step;
    unsigned most = 0;
#pragma unroll
    for (int n = 0; n < CHANNELS; n++) most = max(most, __float_as_uint(v[n]) & MAGNITUDE);
    most = largest_of_warp(most);
    const int exponent = row_exponent(most);
    const float factor = row_factor(most, KV_BITS);
    const bool broken = exponent == BROKEN_ROW;
#pragma unroll
    for (int n = 0; n < HALF; n++) {
        const int a = broken ? 0 : row_integer(v[n], factor, KV_MOST);
        const int b = broken ? 0 : row_integer(v[n + HALF], factor, KV_MOST);
        const unsigned at = WARP_LANES * n * step;
        high[at] = (unsigned char)(a >> 4);
        high[at + HEAD_DIM / 2 * step] = (unsigned char)(b >> 4);
        low[at] = (unsigned char)((a & 15) | (b & 15) << 4);
    }
    if (lane == 0)
        record[I12_EXPONENTS(HEAD_DIM) + (values ? PAGE_TOKENS : 0) + i] = (unsigned char)exponent;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    head_tokens(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const PACKET *q_rope = packet_of(launch, Q_ROPE), *k_rope = packet_of(launch, K_ROPE);
    const unsigned heads = q_rope->size[ROPE_HEADS], kv_heads = k_rope->size[ROPE_HEADS];
    const unsigned token = blockIdx.x, lane = threadIdx.x % WARP_LANES;
    if (token >= count_of(launch, q_rope)) {
        PRECEDING_DONE;
        return;
    }
    // Nothing of a step writes what is read here.
    const float *q_norm = (const float *)operand_at(launch, Q_WEIGHT_AT);
    const float *k_norm = (const float *)operand_at(launch, K_WEIGHT_AT);
    const unsigned *query =
        (const unsigned *)operand_at(launch, QUERY_AT) + token * stride_at(launch, QUERY_AT);
    const unsigned *pages = (const unsigned *)operand_at(launch, PAGES_AT) +
                            query[QUERY_SLOT] * stride_at(launch, PAGES_AT);
    const unsigned position = query[QUERY_POSITION], page = pages[position / PAGE_TOKENS];
    const float *angles =
        (const float *)operand_at(launch, TABLE_AT) + (size_t)position * HEAD_DIM;
    const float q_eps = Q_NORM < 0 ? 0.0f : packet_of(launch, Q_NORM)->real[RMS_NORM_EPS];
    const float k_eps = K_NORM < 0 ? 0.0f : packet_of(launch, K_NORM)->real[RMS_NORM_EPS];
    float q_weight[CHANNELS] = {}, k_weight[CHANNELS] = {}, cosine[HALF], sine[HALF];
    if (q_norm) load_channels(q_weight, q_norm, lane);
    if (k_norm) load_channels(k_weight, k_norm, lane);
    load_channels(cosine, angles, lane);
    load_channels(sine, angles + HEAD_DIM / 2, lane);
    PRECEDING_DONE;
    for (unsigned first = threadIdx.x / WARP_LANES; first < heads + 2 * kv_heads;
         first += WARPS * HELD) {
        float rows[HELD][CHANNELS];
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const unsigned row = first + h * WARPS, key = row - heads, value = key - kv_heads;
            const bool queries = row < heads, keys = row < heads + kv_heads;
            if (row >= heads + 2 * kv_heads) continue;
            const int place = queries ? Q_AT : keys ? K_AT : V_AT;
            load_channels(rows[h],
                          (const float *)operand_at(launch, place) +
                              token * stride_at(launch, place) +
                              (queries ? row : keys ? key : value) * HEAD_DIM,
                          lane);
        }
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const unsigned row = first + h * WARPS, key = row - heads, value = key - kv_heads;
            const bool queries = row < heads, values = row >= heads + kv_heads;
            float(&v)[CHANNELS] = rows[h];
            if (row >= heads + 2 * kv_heads) break;
            if (!values) {
                if (queries ? Q_NORM >= 0 : K_NORM >= 0)
                    norm_channels(v, queries, q_weight, k_weight, queries ? q_norm : k_norm,
                                  queries ? q_eps : k_eps);
                turn_channels(v, cosine, sine);
            }
            if (queries) {
                float *y = (float *)operand_at(launch, Q_RESULT_AT) +
                           token * stride_at(launch, Q_RESULT_AT) + row * HEAD_DIM + lane;
#pragma unroll
                for (int i = 0; i < CHANNELS; i++) y[WARP_LANES * i] = v[i];
            } else {
                const U64 kv = (U64)operand_at(launch, KV_AT);
                const unsigned head = values ? value : key;
                store_channels(v, values,
                               (unsigned char *)i12_record(kv, page, kv_heads, head, HEAD_DIM),
                               position % PAGE_TOKENS, lane);
            }
        }
    }
}
