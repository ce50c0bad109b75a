// Fills a block's ACTIVATIONS (see unit_product.h) from rows of floats, which may be normalized
// first, or from rows of integers that another kernel computed (rules R3 to R5).

#ifndef ACTIVATIONS_H
#define ACTIVATIONS_H

#include "exchange.h"
#include "unit_product.h"

// Eight values of a lane: columns 4 lane .. 4 lane + 3 of a unit, and the columns 128 later.
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

// The same, as currently stored by a source that may have to wait for it, and after it has arrived.
DEVICE EIGHT read_eight(const float *row, unsigned unit, unsigned columns, int lane,
                        const INCOMING &source) {
    EIGHT v = {};
    const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (column + 128 * i < columns) {
            const uint4 x = source.four(row + column + 128 * i);
            v.of[4 * i] = __uint_as_float(x.x), v.of[4 * i + 1] = __uint_as_float(x.y);
            v.of[4 * i + 2] = __uint_as_float(x.z), v.of[4 * i + 3] = __uint_as_float(x.w);
        }
    return v;
}
DEVICE bool is_missing(const EIGHT &v, unsigned unit, unsigned columns, int lane) {
    const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
    bool missing = false;
#pragma unroll
    for (int e = 0; e < 8; e++)
        missing |= column + e / 4 * 128 < columns && !__float_as_uint(v.of[e]);
    return missing;
}
DEVICE void settle_eight(EIGHT &v, const float *row, unsigned unit, unsigned columns, int lane,
                         const INCOMING &source) {
    const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
    if (!source.awaited) return;
    // A single lane waits for missing words, since requests of many lanes overload the cache.
    while (true) {
        const unsigned late = __ballot_sync(ALL_LANES, is_missing(v, unit, columns, lane));
        if (!late) break;
        bool stopped = false;
        if (lane == __popc((late & (0u - late)) - 1)) {
            const unsigned half = column + 128 < columns ? 128 : 0;
            stopped = source.waits_in_vain(row + column + half + 3);
        }
        v = read_eight(row, unit, columns, lane, source);
        if (__ballot_sync(ALL_LANES, stopped)) break;
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (column + e / 4 * 128 < columns)
            v.of[e] = __uint_as_float(~__float_as_uint(v.of[e]));
}

#define INTEGER_ROUNDER 12582912.0f  // a float this is added to has its integer in its low bits

// Of four integers in two words: the bytes above the low four bits, and those four bits.
DEVICE unsigned high_bytes(unsigned first, unsigned second) {
    return __byte_perm(first >> 4, second >> 4, 0x6420);
}
DEVICE unsigned low_bytes(unsigned first, unsigned second) {
    return __byte_perm(first, second, 0x6420) & 0x0F0F0F0Fu;
}

// The factors by which rule R5 converts a segment whose largest magnitude has these bits to
// integers.
struct SEGMENT_SCALE {
    bool broken, silent;
    int exponent;
    float up, limit;
    __device__ __forceinline__ explicit SEGMENT_SCALE(unsigned largest) {
        broken = largest >= 0x7F800000u;
        exponent = (int)(largest >> 23) - 127;
        silent = broken || exponent < -64;
        up = silent ? 0.0f : __uint_as_float((unsigned)(127 + 10 - exponent) << 23);
        limit = silent ? 0.0f : 2047.0f;
    }
    __device__ __forceinline__ float scale() const {
        return broken   ? __uint_as_float(0x7FC00000u)
               : silent ? 0.0f
                        : __uint_as_float((unsigned)(127 - 10 + exponent) << 23);
    }
    // In the low 16 bits.
    __device__ __forceinline__ unsigned integer(float value) const {
        return __float_as_uint(fminf(fmaxf(value * up, -limit), limit) + INTEGER_ROUNDER);
    }
    // Two integers in a word. They are limited as integers: `value * up` is exact, or far below a
    // half.
    __device__ __forceinline__ unsigned pair(float low, float high) const {
        const unsigned both = __byte_perm(__float_as_uint(__fmaf_rn(low, up, INTEGER_ROUNDER)),
                                          __float_as_uint(__fmaf_rn(high, up, INTEGER_ROUNDER)), 0x5410);
        return limited_pair(both, silent ? 0u : 0x07FF07FFu, silent ? 0u : 0xF801F801u);
    }
};

// Converts eight 16-bit integers of a lane, in pairs as words [half][2], to planes.
DEVICE void store_planes(const ACTIVATIONS &x, unsigned index, int lane,
                         const unsigned (&pair)[2][2]) {
    const unsigned of_lane = x.in_eights
                                 ? lane / 8 * 512 + lane / 4 % 2 * 128 + lane % 4 * 4
                                 : lane / 8 * 128 + lane % 4 * 16 + lane / 4 % 2 * 4;
    const unsigned of_half = x.in_eights ? 2048 : 8, of_low = x.in_eights ? 256 : 64;
    const size_t apart = x.in_eights ? 8 : 1;
    unsigned char *planes = x.planes + index * apart * UNIT_PLANES + of_lane;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned char *target = planes + half * of_half;
        *(unsigned *)target = high_bytes(pair[half][0], pair[half][1]);
        *(unsigned *)(target + of_low) = low_bytes(pair[half][0], pair[half][1]);
    }
}
// A lane's part of the sums of 16 columns of both halves, of 16 bits each. The halves borrow from
// each other while they are added up; what a half lent is known at the end.
DEVICE int sums_of_lane(const unsigned (&pair)[2][2]) {
    return add_pairs(pair[0][0], pair[0][1], 0x01010101u) +
           add_pairs(pair[1][0], pair[1][1], 0x01010101u) * 65536;
}
// By every fourth lane, once four have added theirs up.
DEVICE void store_sums(const ACTIVATIONS &x, unsigned index, int lane, int both) {
    const short sum[2] = {(short)both, (short)((both - (short)both) >> 16)};
    if (x.in_eights) {
        unsigned char *bytes = (unsigned char *)(x.sums + index * (size_t)8 * UNIT_SUMS);
        bytes += sum_index(lane / 4);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bytes[sum_index(8 * i)] = (unsigned char)((unsigned)sum[i] >> 8);
            bytes[EIGHT_HALF + sum_index(8 * i)] = (unsigned char)sum[i];
        }
        return;
    }
    short *sums = x.sums + index * (size_t)UNIT_SUMS + sum_index(lane / 4);
    sums[0] = sum[0];
    sums[sum_index(8)] = sum[1];
}
DEVICE void store_integers(const ACTIVATIONS &x, unsigned index, int lane,
                           const unsigned (&pair)[2][2], bool exists) {
    if (exists) store_planes(x, index, lane, pair);
    int both = sums_of_lane(pair);
    both += __shfl_xor_sync(ALL_LANES, both, 1);
    both += __shfl_xor_sync(ALL_LANES, both, 2);
    if (exists && lane % 4 == 0) store_sums(x, index, lane, both);
}

// Of the largest magnitude of a lane.
DEVICE unsigned largest_bits(const EIGHT &v) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; i++) most[i] = larger_magnitude(v.of[i], v.of[i + 4]);
    return __float_as_uint(
        larger_magnitude(larger_magnitude(most[0], most[1]), larger_magnitude(most[2], most[3])));
}

// Rule R5's first half for one unit, which is stored only if it `exists`.
DEVICE void quantize_unit(const ACTIVATIONS &x, unsigned index, int lane, const EIGHT &v,
                          bool exists = true) {
    const SEGMENT_SCALE segment(largest_of_warp(largest_bits(v)));
    unsigned bits[8];
#pragma unroll
    for (int i = 0; i < 8; i++) bits[i] = segment.integer(v.of[i]);
    const unsigned pair[2][2] = {
        {__byte_perm(bits[0], bits[1], 0x5410), __byte_perm(bits[2], bits[3], 0x5410)},
        {__byte_perm(bits[4], bits[5], 0x5410), __byte_perm(bits[6], bits[7], 0x5410)}};
    store_integers(x, index, lane, pair, exists);
    if (exists && lane == 0) x.scales[index * (x.in_eights ? 8 : 1)] = segment.scale();
}

// Rule R4 over the products of two units, for every lane. Of four sums over the lanes each lane
// continues with two, then with one; the order of two operands does not change their sum.
DEVICE float sum_of_products(const EIGHT &v, const EIGHT &w, int lane) {
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = v.of[i] * w.of[i] + v.of[i + 4] * w.of[i + 4];
    const bool upper = lane & 16, odd = lane & 8;
    const float a = (upper ? four[2] : four[0]) +
                    __shfl_xor_sync(ALL_LANES, upper ? four[0] : four[2], 16);
    const float b = (upper ? four[3] : four[1]) +
                    __shfl_xor_sync(ALL_LANES, upper ? four[1] : four[3], 16);
    float sum = (odd ? b : a) + __shfl_xor_sync(ALL_LANES, odd ? a : b, 8);
#pragma unroll
    for (int lanes = 4; lanes; lanes /= 2) sum = sum + __shfl_xor_sync(ALL_LANES, sum, lanes);
    sum = sum + __shfl_xor_sync(ALL_LANES, sum, 16);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 8);
}
DEVICE float sum_of_squares(const EIGHT &v, int lane) { return sum_of_products(v, v, lane); }

#define READ_SPANS 4

// Rule R3 over values of units, `stride` apart: a left fold of four values to a span, and of spans
// to the total.
DEVICE float fold_units(const float *value, unsigned units, unsigned stride) {
    float total = 0.0f;
    unsigned i = 0;
    // Several spans are read at once, since other warps wait for this fold. The loop is not
    // unrolled, since loading a kernel's instructions is slow.
#pragma unroll 1
    for (; i + READ_SPANS * SPAN_UNITS <= units; i += READ_SPANS * SPAN_UNITS) {
        float span[READ_SPANS];
#pragma unroll
        for (int n = 0; n < READ_SPANS; n++) {
            span[n] = 0.0f;
#pragma unroll
            for (int k = 0; k < SPAN_UNITS; k++, value += stride) span[n] = span[n] + value[0];
        }
#pragma unroll
        for (int n = 0; n < READ_SPANS; n++) total = total + span[n];
    }
#pragma unroll 1
    for (; i + SPAN_UNITS <= units; i += SPAN_UNITS, value += SPAN_UNITS * stride)
        total = total + ((((0.0f + value[0]) + value[stride]) + value[2 * stride]) +
                         value[3 * stride]);
    if (i == units) return total;
    float span = 0.0f;
#pragma unroll 1
    for (; i < units; i++, value += stride) span = span + value[0];
    return total + span;
}

DEVICE void normalize_eight(EIGHT &v, float r, bool weighted, const EIGHT &weight) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
        v.of[e] = v.of[e] * r;
        if (weighted) v.of[e] = v.of[e] * weight.of[e];
    }
}

// The activations from a token on, which are not in groups of eight.
DEVICE ACTIVATIONS from_token(ACTIVATIONS x, unsigned token) {
    x.planes += (size_t)token * x.units * UNIT_PLANES;
    x.sums += (size_t)token * x.units * UNIT_SUMS;
    x.scales += (size_t)token * x.units;
    return x;
}

// The activations of one token of several in groups of eight, the first of which begins there.
DEVICE ACTIVATIONS among_eights(unsigned char *planes, short *sums, float *scales, unsigned token,
                                unsigned units) {
    const size_t eight = (size_t)(token / 8 * 8) * units;
    const unsigned row = token % 8;
    return {planes + eight * UNIT_PLANES + row * 16,
            sums + eight * UNIT_SUMS + row * (UNIT_SUMS / 2), scales + eight + row, units, true};
}

#endif
