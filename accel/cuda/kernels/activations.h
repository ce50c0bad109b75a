// A block fills ACTIVATIONS of unit_product.h from float rows, normalized first or not, or from
// rows of integers another kernel made (rules R3 to R5).

#ifndef ACTIVATIONS_H
#define ACTIVATIONS_H

#include "exchange.h"
#include "unit_product.h"

// Eight values of a lane: columns 4 lane .. 4 lane + 3 of a unit, and 128 more.
struct EIGHT {
    float of[8];
};

DEVICE EIGHT load_eight(const float *row, unsigned unit, unsigned columns, int lane) {
    EIGHT v = {};
    const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
    if (column < columns) {
        const float4 x = *(const float4 *)(row + column);
        v.of[0] = x.x, v.of[1] = x.y, v.of[2] = x.z, v.of[3] = x.w;
    }
    if (column + 128 < columns) {
        const float4 x = *(const float4 *)(row + column + 128);
        v.of[4] = x.x, v.of[5] = x.y, v.of[6] = x.z, v.of[7] = x.w;
    }
    return v;
}

// The same from a source that may have to wait: what was read, all of it before any is waited for.
struct READ_EIGHT {
    uint4 half[2];

    __device__ __forceinline__ void load(const float *row, unsigned unit, unsigned columns,
                                         int lane, const INCOMING &source) {
        const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (column + 128 * i < columns) half[i] = source.four(row + column + 128 * i);
    }
    __device__ __forceinline__ EIGHT settled(const float *row, unsigned unit, unsigned columns,
                                             int lane, const INCOMING &source) const {
        EIGHT v = {};
        const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (column + 128 * i < columns) {
                const float4 x = source.settled(half[i], row + column + 128 * i);
                v.of[4 * i] = x.x, v.of[4 * i + 1] = x.y;
                v.of[4 * i + 2] = x.z, v.of[4 * i + 3] = x.w;
            }
        return v;
    }
};

DEVICE unsigned four_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

DEVICE void store_integers(const ACTIVATIONS &x, unsigned index, int lane, const int (&m)[8]) {
    const unsigned of_lane = x.in_eights
                                 ? lane / 8 * 512 + lane / 4 % 2 * 128 + lane % 4 * 4
                                 : lane / 8 * 128 + lane % 4 * 16 + lane / 4 % 2 * 4;
    const unsigned of_half = x.in_eights ? 2048 : 8, of_low = x.in_eights ? 256 : 64;
    const size_t apart = x.in_eights ? 8 : 1;
    unsigned char *planes = x.planes + index * apart * UNIT_PLANES + of_lane;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int *v = m + 4 * half;
        unsigned char *place = planes + half * of_half;
        *(unsigned *)place = four_bytes(v[0] >> 4, v[1] >> 4, v[2] >> 4, v[3] >> 4);
        *(unsigned *)(place + of_low) = four_bytes(v[0], v[1], v[2], v[3]) & 0x0F0F0F0Fu;
        int sum = v[0] + v[1] + v[2] + v[3];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (lane % 4 == 0)
            x.sums[index * apart * UNIT_SUMS + sum_place(lane / 4 + 8 * half)] = (short)sum;
    }
}

// Rule R5's first half for one unit.
DEVICE void quantize_unit(const ACTIVATIONS &x, unsigned index, int lane, const EIGHT &v) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(v.of[i]) & 0x7FFFFFFFu);
    largest = largest_of_warp(largest);
    const bool broken = largest >= 0x7F800000u;
    const int exponent = (int)(largest >> 23) - 127;
    const bool silent = broken || exponent < -64;
    const float up = silent ? 0.0f : __uint_as_float((unsigned)(127 + 10 - exponent) << 23);
    int m[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        m[i] = silent ? 0 : max(-2047, min(2047, __float2int_rn(v.of[i] * up)));
    store_integers(x, index, lane, m);
    if (lane == 0)
        x.scales[index * (x.in_eights ? 8 : 1)] =
            broken   ? __uint_as_float(0x7FC00000u)
            : silent ? 0.0f
                     : __uint_as_float((unsigned)(127 - 10 + exponent) << 23);
}

// Rule R4 over the squares of a unit; every lane gets it.
DEVICE float sum_of_squares(const EIGHT &v) {
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        four[i] = v.of[i] * v.of[i] + v.of[i + 4] * v.of[i + 4];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2)
            four[i] = four[i] + __shfl_xor_sync(ALL_LANES, four[i], lanes);
    }
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// Rule R3 over values of units, `stride` apart: left fold of four into a span, of spans into the
// total.
DEVICE float fold_units(const float *value, unsigned units, unsigned stride) {
    float total = 0.0f;
    unsigned i = 0;
    // A kernel's text comes from afar at every launch: short loops stay loops.
#pragma unroll 1
    for (; i + SPAN_UNITS <= units; i += SPAN_UNITS, value += SPAN_UNITS * stride) {
        const float a = value[0], b = value[stride], c = value[2 * stride], d = value[3 * stride];
        total = total + ((((0.0f + a) + b) + c) + d);
    }
    if (i == units) return total;
    float span = 0.0f;
#pragma unroll 1
    for (; i < units; i++, value += stride) span = span + value[0];
    return total + span;
}

// Rows of floats that become activations; weight 0 where a norm has none.
template <class SOURCE = STANDING> struct FLOAT_ROWS {
    const float *x;
    size_t stride;
    const float *weight;
    float eps;
    unsigned columns, tokens;
    SOURCE source;
};

// What each warp holds of the rows of a block: units of all tokens in turn, `warps` apart. `most` of
// them stay in registers while the norm's factor is found. `single`: there is one token at most.
template <int warps, bool norm, bool single = false, class SOURCE = STANDING,
          int most = HELD_UNITS>
struct ROW_QUANTIZER {
    EIGHT held[most], weight[most];
    const ACTIVATIONS &x;
    const FLOAT_ROWS<SOURCE> &rows;
    unsigned total;
    int lane, warp;

    __device__ __forceinline__ ROW_QUANTIZER(const ACTIVATIONS &x_,
                                             const FLOAT_ROWS<SOURCE> &rows_)
        : x(x_),
          rows(rows_),
          total(rows_.tokens * x_.units),
          lane(threadIdx.x % WARP_LANES),
          warp(threadIdx.x / WARP_LANES) {}

    __device__ __forceinline__ EIGHT load(const float *values, size_t stride,
                                          unsigned index) const {
        if (index >= total) return EIGHT{};
        const unsigned token = token_of(index);
        return load_eight(values + token * stride, index - token * x.units, rows.columns, lane);
    }
    __device__ __forceinline__ unsigned token_of(unsigned index) const {
        return single ? 0 : index / x.units;
    }
    // What no step writes may be read before the kernels in front are done.
    __device__ __forceinline__ void load_weights(unsigned first) {
        if (!norm || !rows.weight) return;
#pragma unroll
        for (int i = 0; i < most; i++) weight[i] = load(rows.weight, 0, first + i * warps);
    }
    __device__ __forceinline__ const float *row_of(unsigned token) const {
        return rows.x + rows.source.row(token) * rows.stride;
    }
    __device__ __forceinline__ void load_incoming(unsigned first) {
        READ_EIGHT read[most];
        if (first < total) {
            const unsigned token = token_of(first), unit = first - token * x.units;
            const unsigned end = min((unit + 1) * UNIT_COLUMNS, rows.columns);
            rows.source.watch(row_of(token) + end - 1, lane);
        }
#pragma unroll
        for (int i = 0; i < most; i++) {
            const unsigned index = first + i * warps, token = token_of(index);
            if (index < total)
                read[i].load(row_of(token), index - token * x.units, rows.columns, lane,
                             rows.source);
        }
#pragma unroll
        for (int i = 0; i < most; i++) {
            const unsigned index = first + i * warps, token = token_of(index);
            held[i] = EIGHT{};
            if (index < total)
                held[i] = read[i].settled(row_of(token), index - token * x.units, rows.columns,
                                          lane, rows.source);
        }
    }
    __device__ __forceinline__ void load_rows(unsigned first) {
        if constexpr (SOURCE::waits_for_others) {
            load_incoming(first);
        } else {
#pragma unroll
            for (int i = 0; i < most; i++)
                held[i] = load(rows.x, rows.stride, first + i * warps);
        }
    }
    // `squares` has room for a float a unit and token.
    __device__ __forceinline__ void run(float *squares) {
        constexpr unsigned step = warps * most;
        if (norm) {
#pragma unroll 1
            for (unsigned first = warp; first < total; first += step) {
                load_rows(first);
#pragma unroll
                for (int i = 0; i < most; i++) {
                    const float square = sum_of_squares(held[i]);
                    if (lane == 0 && first + i * warps < total) squares[first + i * warps] = square;
                }
            }
            __syncthreads();
        }
        unsigned known = rows.tokens;
        float r = 0.0f;
#pragma unroll 1
        for (unsigned first = warp; first < total; first += step) {
            if (!norm || total > step) load_rows(first);
            if (total > step) load_weights(first);
#pragma unroll
            for (int i = 0; i < most; i++) {
                const unsigned index = first + i * warps, token = token_of(index);
                if (index >= total) break;
                if (norm && token != known) {
                    const float sum = fold_units(squares + token * x.units, x.units, 1);
                    const float mean = __fdiv_rn(sum, (float)rows.columns);
                    r = __fdiv_rn(1.0f, __fsqrt_rn(mean + rows.eps));
                    known = token;
                }
#pragma unroll
                for (int e = 0; norm && e < 8; e++) {
                    held[i].of[e] = held[i].of[e] * r;
                    if (rows.weight) held[i].of[e] = held[i].of[e] * weight[i].of[e];
                }
                quantize_unit(x, index, lane, held[i]);
            }
        }
        __syncthreads();
    }
};

// Rows that quantize_activation made, where each begins and how far apart they are: m, of every 32
// columns 8 words of high and 8 of low bytes, in a word columns 0, 2, 1 and 3; sums, a word of two
// shorts for every 32 columns; a scale for every unit. Strides are in words.
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
            short *sums = x.sums + (size_t)index * UNIT_SUMS + sum_place(2 * lane);
            sums[0] = (short)both;
            sums[1] = (short)(both >> 16);
        }
        if (lane == 0) x.scales[index] = rows.scale[token * rows.scale_stride + unit];
    }
    __syncthreads();
}

#endif
