// Values of a unit of Q5_K and packed tokens by products of warp groups in binary16. Codes are
// multiplied by their scales first, so that sums cover a whole unit.
//
// A token's integer m is one binary16. A code times its scale, at most 31 * 63, is the sum of two
// parts: integers of magnitude at most 32, one of which counts 64 times. Sums of 256 products with
// |m| up to 2047 are then below 2^24, and the sum of both is rounded once. The sums M of the
// activations of a sub-block, SUM_BASE a + b, are multiplied by minima less 32, and 32 times the sum
// of the unit's activations is added: 8 * 32 * 65504 is below 2^24, too.

#ifndef HALF_SUMS_H
#define HALF_SUMS_H

#include "half_planes.h"
#include "half_products.h"
#include "unit_scales.h"

typedef UNIT_FORMAT<FORMAT_Q5_K> HALF_FORMAT;

// Two equal binary16, by their values; TINY ones are multiples of 2^-24.
#define HALVES_1 0x3C003C00u
#define HALVES_1024 0x64006400u
#define HALVES_MINUS_1024 0xE400E400u
#define HALVES_MINUS_1056 0xE420E420u
#define TINY_32 0x00200020u
#define TINY_MINUS_32 0x80208020u
#define UPPER_BYTES_1024 0x64646464u  // above a byte x: 1024 + x
#define TINY_UNIT 16777216.0f

DEVICE uint4 row_header(const unsigned char *unit, int row) {
    return vector_at(unit + HALF_FORMAT::scales_at + row * HALF_FORMAT::row_scales);
}

// Scales of rows g and g + 8, a byte a sub-block.
struct HALF_SCALES {
    unsigned six[2][2];

    __device__ __forceinline__ void load(const unsigned char *unit, int lane) {
        unsigned minima[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            six_bit_pairs(row_header(unit, lane / 4 + 8 * r), six[r], minima);
    }
    // Of sub-block b, twice as binary16.
    __device__ __forceinline__ unsigned factor(int r, int b) const {
        const unsigned sum =
            __byte_perm(six[r][b / 4], UPPER_BYTES_1024, 0x4040u | b % 4 * 0x0101u);
        return fused_halves(sum, HALVES_1, HALVES_MINUS_1024);
    }
};

// The operand that multiplies sums of activations: the minima of sub-blocks 2 t and 2 t + 1, less
// 32, times SUM_BASE, and themselves.
DEVICE void minima_operand(const unsigned char *unit, int lane, unsigned (&a)[4]) {
    const int t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        unsigned six[2], minima[2];
        six_bit_pairs(row_header(unit, lane / 4 + 8 * r), six, minima);
        const unsigned sum =
            __byte_perm(minima[t / 2], UPPER_BYTES_1024, t % 2 ? 0x4342u : 0x4140u);
        a[2 + r] = fused_halves(sum, HALVES_1, HALVES_MINUS_1056);
        a[r] = multiply_halves(a[2 + r], HALVES_1024);
    }
}

// The operands of half `half` of sub-block b, which count 2^-24 times: bits of integers below 2^11
// are those of subnormal numbers of binary16 and the least normal ones. Of a code times its scale,
// plus 32, `high` has the bits above the low six, and `low` has those, less 32.
DEVICE void scaled_operands(const uint4 &codes, const uint4 &bits, int b, int half,
                            const unsigned (&factor)[2], unsigned (&high)[4], unsigned (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = i % 2, word = 2 * half + r, shift = i / 2 * 8;
        const unsigned nibbles = word_of(codes, word) >> (shift + b % 2 * 4) & 0x000F000Fu;
        const unsigned fifth = shifted(word_of(bits, word) >> shift, 4 - b) & 0x00100010u;
        const unsigned scaled = fused_halves(nibbles | fifth, factor[r], TINY_32);
        high[i] = scaled & 0x07C007C0u;
        low[i] = fused_halves(scaled & 0x003F003Fu, HALVES_1, TINY_MINUS_32);
    }
}

// Adds the values of a unit to those of the span. `high` and `low` are the sums of both parts and
// are changed; `sums` are those of the tokens' sub-blocks, `scale` their words.
template <int N>
DEVICE void add_half_values(const unsigned char *unit, const unsigned char *sums,
                            const unsigned char *scale, int lane, float (&high)[N],
                            float (&low)[N], float (&span)[N]) {
    float d[2], d_min[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const unsigned both = row_header(unit, lane / 4 + 8 * r).x;
        d[r] = half_bits(both & 0xFFFFu) * TINY_UNIT, d_min[r] = half_bits(both >> 16);
    }
#pragma unroll
    for (int i = 0; i < N; i++) high[i] = d[i / 2 % 2] * (high[i] + low[i]);
    unsigned minima[4];
    minima_operand(unit, lane, minima);
    begin_group_product();
    set_halves(low, minima, group_operand(sums, EIGHT_HALF, HALF_EIGHT_SUMS));
    end_group_product();
    await_operands<0>();
    take_sums(low);
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const uint2 words = *(const uint2 *)((const unsigned *)scale + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const unsigned word = e % 2 ? words.y : words.x;
            const float p = __fmaf_rn(32.0f, sum_of_word(word), low[4 * n + e]);
            const float value = high[4 * n + e] - d_min[e / 2] * p;
            // The scale is a power of two, so that only the sum is rounded.
            span[4 * n + e] = __fmaf_rn(value, scale_of_word(word), span[4 * n + e]);
        }
    }
}

#endif
