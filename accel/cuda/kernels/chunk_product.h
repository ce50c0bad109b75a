// The product of one token with a chunk: CHUNK_UNITS consecutive units of a row of weights. Only
// Q4_K, Q5_K and Q6_K have it; SINGLE_TOKEN tells whether a format does.

#ifndef CHUNK_PRODUCT_H
#define CHUNK_PRODUCT_H

#include "unit_product.h"

// A lane's part of the activations of a unit, for one token.
struct LANE_UNIT {
    uint4 words;
    uint2 sums;
    float scale;

    __device__ __forceinline__ void load(const ACTIVATIONS &x, unsigned index, int lane) {
        words = vector_at(x.planes + (size_t)index * UNIT_PLANES + lane * 16);
        sums = *(const uint2 *)(x.sums + (size_t)index * UNIT_SUMS + lane % 4 * 4);
        scale = x.scales[index];
    }
    // Word i as an operand of the columns of a pair: zeros for all lanes but the pair's own.
    __device__ __forceinline__ unsigned of(int pair, int i, int lane) const {
        return lane / 8 == pair ? word_of(words, i) : 0;
    }
    // The same of two pairs.
    __device__ __forceinline__ unsigned of_two(int pairs, int i, int lane) const {
        return lane / 16 == pairs ? word_of(words, i) : 0;
    }
};

// One token and the two units of a chunk, in formats of super-blocks. The four pairs of columns take
// sub-blocks in turn, so that every lane has sums to scale.
#define CHUNK_UNITS 2

// The data of a chunk that is read before its products, in any format: the nibbles.
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

// A lane's sums and their factors by rows: g and g + 8 of the first unit, g and g + 8 of the
// second. If nibbles are not moved, the first two sums are those of whole bytes, the last two those
// of high halves: the lanes of even pairs need the difference, those of odd ones the latter. For
// formats with half blocks `factors` has four bytes a row; otherwise a byte of each row's last
// three words. Then d and its minimum, for the unit and row of the lane's final value.
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

// All data of a chunk except its nibbles is read from shared memory here.
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
        for (int q = 0; q < (FORMAT::halves || FORMAT::odd_shift ? 4 : 2); q++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums.of[n][q][e] = e % 2 ? -FORMAT::zero * m[q] : 0;
    }
#pragma unroll
    for (int v = 0; v < 4; v++)
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++) {
            // Sub-blocks 2 v and 2 v + 1 belong to pairs 2 (v % 2) and 2 (v % 2) + 1.
            const int first = v % 2 * 2, at = v / 2 * 2;
            if (FORMAT::odd_shift) {
                const uint4 &both = nibbles.of[n][v];
                const unsigned low = x[n].of_two(v % 2, at, lane);
                const unsigned high = x[n].of_two(v % 2, at + 1, lane);
                const unsigned bytes[4] = {both.x, both.y, both.z, both.w};
                const unsigned halves[4] = {both.x & 0xF0F0F0F0u, both.y & 0xF0F0F0F0u,
                                            both.z & 0xF0F0F0F0u, both.w & 0xF0F0F0F0u};
                multiply_32<false>(sums.of[n][v / 2], bytes, low, high);
                multiply_32<false>(sums.of[n][2 + v / 2], halves, low, high);
                continue;
            }
            unsigned even[4], odd[4];
            operands_of<dtype>(nibbles.of[n][v], upper[n], v, even, odd);
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

// Each lane has two numbers. Lanes with `second` keep the sums of the second ones, the others those
// of the first; the lanes that are added are `apart` apart.
DEVICE int kept_of(int a, int b, bool second, int apart) {
    return (second ? b : a) + __shfl_xor_sync(ALL_LANES, second ? a : b, apart);
}

// The final value of lane (g, t): of unit t % 2 and row g + 8 (t / 2).
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
        int total[2];
#pragma unroll
        for (int q = 0; q < 2; q++) {
            total[q] = 16 * sum[q][2 * r] + sum[q][2 * r + 1];
            if (!FORMAT::odd_shift) continue;
            const int high = 16 * sum[2 + q][2 * r] + sum[2 + q][2 * r + 1];
            total[q] = total[q] * (t % 2 ? 0 : 1) + high * (t % 2 ? 1 : -1);
        }
        j[k] = byte_of(first, k) * total[0] + byte_of(second, k) * total[1];
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
