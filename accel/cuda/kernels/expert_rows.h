// Products of units with the tokens of a chunk, up to several times eight of them.

#ifndef EXPERT_ROWS_H
#define EXPERT_ROWS_H

#include "expert_table.h"
#include "expert_units.h"
#include "four_sums.h"
#include "packets.h"
#include "warp_sums.h"

#define FOUR_ROWS 4  // of chunks whose columns are both parts of four tokens

// Activations of a chunk's tokens in shared memory: of four tokens one behind the other; of more by
// units, planes of a token in the order of unit_product.h, at distances that put two tokens in
// different banks.
#define ROW_PLANES(rows) (UNIT_PLANES + ((rows) > FOUR_ROWS ? 64 : 0))
#define ROWS_BYTES(rows, units) ((units) * (rows) * (ROW_PLANES(rows) + 2 * UNIT_SUMS + 4))

template <int rows> struct CHUNK_ROWS {
    unsigned char *planes;
    short *sums;
    float *scales;
    unsigned units;

    __device__ __forceinline__ CHUNK_ROWS(unsigned char *memory, unsigned units_)
        : planes(memory),
          sums((short *)(memory + units_ * rows * ROW_PLANES(rows))),
          scales((float *)(memory + units_ * rows * (ROW_PLANES(rows) + 2 * UNIT_SUMS))),
          units(units_) {}
    // Of one token and unit.
    __device__ __forceinline__ ACTIVATIONS of(unsigned unit, unsigned row) const {
        const unsigned index = rows > FOUR_ROWS ? unit * rows + row : row * units + unit;
        return {planes + index * ROW_PLANES(rows), sums + index * UNIT_SUMS, scales + index, 1,
                false};
    }
    // What products are told of how many tokens there are.
    static __device__ __forceinline__ unsigned extent(unsigned tokens) {
        return rows > FOUR_ROWS ? (tokens + 7) / 8 : tokens;
    }
    // The row of a tile and the token of a lane's element i.
    static __device__ __forceinline__ unsigned row_of(int i, int lane) {
        return lane / 4 + (rows > FOUR_ROWS ? i / 2 % 2 : i) * 8;
    }
    static __device__ __forceinline__ unsigned token_of(int i, int lane) {
        return rows > FOUR_ROWS ? i / 4 * 8 + lane % 4 * 2 + i % 2 : lane % 4;
    }
};

// Adds to `span` the values of a unit for `eights` groups of eight tokens.
template <int dtype, int rows>
DEVICE void add_eights(const unsigned char *unit, const CHUNK_ROWS<rows> &x, unsigned index,
                       unsigned eights, int lane, float (&span)[rows / 2]) {
    const int g = lane / 4, t = lane % 4;
    UNIT_SCALES<dtype> scales;
    scales.load(unit, lane);
    UPPER_PLANES<dtype> upper;
    upper.load(unit, lane);
    int j[rows / 2] = {};
    const unsigned char *own = x.planes + (index * rows + g) * ROW_PLANES(rows) + t * 16;
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        // Sub-blocks 2 pair, 2 pair + 1 and the four after each, whose words a lane reads at once.
        unsigned codes[2][2][4];
#pragma unroll
        for (int v = 0; v < 2; v++) {
            unit_operands<dtype>(unit, upper, lane, pair + 2 * v, codes[v][0], codes[v][1]);
#pragma unroll
            for (int i = 0; i < 4; i++) codes[v][1][i] >>= UNIT_FORMAT<dtype>::odd_shift;
        }
#pragma unroll
        for (int n = 0; n < rows / 8; n++) {
            if (n >= eights) break;
            int of_eight[4] = {j[4 * n], j[4 * n + 1], j[4 * n + 2], j[4 * n + 3]};
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const unsigned char *block = own + n * 8 * ROW_PLANES(rows) + (2 * pair + odd) * 128;
                const uint4 high = vector_at(block), low = vector_at(block + 64);
                const int b = 2 * pair + odd;
                add_sub_block<dtype>(scales, codes[0][odd], b, high.x, high.y, low.x, low.y,
                                     of_eight);
                add_sub_block<dtype>(scales, codes[1][odd], b + 4, high.z, high.w, low.z, low.w,
                                     of_eight);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) j[4 * n + e] = of_eight[e];
        }
    }
#pragma unroll
    for (int n = 0; n < rows / 8; n++) {
        if (n >= eights) break;
        const int of_eight[4] = {j[4 * n], j[4 * n + 1], j[4 * n + 2], j[4 * n + 3]};
        const unsigned first_row = index * rows + 8 * n;
        float value[4];
        const uint2 sums = *(const uint2 *)(x.sums + (first_row + g) * UNIT_SUMS + t * 4);
        int p[4];
        scales.minima_of(sums, p);
        scales.values(of_eight, p, *(const float2 *)(x.scales + first_row + 2 * t), value);
#pragma unroll
        for (int e = 0; e < 4; e++) span[4 * n + e] = span[4 * n + e] + value[e];
    }
}

// Adds to `span` the values of a unit for up to four tokens, or for groups of eight: `extent` of them.
// Elements (row, token) are those of rows g and g + 8, of groups with tokens 2 t and 2 t + 1 of each.
template <int dtype, int rows>
DEVICE void add_unit_rows(const unsigned char *unit, const CHUNK_ROWS<rows> &x, unsigned index,
                          unsigned extent, int lane, float (&span)[rows / 2]) {
    if constexpr (rows == FOUR_ROWS) {
        float value[2];
        scaled_values_of_tokens<dtype>(unit, {x.planes, x.sums, x.scales, x.units, false}, index,
                                       extent, lane, value);
        span[0] = span[0] + value[0], span[1] = span[1] + value[1];
    } else {
        add_eights<dtype, rows>(unit, x, index, extent, lane, span);
    }
}

// The values of a warp's units, folded by rule R3.
template <int dtype, int slots, int rows>
DEVICE void total_of_rows(UNIT_RUN<dtype, slots> &run, const CHUNK_ROWS<rows> &x, unsigned first,
                          unsigned extent, int lane, float (&total)[rows / 2]) {
    typedef UNIT_RUN<dtype, slots> RUN;
    float span[rows / 2] = {};
#pragma unroll 1
    for (unsigned unit = 0; unit < run.count; unit++) {
        const unsigned chunk = unit / CHUNK_UNITS, inside = unit % CHUNK_UNITS;
        if (inside == 0) await_copy<slots>(run.barriers + chunk % slots, chunk / slots);
        add_unit_rows<dtype, rows>(
            run.ring + chunk % slots * RUN::slot_bytes + inside * RUN::unit_bytes, x, first + unit,
            extent, lane, span);
        if (inside + 1 == CHUNK_UNITS || unit + 1 == run.count) {
            __syncwarp();
            run.fetch();
        }
        if (unit % SPAN_UNITS + 1 == SPAN_UNITS || unit + 1 == run.count)
#pragma unroll
            for (int i = 0; i < rows / 2; i++) total[i] = total[i] + span[i], span[i] = 0.0f;
    }
}

#endif
