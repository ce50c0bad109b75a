// How the stored blocks of a GGUF file hold their integers and scales.

#ifndef BLOCKS_H
#define BLOCKS_H

// GGML type ids, as in packet->dtype.
#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q2_K 10
#define Q3_K 11
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20
#define IQ4_XS 23
#define BF16 30
#define MXFP4 39
// Not GGML's: KV pages of integers, see attention_rows.h.
#define I12 1012
#define I4R 1004
#define I3R 1003

#define Q8_0_ELEMENTS 32
#define Q8_0_BYTES 34

static inline float half_at(const GLOBAL uchar *bytes) {
    return vload_half(0, (const GLOBAL half *)bytes);
}

static inline uint uint_at(const GLOBAL uchar *b) {
    return b[0] | (uint)b[1] << 8 | (uint)b[2] << 16 | (uint)b[3] << 24;
}

// The 6-bit scale and minimum of sub-block s of Q4_K and Q5_K, from the 12 packed bytes.
static inline int sub_scale(const GLOBAL uchar *packed, int s) {
    return s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4;
}

static inline int sub_minimum(const GLOBAL uchar *packed, int s) {
    return s < 4 ? packed[s + 4] & 63 : (packed[s + 4] >> 4) | (packed[s] >> 6) << 4;
}

// Element i of a 32-block with nibbles at q, its fifth bits in high.
static inline int nibble_value(const GLOBAL uchar *q, uint high, int i) {
    int nibble = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
    return nibble | (int)(high >> i & 1) << 4;
}

// Element i of a Q4_K or Q5_K super-block.
static inline int affine_super_value(uint dtype, const GLOBAL uchar *block, int i) {
    const GLOBAL uchar *q = block + (dtype == Q5_K ? 48 : 16);
    int s = i / 32, l = i % 32;
    int value = s & 1 ? q[32 * (s / 2) + l] >> 4 : q[32 * (s / 2) + l] & 15;
    return dtype == Q5_K ? value | (block[16 + l] >> s & 1) << 4 : value;
}

// Element i of a Q6_K super-block.
static inline int q6_k_value(const GLOBAL uchar *block, int i) {
    int upper = i / 128, quarter = i % 128 / 32, l = i % 32;
    int low = block[64 * upper + l + 32 * (quarter & 1)] >> 4 * (quarter >> 1) & 15;
    int top = block[128 + 32 * upper + l] >> 2 * quarter & 3;
    return (low | top << 4) - 32;
}

// The two bits of element i of a Q2_K or Q3_K super-block.
static inline int two_bit_value(const GLOBAL uchar *q, int i) {
    return q[i / 128 * 32 + i % 32] >> 2 * (i % 128 / 32) & 3;
}

// The scale of sub-block s of Q3_K, from the 12 packed bytes.
static inline int q3_k_scale(const GLOBAL uchar *packed, int s) {
    int low = packed[s % 8] >> 4 * (s / 8) & 15, high = packed[8 + s % 4] >> 2 * (s / 4) & 3;
    return (low | high << 4) - 32;
}

// The scale of sub-block s of IQ4_XS.
static inline int iq4_xs_scale(const GLOBAL uchar *block, int s) {
    int low = block[4 + s / 2] >> 4 * (s & 1) & 15, high = block[2 + s / 4] >> 2 * (s & 3) & 3;
    return (low | high << 4) - 32;
}

#endif
