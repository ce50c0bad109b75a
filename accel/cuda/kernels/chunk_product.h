// The product of one token with a chunk: CHUNK_UNITS consecutive units of a row of weights. Only
// Q4_K, Q5_K and Q6_K have it; SINGLE_TOKEN tells whether a format does.

#ifndef CHUNK_PRODUCT_H
#define CHUNK_PRODUCT_H

#include "unit_product.h"

// One token and the two units of a chunk, in formats of super-blocks. Columns of a product are four
// pairs, of the high and the low part of m: pairs 0 and 2 have the first unit, 1 and 3 the second;
// 0 and 1 have its even sub-blocks, 2 and 3 its odd ones. So lane t of four has sums of unit t % 2
// and of sub-blocks 2 v + t / 2.
#define CHUNK_UNITS 2

// A lane's part of the activations of a chunk: m as operands of the lane's column, by v % 2 and
// v / 2, and sums of 16 columns for its results.
struct LANE_CHUNK {
    uint4 words[2];
    uint2 sums[2];
    float scale;

    // Instead of a unit behind the `last` one it loads that one.
    __device__ __forceinline__ void load(const ACTIVATIONS &x, unsigned first, unsigned last,
                                         int lane) {
        const unsigned unit = min(first + lane / 8 % 2, last), own = min(first + lane % 2, last);
        const unsigned char *planes = x.planes + (size_t)unit * UNIT_PLANES + lane / 16 * 128 +
                                      lane / 4 % 2 * 64 + lane % 4 * 16;
        const short *shorts = x.sums + (size_t)own * UNIT_SUMS + lane / 2 % 2 * 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            words[i] = vector_at(planes + 256 * i);
            sums[i] = *(const uint2 *)(shorts + 8 * i);
        }
        scale = x.scales[own];
    }
    // Columns from 16 `half` on of sub-blocks 2 v and 2 v + 1, as an operand of the columns of unit
    // n: zeros for all other lanes.
    __device__ __forceinline__ unsigned of(int n, int v, int half, int lane) const {
        return lane / 8 % 2 == n ? word_of(words[v % 2], v / 2 * 2 + half) : 0;
    }
    // The same of sub-block 2 v + odd.
    __device__ __forceinline__ unsigned of_one(int n, int v, int odd, int half, int lane) const {
        return lane / 8 == n + 2 * odd ? word_of(words[v % 2], v / 2 * 2 + half) : 0;
    }
};

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

// A lane's sums by v, of a unit's rows g (elements 0 and 1) and g + 8. If nibbles are not moved,
// the first ones are those of whole bytes, the second ones those of high halves: the lanes of even
// sub-blocks need the difference, those of odd ones the latter. For formats with half blocks they
// are of 16 columns each, and `factors` has four bytes for each row and v / 2; otherwise
// it has bytes of the last three words of both rows, of sub-blocks t / 2 and 2 + t / 2. Then d and
// its minimum, for the unit and row of the lane's final value.
struct CHUNK_SUMS {
    int of[4][2][4];
    unsigned factors[4], d;
};

template <int dtype>
DEVICE void load_factors(const unsigned char *chunk, int lane, CHUNK_SUMS &sums) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const int odd = lane / 2 % 2;
    const unsigned char *own = chunk + lane % 2 * FORMAT::unit_bytes;
    uint4 row[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        row[r] = vector_at(own + FORMAT::scales_at + (lane / 4 + r * 8) * 16);
    if (FORMAT::halves) {
        const unsigned two = odd ? 0x7632u : 0x5410u;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sums.factors[2 * r] = __byte_perm(row[r].x, row[r].y, two);
            sums.factors[2 * r + 1] = __byte_perm(row[r].z, row[r].w, two);
        }
        sums.d = ((const unsigned short *)(own + FORMAT::rest_at))[lane / 4 + 8 * odd];
    } else {
        const unsigned two = 0x6420u + 0x1111u * odd;
        sums.factors[0] = __byte_perm(row[0].y, row[1].y, two);
        sums.factors[1] = __byte_perm(row[0].z, row[1].z, two);
        sums.factors[2] = __byte_perm(row[0].w, row[1].w, two);
        sums.d = odd ? row[1].x : row[0].x;
    }
}

// All data of a chunk except its nibbles is read from shared memory here.
template <int dtype>
DEVICE void multiply_chunk(const unsigned char *chunk, const CHUNK_NIBBLES &nibbles,
                           const LANE_CHUNK &x, int lane, CHUNK_SUMS &sums) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    UPPER_PLANES<dtype> upper[CHUNK_UNITS];
#pragma unroll
    for (int n = 0; n < CHUNK_UNITS; n++) upper[n].load(chunk + n * FORMAT::unit_bytes, lane);
    load_factors<dtype>(chunk, lane, sums);
#pragma unroll
    for (int i = 0; i < 32; i++) sums.of[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
    for (int n = 0; n < CHUNK_UNITS; n++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            int(&sum)[2][4] = sums.of[v];
            if (FORMAT::odd_shift) {
                const uint4 &both = nibbles.of[n][v];
                const unsigned low = x.of(n, v, 0, lane), high = x.of(n, v, 1, lane);
                const unsigned bytes[4] = {both.x, both.y, both.z, both.w};
                const unsigned halves[4] = {both.x & 0xF0F0F0F0u, both.y & 0xF0F0F0F0u,
                                            both.z & 0xF0F0F0F0u, both.w & 0xF0F0F0F0u};
                multiply_32<false>(sum[0], bytes, low, high);
                multiply_32<false>(sum[1], halves, low, high);
                continue;
            }
            unsigned even[4], odd[4];
            operands_of<dtype>(nibbles.of[n][v], upper[n], v, even, odd);
            if (FORMAT::halves) {
                const unsigned low[4] = {even[0], even[1], odd[0], odd[1]};
                const unsigned high[4] = {even[2], even[3], odd[2], odd[3]};
                multiply_32<false>(sum[0], low, x.of_one(n, v, 0, 0, lane),
                                   x.of_one(n, v, 1, 0, lane));
                multiply_32<false>(sum[1], high, x.of_one(n, v, 0, 1, lane),
                                   x.of_one(n, v, 1, 1, lane));
            } else {
                multiply_32<FORMAT::is_signed>(sum[0], even, x.of_one(n, v, 0, 0, lane),
                                               x.of_one(n, v, 0, 1, lane));
                multiply_32<FORMAT::is_signed>(sum[0], odd, x.of_one(n, v, 1, 0, lane),
                                               x.of_one(n, v, 1, 1, lane));
            }
        }
}

// Each lane has two numbers. Lanes with `second` keep the sums of the second ones, the others those
// of the first; the lanes that are added are `apart` apart.
DEVICE int kept_of(int a, int b, bool second, int apart) {
    return (second ? b : a) + __shfl_xor_sync(ALL_LANES, second ? a : b, apart);
}

// Scaled sums of row g + 8 r of the lane's unit, of half of its columns, before those of minima.
template <int dtype>
DEVICE int scaled_sum(const CHUNK_SUMS &sums, const unsigned (&factors)[2], const LANE_CHUNK &x,
                      int r, bool odd) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    unsigned all = 0, high = 0;
#pragma unroll
    for (int v = 0; v < 4; v++) {
        const int(&sum)[2][4] = sums.of[v];
        if (FORMAT::halves) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                all += signed_byte(sums.factors[2 * r + v / 2], v % 2 * 2 + half) *
                       (16 * sum[half][2 * r] + sum[half][2 * r + 1]);
            continue;
        }
        const unsigned factor = byte_of(factors[v / 2], 2 * r + v % 2);
        all += factor * (16 * sum[0][2 * r] + sum[0][2 * r + 1]);
        // Codes of high halves count 16 times.
        if (FORMAT::odd_shift) high += factor * (sum[1][2 * r] + (sum[1][2 * r + 1] >> 4));
    }
    // Zeros of codes.
    if (FORMAT::zero)
        all -= FORMAT::zero * (add_pairs<true>(x.sums[0].x, x.sums[1].x, sums.factors[2 * r]) +
                               add_pairs<true>(x.sums[0].y, x.sums[1].y, sums.factors[2 * r + 1]));
    // Both sums may exceed 32 bits, the difference does not.
    if (FORMAT::odd_shift) all = all * (odd ? 0u : 1u) + high * (odd ? 1u : -16u);
    return (int)all;
}

// The final value of lane (g, t): of unit t % 2 and row g + 8 (t / 2).
template <int dtype>
DEVICE float value_of_chunk(const CHUNK_SUMS &sums, const LANE_CHUNK &x, int lane) {
    typedef UNIT_FORMAT<dtype> FORMAT;
    const bool odd = lane / 2 % 2;
    const unsigned near = sums.factors[0], minima = sums.factors[1], far = sums.factors[2];
    // Six bits of sub-blocks s and 4 + s of both rows, see six_bit_pairs.
    const unsigned factors[2] = {near & 0x3F3F3F3Fu,
                                 (far & 0x0F0F0F0Fu) | (near >> 2 & 0x30303030u)};
    const int all = kept_of(scaled_sum<dtype>(sums, factors, x, 0, odd),
                            scaled_sum<dtype>(sums, factors, x, 1, odd), odd, 2);
    const float d = half_bits(sums.d & 0xFFFFu);
    if (!FORMAT::minima) return d * (float)all * x.scale;
    const unsigned first = minima & 0x3F3F3F3Fu;
    const unsigned second = (far >> 4 & 0x0F0F0F0Fu) | (minima >> 2 & 0x30303030u);
    int p[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 4; k++)
        p[k / 2] += add_pairs(x.sums[k % 2].x, x.sums[k % 2].y,
                              __byte_perm(first, second, 0x4400u + 0x1111u * k));
    const int least = kept_of(p[0], p[1], odd, 2);
    return (d * (float)all - half_bits(sums.d >> 16) * (float)least) * x.scale;
}

// Whether one token has a path of its own.
template <int dtype> struct SINGLE_TOKEN {
    static constexpr bool quick =
        dtype == FORMAT_Q4_K || dtype == FORMAT_Q5_K || dtype == FORMAT_Q6_K;
};

#endif
