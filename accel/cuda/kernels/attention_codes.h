// A page of I4R or I3R for attention_group.h: codes become operands in registers. A key is a byte a
// channel, so that a group of 32 channels is one product, whose sums are multiplied by the group's
// scale. A position's values have a scale of their own, which multiplies its weight.

#ifndef ATTENTION_CODES_H
#define ATTENTION_CODES_H

#define CODED_GROUPS (HEAD_DIM / 32)

// A code c of n bits stands for 2 c - (2^n - 1). A byte of an operand is that times 2^SHIFT: c in
// the upper bits, the topmost inverted, and a one below them.
#define KEY_SHIFT (7 - KEY_CODE_BITS)
#define VALUE_SHIFT (7 - VALUE_CODE_BITS)

// Four keys as such bytes, of codes' low four bits, in lower or upper halves of bytes, and, as the
// low four bits of `tops`, their fifth ones.
DEVICE unsigned key_bytes(unsigned word, bool upper, unsigned tops) {
    if (DTYPE == I3R) return ((upper ? word : word << 4) & 0xF0F0F0F0u) ^ 0x88888888u;
    const unsigned shifted = (upper ? word >> 1 : word << 3) & 0x78787878u;
    return shifted ^ 0x84848484u ^ ((tops & 15) * 0x10204080u & 0x80808080u);
}

// Bytes that lie one after another, from an address that is a multiple of their number or of 4.
template <int N> DEVICE void load_bytes(const unsigned char *place, int (&byte)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const unsigned word =
            N % 4 == 0 ? *(const unsigned *)(place + i) : *(const unsigned short *)(place + i);
#pragma unroll
        for (int n = i; n < N && n < i + 4; n++) byte[n] = word >> 8 * (n - i) & 255;
    }
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
            for (int i = 0; i < CODED_GROUPS; i++)
                codes[r][i] = *(const unsigned *)(record + row * HALF_DIM + 16 * i + 4 * t);
            if (DTYPE == I4R) load_words(words, tops[r]);
#pragma unroll
            for (int i = 0; i < CODED_GROUPS; i++)
                tops[r][i] = DTYPE == I4R ? tops[r][i] >> 4 * t : 0;
            load_bytes(scales, scale[r]);
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
                a[r] = key_bytes(codes[r][i], false, tops[r][i]);
                a[2 + r] = key_bytes(codes[r][i], true, tops[r][i] >> 16);
            }
            int sum[4] = {0, 0, 0, 0};
            multiply_32<true>(sum, a, *(const unsigned *)(column + 32 * i),
                              *(const unsigned *)(column + 32 * i + 16));
#pragma unroll
            for (int r = 0; r < 2; r++)
                dot[r] += (sum[2 * r] * (1 << Q_SHIFT) + sum[2 * r + 1] >> KEY_SHIFT) * scale[r][i];
        }
    }
};

// A lane's part of the products of weights and value scales, of 16 positions and a group of
// channels. They have at most 22 bits; their digits to base 256, from -128 on, are operands. Column
// g is of head g / 2: `upper` has the topmost digit if g is even and otherwise the one below, and
// `lower` the lowest.
struct SCALED_WEIGHTS {
    unsigned upper[4], lower[4];

    // `weights` are the head's.
    __device__ __forceinline__ void load(const unsigned char *weights, const unsigned char *scales,
                                         int column) {
        unsigned high[4], low[4], scale[4];
        load_words(weights, high);
        load_words(weights + KV_TILE, low);
        load_words(scales, scale);
        const unsigned digits = column % 2 ? 0x0051 : 0x0062;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned of[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const unsigned weight =
                    (high[i] >> 8 * n & 255) << Q_SHIFT | (low[i] >> 8 * n & 255);
                of[n] = weight * (scale[i] >> 8 * n & 255) + 0x808080u;
            }
            upper[i] = __byte_perm(__byte_perm(of[0], of[1], digits),
                                   __byte_perm(of[2], of[3], digits), 0x5410) ^ 0x80808080u;
            lower[i] = __byte_perm(__byte_perm(of[0], of[1], 0x0040),
                                   __byte_perm(of[2], of[3], 0x0040), 0x5410) ^ 0x80808080u;
        }
    }
};

// The values of a group of a page, channels `channel` and channel + 16: a lane's part of 16
// positions.
struct GROUP_CODES {
    unsigned first[4], second[4];

    __device__ __forceinline__ void load(const unsigned char *record, unsigned group, int channel) {
        unsigned codes[4];
        load_words(record + CODED_VALUES(HEAD_DIM) +
                       (VALUE_OCTETS * group + channel % VALUE_OCTETS) * PAGE_TOKENS,
                   codes);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (DTYPE == I4R) {
                first[i] = (codes[i] << 4 & 0xF0F0F0F0u) ^ 0x88888888u;
                second[i] = (codes[i] & 0xF0F0F0F0u) ^ 0x88888888u;
                continue;
            }
            unsigned tops[4];
            load_words(record + CODED_TOPS(HEAD_DIM) + (4 * group + i) * PAGE_TOKENS, tops);
#pragma unroll
            for (int n = 0; n < 4; n++) tops[n] = tops[n] >> channel & 0x00010001u;
            const unsigned early = tops[0] | tops[1] << 8, late = tops[2] | tops[3] << 8;
            const unsigned low = codes[i] >> channel / 8 * 2;
            const unsigned top = __byte_perm(early, late, 0x5410) << 7;
            const unsigned top_later = __byte_perm(early, late, 0x7632) << 7;
            first[i] = (low << 5 & 0x60606060u) ^ top ^ 0x90909090u;
            second[i] = (low << 1 & 0x60606060u) ^ top_later ^ 0x90909090u;
        }
    }
    // The sum of three digits' sums.
    static __device__ __forceinline__ float joined_digits(const int (&upper)[4],
                                                          const int (&lower)[4], int row) {
        const unsigned top = (unsigned)upper[2 * row] << (16 - VALUE_SHIFT);
        const unsigned next = (unsigned)upper[2 * row + 1] << (8 - VALUE_SHIFT);
        return (float)(int)(top + next + (unsigned)(lower[2 * row] >> VALUE_SHIFT));
    }
    // o of both channels of head t.
    __device__ __forceinline__ void sums(const SCALED_WEIGHTS &weight, float &of_first,
                                         float &of_second) const {
        int upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned a[4] = {first[i], second[i], first[i + 1], second[i + 1]};
            multiply_32<true>(upper, a, weight.upper[i], weight.upper[i + 1]);
            multiply_32<true>(lower, a, weight.lower[i], weight.lower[i + 1]);
        }
        of_first = joined_digits(upper, lower, 0);
        of_second = joined_digits(upper, lower, 1);
    }
};

#endif
