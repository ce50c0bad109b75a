// The router's logits of many tokens (rules R3 and R4): products of normalized rows with its float
// rows. A block computes TILE_TOKENS tokens and TILE_ROWS rows of the router, segment after segment
// of 256 columns, which it keeps transposed in shared memory. A thread folds columns lane % 8 + 8 k
// of a segment for four tokens and four rows; eight lanes then fold theirs.
//
// Compiled with WARPS, TILE_TOKENS, TILE_ROWS (multiples of 32), these operand numbers (see
// packets.h): X, NORM_WEIGHT, ROUTER, LOGITS; and the packet number PRODUCT. unit_pack_fours.cu has
// written the factor of each token's norm to the workspace, at the byte FACTORS_AT.

#include "packets.h"
#include "units.h"
#include "warp.h"

#define THREADS (WARPS * WARP_LANES)
#define LANES 8  // that share a segment's columns
#define COLUMNS_OF_LANE (UNIT_COLUMNS / LANES)
// Distances between columns, which put those of eight lanes in different banks.
#define TOKENS_APART (TILE_TOKENS + 4)
#define ROWS_APART (TILE_ROWS + 4)
#define VALUES 16  // of a thread: four rows times four tokens

DEVICE float of_four(const float4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Rule R4 over the lane's columns `first`, first + apart, first + 2 apart and so on.
template <int first, int apart>
DEVICE void fold_columns(const float *x, const float *w, float (&sum)[VALUES]) {
    if constexpr (apart == COLUMNS_OF_LANE) {
        const float4 a = *(const float4 *)(x + first * LANES * TOKENS_APART);
        const float4 b = *(const float4 *)(w + first * LANES * ROWS_APART);
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum[i] = of_four(b, i % 4) * of_four(a, i / 4);
    } else {
        float other[VALUES];
        fold_columns<first, 2 * apart>(x, w, sum);
        fold_columns<first + apart, 2 * apart>(x, w, other);
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum[i] = sum[i] + other[i];
    }
}

// Folds the sums of eight lanes; each gets two, from number 2 (bits of lane % 8, reversed) on.
DEVICE unsigned fold_lanes(float (&sum)[VALUES], int lane) {
    unsigned first = 0, runs = VALUES;
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) {
        runs /= 2;
        const bool upper = lane & lanes;
        if (upper) first += runs;
#pragma unroll
        for (int n = 0; n < VALUES / 2; n++) {
            if (n >= runs) break;
            const float other = upper ? sum[n] : sum[n + runs];
            const float own = upper ? sum[n + runs] : sum[n];
            sum[n] = own + __shfl_xor_sync(ALL_LANES, other, lanes);
        }
    }
    return first;
}

struct ROWS_OF {
    const float *rows, *norm, *factors;
    size_t stride;
    unsigned count, columns;
};

// Copies a segment of `lines` rows, four rows and columns at a time: column after column.
template <int lines, int apart>
DEVICE void transpose_segment(float *to, const ROWS_OF &from, unsigned segment) {
    constexpr unsigned fours = UNIT_COLUMNS / 4;
#pragma unroll 2
    for (unsigned item = threadIdx.x; item < lines / 4 * fours; item += THREADS) {
        const unsigned line = (item % 8 + item / (8 * fours) * 8) * 4, four = item / 8 % fours;
        const unsigned column = segment * UNIT_COLUMNS + four * 4;
        float4 v[4], w = {1.0f, 1.0f, 1.0f, 1.0f};
        if (from.norm && column < from.columns) w = *(const float4 *)(from.norm + column);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (line + j >= from.count || column >= from.columns) continue;
            v[j] = *(const float4 *)(from.rows + (line + j) * from.stride + column);
            if (!from.factors) continue;
            const float factor = from.factors[line + j];
            v[j].x = v[j].x * factor * w.x, v[j].y = v[j].y * factor * w.y;
            v[j].z = v[j].z * factor * w.z, v[j].w = v[j].w * factor * w.w;
        }
        float *lane_to = to + four * 4 * apart + line;
        *(float4 *)(lane_to) = {v[0].x, v[1].x, v[2].x, v[3].x};
        *(float4 *)(lane_to + apart) = {v[0].y, v[1].y, v[2].y, v[3].y};
        *(float4 *)(lane_to + 2 * apart) = {v[0].z, v[1].z, v[2].z, v[3].z};
        *(float4 *)(lane_to + 3 * apart) = {v[0].w, v[1].w, v[2].w, v[3].w};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_logits(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                  U64 workspace) {
    BLOCK_MEMORY(shared);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned segments = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const unsigned tokens = count_of(launch, product), first_token = blockIdx.y * TILE_TOKENS;
    const unsigned first_row = blockIdx.x * TILE_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (first_token >= tokens) return;
    float *x = (float *)shared, *w = x + UNIT_COLUMNS * TOKENS_APART;
    float2 *spans = (float2 *)(w + UNIT_COLUMNS * ROWS_APART);  // [part][lane]
    const size_t stride = stride_at(launch, X);
    const ROWS_OF of_tokens = {(const float *)operand_at(launch, X) + first_token * stride,
                               (const float *)operand_at(launch, NORM_WEIGHT),
                               (const float *)(workspace + FACTORS_AT) + first_token, stride,
                               tokens - first_token, columns};
    const ROWS_OF of_router = {(const float *)operand_at(launch, ROUTER) +
                                   (size_t)first_row * columns,
                               0, 0, columns, rows - first_row, columns};
    for (unsigned segment = 0; segment < segments; segment++) {
        __syncthreads();
        transpose_segment<TILE_TOKENS, TOKENS_APART>(x, of_tokens, segment);
        transpose_segment<TILE_ROWS, ROWS_APART>(w, of_router, segment);
        __syncthreads();
        const unsigned of_span = segment % SPAN_UNITS;
#pragma unroll 1
        for (unsigned part = threadIdx.x / WARP_LANES; part < TILE_TOKENS * TILE_ROWS / 64;
             part += WARPS) {
            const unsigned token = part % (TILE_TOKENS / 8) * 8 + lane / 8 % 2 * 4;
            const unsigned row = part / (TILE_TOKENS / 8) * 8 + lane / 16 * 4;
            float sum[VALUES];
            fold_columns<0, 1>(x + lane % LANES * TOKENS_APART + token,
                               w + lane % LANES * ROWS_APART + row, sum);
            const unsigned own = fold_lanes(sum, lane);
            float2 span = {0.0f, 0.0f};
            if (of_span) span = spans[part * WARP_LANES + lane];
            span.x = span.x + sum[0], span.y = span.y + sum[1];
            spans[part * WARP_LANES + lane] = span;
            if (of_span + 1 != SPAN_UNITS && segment + 1 != segments) continue;
            const unsigned to_token = first_token + token + own / 4;
            const unsigned to_row = first_row + row + own % 4;
            if (to_token >= tokens) continue;
            float *to =
                (float *)operand_at(launch, LOGITS) + to_token * stride_at(launch, LOGITS) + to_row;
            const bool more = segment >= SPAN_UNITS;
            if (to_row < rows) to[0] = (more ? to[0] : 0.0f) + span.x;
            if (to_row + 1 < rows) to[1] = (more ? to[1] : 0.0f) + span.y;
        }
    }
}
