// Rows of heads of a model whose pages are I4R or I3R, a warp for each row (rule R13): rotation, and
// the codes of keys and values. A lane holds channels lane + 32 i of HEAD_DIM, 64, 128 or 256. Whoever
// includes this has included attention_rows.k, pages.k and pages_coded.k.

#ifndef ROTATED_ROWS_H
#define ROTATED_ROWS_H

// As in rotate_heads.k.
#define MIN_ROTATED __uint_as_float(0x1F800000u)
DEVICE unsigned sign_word(unsigned word) {
    const unsigned first = word & 1 ? 0xe169c58du : 0x6627e8d5u;
    const unsigned second = word & 1 ? 0x9b00dbd8u : 0xbc57ac4cu;
    const unsigned third = word & 1 ? 0x5cb200dbu : 0xf8e4cca4u;
    const unsigned fourth = word & 1 ? 0x097eff67u : 0xb1a574ebu;
    return word & 4 ? (word & 2 ? fourth : third) : (word & 2 ? second : first);
}
DEVICE float rotated_channel(float x) { return magnitude_of(x) < MIN_ROTATED ? 0.0f : x; }
DEVICE float with_sign(float x, unsigned word, unsigned bit) {
    return __uint_as_float(__float_as_uint(x) ^ (word >> bit & 1u) << 31);
}
// 1 / sqrt(HEAD_DIM), rounded once.
DEVICE float rotation_unit() {
    return HEAD_DIM == 128 ? __uint_as_float(0x3DB504F3u) : HEAD_DIM == 64 ? 0.125f : 0.0625f;
}

// Sums and differences of the values of lanes 1, 2, 4 ... up to `apart` apart; rolled, since length is
// time.
template <int N> DEVICE void join_lanes(float (&of)[N], int apart, int lane) {
#pragma unroll 1
    for (int lanes = 1; lanes <= apart; lanes *= 2) {
        const unsigned sign = lane & lanes ? 0x80000000u : 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float other = __shfl_xor_sync(ALL_LANES, of[i], lanes);
            of[i] = other + __uint_as_float(__float_as_uint(of[i]) ^ sign);
        }
    }
}
// The same of values `apart` elements apart.
template <int apart, int N> DEVICE void join_elements(float (&of)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i & apart) continue;
        const float a = of[i], b = of[i + apart];
        of[i] = a + b, of[i + apart] = a - b;
    }
}

template <int N> DEVICE void rotate_channels(float (&of)[N], int lane) {
#pragma unroll
    for (int i = 0; i < N; i++) of[i] = with_sign(rotated_channel(of[i]), sign_word(i), lane);
    join_lanes(of, WARP_LANES / 2, lane);
    join_elements<1>(of);
    if constexpr (N > 2) join_elements<2>(of);
    if constexpr (N > 4) join_elements<4>(of);
#pragma unroll
    for (int i = 0; i < N; i++) of[i] = of[i] * rotation_unit();
}

// Eight results of attention, columns 4 lane to 4 lane + 3 of a unit and those 128 behind, rotated
// back.
DEVICE void rotate_back(float (&of)[8], int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) of[i] = rotated_channel(of[i]);
    join_elements<1>(of);
    join_elements<2>(of);
    join_lanes(of, HEAD_DIM > 64 ? WARP_LANES / 2 : WARP_LANES / 4, lane);
    if (HEAD_DIM > 128) join_elements<4>(of);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned channel = (128 * half + 4 * lane) % HEAD_DIM;
        const unsigned word = sign_word(channel / 32);
#pragma unroll
        for (int i = 4 * half; i < 4 * half + 4; i++)
            of[i] = with_sign(of[i] * rotation_unit(), word, channel % 32 + i % 4);
    }
}

// See code_of of coded_rows.k: `inverse` is 1 / (2 scale). The quotient is exact enough, because half
// a step lies at least 1 / 1020 from each integer.
DEVICE int code_near(int m, int scale, float inverse, int bits) {
    const float above = (float)(m + (scale << bits) - 1) + 0.5f;
    return min(max((int)(above * inverse), 0), (1 << bits) - 1);
}

// N consecutive channels of a row: lane l holds channels N l to N l + N - 1, of group N l / 32, so that
// all groups are coded at once.
template <int N> struct OWN_CHANNELS {
    static constexpr int LANES = 32 / N, WORDS = (N + 3) / 4;  // lanes of a group
    int m[N], scale;
    unsigned codes[WORDS];  // a byte each

    // From channels lane + 32 i.
    __device__ __forceinline__ void take(const int (&of)[N], int lane) {
        unsigned pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            pairs[i] = ((unsigned)of[2 * i] & 0xFFFFu) | (unsigned)of[2 * i + 1] << 16;
        const int group = lane / LANES;
#pragma unroll
        for (int j = 0; j < N; j++) {
            unsigned word = 0;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const unsigned one = __shfl_sync(ALL_LANES, pairs[i], (N * lane + j) % 32);
                if (i == group / 2) word = one;
            }
            m[j] = (int)(short)(word >> group % 2 * 16);
        }
    }
    // The codes with the scale of the group, see group_scale of coded_rows.k.
    __device__ __forceinline__ void find_codes(bool values) {
        constexpr int key_top = (1 << KEY_CODE_BITS) - 1, value_top = (1 << VALUE_CODE_BITS) - 1;
        const int bits = values ? VALUE_CODE_BITS : KEY_CODE_BITS, top = values ? value_top : key_top;
        unsigned most = 0, least = ~0u;
#pragma unroll
        for (int j = 0; j < N; j++) most = max(most, (unsigned)abs(m[j]));
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, lanes));
        most = values ? (most + value_top - 1) / value_top : (most + key_top - 1) / key_top;
        const int largest = min((int)most, values ? min(2048 / value_top, 255) : 2048 / key_top);
        scale = 0;
#pragma unroll 1
        for (unsigned part = 0; part < 6; part++) {
            const int one = largest - (int)((unsigned)largest * part / 16);
            const float inverse = __fdiv_rn(1.0f, (float)max(2 * one, 2));
            unsigned squares = 0, found[WORDS] = {};
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int code = code_near(m[j], one, inverse, bits);
                const int difference = m[j] - (2 * code - top) * one;
                squares += (unsigned)(difference * difference);
                found[j / 4] |= (unsigned)code << j % 4 * 8;
            }
#pragma unroll
            for (int lanes = 1; lanes < LANES; lanes *= 2)
                squares += __shfl_xor_sync(ALL_LANES, squares, lanes);
            if ((squares << 3 | part) >= least) continue;
            least = squares << 3 | part, scale = one;
#pragma unroll
            for (int i = 0; i < WORDS; i++) codes[i] = found[i];
        }
    }
    // Bit `low` of the codes of all channels of the group.
    __device__ __forceinline__ unsigned tops(unsigned low, int lane) const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            bits |= ((codes[i] >> low & 0x01010101u) * 0x10204080u >> 28) << 4 * i;
        bits <<= lane % LANES * N;
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2)
            bits |= __shfl_xor_sync(ALL_LANES, bits, lanes);
        return bits;
    }
};

// Writes keys or values of position i of a page to its record and to a copy of it; either may be 0.
struct RECORD_AND_COPY {
    unsigned char *record, *copy;
    __device__ __forceinline__ void put(unsigned at, unsigned byte) const {
        if (record) record[at] = (unsigned char)byte;
        if (copy) copy[at] = (unsigned char)byte;
    }
    __device__ __forceinline__ void put_word(unsigned at, unsigned word) const {
        if (record) *(unsigned *)(record + at) = word;
        if (copy) *(unsigned *)(copy + at) = word;
    }
};
template <int N>
DEVICE void store_codes(const float (&of)[N], bool values, const RECORD_AND_COPY &to, unsigned i,
                        int lane) {
    const unsigned low_bits = values ? VALUE_LOW_BITS : 4, step = values ? PAGE_TOKENS : 1;
    unsigned most = 0;
#pragma unroll
    for (int g = 0; g < N; g++) most = max(most, __float_as_uint(of[g]) & MAGNITUDE);
    most = largest_of_warp(most);
    const int exponent = row_exponent(most);
    const float factor = row_factor(most, KV_BITS);
    int m[N];
#pragma unroll
    for (int g = 0; g < N; g++)
        m[g] = exponent == BROKEN_ROW ? 0 : row_integer(of[g], factor, KV_MAX);
    OWN_CHANNELS<N> own;
    own.take(m, lane);
    own.find_codes(values);
    const unsigned group = lane / own.LANES, channel = lane % own.LANES * N;
    const unsigned group_index = values ? group * PAGE_TOKENS + i : i * N + group;
    const unsigned at = (values ? CODED_VALUES(HEAD_DIM) + i : i * HEAD_DIM / 2) +
                        (4 * low_bits * group + channel) * step;
    const unsigned tops = values == (DTYPE == I3R) ? own.tops(low_bits, lane) : 0;
#pragma unroll
    for (int word = 0; word < own.WORDS; word++) {
        unsigned both = own.codes[word] & ((1u << low_bits) - 1) * 0x01010101u;
        if (low_bits == 2) both |= __shfl_xor_sync(ALL_LANES, both, 8 / N) << 2;
        both |= __shfl_xor_sync(ALL_LANES, both, 16 / N) << 4;
        if (channel < 4 * low_bits) {
#pragma unroll
            for (int j = 0; j < min(N, 4); j++) to.put(at + (4 * word + j) * step, both >> 8 * j);
        }
    }
    if (channel == 0) {
        to.put((values ? CODED_VALUE_SCALES(HEAD_DIM) : CODED_SCALES(HEAD_DIM)) + group_index,
               (unsigned)own.scale);
        if (values == (DTYPE == I3R)) to.put_word(CODED_TOPS(HEAD_DIM) + 4 * group_index, tops);
    }
    if (lane == 0)
        to.put(CODED_EXPONENTS(HEAD_DIM) + (values ? PAGE_TOKENS : 0) + i, (unsigned)exponent & 255);
}

#endif
