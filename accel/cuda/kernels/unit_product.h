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

DEVICE uint4 vector_at(const unsigned char *place) { return *(const uint4 *)place; }

// Four nibbles of the low half and of the high half of each byte become the integers of IQ4's or
// E2M1's table.
template <int dtype> DEVICE void look_up(unsigned codes, unsigned &low, unsigned &high) {
    constexpr bool iq4 = dtype != FORMAT_MXFP4;
    constexpr unsigned t0 = iq4 ? 0xBFAD9881u : 0x03020100u, t1 = iq4 ? 0xF6EADDCFu : 0x0C080604u;
    constexpr unsigned t2 = iq4 ? 0x26190D01u : 0xFDFEFF00u, t3 = iq4 ? 0x71594535u : 0xF4F8FAFCu;
    const unsigned places = codes & 0x77777777u, upper = (codes & 0x88888888u) >> 1;
    const unsigned first = __byte_perm(__byte_perm(t0, t1, places), __byte_perm(t2, t3, places),
                                       0x3210u | (upper & 0xFFFFu));
    const unsigned second = __byte_perm(__byte_perm(t0, t1, places >> 16),
                                        __byte_perm(t2, t3, places >> 16), 0x3210u | upper >> 16);
    low = __byte_perm(first, second, 0x6420u);
    high = __byte_perm(first, second, 0x7531u);
}

// The planes of a unit but the nibbles and bytes, which are read where they are needed.
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

// Where of a unit's sums those of columns 16 s .. 16 s + 15 stand.
DEVICE int sum_place(int s) { return s / 2 % 4 * 4 + s % 2 + s / 8 * 2; }

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
            const int m = sums[sum_place(2 * b)] + sums[sum_place(2 * b + 1)];
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
        const int m = sums[sum_place(s)];
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
    const size_t place = (size_t)token * x.units + index;
    alignas(16) short sums[UNIT_SUMS];
    *(uint4 *)sums = ((const uint4 *)(x.sums + place * UNIT_SUMS))[0];
    *(uint4 *)(sums + 8) = ((const uint4 *)(x.sums + place * UNIT_SUMS))[1];
    value[0] = row_value<dtype>(unit, g, sub[0], sums, x.scales[place]);
    value[1] = row_value<dtype>(unit, g + 8, sub[1], sums, x.scales[place]);
}

// What a lane has of the activations of a unit, for one token.
struct LANE_UNIT {
    uint4 words;
    uint2 sums;
    float scale;

    __device__ __forceinline__ void load(const ACTIVATIONS &x, unsigned index, int lane) {
        words = vector_at(x.planes + (size_t)index * UNIT_PLANES + lane * 16);
        sums = *(const uint2 *)(x.sums + (size_t)index * UNIT_SUMS + lane % 4 * 4);
        scale = x.scales[index];
    }
    // Word i as an operand of the columns of a pair: zeros for all but the lane's own.
    __device__ __forceinline__ unsigned of(int pair, int i, int lane) const {
        return lane / 8 == pair ? word_of(words, i) : 0;
    }
};

// One token and the two units of a chunk, in formats of super-blocks. The four pairs of columns take
// sub-blocks in turn, so that every lane has sums to scale.
#define CHUNK_UNITS 2

// What is read of a chunk ahead of its products, whatever its format: the nibbles.
struct CHUNK_NIBBLES {
    uint4 of[CHUNK_UNITS][4];

    __device__ __forceinline__ void load(const unsigned char *chunk, unsigned unit_bytes,
                                         int lane) {
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                of[n][v] = vector_at(chunk + n * unit_bytes + v * 512 + lane * 16);
    }
};

// A lane's sums, with what they are to be multiplied by, by rows: g and g + 8 of the first unit, g and
// g + 8 of the second. Of formats with half blocks `factors` has four bytes a row; else a byte of each
// row's last three words. And d, with its minimum, of the unit and row that the lane ends with.
struct CHUNK_SUMS {
    int of[CHUNK_UNITS][4][4];
    unsigned factors[2 * CHUNK_UNITS], d;
};

// Byte t of one word of every row.
DEVICE unsigned bytes_of(unsigned a, unsigned b, unsigned c, unsigned d, int t) {
    const unsigned both = 0x0040u + 0x0011u * t;
    return __byte_perm(__byte_perm(a, b, both), __byte_perm(c, d, both), 0x5410u);
}

template <int dtype>
DEVICE void load_factors(const unsigned char *chunk, int lane, CHUNK_SUMS &sums) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const int t = lane % 4;
    uint4 row[2 * CHUNK_UNITS];
#pragma unroll
    for (int k = 0; k < 2 * CHUNK_UNITS; k++)
        row[k] = vector_at(chunk + k / 2 * FORMAT::unit_bytes + FORMAT::scales_at +
                           (lane / 4 + k % 2 * 8) * 16);
    if (FORMAT::halves) {
        // Sums 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of the sixteen.
        const unsigned two = 0x0010u + 0x0022u * t;
#pragma unroll
        for (int k = 0; k < 2 * CHUNK_UNITS; k++)
            sums.factors[k] = __byte_perm(__byte_perm(row[k].x, row[k].y, two),
                                          __byte_perm(row[k].z, row[k].w, two), 0x5410u);
    } else {
        sums.factors[0] = bytes_of(row[0].y, row[1].y, row[2].y, row[3].y, t);
        sums.factors[1] = bytes_of(row[0].z, row[1].z, row[2].z, row[3].z, t);
        sums.factors[2] = bytes_of(row[0].w, row[1].w, row[2].w, row[3].w, t);
    }
    const unsigned char *own = chunk + t % 2 * FORMAT::unit_bytes;
    const int last = lane / 4 + 8 * (t / 2);
    sums.d = FORMAT::minima ? *(const unsigned *)(own + FORMAT::scales_at + last * 16)
                            : ((const unsigned short *)(own + FORMAT::rest_at))[last];
}

// Everything of a chunk but its nibbles is read from shared memory here.
template <int dtype>
DEVICE void multiply_chunk(const unsigned char *chunk, const CHUNK_NIBBLES &nibbles,
                           const LANE_UNIT (&x)[CHUNK_UNITS], int lane, CHUNK_SUMS &sums) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    UPPER_PLANES<dtype> upper[CHUNK_UNITS];
#pragma unroll
    for (int n = 0; n < CHUNK_UNITS; n++) upper[n].load(chunk + n * FORMAT::unit_bytes, lane);
    load_factors<dtype>(chunk, lane, sums);
#pragma unroll
    for (int n = 0; n < CHUNK_UNITS; n++) {
        const int m[4] = {(short)x[n].sums.x, (int)x[n].sums.x >> 16, (short)x[n].sums.y,
                          (int)x[n].sums.y >> 16};
#pragma unroll
        for (int q = 0; q < (FORMAT::halves ? 4 : 2); q++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums.of[n][q][e] = e % 2 ? -FORMAT::zero * m[q] : 0;
    }
#pragma unroll
    for (int v = 0; v < 4; v++)
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++) {
            // Sub-blocks 2 v and 2 v + 1 belong to pairs 2 (v % 2) and 2 (v % 2) + 1.
            unsigned even[4], odd[4];
            operands_of<dtype>(nibbles.of[n][v], upper[n], v, even, odd);
            const int first = v % 2 * 2, at = v / 2 * 2;
            if (FORMAT::halves) {
                const unsigned low[4] = {even[0], even[1], odd[0], odd[1]};
                const unsigned high[4] = {even[2], even[3], odd[2], odd[3]};
                multiply_32<false>(sums.of[n][at], low, x[n].of(first, at, lane),
                                   x[n].of(first + 1, at, lane));
                multiply_32<false>(sums.of[n][at + 1], high, x[n].of(first, at + 1, lane),
                                   x[n].of(first + 1, at + 1, lane));
            } else {
                multiply_32<FORMAT::is_signed>(sums.of[n][v / 2], even, x[n].of(first, at, lane),
                                               x[n].of(first, at + 1, lane));
                multiply_32<FORMAT::is_signed>(sums.of[n][v / 2], odd, x[n].of(first + 1, at, lane),
                                               x[n].of(first + 1, at + 1, lane));
            }
        }
}

// Of two numbers of every lane lanes with `second` keep the sums of the second ones, the others those of
// the first, with lanes `apart`.
DEVICE int kept_of(int a, int b, bool second, int apart) {
    return (second ? b : a) + __shfl_xor_sync(ALL_LANES, second ? a : b, apart);
}

// Byte k of a word, signed or not.
DEVICE int signed_byte(unsigned word, int k) { return (signed char)(word >> 8 * k); }

// The value that lane (g, t) ends with: of unit t % 2 and row g + 8 (t / 2).
template <int dtype>
DEVICE float value_of_chunk(const CHUNK_SUMS &sums, const LANE_UNIT (&x)[CHUNK_UNITS], int lane) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const int t = lane % 4;
    const unsigned near = sums.factors[0], minima = sums.factors[1], far = sums.factors[2];
    // Six bits of sub-blocks t and 4 + t of every row, see six_bit_pairs.
    const unsigned first = near & 0x3F3F3F3Fu, second = (far & 0x0F0F0F0Fu) | (near >> 2 & 0x30303030u);
    const unsigned least_first = minima & 0x3F3F3F3Fu;
    const unsigned least_second = (far >> 4 & 0x0F0F0F0Fu) | (minima >> 2 & 0x30303030u);
    int j[2 * CHUNK_UNITS], p[2 * CHUNK_UNITS];
#pragma unroll
    for (int k = 0; k < 2 * CHUNK_UNITS; k++) {
        const int r = k % 2;
        const int(&sum)[4][4] = sums.of[k / 2];
        if (FORMAT::halves) {
            j[k] = 0;
#pragma unroll
            for (int q = 0; q < 4; q++)
                j[k] += signed_byte(sums.factors[k], q) *
                        (16 * sum[q][2 * r] + sum[q][2 * r + 1]);
            continue;
        }
        j[k] = byte_of(first, k) * (16 * sum[0][2 * r] + sum[0][2 * r + 1]) +
               byte_of(second, k) * (16 * sum[1][2 * r] + sum[1][2 * r + 1]);
        // Codes that count 16 times: 2 x 63 x 16 x 15 x 32 x 2047 is less than 2^31.
        if (FORMAT::odd_shift) j[k] >>= t % 2 * FORMAT::odd_shift;
        const unsigned least = __byte_perm(least_first, least_second, 0x4400u + 0x1111u * k);
        p[k] = add_pairs(x[k / 2].sums.x, x[k / 2].sums.y, least);
    }
    const bool odd = t % 2, upper = t / 2;
    const float d = half_bits(sums.d & 0xFFFFu), scale = odd ? x[1].scale : x[0].scale;
    const int all = kept_of(kept_of(j[0], j[2], odd, 1), kept_of(j[1], j[3], odd, 1), upper, 2);
    if (!FORMAT::minima) return d * (float)all * scale;
    const int least = kept_of(kept_of(p[0], p[2], odd, 1), kept_of(p[1], p[3], odd, 1), upper, 2);
    return (d * (float)all - half_bits(sums.d >> 16) * (float)least) * scale;
}

// Whether one token has a path of its own.
template <int dtype> struct SINGLE_TOKEN {
    static constexpr bool quick =
        dtype == FORMAT_Q4_K || dtype == FORMAT_Q5_K || dtype == FORMAT_Q6_K;
};

#endif
