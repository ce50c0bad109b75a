// Converts the row of one token to activations; a warp computes all units that it holds of the row
// at the same time (rules R3 to R5).

#ifndef ONE_ROW_H
#define ONE_ROW_H

#include "row_quantizer.h"

// Shared memory for the squares of a row's units, of which there are `units` of `columns` columns.
// All threads of the block call `meet`, after which all squares are visible.
struct ROW_SQUARES {
    float *of;
    unsigned units, columns;

    __device__ __forceinline__ void put(unsigned unit, float square) const { of[unit] = square; }
    __device__ __forceinline__ void meet() const { __syncthreads(); }
};

// Normalizes the first `normal` units that a warp holds of a row, at the same time. All threads of
// the block must call this; a team of `warps` warps has a row.
template <int warps, int normal, int most, class ROWS, class SQUARES>
DEVICE void normalize_units(EIGHT (&held)[most], const EIGHT (&weight)[normal],
                            const ACTIVATIONS &x, const ROWS &rows, const SQUARES &squares) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % warps;
    float square[normal];
#pragma unroll
    for (int i = 0; i < normal; i++) square[i] = sum_of_squares(held[i], lane);
#pragma unroll
    for (int i = 0; i < normal; i++)
        if (lane == 0 && warp + i * warps < x.units) squares.put(warp + i * warps, square[i]);
    squares.meet();
    const float mean =
        __fdiv_rn(fold_units(squares.of, squares.units, 1), (float)squares.columns);
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + rows.eps));
#pragma unroll
    for (int i = 0; i < normal; i++) normalize_eight(held[i], r, rows.weight != 0, weight[i]);
}

// Quantizes units from `first` on, and moves the units after them to the front.
template <int warps, int normal, int most>
DEVICE void quantize_units(EIGHT (&held)[most], const ACTIVATIONS &x, unsigned first, int lane) {
#pragma unroll
    for (int i = 0; i < normal; i++) {
        const unsigned unit = first + i * warps;
        quantize_unit(x, unit, lane, held[i], unit < x.units);
    }
#pragma unroll
    for (int i = normal; i < most; i++) held[i - normal] = held[i];
}

// What each of `warps` warps, of several teams of them, holds of the row of one token: units
// `warps` apart, `most` of them at once. If the row has a norm, a warp has at most `normal` units.
// All computations of `normal` units are interleaved, because the latency of dependent instructions
// matters here.
template <int warps, bool norm, int normal, int most> struct ONE_ROW {
    EIGHT held[most], weight[normal];
    const ACTIVATIONS &x;
    const FLOAT_ROWS<> &rows;
    int lane, warp;

    __device__ __forceinline__ ONE_ROW(const ACTIVATIONS &x_, const FLOAT_ROWS<> &rows_)
        : x(x_),
          rows(rows_),
          lane(threadIdx.x % WARP_LANES),
          warp(threadIdx.x / WARP_LANES % warps) {}

    // Data that no step writes may be read before the previous kernels have ended.
    __device__ __forceinline__ void load_weights() {
        if (!norm || !rows.weight) return;
#pragma unroll
        for (int i = 0; i < normal; i++)
            weight[i] = load_eight(rows.weight, warp + i * warps, rows.columns, lane);
    }
    template <int count> __device__ __forceinline__ void load(unsigned first) {
#pragma unroll
        for (int i = 0; i < count; i++)
            held[i] = load_eight(rows.x, first + i * warps, rows.columns, lane);
    }
    template <class SQUARES> __device__ __forceinline__ void run(const SQUARES &squares) {
        if (!rows.tokens) {
            if (norm) __syncthreads();
            __syncthreads();
            return;
        }
        if (norm) {
            load<normal>(warp);
            normalize_units<warps>(held, weight, x, rows, squares);
            quantize_units<warps, normal>(held, x, warp, lane);
        } else {
#pragma unroll 1
            for (unsigned first = warp; first < x.units; first += warps * most) {
                load<most>(first);
#pragma unroll 1
                for (int at = 0; at < most; at += normal) {
                    if (first + at * warps >= x.units) break;
                    quantize_units<warps, normal>(held, x, first + at * warps, lane);
                }
            }
        }
        __syncthreads();
    }
};

#endif
