// Scaled sums of a unit and packed tokens in groups of eight (unit_product.h) by products of single
// warps.

#ifndef WARP_SUMS_H
#define WARP_SUMS_H

#include "unit_scales.h"

DEVICE void add_scaled(int (&j)[4], const int (&sum)[4], int upper, int lower) {
#pragma unroll
    for (int e = 0; e < 4; e++) j[e] += (e / 2 ? lower : upper) * sum[e];
}

// The same of 16 high + low.
DEVICE void add_scaled(int (&j)[4], const int (&high)[4], const int (&low)[4], int upper,
                       int lower) {
#pragma unroll
    for (int e = 0; e < 4; e++) j[e] += (e / 2 ? lower : upper) * (16 * high[e] + low[e]);
}

// Sub-block b, as an operand, times eight tokens; h0 and h1 are the lane's words of both halves of
// the high parts of m, l0 and l1 those of the low ones. For codes of four bits, 16 times the codes
// multiply the high parts and the codes themselves the low ones in one sum.
template <int dtype>
DEVICE void add_sub_block(const UNIT_SCALES<dtype> &scales, const unsigned (&codes)[4], int b,
                          unsigned h0, unsigned h1, unsigned l0, unsigned l1, int (&j)[4]) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    int first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
    if (FORMAT::odd_shift) {
        const unsigned shifted_codes[4] = {codes[0] << 4, codes[1] << 4, codes[2] << 4,
                                           codes[3] << 4};
        multiply_32<false>(first, shifted_codes, h0, h1);
        multiply_32<false>(first, codes, l0, l1);
        add_scaled(j, first, scales.factor(0, b), scales.factor(1, b));
    } else if (FORMAT::halves) {
        multiply_16(first, codes[0], codes[1], h0);
        multiply_16(second, codes[0], codes[1], l0);
        add_scaled(j, first, second, scales.factor(0, 2 * b), scales.factor(1, 2 * b));
        int more[4] = {0, 0, 0, 0}, rest[4] = {0, 0, 0, 0};
        multiply_16(more, codes[2], codes[3], h1);
        multiply_16(rest, codes[2], codes[3], l1);
        add_scaled(j, more, rest, scales.factor(0, 2 * b + 1), scales.factor(1, 2 * b + 1));
    } else {
        multiply_32<false>(first, codes, h0, h1);
        multiply_32<false>(second, codes, l0, l1);
        add_scaled(j, first, second, scales.factor(0, b), scales.factor(1, b));
    }
}

// j of rows g and g + 8 and tokens 2 t and 2 t + 1 of the first `eights`: elements (row, token).
template <int dtype, int N>
DEVICE void sum_by_warps(const UNIT_SCALES<dtype> &scales, const unsigned char *unit,
                         const unsigned char *planes, int lane, int (&j)[N],
                         unsigned eights = N / 4) {
    UPPER_PLANES<dtype> upper;
    upper.load(unit, lane);
#pragma unroll
    for (int v = 0; v < 4; v++) {
        unsigned codes[2][4];
        unit_operands<dtype>(unit, upper, lane, v, codes[0], codes[1]);
#pragma unroll
        for (int i = 0; i < 4; i++) codes[1][i] >>= UNIT_FORMAT<dtype>::odd_shift;
#pragma unroll
        for (int n = 0; n < N / 4; n++) {
            if (n >= eights) break;
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int b = 2 * v + odd;
                int of_eight[4] = {j[4 * n], j[4 * n + 1], j[4 * n + 2], j[4 * n + 3]};
                // Of both halves of the high parts of m, then of the low ones.
                unsigned m[4];
                load_matrices(m, planes + n * EIGHT_BYTES + b * 512 + lane * 16);
                add_sub_block<dtype>(scales, codes[odd], b, m[0], m[1], m[2], m[3], of_eight);
#pragma unroll
                for (int e = 0; e < 4; e++) j[4 * n + e] = of_eight[e];
            }
        }
    }
}

// Adds the values of scaled sums `j`, minus `p`, to those of the span; `scale` has those of the
// tokens.
template <int dtype, int N, int ALL>
DEVICE void add_values(const UNIT_SCALES<dtype> &scales, const unsigned char *scale, int lane,
                       const int (&j)[N], const int (&p)[N], float (&span)[ALL]) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const int of_eight[4] = {j[4 * n], j[4 * n + 1], j[4 * n + 2], j[4 * n + 3]};
        const int taken[4] = {p[4 * n], p[4 * n + 1], p[4 * n + 2], p[4 * n + 3]};
        float value[4];
        scales.values(of_eight, taken, *(const float2 *)((const float *)scale + 8 * n + lane % 4 * 2),
                      value);
#pragma unroll
        for (int e = 0; e < 4; e++) span[4 * n + e] = span[4 * n + e] + value[e];
    }
}

// The same, single warps multiplying the `sums` of the tokens.
template <int dtype, int N, int ALL>
DEVICE void add_values(const UNIT_SCALES<dtype> &scales, const unsigned char *sums,
                       const unsigned char *scale, int lane, const int (&j)[N],
                       float (&span)[ALL]) {
    int p[N];
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const unsigned *words = (const unsigned *)(sums + n * EIGHT_SUMS_BYTES) + lane;
        int taken[4];
        scales.minima_of(words[0], words[EIGHT_HALF / 4], taken);
#pragma unroll
        for (int e = 0; e < 4; e++) p[4 * n + e] = taken[e];
    }
    add_values(scales, scale, lane, j, p, span);
}

#endif
