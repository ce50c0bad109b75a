// Products of four warps in binary16 (sm_90a): 64 rows times 128 tokens, summed as binary32. A warp
// holds 16 of the rows in registers, in the operand order of mma.m16n8k16; an operand of 16 columns
// of tokens lies in shared memory as groups.h has it, eight binary16 in 16 bytes. All products and
// sums must be integers of magnitude up to 2^24 times one power of two: each is exact then, in any
// order.

#ifndef HALF_PRODUCTS_H
#define HALF_PRODUCTS_H

#include "groups.h"

// a b, and a b + c, of the binary16 in both halves of words.
DEVICE unsigned multiply_halves(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
DEVICE unsigned fused_halves(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// As for integers in groups.h.
template <int N> DEVICE void take_sums(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

#define HALF_SUM_OPERANDS(USE, i)                                                            \
    USE(sum[i]), USE(sum[i + 1]), USE(sum[i + 2]), USE(sum[i + 3]), USE(sum[i + 4]),         \
        USE(sum[i + 5]), USE(sum[i + 6]), USE(sum[i + 7]), USE(sum[i + 8]), USE(sum[i + 9]), \
        USE(sum[i + 10]), USE(sum[i + 11]), USE(sum[i + 12]), USE(sum[i + 13]),              \
        USE(sum[i + 14]), USE(sum[i + 15])
// sum = A B, and sum += A B.
#define HALF_PRODUCT(NAME, MORE, USE)                                                            \
    DEVICE void NAME(float (&sum)[64], const unsigned (&a)[4], U64 b) {                          \
        asm volatile(                                                                            \
            "{ .reg .pred p; setp.ne.b32 p, " MORE ", 0;\n"                                      \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "                               \
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"    \
            "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,"       \
            "%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"       \
            "%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1, 0; }"                            \
            : HALF_SUM_OPERANDS(USE, 0), HALF_SUM_OPERANDS(USE, 16), HALF_SUM_OPERANDS(USE, 32), \
              HALF_SUM_OPERANDS(USE, 48)                                                         \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
    }
HALF_PRODUCT(set_halves, "0", "=f")
HALF_PRODUCT(add_halves, "1", "+f")

#endif
