// RMS_NORM (rule R4); a block computes the row of a token, of which a warp has HELD_UNITS units at
// most, WARPS apart. Compiled with these and these operand numbers (see packets.h): X_AT,
// WEIGHT_AT, Y_AT. The packet is the first one.

#include "activations.h"
#include "packets.h"

#define THREADS (WARPS * WARP_LANES)

DEVICE void store_four(float *row, unsigned column, unsigned columns, const float *four) {
    if (column < columns) *(float4 *)(row + column) = {four[0], four[1], four[2], four[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *squares = (float *)shared;  // of each unit
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, 0);
    const unsigned token = blockIdx.x, columns = op->size[RMS_NORM_WIDTH];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const float *weights = (const float *)operand_at(launch, WEIGHT_AT);
    EIGHT held[HELD_UNITS], weight[HELD_UNITS];
    FOLLOWING_MAY_START;
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++)
        weight[i] = weights ? load_eight(weights, warp + i * WARPS, columns, lane) : EIGHT{};
    PRECEDING_DONE;
    if (token >= count_of(launch, op)) return;
    const float *x = (const float *)operand_at(launch, X_AT) + token * stride_at(launch, X_AT);
    float *y = (float *)operand_at(launch, Y_AT) + token * stride_at(launch, Y_AT);
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++) held[i] = load_eight(x, warp + i * WARPS, columns, lane);
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++) {
        const float square = sum_of_squares(held[i], lane);
        if (lane == 0 && warp + i * WARPS < units) squares[warp + i * WARPS] = square;
    }
    __syncthreads();
    const float mean = __fdiv_rn(fold_units(squares, units, 1), (float)columns);
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + op->real[RMS_NORM_EPS]));
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++) {
        const unsigned column = (warp + i * WARPS) * UNIT_COLUMNS + 4 * lane;
        normalize_eight(held[i], r, weights != 0, weight[i]);
        store_four(y, column, columns, held[i].of);
        store_four(y, column + 128, columns, held[i].of + 4);
    }
}
