// Fills a block's ACTIVATIONS from rows: rows of floats, which are normalized first if there is a
// norm, or rows of integers that another kernel quantized (rules R3 to R5).

#ifndef ROW_QUANTIZER_H
#define ROW_QUANTIZER_H

#include "activations.h"

// Rows of floats to be converted to activations; weight 0 if a norm has none.
template <class SOURCE = STANDING> struct FLOAT_ROWS {
    const float *x;
    size_t stride;
    const float *weight;
    float eps;
    unsigned columns, tokens;
    SOURCE source;
};

// What each warp holds of the rows of a block: units of all tokens in turn, `warps` apart. `normal`
// of them stay in registers while the norm's factor is computed, if both `norm` and `normed`;
// without a norm `most`, a multiple of that, are loaded at once. `single`: there is one token at
// most.
template <int warps, bool norm, bool single = false, class SOURCE = STANDING,
          int normal = norm ? HELD_UNITS : 1, int most = HELD_UNITS>
struct ROW_QUANTIZER {
    EIGHT held[most], weight[normal];
    const ACTIVATIONS &x;
    const FLOAT_ROWS<SOURCE> &rows;
    unsigned total;
    int lane, warp;
    bool normed;

    __device__ __forceinline__ ROW_QUANTIZER(const ACTIVATIONS &x_,
                                             const FLOAT_ROWS<SOURCE> &rows_, bool normed_ = norm)
        : x(x_),
          rows(rows_),
          total(rows_.tokens * x_.units),
          lane(threadIdx.x % WARP_LANES),
          warp(threadIdx.x / WARP_LANES),
          normed(normed_) {}

    __device__ __forceinline__ EIGHT load(const float *values, size_t stride,
                                          unsigned index) const {
        if (index >= total) return EIGHT{};
        const unsigned token = token_of(index);
        return load_eight(values + token * stride, index - token * x.units, rows.columns, lane);
    }
    __device__ __forceinline__ unsigned token_of(unsigned index) const {
        return single ? 0 : index / x.units;
    }
    // Data that no step writes may be read before the previous kernels have ended.
    __device__ __forceinline__ void load_weights() { load_weights(warp); }
    __device__ __forceinline__ void load_weights(unsigned first) {
        if (!norm || !normed || !rows.weight) return;
#pragma unroll
        for (int i = 0; i < normal; i++) weight[i] = load(rows.weight, 0, first + i * warps);
    }
    __device__ __forceinline__ const float *row_of(unsigned token) const {
        return rows.x + rows.source.row(token) * rows.stride;
    }
    __device__ __forceinline__ void load_rows(unsigned first) {
        if constexpr (SOURCE::waits_for_others) {
            const unsigned token = token_of(first), unit = first - token * x.units;
            const unsigned end = min((unit + 1) * UNIT_COLUMNS, rows.columns);
            rows.source.watch(row_of(token) + end - 1, lane);
        }
#pragma unroll
        for (int i = 0; i < most; i++) {
            const unsigned index = first + i * warps, token = token_of(index);
            if (norm && normed && i >= normal) break;
            if constexpr (SOURCE::waits_for_others) {
                if (index < total)
                    held[i] = read_eight(row_of(token), index - token * x.units, rows.columns,
                                         lane, rows.source);
            } else {
                held[i] = load(rows.x, rows.stride, index);
            }
        }
    }
    // The data of a unit as it was read before it may have arrived.
    __device__ __forceinline__ void settle(EIGHT &v, unsigned index) const {
        if constexpr (SOURCE::waits_for_others) {
            const unsigned token = token_of(index);
            settle_eight(v, row_of(token), index - token * x.units, rows.columns, lane,
                         rows.source);
        }
    }
    // The units behind the first ones come to the front.
    __device__ __forceinline__ void turn() {
#pragma unroll
        for (int i = normal; i < most; i++) held[i - normal] = held[i];
    }
    // `squares` has room for a float a unit and token. Units are computed in a loop, since loading
    // a kernel's instructions is slow.
    __device__ __forceinline__ void run(float *squares) {
        constexpr unsigned apart = warps * normal;
        const unsigned step = norm && normed ? apart : warps * most;
        unsigned known = rows.tokens;
        float r = 0.0f;
#pragma unroll 1
        for (int pass = norm && normed ? 0 : 1; pass < 2; pass++) {
            const bool fresh = pass == 0 || !norm || !normed || total > step;
#pragma unroll 1
            for (unsigned first = warp; first < total; first += step) {
                if (fresh) load_rows(first);
                if (pass && total > step) load_weights(first);
#pragma unroll 1
                for (unsigned at = first; at < min(first + step, total); at += apart) {
                    if (most > normal && at != first) turn();
#pragma unroll
                    for (int i = 0; i < normal; i++) {
                        const unsigned index = at + i * warps, token = token_of(index);
                        if (index >= total) break;
                        if (fresh) settle(held[i], index);
                        if (pass == 0) {
                            const float square = sum_of_squares(held[i], lane);
                            if (lane == 0) squares[index] = square;
                            continue;
                        }
                        if (norm && normed && token != known) {
                            const float sum = fold_units(squares + token * x.units, x.units, 1);
                            const float mean = __fdiv_rn(sum, (float)rows.columns);
                            r = __fdiv_rn(1.0f, __fsqrt_rn(mean + rows.eps));
                            known = token;
                        }
                        if (norm && normed) normalize_eight(held[i], r, rows.weight != 0, weight[i]);
                        quantize_unit(x, index, lane, held[i]);
                    }
                }
            }
            __syncthreads();
        }
    }
};

// Rows of quantize_activation, their first addresses and distances: m has 8 words of high and 8 of
// low bytes for every 32 columns, with columns 0, 2, 1 and 3 in a word; sums has a word of two
// shorts for every 32 columns; scale has a float for every unit. Strides are in words.
struct INTEGER_ROWS {
    const unsigned *m, *sums;
    const float *scale;
    size_t m_stride, sums_stride, scale_stride;
    unsigned tokens;
};

template <int warps> DEVICE void take_rows(const ACTIVATIONS &x, const INTEGER_ROWS &rows) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
#pragma unroll 1
    for (unsigned index = warp; index < rows.tokens * x.units; index += warps) {
        const unsigned token = index / x.units, unit = index - token * x.units;
        const unsigned *row = rows.m + token * rows.m_stride + unit * (UNIT_COLUMNS / 2);
        unsigned char *planes = x.planes + (size_t)index * UNIT_PLANES + lane / 8 * 128 +
                                lane % 4 * 16 + lane / 4 % 2 * 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned *block = row + (lane / 8 + 4 * half) * 16 + lane % 8;
            *(unsigned *)(planes + 8 * half) = __byte_perm(block[0], 0, 0x3120);
            *(unsigned *)(planes + 8 * half + 64) = __byte_perm(block[8], 0, 0x3120);
        }
        if (lane < UNIT_SUB_BLOCKS) {
            const unsigned both =
                rows.sums[token * rows.sums_stride + unit * UNIT_SUB_BLOCKS + lane];
            short *sums = x.sums + (size_t)index * UNIT_SUMS + sum_index(2 * lane);
            sums[0] = (short)both;
            sums[1] = (short)(both >> 16);
        }
        if (lane == 0) x.scales[index] = rows.scale[token * rows.scale_stride + unit];
    }
    __syncthreads();
}

#endif
