// The language of kernels in OpenCL C 1.2. What each macro means is the dialect of docs/kernels.md;
// vk.h and cu.h have the same ones. What they keep in globals, the memory of the group, travels as
// CTX.
//
// SHARED_ADDRESSES is 1 where the device dereferences host addresses; else an address names one of
// BANKS buffers and an offset in it. amd.h includes this file and has defined what it does itself.

#pragma OPENCL FP_CONTRACT OFF

#include "packet_constants.h"

#define ADDRESS ulong
#define U64 ulong
#define U32X4 uint4

#ifdef __clang__
#define FN static inline __attribute__((always_inline))
#else
#define FN static inline
#endif
#define STRUCT(T) typedef struct T T; struct T
#define INOUT(T) T *
#define INOUT_ARRAY(T, name, count) T *name
#define REF(name) (*name)
#define PASS(name) &name
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

#define TO_F32(x) ((float)(x))
#define TO_I32(x) ((int)(x))
#define TO_U32(x) ((uint)(x))
#define TO_U64(x) ((ulong)(x))
#define AS_F32(x) as_float((uint)(x))
#define AS_U32(x) as_uint(x)
#define MAKE_U32X4(a, b, c, d) ((uint4)(a, b, c, d))
#define MIN_I(a, b) min((int)(a), (int)(b))
#define MAX_I(a, b) max((int)(a), (int)(b))
#define MIN_U(a, b) min((uint)(a), (uint)(b))
#define MAX_U(a, b) max((uint)(a), (uint)(b))
#define HIGHEST_BIT(x) (31 - (int)clz((uint)(x)))
#define NATIVE_QUOTIENT(a, b) ((a) / (b))
#define NATIVE_SQUARE_ROOT(a) sqrt(a)

#ifndef NATIVE_WIDENED
FN float half_in_register(ushort bits) { return vload_half(0, (const half *)&bits); }
#define NATIVE_WIDENED(bits) half_in_register((ushort)(bits))
#endif

#define F32_AT(p, i) (((__global float *)(p))[i])
#define I32_AT(p, i) (((__global int *)(p))[i])
#define U32_AT(p, i) (((__global uint *)(p))[i])
#define U32_SHARED_AT(p, i) (((volatile __global uint *)(p))[i])
#define U32_NEAR(p, i) U32_AT(p, i)
#define U32X4_AT(p, i) (((__global uint4 *)(p))[i])
#define NATIVE_F16_AT(p, i) vload_half(i, (const __global half *)(p))
#define U16_AT(p, i) ((uint)((__global ushort *)(p))[i])
#define U8_AT(p, i) ((uint)((__global uchar *)(p))[i])
#define I8_AT(p, i) ((int)((__global char *)(p))[i])
#define SET_U16(p, i, x) ((__global ushort *)(p))[i] = (ushort)(x)
#define SET_U8(p, i, x) ((__global uchar *)(p))[i] = (uchar)(x)
// A barrier orders these.
#define U8_SHARED_AT(p, i) U8_AT(p, i)
#define U32X4_SHARED_AT(p, i) U32X4_AT(p, i)
#define SET_U8_SHARED(p, i, x) SET_U8(p, i, x)

#define CTX __local uint *group_memory,
#define CTX_ONLY __local uint *group_memory
#define PASS_CTX group_memory,
#define PASS_CTX_ONLY group_memory
#define GROUP_MEMORY(words) enum { GROUP_WORDS = words };
#define GROUP_VECTORS(vectors) enum { GROUP_WORDS = 4 * (vectors), VECTORS_AT = 0 };
#define GROUP_MEMORY_AND_VECTORS(words, vectors)                                              \
    enum { GROUP_WORDS = (words) + 4 * (vectors), VECTORS_AT = words };
#define GROUP_U32X4(i) ((__local uint4 *)(group_memory + VECTORS_AT))[i]
#define GROUP_VECTOR_WORD(i) group_memory[VECTORS_AT + (i)]
#define GROUP_U32(i) group_memory[i]
#define GROUP_I32(i) as_int(group_memory[i])
#define GROUP_F32(i) as_float(group_memory[i])
#define SET_GROUP_U32(i, x) group_memory[i] = (uint)(x)
#define SET_GROUP_I32(i, x) group_memory[i] = (uint)(x)
#define SET_GROUP_F32(i, x) group_memory[i] = as_uint(x)
#define GROUP_ADD(i, x) atomic_add(group_memory + (i), x)
#define GROUP_BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define GLOBAL_BARRIER barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)

#define ITEM ((uint)get_local_id(0))
#define GROUP ((uint)get_group_id(0))
#ifndef GROUPS
#define GROUPS ((uint)get_num_groups(0))
#define GROUPS_PARAMETER
#endif

#ifdef __NV_CL_C_VERSION
static inline int packed_sdot(uint a, uint b) {
    int sum;
    __asm__("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(0));
    return sum;
}
static inline int packed_sudot(uint a, uint b) {
    int sum;
    __asm__("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(0));
    return sum;
}
#define NATIVE_SDOT4(a, b) packed_sdot(a, b)
#define NATIVE_SUDOT4(a, b) packed_sudot(a, b)
#endif

#if SHARED_ADDRESSES
#define BANK_PARAMETERS
#define BANK_POINTERS { 0 }
#else
#define BANK_PARAMETERS                                                                       \
    __global uchar *bank0, __global uchar *bank1, __global uchar *bank2,                      \
        __global uchar *bank3, __global uchar *bank4, __global uchar *bank5,                  \
        __global uchar *bank6, __global uchar *bank7, __global uchar *bank8,                  \
        __global uchar *bank9, __global uchar *bank10, __global uchar *bank11,                \
        __global uchar *bank12, __global uchar *bank13, __global uchar *bank14,               \
        __global uchar *bank15,
#define BANK_POINTERS                                                                         \
    { (ADDRESS)bank0, (ADDRESS)bank1, (ADDRESS)bank2, (ADDRESS)bank3, (ADDRESS)bank4,         \
      (ADDRESS)bank5, (ADDRESS)bank6, (ADDRESS)bank7, (ADDRESS)bank8, (ADDRESS)bank9,         \
      (ADDRESS)bank10, (ADDRESS)bank11, (ADDRESS)bank12, (ADDRESS)bank13, (ADDRESS)bank14,    \
      (ADDRESS)bank15 }
#endif

// The arguments of a launch.
typedef struct {
    ADDRESS bank[BANKS];
    ADDRESS scratch, inputs, packets;
    uint index;
} LAUNCH;
#define LAUNCH_CTX const LAUNCH *launch
#define INPUTS address_of(launch, launch->inputs)

// An address as the host writes it, whatever it is relative to.
FN ADDRESS address_in_bank(LAUNCH_CTX, ulong stored) {
#if SHARED_ADDRESSES
    return stored & OFFSET_MASK;
#else
    // An array that is indexed by a variable would be copied to the memory of every item.
    const ulong number = stored >> BANK_SHIFT;
    ADDRESS bank = launch->bank[0];
    UNROLL for (uint i = 1; i < BANKS; i++) bank = number == i ? launch->bank[i] : bank;
    return bank + (stored & OFFSET_MASK);
#endif
}

FN ADDRESS address_of(LAUNCH_CTX, ulong stored) {
    const ulong offset = stored & OFFSET_MASK;
    if (stored & SCRATCH_MEMORY) return address_in_bank(launch, launch->scratch) + offset;
    if (stored & INPUT_MEMORY) return address_in_bank(launch, launch->inputs) + offset;
    return address_in_bank(launch, stored);
}

#define PACKET_STRUCT typedef struct PACKET PACKET; struct PACKET
#ifndef PACKET_SPACE
#define PACKET_SPACE __global
#endif
#define LOAD_PACKET                                                                           \
    const PACKET_SPACE PACKET *packet =                                                       \
        (const PACKET_SPACE PACKET *)address_of(launch, launch->packets) + launch->index
#define PACKET_FIELD(field) packet->field
#define PACKET_ADDRESS(i) address_of(launch, packet->operand[i])

#define KERNEL(name)                                                                          \
    __kernel __attribute__((reqd_work_group_size(GROUP_SIZE, 1, 1))) void launch_##name(      \
        BANK_PARAMETERS ulong scratch, ulong inputs, ulong packets, uint index GROUPS_PARAMETER)
#define OPEN                                                                                  \
    const LAUNCH launch_ = {BANK_POINTERS, scratch, inputs, packets, index};                  \
    const OP op = opened(&launch_)
#define OPEN_GROUP                                                                            \
    __local uint group_memory[GROUP_WORDS] __attribute__((aligned(16)));                                                   \
    OPEN

#include "packet.h"
