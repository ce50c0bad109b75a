// Converts the row of one token, which other blocks compute, to ACTIVATIONS of a block of a step
// kernel; the row may be normalized first (rules R3 to R5). The text is short: code that all phases
// share exists once, and the instructions that request values for the first time also request
// missing ones again.

#ifndef STEP_ACTIVATIONS_H
#define STEP_ACTIVATIONS_H

#include "one_row.h"
#include "attention_rows.k"
#include "pages.k"
#include "pages_coded.k"
#if IS_CODED
#include "rotated_rows.h"
#endif

// What each warp holds of the row: `normal` units at once, `warps` apart, and as many of the units
// after them, which are being loaded. A row with a norm has only the first ones. All computations
// of `normal` units are interleaved, because the latency of dependent instructions matters here.
template <int warps, int normal> struct AWAITED_ROW {
    EIGHT held[normal], coming[normal], weight[normal];
    const ACTIVATIONS &x;
    const FLOAT_ROWS<INCOMING> &rows;
    const float *row;
    int lane, warp;
    bool normed, turned, asked = false;

    __device__ __forceinline__ AWAITED_ROW(const ACTIVATIONS &x_,
                                           const FLOAT_ROWS<INCOMING> &rows_, bool normed_,
                                           bool turned_)
        : x(x_),
          rows(rows_),
          row(rows_.x + rows_.source.row(0) * rows_.stride),
          lane(threadIdx.x % WARP_LANES),
          warp(threadIdx.x / WARP_LANES),
          normed(normed_),
          turned(turned_) {}

    __device__ __forceinline__ void load_weights() {
        if (!normed || !rows.weight) return;
#pragma unroll
        for (int i = 0; i < normal; i++)
            weight[i] = load_eight(rows.weight, warp + i * warps, rows.columns, lane);
    }
    // Requests units from `first` on, as currently stored, and `again` those that are missing;
    // instead of columns that the row does not have it requests the last ones.
    __device__ __forceinline__ void ask(EIGHT (&units)[normal], unsigned first,
                                        bool again = false) const {
#pragma unroll
        for (int i = 0; i < 2 * normal; i++) {
            const unsigned apart = i / 2 * warps * UNIT_COLUMNS + i % 2 * 128;
            const unsigned column = first * UNIT_COLUMNS + 4 * lane + apart;
            float *v = units[i / 2].of + i % 2 * 4;
            if (again && min_of_four(v) != 0) continue;
            const uint4 four = rows.source.four(row + min(column, rows.columns - 4));
            v[0] = __uint_as_float(four.x), v[1] = __uint_as_float(four.y);
            v[2] = __uint_as_float(four.z), v[3] = __uint_as_float(four.w);
        }
    }
    // Requests units again until all have arrived.
    __device__ __forceinline__ void await(unsigned first) {
        unsigned spins = 0;
        while (rows.source.waits(min_of(held) == 0, spins)) ask(held, first, true);
        __syncwarp();
        const unsigned flip = rows.source.awaited ? 0xFFFFFFFFu : 0u;
#pragma unroll
        for (int i = 0; i < 8 * normal; i++)
            held[i / 8].of[i % 8] = __uint_as_float(__float_as_uint(held[i / 8].of[i % 8]) ^ flip);
        if (rows.columns % UNIT_COLUMNS == 0) return;
#pragma unroll
        for (int i = 0; i < 8 * normal; i++) {
            const unsigned apart = i / 8 * warps * UNIT_COLUMNS + i % 8 / 4 * 128;
            if (first * UNIT_COLUMNS + 4 * lane + apart >= rows.columns) held[i / 8].of[i % 8] = 0.0f;
        }
    }
    static __device__ __forceinline__ unsigned min_of_four(const float *v) {
        return min(min(__float_as_uint(v[0]), __float_as_uint(v[1])),
                   min(__float_as_uint(v[2]), __float_as_uint(v[3])));
    }
    static __device__ __forceinline__ unsigned min_of(const EIGHT (&units)[normal]) {
        unsigned least = ~0u;
#pragma unroll
        for (int i = 0; i < 2 * normal; i++)
            least = min(least, min_of_four(units[i / 2].of + i % 2 * 4));
        return least;
    }
    // Quantizes units from `first` on: lanes do everything in common before any existing unit is
    // stored, so that units are computed at the same time.
    __device__ __forceinline__ void quantize(unsigned first) const {
        unsigned largest[normal], pair[normal][2][2];
        float scale[normal];
        int sums[normal];
#pragma unroll
        for (int i = 0; i < normal; i++) largest[i] = largest_of_warp(largest_bits(held[i]));
#pragma unroll
        for (int i = 0; i < normal; i++) {
            const SEGMENT_SCALE segment(largest[i]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                pair[i][e / 2][e % 2] = segment.pair(held[i].of[2 * e], held[i].of[2 * e + 1]);
            sums[i] = sums_of_lane(pair[i]), scale[i] = segment.scale();
        }
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
            for (int i = 0; i < normal; i++)
                sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], lanes);
#pragma unroll
        for (int i = 0; i < normal; i++) {
            const unsigned unit = first + i * warps;
            if (unit >= x.units) continue;
            store_planes(x, unit, lane, pair[i]);
            if (lane % 4 == 0) store_sums(x, unit, lane, sums[i]);
            if (lane == 0) x.scales[unit] = scale[i];
        }
    }
    // Requests the first units.
    __device__ __forceinline__ void begin() {
        if (rows.tokens) ask(held, warp);
        asked = true;
    }
    // `squares` has room for a float a unit; `meanwhile` is called while the first units are being
    // loaded. The last units of a long row arrive long after the others.
    template <class MEANWHILE>
    __device__ __forceinline__ void run(float *squares, const MEANWHILE &meanwhile) {
        if (!asked) begin();
        load_weights();
        meanwhile();
        if (rows.tokens)
#pragma unroll 1
            for (unsigned first = warp;;) {
                const unsigned next = first + warps * normal;
                if (next < x.units) ask(coming, next);
                await(first);
                if (normed)
                    normalize_units<warps>(held, weight, x, rows,
                                           ROW_SQUARES{squares, x.units, rows.columns});
#if IS_CODED
                if (turned)
#pragma unroll
                    for (int i = 0; i < normal; i++) rotate_back(held[i].of, lane);
#endif
                quantize(first);
                if (next >= x.units) break;
#pragma unroll
                for (int i = 0; i < normal; i++) held[i] = coming[i];
                first = next;
            }
        __syncthreads();
    }
};

#endif
