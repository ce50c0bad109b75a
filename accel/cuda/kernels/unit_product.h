// Products of one unit of units.h with quantized activations, by rule R5.
//
// Activations of a token lie in shared memory so that a lane reads what it needs for a unit at
// once. m = 16 high + low, bytes -128..127 and 0..15; for each unit of 256 columns:
//   planes 512 bytes: 16 a lane; lane (g, t) = (lane / 4, lane % 4) has of plane g % 2 (0: high)
//   the
//                     columns 32 (g / 2) + 4 t + (0..3), 16 and 128 more, and 16 and 128
//   sums   16 shorts: of 16 columns each; of t = 0..3 in turn those of the columns 32 t, 32 t + 16,
//                     128 + 32 t, 128 + 32 t + 16
//   scale  a float

#ifndef UNIT_PRODUCT_H
#define UNIT_PRODUCT_H

#include "units.h"
#include "warp.h"

#define UNIT_PLANES 512
#define UNIT_SUMS 16

// Quantized activations of one token or, a stride of `units` apart, of several. Where `in_eights`
// they are those of one token of eight that lie together, by units: planes 4,096 bytes, for every
// sub-block the high and then the low bytes of two halves of 16 columns, of each half 16 bytes a
// token; sums as two such halves, their high and their low bytes; scales a float a token.
struct ACTIVATIONS {
    unsigned char *planes;
    short *sums;
    float *scales;
    unsigned units;
    bool in_eights;
};
#define EIGHT_BYTES (8 * UNIT_PLANES)
#define EIGHT_HALF (8 * 16)
#define EIGHT_SUMS_BYTES (8 * UNIT_SUMS * 2)

DEVICE uint4 vector_at(const unsigned char *address) { return *(const uint4 *)address; }

// Converts four nibbles of the low half and of the high half of each byte to the integers of IQ4's
// or E2M1's table.
template <int dtype> DEVICE void look_up(unsigned codes, unsigned &low, unsigned &high) {
    constexpr bool iq4 = dtype != FORMAT_MXFP4;
    constexpr unsigned t0 = iq4 ? 0xBFAD9881u : 0x03020100u, t1 = iq4 ? 0xF6EADDCFu : 0x0C080604u;
    constexpr unsigned t2 = iq4 ? 0x26190D01u : 0xFDFEFF00u, t3 = iq4 ? 0x71594535u : 0xF4F8FAFCu;
    const unsigned indices = codes & 0x77777777u, upper = (codes & 0x88888888u) >> 1;
    const unsigned first = __byte_perm(__byte_perm(t0, t1, indices), __byte_perm(t2, t3, indices),
                                       0x3210u | (upper & 0xFFFFu));
    const unsigned second = __byte_perm(__byte_perm(t0, t1, indices >> 16),
                                        __byte_perm(t2, t3, indices >> 16), 0x3210u | upper >> 16);
    low = __byte_perm(first, second, 0x6420u);
    high = __byte_perm(first, second, 0x7531u);
}

// The planes of a unit except nibbles and bytes, which are read when they are needed.
template <int dtype> struct UPPER_PLANES {
    uint4 pairs[2], bits;
    __device__ __forceinline__ void load(const unsigned char *unit, int lane) {
        typedef UNIT_FORMAT<dtype> FORMAT;
        if (FORMAT::pairs) {
            pairs[0] = vector_at(unit + FORMAT::pairs_at + lane * 16);
            pairs[1] = vector_at(unit + FORMAT::pairs_at + 512 + lane * 16);
        }
        if (FORMAT::bits) bits = vector_at(unit + FORMAT::bits_at + lane * 16);
    }
};

DEVICE unsigned word_of(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

DEVICE unsigned shifted(unsigned word, int left) { return left < 0 ? word >> -left : word << left; }

// Sub-blocks 2 v and 2 v + 1 as operands of a product, of a format whose codes are not bytes. Where
// odd_shift is not 0 the second counts 2^odd_shift times; codes of six bits may all count 2^left times.
template <int dtype, int left = 0>
DEVICE void operands_of(const uint4 &nibbles, const UPPER_PLANES<dtype> &upper, int v,
                        unsigned (&even)[4], unsigned (&odd)[4]) {
    typedef UNIT_FORMAT<dtype> FORMAT;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const unsigned x = word_of(nibbles, r);
        if (FORMAT::table) {
            look_up<dtype>(x, even[r], odd[r]);
            continue;
        }
        if (FORMAT::nibbles && FORMAT::pairs && left == 0) {
            // What shifts move into another byte is in its low half, which is not selected.
            const unsigned p = word_of(upper.pairs[v / 2], r), nibble = 0x0F0F0F0Fu;
            const unsigned near = selected_bits(p, 0, 0x33333333u);
            const unsigned far = selected_bits(p, 0, 0xCCCCCCCCu);
            even[r] = selected_bits(x, shifted(near, v % 2 ? 0 : 4), nibble);
            odd[r] = selected_bits(x >> 4, shifted(far, v % 2 ? -2 : 2), nibble);
            continue;
        }
        even[r] = shifted(x, left) & 0x0F0F0F0Fu << left;
        odd[r] = FORMAT::odd_shift ? x & 0xF0F0F0F0u : shifted(x, left - 4) & 0x0F0F0F0Fu << left;
        int above = left + (FORMAT::nibbles ? 4 : 0);
        if (FORMAT::pairs) {
            const unsigned p = word_of(upper.pairs[v / 2], r), mask = 0x03030303u << above;
            even[r] |= shifted(p, above - v % 2 * 4) & mask;
            odd[r] |= shifted(p, above - v % 2 * 4 - 2) & mask;
            above += 2;
        }
        if (FORMAT::bits) {
            const unsigned b = word_of(upper.bits, r), mask = 0x01010101u << above;
            even[r] |= shifted(b, above - 2 * v) & mask;
            odd[r] |= shifted(b, above - 2 * v - 1) & mask;
        }
    }
}

// The same of any format, as it lies in shared memory.
template <int dtype, int left = 0>
DEVICE void unit_operands(const unsigned char *unit, const UPPER_PLANES<dtype> &upper, int lane, int v,
                          unsigned (&even)[4], unsigned (&odd)[4]) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    if (FORMAT::bytes) {
        const uint4 a = vector_at(unit + 2 * v * 512 + lane * 16);
        const uint4 b = vector_at(unit + (2 * v + 1) * 512 + lane * 16);
#pragma unroll
        for (int r = 0; r < 4; r++) even[r] = word_of(a, r), odd[r] = word_of(b, r);
        return;
    }
    const uint4 nibbles = FORMAT::nibbles ? vector_at(unit + v * 512 + lane * 16) : uint4{};
    operands_of<dtype, left>(nibbles, upper, v, even, odd);
}

DEVICE int byte_of(unsigned word, int i) { return (int)(word >> 8 * i & 0xFFu); }

// The 6-bit scales and minima of eight sub-blocks, a byte each, of a row's 16 bytes.
DEVICE void six_bit_pairs(const uint4 &row, unsigned (&scales)[2], unsigned (&minima)[2]) {
    scales[0] = row.y & 0x3F3F3F3Fu;
    scales[1] = (row.w & 0x0F0F0F0Fu) | (row.y >> 2 & 0x30303030u);
    minima[0] = row.z & 0x3F3F3F3Fu;
    minima[1] = (row.w >> 4 & 0x0F0F0F0Fu) | (row.z >> 2 & 0x30303030u);
}

// The index of the sum of columns 16 s .. 16 s + 15 among a unit's sums.
DEVICE int sum_index(int s) { return s / 2 % 4 * 4 + s % 2 + s / 8 * 2; }

// 2^(e - 128), +0 where that is subnormal.
DEVICE float exponent_scale(unsigned e) { return __uint_as_float(e < 2 ? 0u : (e - 1) << 23); }

// The scale of sub-block b of IQ4_XS.
DEVICE int iq4_xs_factor(const unsigned char *scales, int b) {
    const unsigned high = ((const unsigned short *)scales)[1], low = ((const unsigned *)scales)[1];
    return (int)((low >> 4 * b & 15) | (high >> 2 * b & 3) << 4) - 32;
}

// The scale of half block s of Q2_K, Q3_K and Q6_K.
template <int dtype> DEVICE int half_block_factor(const unsigned char *scales, int s) {
    if (dtype == FORMAT_Q2_K) return scales[s] & 15;
    if (dtype == FORMAT_Q6_K) return (signed char)scales[s];
    return (int)((scales[s % 8] >> s / 8 * 4 & 15) | (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4) -
           32;
}

// One row's value for one token: sums of products q m by sub-block, of m, the activation's scale.
// `sub` has 8 sums, of 16 columns 16; zeros of codes are still in them. Q4_K, Q5_K and Q6_K: four_sums.h.
template <int dtype> DEVICE float row_value(const unsigned char *unit, int row, const int *sub,
                                            const short *sums, float scale) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const unsigned char *scales = unit + FORMAT::scales_at + row * FORMAT::row_scales;
    const unsigned char *rest = unit + FORMAT::rest_at + row * FORMAT::row_rest;
    if (!FORMAT::super) {
        float segment = 0.0f;
#pragma unroll
        for (int b = 0; b < 8; b++) {
            const int m = sums[sum_index(2 * b)] + sums[sum_index(2 * b + 1)];
            const float d = dtype == FORMAT_MXFP4 ? exponent_scale(scales[b])
                                                  : half_bits(((const unsigned short *)scales)[b]);
            const int dot = (b % 2 ? sub[b] >> FORMAT::odd_shift : sub[b]) - FORMAT::zero * m;
            float term = d * (float)dot;
            if (FORMAT::minima)
                term = term + half_bits(((const unsigned short *)rest)[b]) * (float)m;
            segment = segment + term;
        }
        return segment * scale;
    }
    int j = 0, p = 0;
    if (dtype == FORMAT_IQ4_XS) {
#pragma unroll
        for (int b = 0; b < 8; b++) j += iq4_xs_factor(scales, b) * sub[b];
        return half_bits(*(const unsigned short *)scales) * (float)j * scale;
    }
#pragma unroll
    for (int s = 0; s < 16; s++) {
        const int m = sums[sum_index(s)];
        if (FORMAT::minima) p += (scales[s] >> 4) * m;
        j += half_block_factor<dtype>(scales, s) * (sub[s] - FORMAT::zero * m);
    }
    const float d = half_bits(*(const unsigned short *)rest);
    if (!FORMAT::minima) return d * (float)j * scale;
    return (d * (float)j - half_bits(((const unsigned short *)rest)[1]) * (float)p) * scale;
}

// Values of rows g and g + 8 of a unit for token t of up to four, `tokens` of which exist: lane
// (g, t) gets what it stores. Every sub-block has a product of its own. Q4_K, Q5_K and Q6_K: four_sums.h.
template <int dtype> DEVICE void unit_values_of_tokens(const unsigned char *unit,
                                                       const ACTIVATIONS &x, unsigned index,
                                                       int tokens, int lane, float (&value)[2]) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const int g = lane / 4, t = lane % 4, column = min(g / 2, tokens - 1),
              token = min(t, tokens - 1);
    const unsigned char *planes =
        x.planes + ((size_t)column * x.units + index) * UNIT_PLANES + (g % 2 * 4 + t) * 16;
    uint4 b[4];
#pragma unroll
    for (int p = 0; p < 4; p++) b[p] = vector_at(planes + p * 128);
    UPPER_PLANES<dtype> upper;
    upper.load(unit, lane);
    constexpr int subs = FORMAT::halves ? 16 : 8;
    int sub[2][subs];
#pragma unroll
    for (int v = 0; v < 4; v++) {
        unsigned a[2][4];
        unit_operands<dtype>(unit, upper, lane, v, a[0], a[1]);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int j = 2 * v + odd;
            const unsigned b0 = word_of(b[j % 4], j / 4 * 2), b1 = word_of(b[j % 4], j / 4 * 2 + 1);
            if (FORMAT::halves) {
                int first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
                multiply_16(first, a[odd][0], a[odd][1], b0);
                multiply_16(second, a[odd][2], a[odd][3], b1);
                sub[0][2 * j % subs] = 16 * first[0] + first[1];
                sub[1][2 * j % subs] = 16 * first[2] + first[3];
                sub[0][(2 * j + 1) % subs] = 16 * second[0] + second[1];
                sub[1][(2 * j + 1) % subs] = 16 * second[2] + second[3];
            } else {
                int sum[4] = {0, 0, 0, 0};
                multiply_32<FORMAT::is_signed>(sum, a[odd], b0, b1);
                sub[0][j] = 16 * sum[0] + sum[1];
                sub[1][j] = 16 * sum[2] + sum[3];
            }
        }
    }
    const size_t unit_index = (size_t)token * x.units + index;
    alignas(16) short sums[UNIT_SUMS];
    *(uint4 *)sums = ((const uint4 *)(x.sums + unit_index * UNIT_SUMS))[0];
    *(uint4 *)(sums + 8) = ((const uint4 *)(x.sums + unit_index * UNIT_SUMS))[1];
    value[0] = row_value<dtype>(unit, g, sub[0], sums, x.scales[unit_index]);
    value[1] = row_value<dtype>(unit, g + 8, sub[1], sums, x.scales[unit_index]);
}

#endif
