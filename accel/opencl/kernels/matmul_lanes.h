// Sixteen output rows side by side, one in each lane, and their dot products with activations.
//
// A uint16 holds four weights of each row as unsigned bytes in the order k0 k2 k1 k3, so that the
// even bytes are the pair (k0, k1) as 16-bit numbers and the odd bytes the pair (k2, k3).
//
// Build option DOT_VNNI 1: the device has AVX-512 VNNI even if its compiler does not say so (PoCL
// takes a Cascade Lake for a Skylake). Functions that use it lie between MATMUL_TARGET_BEGIN and
// MATMUL_TARGET_END, and those called from outside are OUTLINED: PoCL would otherwise merge them
// into a kernel that lacks the instructions.

#ifndef MATMUL_LANES_H
#define MATMUL_LANES_H

#define INLINE static inline __attribute__((always_inline))
#define OUTLINED static __attribute__((noinline))
#define UNROLL _Pragma("unroll")

#if !defined(__AVX512BW__)
#undef DOT_VNNI
#define DOT_VNNI 0
#elif defined(__AVX512VNNI__)
#undef DOT_VNNI
#define DOT_VNNI 1
#endif

#if DOT_VNNI
#define MATMUL_TARGET_BEGIN \
    _Pragma("clang attribute push(__attribute__((target(\"avx512vnni\"))), apply_to = function)")
#define MATMUL_TARGET_END _Pragma("clang attribute pop")
#else
#define MATMUL_TARGET_BEGIN
#define MATMUL_TARGET_END
#endif

// Whether unsigned bytes of weights are multiplied with signed bytes of activations, and pairs of
// products are added to 16-bit numbers, which is faster than products of 16-bit numbers.
#if !DOT_VNNI && defined(__SSSE3__)
#define BYTE_PRODUCTS 1
#else
#define BYTE_PRODUCTS 0
#endif

#if defined(__AVX512BW__)
typedef int NATIVE_INT16 __attribute__((__vector_size__(64)));
typedef short NATIVE_SHORT32 __attribute__((__vector_size__(64)));
typedef short NATIVE_SHORT16 __attribute__((__vector_size__(32)));
typedef float NATIVE_FLOAT16 __attribute__((__vector_size__(64)));
typedef char NATIVE_CHAR64 __attribute__((__vector_size__(64)));
#elif defined(__AVX2__)
typedef short NATIVE_SHORT16 __attribute__((__vector_size__(32)));
typedef char NATIVE_CHAR32 __attribute__((__vector_size__(32)));
#elif defined(__SSSE3__)
typedef short NATIVE_SHORT8 __attribute__((__vector_size__(16)));
typedef char NATIVE_CHAR16 __attribute__((__vector_size__(16)));
#endif

MATMUL_TARGET_BEGIN

// acc + a0 b0 + a1 b1 in each lane, a and b being pairs of signed 16-bit numbers.
#if DOT_VNNI
INLINE int16 dot_pairs(int16 acc, uint16 a, uint16 b) {
    return __builtin_astype(__builtin_ia32_vpdpwssd512(__builtin_astype(acc, NATIVE_INT16),
                                                       __builtin_astype(a, NATIVE_INT16),
                                                       __builtin_astype(b, NATIVE_INT16)),
                            int16);
}

// acc + the four products of unsigned bytes of a with signed bytes of b, in each lane.
INLINE int16 dot_bytes(int16 acc, uint16 a, uint16 b) {
    return __builtin_astype(__builtin_ia32_vpdpbusd512(__builtin_astype(acc, NATIVE_INT16),
                                                       __builtin_astype(a, NATIVE_INT16),
                                                       __builtin_astype(b, NATIVE_INT16)),
                            int16);
}
#elif defined(__AVX512BW__)
// In each half of a lane the sum of two products of an unsigned byte of a and a signed one of b.
INLINE uint16 byte_products(uint16 a, uint16 b) {
    return __builtin_astype(__builtin_ia32_pmaddubsw512(__builtin_astype(a, NATIVE_CHAR64),
                                                        __builtin_astype(b, NATIVE_CHAR64)),
                            uint16);
}

INLINE uint16 add_pairs(uint16 a, uint16 b) {
    return __builtin_astype(__builtin_astype(a, NATIVE_SHORT32) +
                                __builtin_astype(b, NATIVE_SHORT32),
                            uint16);
}

INLINE int16 dot_pairs(int16 acc, uint16 a, uint16 b) {
    return acc + __builtin_astype(__builtin_ia32_pmaddwd512(__builtin_astype(a, NATIVE_SHORT32),
                                                            __builtin_astype(b, NATIVE_SHORT32)),
                                  int16);
}
#elif defined(__AVX2__)
INLINE int8 pair_products(uint8 a, uint8 b) {
    return __builtin_astype(__builtin_ia32_pmaddwd256(__builtin_astype(a, NATIVE_SHORT16),
                                                      __builtin_astype(b, NATIVE_SHORT16)),
                            int8);
}

INLINE int16 dot_pairs(int16 acc, uint16 a, uint16 b) {
    return make_int16(acc.lo + pair_products(a.lo, b.lo), acc.hi + pair_products(a.hi, b.hi));
}

INLINE uint8 byte_products_half(uint8 a, uint8 b) {
    return __builtin_astype(__builtin_ia32_pmaddubsw256(__builtin_astype(a, NATIVE_CHAR32),
                                                        __builtin_astype(b, NATIVE_CHAR32)),
                            uint8);
}

INLINE uint16 byte_products(uint16 a, uint16 b) {
    return make_uint16(byte_products_half(a.lo, b.lo), byte_products_half(a.hi, b.hi));
}

INLINE uint8 add_pairs_half(uint8 a, uint8 b) {
    return __builtin_astype(__builtin_astype(a, NATIVE_SHORT16) +
                                __builtin_astype(b, NATIVE_SHORT16),
                            uint8);
}

INLINE uint16 add_pairs(uint16 a, uint16 b) {
    return make_uint16(add_pairs_half(a.lo, b.lo), add_pairs_half(a.hi, b.hi));
}
#elif defined(__SSSE3__)
INLINE int4 pair_products(uint4 a, uint4 b) {
    return __builtin_astype(__builtin_ia32_pmaddwd128(__builtin_astype(a, NATIVE_SHORT8),
                                                      __builtin_astype(b, NATIVE_SHORT8)),
                            int4);
}

INLINE int16 dot_pairs(int16 acc, uint16 a, uint16 b) {
    return acc + make_int16(pair_products(a.lo.lo, b.lo.lo), pair_products(a.lo.hi, b.lo.hi),
                            pair_products(a.hi.lo, b.hi.lo), pair_products(a.hi.hi, b.hi.hi));
}

INLINE uint4 byte_products_quarter(uint4 a, uint4 b) {
    return __builtin_astype(__builtin_ia32_pmaddubsw128(__builtin_astype(a, NATIVE_CHAR16),
                                                        __builtin_astype(b, NATIVE_CHAR16)),
                            uint4);
}

INLINE uint16 byte_products(uint16 a, uint16 b) {
    return make_uint16(
        byte_products_quarter(a.lo.lo, b.lo.lo), byte_products_quarter(a.lo.hi, b.lo.hi),
        byte_products_quarter(a.hi.lo, b.hi.lo), byte_products_quarter(a.hi.hi, b.hi.hi));
}

INLINE uint4 add_pairs_quarter(uint4 a, uint4 b) {
    return __builtin_astype(__builtin_astype(a, NATIVE_SHORT8) + __builtin_astype(b, NATIVE_SHORT8),
                            uint4);
}

INLINE uint16 add_pairs(uint16 a, uint16 b) {
    return make_uint16(add_pairs_quarter(a.lo.lo, b.lo.lo), add_pairs_quarter(a.lo.hi, b.lo.hi),
                       add_pairs_quarter(a.hi.lo, b.hi.lo), add_pairs_quarter(a.hi.hi, b.hi.hi));
}
#else
INLINE int16 dot_pairs(int16 acc, uint16 a, uint16 b) {
    int16 x = as_int16(a), y = as_int16(b);
    return acc + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
}
#endif

INLINE uint16 even_pairs(uint16 bytes) { return bytes & 0x00FF00FFu; }
INLINE uint16 odd_pairs(uint16 bytes) { return (bytes >> 8) & 0x00FF00FFu; }

// For each byte of `index`, 0 to 15, that byte of a table of sixteen. Without a byte shuffle the bits
// of `index` choose, from the lowest, among ever fewer values.
#define CHOOSE_BYTES(NUMBER, table, index)                                     \
    const uint dwords[4] = {table.x, table.y, table.z, table.w};               \
    NUMBER value[16];                                                          \
    UNROLL for (int i = 0; i < 16; i++)                                        \
        value[i] = (dwords[i / 4] >> (8 * (i & 3)) & 0xFFu) * 0x01010101u;     \
    UNROLL for (int bit = 0; bit < 4; bit++) {                                 \
        const NUMBER chosen = ((index >> (uint)bit) & 0x01010101u) * 0xFFu;    \
        UNROLL for (int i = 0; i < 8 >> bit; i++)                              \
            value[i] = value[2 * i] ^ (chosen & (value[2 * i] ^ value[2 * i + 1])); \
    }                                                                          \
    return value[0];

#if defined(__AVX512BW__)
INLINE uint16 look_up(uint4 table, uint16 index) {
    uint16 all = make_uint16(table, table, table, table);
    return __builtin_astype(__builtin_ia32_pshufb512(__builtin_astype(all, NATIVE_CHAR64),
                                                     __builtin_astype(index, NATIVE_CHAR64)),
                            uint16);
}
#elif defined(__AVX2__)
INLINE uint8 look_up_half(uint4 table, uint8 index) {
    uint8 all = make_uint8(table, table);
    return __builtin_astype(__builtin_ia32_pshufb256(__builtin_astype(all, NATIVE_CHAR32),
                                                     __builtin_astype(index, NATIVE_CHAR32)),
                            uint8);
}

INLINE uint16 look_up(uint4 table, uint16 index) {
    return make_uint16(look_up_half(table, index.lo), look_up_half(table, index.hi));
}
#elif defined(__SSSE3__)
INLINE uint4 look_up_quarter(uint4 table, uint4 index) {
    return __builtin_astype(__builtin_ia32_pshufb128(__builtin_astype(table, NATIVE_CHAR16),
                                                     __builtin_astype(index, NATIVE_CHAR16)),
                            uint4);
}

INLINE uint16 look_up(uint4 table, uint16 index) {
    return make_uint16(look_up_quarter(table, index.lo.lo), look_up_quarter(table, index.lo.hi),
                       look_up_quarter(table, index.hi.lo), look_up_quarter(table, index.hi.hi));
}
#else
INLINE uint16 look_up(uint4 table, uint16 index) { CHOOSE_BYTES(uint16, table, index) }
#endif

INLINE uint16 load_lanes(const GLOBAL uchar *bytes) {
    return vload16(0, (const GLOBAL uint *)bytes);
}

// vload_half16 makes two 8-lane conversions of it on PoCL.
INLINE float16 load_halves(const GLOBAL uchar *bytes) {
#if defined(__AVX512BW__)
    short16 bits = vload16(0, (const GLOBAL short *)bytes);
    return __builtin_astype(
        __builtin_ia32_vcvtph2ps512_mask(__builtin_astype(bits, NATIVE_SHORT16),
                                         __builtin_astype((float16)(0.0f), NATIVE_FLOAT16),
                                         (ushort)0xFFFF, 4),
        float16);
#else
    return vload_half16(0, (const GLOBAL half *)bytes);
#endif
}

// A hint that changes no result; the pointer may lie beyond the buffer.
INLINE void prefetch_line(const GLOBAL uchar *bytes) {
#if defined(__x86_64__)
    __builtin_prefetch((const __private void *)(size_t)bytes, 0, 3);
#endif
}

MATMUL_TARGET_END

// look_up for one lane.
INLINE uint look_up_lane(uint4 table, uint index) {
#ifdef __NV_CL_C_VERSION
    // A byte permutation takes eight bytes and four indices of four bits; its third use picks the
    // half of the table.
    uint low, high, chosen, indices = (index | index >> 4) & 0x00FF00FFu;
    indices = (indices | indices >> 8) & 0xFFFFu;
    const uint within = indices & 0x7777u, half_of = 0x3210u | (indices >> 1 & 0x4444u);
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(low) : "r"(table.x), "r"(table.y), "r"(within));
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(table.z), "r"(table.w), "r"(within));
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(low), "r"(high), "r"(half_of));
    return chosen;
#else
    CHOOSE_BYTES(uint, table, index)
#endif
}

// The same for eight dwords, written as one vector for the compiler's sake: it has less to read.
INLINE uint8 look_up_lanes(uint4 table, uint8 index) {
#ifdef __NV_CL_C_VERSION
    return make_uint8(look_up_lane(table, index.s0), look_up_lane(table, index.s1),
                   look_up_lane(table, index.s2), look_up_lane(table, index.s3),
                   look_up_lane(table, index.s4), look_up_lane(table, index.s5),
                   look_up_lane(table, index.s6), look_up_lane(table, index.s7));
#else
    CHOOSE_BYTES(uint8, table, index)
#endif
}

#endif
