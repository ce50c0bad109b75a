// The router's logits of many tokens (rules R3 and R4): products of normalized rows with its float
// rows. A block computes TILE_TOKENS tokens and TILE_ROWS rows of the router, segment after segment
// of 256 columns, which it keeps transposed in shared memory. A thread folds columns lane % 4 + 4 k
// of a segment for four tokens and four rows; four lanes then fold theirs. So of the lanes whose loads
// a multiprocessor joins, 16, half read the same.
//
// Compiled with WARPS, TILE_TOKENS, TILE_ROWS (multiples of 32), these operand numbers (see
// packets.h): X, NORM_WEIGHT, ROUTER, LOGITS; and the packet number PRODUCT. unit_pack_fours.cu has
// written the factor of each token's norm to the workspace, at the byte FACTORS_AT.

#include "packets.h"
#include "units.h"
#include "warp.h"

#define THREADS (WARPS * WARP_LANES)
#define LANES 4  // that share a segment's columns
#define COLUMNS_OF_LANE (UNIT_COLUMNS / LANES)
#define PART_TOKENS 16  // of a warp at a time, and rows
#define PART_ROWS 8
#define VALUES 16  // of a thread: four rows times four tokens

// Where four lines of a column begin: in an order that puts two fours of four columns in different
// banks.
DEVICE unsigned four_at(unsigned line, unsigned column) { return line ^ column % LANES * 8; }

DEVICE float of_four(const float4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Rule R4 over the lane's columns `first`, first + apart, first + 2 apart and so on.
template <int first, int apart>
DEVICE void fold_columns(const float *x, const float *w, float (&sum)[VALUES]) {
    if constexpr (apart == COLUMNS_OF_LANE) {
        const float4 a = *(const float4 *)(x + first * LANES * TILE_TOKENS);
        const float4 b = *(const float4 *)(w + first * LANES * TILE_ROWS);
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

// Folds the sums of four lanes; each gets four, from number 4 (bits of lane % 4, reversed) on.
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
template <int lines>
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
        float *column_to = to + four * 4 * lines;
        *(float4 *)(column_to + four_at(line, 0)) = {v[0].x, v[1].x, v[2].x, v[3].x};
        *(float4 *)(column_to + lines + four_at(line, 1)) = {v[0].y, v[1].y, v[2].y, v[3].y};
        *(float4 *)(column_to + 2 * lines + four_at(line, 2)) = {v[0].z, v[1].z, v[2].z, v[3].z};
        *(float4 *)(column_to + 3 * lines + four_at(line, 3)) = {v[0].w, v[1].w, v[2].w, v[3].w};
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
    float *x = (float *)shared, *w = x + UNIT_COLUMNS * TILE_TOKENS;
    float4 *spans = (float4 *)(w + UNIT_COLUMNS * TILE_ROWS);  // [part][lane]
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
        transpose_segment<TILE_TOKENS>(x, of_tokens, segment);
        transpose_segment<TILE_ROWS>(w, of_router, segment);
        __syncthreads();
        const unsigned of_span = segment % SPAN_UNITS;
#pragma unroll 1
        for (unsigned part = threadIdx.x / WARP_LANES;
             part < TILE_TOKENS * TILE_ROWS / (PART_TOKENS * PART_ROWS); part += WARPS) {
            constexpr unsigned across = TILE_TOKENS / PART_TOKENS;
            const unsigned column = lane % LANES;
            const unsigned token = part % across * PART_TOKENS + lane / 16 * 8 + lane / 4 % 2 * 4;
            const unsigned row = part / across * PART_ROWS + lane / 8 % 2 * 4;
            float sum[VALUES];
            fold_columns<0, 1>(x + column * TILE_TOKENS + four_at(token, column),
                               w + column * TILE_ROWS + four_at(row, column), sum);
            const unsigned own = fold_lanes(sum, lane);
            float4 span = {0.0f, 0.0f, 0.0f, 0.0f};
            if (of_span) span = spans[part * WARP_LANES + lane];
            span.x = span.x + sum[0], span.y = span.y + sum[1];
            span.z = span.z + sum[2], span.w = span.w + sum[3];
            spans[part * WARP_LANES + lane] = span;
            if (of_span + 1 != SPAN_UNITS && segment + 1 != segments) continue;
            const unsigned to_token = first_token + token + own / 4, to_row = first_row + row;
            if (to_token >= tokens) continue;
            float *to =
                (float *)operand_at(launch, LOGITS) + to_token * stride_at(launch, LOGITS) + to_row;
            const bool more = segment >= SPAN_UNITS;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (to_row + i < rows) to[i] = (more ? to[i] : 0.0f) + of_four(span, i);
        }
    }
}
