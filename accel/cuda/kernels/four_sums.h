// Values of a unit of Q4_K, Q5_K or Q6_K for up to four tokens.

#ifndef FOUR_SUMS_H
#define FOUR_SUMS_H

#include "unit_scales.h"

// As in unit_values_of_tokens: lane (g, t) gets the values that it stores, of rows g and g + 8 for
// token t of up to four, `tokens` of which exist. Columns of a product are the high and the low
// parts of m of one token after the other, so that a lane has both parts of its own token.
template <int dtype> DEVICE void scaled_values_of_tokens(const unsigned char *unit,
                                                         const ACTIVATIONS &x, unsigned index,
                                                         int tokens, int lane, float (&value)[2]) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const int g = lane / 4, t = lane % 4;
    const size_t column = (size_t)min(g / 2, tokens - 1) * x.units + index;
    const unsigned char *planes = x.planes + column * UNIT_PLANES + (g % 2 * 4 + t) * 16;
    uint4 m[4];
#pragma unroll
    for (int p = 0; p < 4; p++) m[p] = vector_at(planes + p * 128);
    UPPER_PLANES<dtype> upper;
    upper.load(unit, lane);
    UNIT_SCALES<dtype> scales;
    scales.load(unit, lane);
    // Codes that count 16 times are added up by two sub-blocks:
    // 2 x 63 x 16 x 15 x 32 x 2047 is less than 2^31.
    int j[2] = {0, 0}, shifted_j[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int v = 0; v < 4; v++) {
        unsigned a[2][4];
        unit_operands<dtype>(unit, upper, lane, v, a[0], a[1]);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int b = 2 * v + odd;
            const unsigned m0 = word_of(m[b % 4], b / 4 * 2), m1 = word_of(m[b % 4], b / 4 * 2 + 1);
            int first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
            if (FORMAT::halves) {
                multiply_16(first, a[odd][0], a[odd][1], m0);
                multiply_16(second, a[odd][2], a[odd][3], m1);
            } else {
                multiply_32<false>(first, a[odd], m0, m1);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int &total = odd && FORMAT::odd_shift ? shifted_j[v / 2][r] : j[r];
                total += scales.factor(r, FORMAT::halves ? 2 * b : b) *
                         (16 * first[2 * r] + first[2 * r + 1]);
                if (FORMAT::halves)
                    total += scales.factor(r, 2 * b + 1) * (16 * second[2 * r] + second[2 * r + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) j[i % 2] += shifted_j[i / 2][i % 2] >> FORMAT::odd_shift;
    const int both[4] = {j[0], 0, j[1], 0};
    const float scale = x.scales[(size_t)min(t, tokens - 1) * x.units + index];
    float values[4];
    const uint2 sums = *(const uint2 *)(x.sums + column * UNIT_SUMS + t * 4);
    int p[4];
    scales.minima_of(sums, p);
    scales.values(both, p, {scale, scale}, values);
    value[0] = values[0], value[1] = values[2];
}

#endif
