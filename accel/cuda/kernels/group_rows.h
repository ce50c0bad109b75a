// Chooses the tiles of weights and the tokens that a block of unit_groups.cu multiplies, and the
// addresses at which it stores their products. Compiled with the macros of unit_groups.cu.

#ifndef GROUP_ROWS_H
#define GROUP_ROWS_H

#include "packets.h"
#include "expert_table.h"
#include "gate.h"
#include "group_stages.h"
#include "sending.h"
#include "stack_matrices.h"

struct RESULT {
    float *y;
    const float *bias, *residual;
    size_t stride, residual_stride;
    // `row` is the first row of the warp's tile, in a matrix of `rows` rows.
    unsigned rows, row, rows_in_front, first_token, tokens;
    const unsigned *pairs;  // of the block's tokens, if EXPERT_PAIRS
    uint activation;
    SENT sent;

    // Element i of a thread whose warp's tile begins at `first_row`.
    __device__ __forceinline__ void store(unsigned first_row, int i, float value) const {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const unsigned row = first_row + lane / 4 + 8 * (i / 2 % 2);
        const unsigned of_block = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row >= rows || first_token + of_block >= tokens) return;
        const size_t token = EXPERT_PAIRS ? pairs[of_block] : first_token + of_block;
        if (bias) value = value + bias[row];
        if (residual) value = residual[token * residual_stride + row] + value;
        sent.store(y + token * stride + row, value);
    }
    // Stores the elements of eight tokens, number `n` of the block's.
    __device__ __forceinline__ void store_four(unsigned n, const float4 &values) const {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const unsigned token = first_token + n * 8 + lane % 4 * 2, own = row + lane / 4;
        const float value[4] = {values.x, values.y, values.z, values.w};
        float rest[4] = {};
        bool exists[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            exists[e] = token + e % 2 < tokens && own + 8 * (e / 2) < rows;
            if (residual && exists[e])
                rest[e] = residual[(size_t)(token + e % 2) * residual_stride + own + 8 * (e / 2)];
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (!exists[e]) continue;
            float result = value[e];
            if (bias) result = result + bias[own + 8 * (e / 2)];
            if (residual) result = rest[e] + result;
            sent.store(y + (size_t)(token + e % 2) * stride + own + 8 * (e / 2), result);
        }
    }
    // Stores all elements of one span, which another kernel adds up: `y` has all rows of a token
    // together, and all tokens of a span.
    __device__ __forceinline__ void store_span(unsigned span,
                                               const float (&values)[VALUES]) const {
        const unsigned lane = threadIdx.x % WARP_LANES, own_row = row + lane / 4;
        const unsigned token = first_token + lane % 4 * 2;
        float *own = y + ((size_t)span * tokens + token) * rows + own_row;
        const bool first = own_row < rows, second = own_row + 8 < rows;
#pragma unroll
        for (int n = 0; n < 2 * EIGHTS; n++) {
            const unsigned behind = n / 2 * 8 + n % 2;
            const int i = n / 2 * 4 + n % 2;
            float *to = own + (size_t)behind * rows;
            if (first && token + behind < tokens) to[0] = values[i];
            if (second && token + behind < tokens) to[8] = values[i + 2];
        }
    }
    // Elements `first` to `first + count` - 1; values[i * apart + thread] is element i of the
    // group's threads. The values of its first two warps are gates of those of the other two.
    __device__ __forceinline__ void store_gated(unsigned group_row, const float *values,
                                                unsigned apart, int first, int count) const {
        const unsigned warp = threadIdx.x / WARP_LANES % GROUP_WARPS, half = warp / 2;
        const unsigned thread = threadIdx.x % (GROUP_THREADS / 2);
        for (int n = 0; n < count / 2; n++) {
            const int i = first + half * (count / 2) + n;
            const float *gate = values + i * apart + thread;
            store(group_row + warp % 2 * UNIT_ROWS, i,
                  gated(activation, gate[0], gate[GROUP_THREADS / 2]));
        }
    }
};

DEVICE unsigned tiles_of(const LAUNCH &launch, int w) {
    return (packet_of(launch, w / 16)->size[MATMUL_ROWS] + UNIT_ROWS - 1) / UNIT_ROWS;
}

// A matrix or, with EXPERT_PAIRS, that of the tokens' expert.
DEVICE const unsigned char *matrix_at(const LAUNCH &launch, int w, const GROUP_WORK &work) {
    if (!EXPERT_PAIRS) return operand_at(launch, w);
    const size_t tile_bytes = (size_t)work.units * FORMAT::unit_bytes;
    return matrix_of(launch, w, work.expert, tiles_of(launch, w) * tile_bytes);
}

// Takes the warp's tile, number `tile` of a matrix; false if it is in a later matrix.
DEVICE bool open_matrix(const LAUNCH &launch, int w, int b, int y, int to, unsigned &tile,
                        GROUP_WORK &work, RESULT &result) {
    const unsigned rows = packet_of(launch, w / 16)->size[MATMUL_ROWS], tiles = tiles_of(launch, w);
    if (tile >= tiles) {
        tile -= tiles, result.rows_in_front += rows;
        return false;
    }
    work.own = matrix_at(launch, w, work) + (size_t)tile * work.units * FORMAT::unit_bytes;
    result.rows = rows, result.row = tile * UNIT_ROWS;
    result.y = (float *)operand_at(launch, y);
    result.stride = stride_at(launch, y);
    result.bias = (const float *)operand_at(launch, b);
    result.sent.open(launch, to);
    return true;
}

// Takes the tiles of block `block`, of which warp `warp` has one; false if there are none left.
DEVICE bool open_rows(const LAUNCH &launch, unsigned block, unsigned warp, GROUP_WORK &work,
                      RESULT &result) {
    result.rows_in_front = ROWS_IN_FRONT;
    result.rows = result.row = 0;
    work.own = 0;
    work.first_tile = block * BLOCK_TILES, work.tiles = tiles_of(launch, W0);
    unsigned tile = work.first_tile + warp;
#if MATRICES > 1
    if (PAIRED) {
        tile = work.first_tile + warp / GROUP_WARPS * (GROUP_WARPS / 2) + warp % 2;
        open_matrix(launch, W0, B0, Y0, TO_Y0, tile, work, result);
        if (work.own && warp / 2 % 2)
            work.own = matrix_at(launch, W1, work) + (size_t)tile * work.units * FORMAT::unit_bytes;
        return work.first_tile < work.tiles;
    }
#endif
    bool found = open_matrix(launch, W0, B0, Y0, TO_Y0, tile, work, result);
#if MATRICES > 1
    if (!found) found = open_matrix(launch, W1, B1, Y1, TO_Y1, tile, work, result);
    work.tiles += tiles_of(launch, W1);
#endif
#if MATRICES > 2
    if (!found) found = open_matrix(launch, W2, B2, Y2, TO_Y2, tile, work, result);
    work.tiles += tiles_of(launch, W2);
#endif
#if MATRICES > 3
    if (!found) found = open_matrix(launch, W3, B3, Y3, TO_Y3, tile, work, result);
    work.tiles += tiles_of(launch, W3);
#endif
    return work.first_tile < work.tiles;
}

// The values that are equal in all blocks.
DEVICE void open_step(const LAUNCH &launch, unsigned tokens, GROUP_WORK &work, RESULT &result) {
    const PACKET *product = packet_of(launch, PRODUCT);
    result.tokens = work.tokens = tokens;
    result.activation = PAIRED ? packet_of(launch, GATE)->size[SWIGLU_ACTIVATION] : 0;
    work.units = (product->size[MATMUL_COLUMNS] + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    work.first_unit = 0, work.end_unit = work.units;
#if !EXPERT_PAIRS
    work.planes = operand_at(launch, M);
    work.sums = operand_at(launch, SUMS);
    work.scales = (const float *)operand_at(launch, SCALE);
#endif
    result.residual = (const float *)operand_at(launch, RESIDUAL);
    result.residual_stride = stride_at(launch, RESIDUAL);
}

#endif
