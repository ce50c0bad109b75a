// A page of I4R or I3R for attention_group.h: codes become operands in registers. A key is a byte a
// channel, so that a group of 32 channels is one product, whose sums are multiplied by the group's
// scale. Values are I12 integers, since each position has a scale of its own.

#ifndef ATTENTION_CODES_H
#define ATTENTION_CODES_H

#define CODED_GROUPS (HEAD_DIM / 32)

// Four signed bytes 2 code - (2^bits - 1), of codes' low four bits and, as the low four bits of `tops`,
// their fifth ones.
DEVICE unsigned key_bytes(unsigned nibbles, unsigned tops) {
    const unsigned most = ((1 << KEY_CODE_BITS) - 1) * 0x01010101u;
    unsigned doubled = nibbles << 1;
    if (DTYPE == I4R) doubled |= (tops & 15) * 0x04081020u & 0x20202020u;
    return ((doubled | 0x80808080u) - most) ^ 0x80808080u;
}

// Positions g and g + 8 of a page: a lane's part of their keys, and the exponents of both rows.
struct PAGE_CODES {
    unsigned codes[2][CODED_GROUPS], tops[2][CODED_GROUPS];
    int scale[2][CODED_GROUPS], key[2], value[2];

    __device__ __forceinline__ void load(const unsigned char *record, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = g + 8 * r;
            const unsigned char *scales = record + CODED_SCALES(HEAD_DIM) + row * CODED_GROUPS;
            const unsigned char *words = record + CODED_TOPS(HEAD_DIM) + row * CODED_GROUPS * 4;
#pragma unroll
            for (int i = 0; i < CODED_GROUPS; i++) {
                codes[r][i] = *(const unsigned *)(record + row * HALF_DIM + 16 * i + 4 * t);
                tops[r][i] = DTYPE == I4R ? *(const unsigned *)(words + 4 * i) >> 4 * t : 0;
                scale[r][i] = scales[i];
            }
            const signed char *exponents = (const signed char *)record + CODED_EXPONENTS(HEAD_DIM);
            key[r] = exponents[row], value[r] = exponents[PAGE_TOKENS + row];
        }
    }
    // q.k with the query of head t; `column` is a lane's of the parts of queries.
    __device__ __forceinline__ void scores(const unsigned char *column, int (&dot)[2]) const {
        dot[0] = dot[1] = 0;
#pragma unroll
        for (int i = 0; i < CODED_GROUPS; i++) {
            unsigned a[4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                a[r] = key_bytes(codes[r][i] & 0x0F0F0F0Fu, tops[r][i]);
                a[2 + r] = key_bytes(codes[r][i] >> 4 & 0x0F0F0F0Fu, tops[r][i] >> 16);
            }
            int sum[4] = {0, 0, 0, 0};
            multiply_32<true>(sum, a, *(const unsigned *)(column + 32 * i),
                              *(const unsigned *)(column + 32 * i + 16));
#pragma unroll
            for (int r = 0; r < 2; r++)
                dot[r] += ((sum[2 * r] * (1 << Q_SHIFT)) + sum[2 * r + 1]) * scale[r][i];
        }
    }
};

// Twice the codes of channels `channel` and channel + 16 of a group, in halves of a word, of the
// position of the lowest byte of `codes`; `tops` are the group's top bits of that position.
DEVICE unsigned code_pair(unsigned codes, unsigned tops, int channel) {
    if (DTYPE == I4R) return (codes & 255) * 0x2002u & 0x001E001Eu;
    const unsigned low = (codes >> channel / 8 * 2 & 0x33) * 0x2002u & 0x00060006u;
    return low | (tops >> channel & 0x00010001u) << 3;
}

// The high and the low parts of I12 integers, a byte each, of four positions and two channels: `words`
// has a position each, a channel in each half.
DEVICE void split_pairs(const unsigned (&words)[4], unsigned (&high)[2], unsigned (&low)[2]) {
    const unsigned first = __byte_perm(words[0], words[1], 0x6240);
    const unsigned second = __byte_perm(words[2], words[3], 0x6240);
    low[0] = __byte_perm(first, second, 0x5410) & 0x0F0F0F0Fu;
    low[1] = __byte_perm(first, second, 0x7632) & 0x0F0F0F0Fu;
    const unsigned third = __byte_perm(words[0] >> 4, words[1] >> 4, 0x6240);
    const unsigned fourth = __byte_perm(words[2] >> 4, words[3] >> 4, 0x6240);
    high[0] = __byte_perm(third, fourth, 0x5410);
    high[1] = __byte_perm(third, fourth, 0x7632);
}

// The values of group `group` of a page, channels g and g + 16 and, with the next call, g + 8 and
// g + 24: a lane's part of 16 positions.
struct GROUP_CODES {
    unsigned high[4][2], low[4][2];

    __device__ __forceinline__ void load(const unsigned char *record, unsigned group, int channel) {
        constexpr int top = (1 << VALUE_CODE_BITS) - 1;
        unsigned codes[4], scales[4];
        load_words(record + CODED_VALUES(HEAD_DIM) +
                       (VALUE_OCTETS * group + channel % VALUE_OCTETS) * PAGE_TOKENS,
                   codes);
        load_words(record + CODED_VALUE_SCALES(HEAD_DIM) + group * PAGE_TOKENS, scales);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned words[4], tops[4] = {0, 0, 0, 0};
            if (DTYPE == I3R)
                load_words(record + CODED_TOPS(HEAD_DIM) + (4 * group + i) * PAGE_TOKENS, tops);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const unsigned scale = scales[i] >> 8 * n & 255;
                // What is added keeps both halves positive, above the twelve bits that are taken.
                words[n] = code_pair(codes[i] >> 8 * n & 255, tops[n], channel) * scale +
                           (0x40004000u - scale * (top * 0x10001u));
            }
            split_pairs(words, high[i], low[i]);
        }
    }
    // o of channels g and g + 16 of head t.
    __device__ __forceinline__ void sums(const unsigned (&weight)[4], float &first,
                                         float &second) const {
        int of_high[4] = {0, 0, 0, 0}, of_low[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned a[4] = {high[i][0], high[i][1], high[i + 1][0], high[i + 1][1]};
            const unsigned c[4] = {low[i][0], low[i][1], low[i + 1][0], low[i + 1][1]};
            multiply_32<true>(of_high, a, weight[i], weight[i + 1]);
            multiply_32<false>(of_low, c, weight[i], weight[i + 1]);
        }
        first = (float)joined(of_high, of_low, 0);
        second = (float)joined(of_high, of_low, 1);
    }
};

#endif
