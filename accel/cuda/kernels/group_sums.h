// Scaled sums of a unit and packed tokens in groups of eight (unit_product.h) by products of warp
// groups, in one of two ways: sums of sub-blocks multiplied by their scales, or sums of codes that
// were multiplied by the scales before.

#ifndef GROUP_SUMS_H
#define GROUP_SUMS_H

#include "groups.h"
#include "unit_scales.h"

// Of the operand of a unit's first sub-block that of part `low` of m of sub-block b.
DEVICE U64 tokens_operand(U64 first, int b, int low) {
    return operand_behind(first, b * 512 + low * 256);
}

template <int dtype, int N>
DEVICE void add_scaled_sums(const UNIT_SCALES<dtype> &scales, int b, const int (&sum)[N],
                            int (&j)[N]) {
#pragma unroll
    for (int e = 0; e < N; e++) j[e] += scales.factor(e / 2 % 2, b) * sum[e];
}

// Calls use(b, codes) for every sub-block of a unit, with codes as unit_operands has them.
template <int dtype, int left = 0, class USE>
DEVICE void for_sub_blocks(const unsigned char *unit, const UPPER_PLANES<dtype> &upper, int lane,
                           const USE &use) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
        unsigned codes[2][4];
        unit_operands<dtype, left>(unit, upper, lane, v, codes[0], codes[1]);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) use(2 * v + odd, codes[odd]);
    }
}

// Codes of four bits: in one sum, 16 times the codes multiply the high parts, and the codes
// themselves the low ones. `ahead`: two such sums are used in turn, and the sums of activations
// times minima are two more, in which high and low bytes are the halves of one operand and minima
// meet zeros in the other.
template <int dtype, bool ahead, int N, class WORK>
DEVICE void sum_narrow_codes(const UNIT_SCALES<dtype> &scales, const unsigned char *unit,
                             const UPPER_PLANES<dtype> &upper, U64 tokens, U64 token_sums, int lane,
                             int (&j)[N], int (&p)[N], const WORK &meanwhile) {
    constexpr int sums = ahead ? 2 : 1;
    int sum[sums][N] = {};
    for_sub_blocks<dtype>(unit, upper, lane, [&](int b, const unsigned(&codes)[4]) {
        unsigned small[4], large[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            small[i] = b % 2 ? codes[i] >> 4 : codes[i];
            large[i] = b % 2 ? codes[i] : codes[i] << 4;
        }
        begin_group_product();
        multiply_group(sum[b % sums], large, tokens_operand(tokens, b, 0), false);
        multiply_group(sum[b % sums], small, tokens_operand(tokens, b, 1), true);
        end_group_product();
        if (b == 0) meanwhile();
        if (!ahead) {
            await_operands<0>();
            take_sums(sum[0]);
            add_scaled_sums<dtype>(scales, b, sum[0], j);
        } else if (b > 0) {
            await_operands<1>();
            take_sums(sum[(b - 1) % sums]);
            add_scaled_sums<dtype>(scales, b - 1, sum[(b - 1) % sums], j);
        }
    });
    if (!ahead) return;
    constexpr int last = (UNIT_SUB_BLOCKS - 1) % sums;
    const unsigned none = hidden_zero();
    const unsigned high[4] = {scales.sums[0], scales.sums[1], none, none};
    const unsigned low[4] = {none, none, scales.sums[0], scales.sums[1]};
    begin_group_product();
    multiply_group(sum[1 - last], high, token_sums, false);
    end_group_product();
    await_operands<1>();
    take_sums(sum[last]);
    add_scaled_sums<dtype>(scales, UNIT_SUB_BLOCKS - 1, sum[last], j);
    begin_group_product();
    multiply_unsigned_group(sum[last], low, token_sums, false);
    end_group_product();
    await_operands<0>();
    take_sums(sum[0]);
    take_sums(sum[sums - 1]);
#pragma unroll
    for (int e = 0; e < N; e++) p[e] = 256 * sum[1 - last][e] + sum[last][e];
}

// Codes of five bits: a sum for each part.
template <int dtype, int N, class WORK>
DEVICE void sum_wide_codes(const UNIT_SCALES<dtype> &scales, const unsigned char *unit,
                           const UPPER_PLANES<dtype> &upper, U64 tokens, int lane, int (&j)[N],
                           const WORK &meanwhile) {
    int high[N] = {}, low[N] = {};
    for_sub_blocks<dtype>(unit, upper, lane, [&](int b, const unsigned(&codes)[4]) {
        begin_group_product();
        multiply_group(high, codes, tokens_operand(tokens, b, 0), false);
        multiply_group(low, codes, tokens_operand(tokens, b, 1), false);
        end_group_product();
        if (b == 0) meanwhile();
        await_operands<0>();
        take_sums(high);
        take_sums(low);
#pragma unroll
        for (int e = 0; e < N; e++) high[e] = 16 * high[e] + low[e];
        add_scaled_sums<dtype>(scales, b, high, j);
    });
}

#define CODE_SHIFT 2  // of codes that are bytes then

// The integers of a word's codes times the scale of their sub-block, as 64 high + low / 4 in bytes:
// high bytes are signed, low ones are not. Codes count four times, so that products fill the halves
// of a word, whose bytes these are. A half is above -2^15, so that it borrows nothing from the
// other.
template <int zero>
DEVICE void scale_codes(unsigned codes, int factor, unsigned &high, unsigned &low) {
    const unsigned begin = 0x80008000u - (zero << CODE_SHIFT) * 0x00010001u * (unsigned)factor;
    const unsigned even = (codes & 0x00FF00FFu) * (unsigned)factor + begin;
    const unsigned odd = __byte_perm(codes, 0, 0x4341) * (unsigned)factor + begin;
    low = __byte_perm(even, odd, 0x6240);
    high = __byte_perm(even, odd, 0x7351) ^ 0x80808080u;
}

// Sub-blocks of 16 columns, of which a product has two: sums of scaled codes, before the codes'
// zero is subtracted, cover the whole unit.
template <int dtype, int N, class WORK>
DEVICE void sum_scaled_codes(const UNIT_SCALES<dtype> &scales, const unsigned char *unit,
                             const UPPER_PLANES<dtype> &upper, U64 tokens, int lane, int (&j)[N],
                             const WORK &meanwhile) {
    int sum[2][2][N] = {};      // [high, low of codes][high, low of m]
    unsigned operand[2][2][4];  // of two sub-blocks in turn
    for_sub_blocks<dtype, CODE_SHIFT>(unit, upper, lane, [&](int b, const unsigned(&codes)[4]) {
        if (b > 1) await_operands<1>();
        unsigned(&a)[2][4] = operand[b % 2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            scale_codes<UNIT_FORMAT<dtype>::zero>(codes[i], scales.factor(i % 2, 2 * b + i / 2), a[0][i],
                                                  a[1][i]);
        begin_group_product();
#pragma unroll
        for (int low = 0; low < 2; low++) {
            const U64 of_part = tokens_operand(tokens, b, low);
            multiply_signed_group(sum[0][low], a[0], of_part, b > 0);
            multiply_group(sum[1][low], a[1], of_part, b > 0);
        }
        end_group_product();
        if (b == 0) meanwhile();
    });
    await_operands<0>();
#pragma unroll
    for (int i = 0; i < 4; i++) take_sums(sum[i / 2][i % 2]);
#pragma unroll
    for (int e = 0; e < N; e++) {
        const int low = (16 * sum[1][0][e] + sum[1][1][e]) >> CODE_SHIFT;
        j[e] = (int)(1024u * (unsigned)sum[0][0][e] + 64u * (unsigned)sum[0][1][e] + (unsigned)low);
    }
}

struct NOTHING {
    __device__ __forceinline__ void operator()() const {}
};

// Whether the number to be subtracted is known, too: nothing, or sums of activations times minima.
template <int dtype, bool ahead>
constexpr bool all_summed = UNIT_FORMAT<dtype>::halves || (UNIT_FORMAT<dtype>::odd_shift != 0 && ahead);

// j of rows g and g + 8 and tokens 2 t and 2 t + 1 of every eight: elements (row, token); and p,
// the number to be subtracted, if `all_summed`. `sums` belong to the tokens. `meanwhile` begins
// after the first products.
template <int dtype, bool ahead, int N, class WORK = NOTHING>
DEVICE void sum_by_groups(const UNIT_SCALES<dtype> &scales, const unsigned char *unit,
                          const unsigned char *planes, const unsigned char *sums, int lane, int (&j)[N],
                          int (&p)[N], const WORK &meanwhile = WORK()) {
    UPPER_PLANES<dtype> upper;
    upper.load(unit, lane);
    const U64 tokens = group_operand(planes, EIGHT_HALF, EIGHT_BYTES);
    const U64 token_sums = group_operand(sums, EIGHT_HALF, EIGHT_SUMS_BYTES);
    if constexpr (UNIT_FORMAT<dtype>::halves)
        sum_scaled_codes<dtype>(scales, unit, upper, tokens, lane, j, meanwhile);
    else if constexpr (UNIT_FORMAT<dtype>::odd_shift != 0)
        sum_narrow_codes<dtype, ahead>(scales, unit, upper, tokens, token_sums, lane, j, p, meanwhile);
    else
        sum_wide_codes<dtype>(scales, unit, upper, tokens, lane, j, meanwhile);
}

#endif
