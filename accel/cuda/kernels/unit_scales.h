// Scales of rows g and g + 8 of a unit of Q4_K, Q5_K or Q6_K, for products of many tokens.

#ifndef UNIT_SCALES_H
#define UNIT_SCALES_H

#include "unit_product.h"

// `sums` multiplies the sums of activations: minima or, for codes with a zero, the scales.
template <int dtype> struct UNIT_SCALES {
    typedef UNIT_FORMAT<dtype> FORMAT;
    static constexpr int words = FORMAT::halves ? 4 : 2;
    unsigned factors[2][words], sums[2];
    float d[2], d_min[2];

    __device__ __forceinline__ void load(const unsigned char *unit, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const unsigned char *scales =
                unit + FORMAT::scales_at + (g + 8 * r) * FORMAT::row_scales;
            const uint4 header = vector_at(scales);
            if (FORMAT::halves) {
#pragma unroll
                for (int i = 0; i < words; i++) factors[r][i] = word_of(header, i);
                sums[r] = ((const unsigned short *)scales)[t] |
                          (unsigned)((const unsigned short *)scales)[4 + t] << 16;
                d[r] = half_bits(((const unsigned short *)(unit + FORMAT::rest_at))[g + 8 * r]);
            } else {
                unsigned six[2], minima[2];
                six_bit_pairs(header, six, minima);
                factors[r][0] = six[0], factors[r][1] = six[1];
                sums[r] = byte_of(minima[0], t) * 0x0101u | byte_of(minima[1], t) * 0x01010000u;
                d[r] = half_bits(header.x & 0xFFFFu), d_min[r] = half_bits(header.x >> 16);
            }
        }
    }
    // Of sub-block s, of 16 columns where there are such.
    __device__ __forceinline__ int factor(int r, int s) const {
        const unsigned word = factors[r][s / 4];
        return FORMAT::halves ? (int)(word << (24 - s % 4 * 8)) >> 24 : byte_of(word, s % 4);
    }
    // The number to be subtracted, as sums of activations times `sums`, for both rows and two
    // tokens: elements (row, token). The lane multiplies the high and the low bytes of its token's
    // sums.
    __device__ __forceinline__ void minima_of(unsigned high_bytes, unsigned low_bytes,
                                              int (&p)[4]) const {
        int high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};
        multiply_sums<FORMAT::halves>(high, low, sums[0], sums[1], high_bytes, low_bytes);
#pragma unroll
        for (int e = 0; e < 4; e++) p[e] = 256 * high[e] + low[e];
    }
    // The same of four sums of 16 bits.
    __device__ __forceinline__ void minima_of(const uint2 &token_sums, int (&p)[4]) const {
        minima_of(__byte_perm(token_sums.x, token_sums.y, 0x7531),
                  __byte_perm(token_sums.x, token_sums.y, 0x6420), p);
    }
    // Values from the scaled sums; `scale` has those of the two tokens.
    __device__ __forceinline__ void values(const int (&j)[4], const int (&p)[4], const float2 &scale,
                                           float (&value)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = e / 2;
            const float of_token = e % 2 ? scale.y : scale.x;
            if (FORMAT::minima)
                value[e] = (d[r] * (float)j[e] - d_min[r] * (float)p[e]) * of_token;
            else
                value[e] = d[r] * (float)(j[e] - FORMAT::zero * p[e]) * of_token;
        }
    }
};

#endif
