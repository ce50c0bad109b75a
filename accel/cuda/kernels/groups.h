// Products of four warps together (sm_90a): 64 rows times N tokens. A warp holds 16 of the rows in
// registers, in the operand order of mma.m16n8k32; the tokens are in shared memory. A 32 x N
// operand of bytes consists of tiles of 8 tokens and 16 columns, in which a token's 16 bytes follow
// those of the token before. The two halves of the columns are `lead` bytes apart, groups of 8
// tokens `stride` bytes.

#ifndef GROUPS_H
#define GROUPS_H

#include "warp.h"

#define GROUP_WARPS 4

DEVICE U64 group_operand(const unsigned char *address, unsigned lead, unsigned stride) {
    return (U64)(shared_address(address) >> 4 & 0x3FFFu) | (U64)(lead >> 4) << 16 |
           (U64)(stride >> 4) << 32;
}
// The same so many bytes further on, a multiple of 16.
DEVICE U64 operand_behind(U64 operand, unsigned bytes) { return operand + (bytes >> 4); }

DEVICE void begin_group_product() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_group_product() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The sums of products begun earlier have their values from here on; nothing may read them before.
template <int N> DEVICE void take_sums(int (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(sum[i])::"memory");
}
// Returns when all products but those ended by the latest `left` calls have read their operands.
template <int left> DEVICE void await_operands() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// A zero for operands that the compiler cannot know: it would share a known one with the flags that
// say where sums begin, which would then be no constants, and would clear all sums.
DEVICE unsigned hidden_zero() {
    unsigned zero;
    asm volatile("mov.u32 %0, 0;" : "=r"(zero));
    return zero;
}

// Products after the next barrier see what threads wrote to shared memory.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies to a stage of shared memory, by any thread: a barrier counts the bytes, which one thread
// announces. `await_stage` returns when they have arrived; `phase` counts how often the stage was
// filled before.
DEVICE void open_stages(COPY_BARRIER *barriers, int count) {
    for (int i = 0; i < count; i++)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers + i))
                     : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void announce(COPY_BARRIER *barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
DEVICE void copy_to_stage(COPY_BARRIER *barrier, void *to, const void *from, unsigned bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
DEVICE void await_stage(COPY_BARRIER *barrier, unsigned phase) { await_copy<1>(barrier, phase); }
DEVICE bool have_come(COPY_BARRIER *barrier, unsigned phase) { return have_arrived(barrier, phase); }

// sum = A B, or sum += A B if `more`; KIND are the types of the bytes of A and B. Sums are in the
// order of mma.m16n8k32, four for every 8 tokens. They must have values before, whichever, since a
// compiler may leave out code that reads unset values.
#define GROUP_PRODUCTS(NAME, KIND)                                                  \
    DEVICE void NAME(int (&sum)[8], const unsigned (&a)[4], U64 b, bool more) {     \
        asm volatile(                                                               \
            "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"                              \
            "wgmma.mma_async.sync.aligned.m64n16k32.s32." KIND " "               \
            "{%0,%1,%2,%3,%4,%5,%6,%7}, "                                           \
            "{%8,%9,%10,%11}, %12, p; }"                                            \
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3]), "+r"(sum[4]), \
              "+r"(sum[5]), "+r"(sum[6]), "+r"(sum[7])                              \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));  \
    }                                                                               \
    DEVICE void NAME(int (&sum)[16], const unsigned (&a)[4], U64 b, bool more) {    \
        asm volatile(                                                               \
            "{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"                              \
            "wgmma.mma_async.sync.aligned.m64n32k32.s32." KIND " "               \
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "             \
            "{%16,%17,%18,%19}, %20, p; }"                                          \
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3]), "+r"(sum[4]), \
              "+r"(sum[5]), "+r"(sum[6]), "+r"(sum[7]), "+r"(sum[8]), "+r"(sum[9]), \
              "+r"(sum[10]), "+r"(sum[11]), "+r"(sum[12]), "+r"(sum[13]),           \
              "+r"(sum[14]), "+r"(sum[15])                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));  \
    }                                                                               \
    DEVICE void NAME(int (&sum)[24], const unsigned (&a)[4], U64 b, bool more) {    \
        asm volatile(                                                               \
            "{ .reg .pred p; setp.ne.b32 p, %29, 0;\n"                              \
            "wgmma.mma_async.sync.aligned.m64n48k32.s32." KIND " "               \
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,"   \
            "%19,%20,%21,%22,%23}, {%24,%25,%26,%27}, %28, p; }"                    \
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3]), "+r"(sum[4]), \
              "+r"(sum[5]), "+r"(sum[6]), "+r"(sum[7]), "+r"(sum[8]), "+r"(sum[9]), \
              "+r"(sum[10]), "+r"(sum[11]), "+r"(sum[12]), "+r"(sum[13]),           \
              "+r"(sum[14]), "+r"(sum[15]), "+r"(sum[16]), "+r"(sum[17]),           \
              "+r"(sum[18]), "+r"(sum[19]), "+r"(sum[20]), "+r"(sum[21]),           \
              "+r"(sum[22]), "+r"(sum[23])                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));  \
    }                                                                               \
    DEVICE void NAME(int (&sum)[32], const unsigned (&a)[4], U64 b, bool more) {    \
        asm volatile(                                                               \
            "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"                              \
            "wgmma.mma_async.sync.aligned.m64n64k32.s32." KIND " "               \
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,"   \
            "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "                \
            "{%32,%33,%34,%35}, %36, p; }"                                          \
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3]), "+r"(sum[4]), \
              "+r"(sum[5]), "+r"(sum[6]), "+r"(sum[7]), "+r"(sum[8]), "+r"(sum[9]), \
              "+r"(sum[10]), "+r"(sum[11]), "+r"(sum[12]), "+r"(sum[13]),           \
              "+r"(sum[14]), "+r"(sum[15]), "+r"(sum[16]), "+r"(sum[17]),           \
              "+r"(sum[18]), "+r"(sum[19]), "+r"(sum[20]), "+r"(sum[21]),           \
              "+r"(sum[22]), "+r"(sum[23]), "+r"(sum[24]), "+r"(sum[25]),           \
              "+r"(sum[26]), "+r"(sum[27]), "+r"(sum[28]), "+r"(sum[29]),           \
              "+r"(sum[30]), "+r"(sum[31])                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));  \
    }
GROUP_PRODUCTS(multiply_group, "u8.s8")
GROUP_PRODUCTS(multiply_signed_group, "s8.s8")
GROUP_PRODUCTS(multiply_unsigned_group, "u8.u8")

// The same of 32 or 64 columns, KIND being the types of A and B; `set_` begins sums that may be
// unset, `add_` adds to them.
#define GROUP_SUMS(NAME, KIND)                                                   \
    DEVICE void set_##NAME(int (&sum)[16], const unsigned (&a)[4], U64 b) {      \
        asm volatile(GROUP_SUM_TEXT_32(KIND, "0") : GROUP_SUM_OPERANDS("=r", 0)  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));      \
    }                                                                            \
    DEVICE void add_##NAME(int (&sum)[16], const unsigned (&a)[4], U64 b) {      \
        asm volatile(GROUP_SUM_TEXT_32(KIND, "1") : GROUP_SUM_OPERANDS("+r", 0)  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));      \
    }                                                                            \
    DEVICE void set_##NAME(int (&sum)[32], const unsigned (&a)[4], U64 b) {      \
        asm volatile(GROUP_SUM_TEXT_64(KIND, "0")                                \
                     : GROUP_SUM_OPERANDS("=r", 0), GROUP_SUM_OPERANDS("=r", 16) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));      \
    }                                                                            \
    DEVICE void add_##NAME(int (&sum)[32], const unsigned (&a)[4], U64 b) {      \
        asm volatile(GROUP_SUM_TEXT_64(KIND, "1")                                \
                     : GROUP_SUM_OPERANDS("+r", 0), GROUP_SUM_OPERANDS("+r", 16) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));      \
    }
// The same of rows in shared memory, in the order of the other operand.
#define GROUP_SUMS_OF_SHARED(NAME, KIND)                                         \
    DEVICE void set_##NAME(int (&sum)[32], U64 a, U64 b) {                       \
        asm volatile(GROUP_SUM_TEXT_SHARED(KIND, "0")                            \
                     : GROUP_SUM_OPERANDS("=r", 0), GROUP_SUM_OPERANDS("=r", 16) \
                     : "l"(a), "l"(b));                                          \
    }                                                                            \
    DEVICE void add_##NAME(int (&sum)[32], U64 a, U64 b) {                       \
        asm volatile(GROUP_SUM_TEXT_SHARED(KIND, "1")                            \
                     : GROUP_SUM_OPERANDS("+r", 0), GROUP_SUM_OPERANDS("+r", 16) \
                     : "l"(a), "l"(b));                                          \
    }
#define GROUP_SUM_TEXT_32(KIND, MORE)                           \
    "{ .reg .pred p; setp.ne.b32 p, " MORE ", 0;\n"             \
    "wgmma.mma_async.sync.aligned.m64n32k32.s32." KIND " "      \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, " \
    "{%16,%17,%18,%19}, %20, p; }"
#define GROUP_SUM_TEXT_64(KIND, MORE)                                     \
    "{ .reg .pred p; setp.ne.b32 p, " MORE ", 0;\n"                       \
    "wgmma.mma_async.sync.aligned.m64n64k32.s32." KIND " "                \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18," \
    "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "              \
    "{%32,%33,%34,%35}, %36, p; }"
#define GROUP_SUM_TEXT_SHARED(KIND, MORE)                                 \
    "{ .reg .pred p; setp.ne.b32 p, " MORE ", 0;\n"                       \
    "wgmma.mma_async.sync.aligned.m64n64k32.s32." KIND " "                \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18," \
    "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p; }"
#define GROUP_SUM_OPERANDS(USE, i)                                                                \
    USE(sum[i]), USE(sum[i + 1]), USE(sum[i + 2]), USE(sum[i + 3]), USE(sum[i + 4]),              \
        USE(sum[i + 5]), USE(sum[i + 6]), USE(sum[i + 7]), USE(sum[i + 8]), USE(sum[i + 9]),      \
        USE(sum[i + 10]), USE(sum[i + 11]), USE(sum[i + 12]), USE(sum[i + 13]), USE(sum[i + 14]), \
        USE(sum[i + 15])
GROUP_SUMS(signed_sums, "s8.s8")
GROUP_SUMS(mixed_sums, "s8.u8")
GROUP_SUMS(sums, "u8.s8")
GROUP_SUMS(unsigned_sums, "u8.u8")
GROUP_SUMS_OF_SHARED(sums, "u8.s8")
GROUP_SUMS_OF_SHARED(unsigned_sums, "u8.u8")

// Returns when all have arrived, see `have_arrived`.
DEVICE void await_arrivals(unsigned long long *address, unsigned turn) {
    await_copy<1>(address, turn);
}
// A barrier of the first threads of the block, whose id is that of no group.
template <int threads> DEVICE void part_barrier() {
    asm volatile("bar.sync 15, %0;" ::"n"(threads) : "memory");
}

// Sets the registers of a thread from here on, by all threads of the group; the total of the block
// does not change.
template <int count> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

#endif
