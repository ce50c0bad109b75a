// The language of kernels in Metal's shading language, version 3, memory being reached by GPU address.
// What each macro means is the dialect of docs/kernels.md; vk.h, cl.h and cu.h have the same ones. To
// be compiled without fast math. GROUP_STORAGE is what memory of a group is declared as.

#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)

#include "packet_constants.h"

#ifndef GROUP_STORAGE
#define GROUP_STORAGE threadgroup
#endif

#define ADDRESS ulong
#define U64 ulong
#define U32X4 uint4

#define FN static inline __attribute__((always_inline))
#define STRUCT(T) struct T
#define INOUT(T) thread T &
#define INOUT_ARRAY(T, name, count) thread T (&name)[count]
#define REF(name) name
#define PASS(name) name
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

#define TO_F32(x) ((float)(x))
#define TO_I32(x) ((int)(x))
#define TO_U32(x) ((uint)(x))
#define TO_U64(x) ((ulong)(x))
#define AS_F32(x) as_type<float>((uint)(x))
#define AS_U32(x) as_type<uint>((float)(x))
#define MAKE_U32X4(a, b, c, d) uint4(a, b, c, d)
#define MIN_I(a, b) min((int)(a), (int)(b))
#define MAX_I(a, b) max((int)(a), (int)(b))
#define MIN_U(a, b) min((uint)(a), (uint)(b))
#define MAX_U(a, b) max((uint)(a), (uint)(b))
#define HIGHEST_BIT(x) (31 - (int)clz((uint)(x)))
#define NATIVE_QUOTIENT(a, b) ((a) / (b))
#define NATIVE_SQUARE_ROOT(a) precise::sqrt(a)

#define F32_AT(p, i) (((device float *)(p))[i])
#define I32_AT(p, i) (((device int *)(p))[i])
#define U32_AT(p, i) (((device uint *)(p))[i])
#define U32_SHARED_AT(p, i) (((volatile device uint *)(p))[i])
#define U32_NEAR(p, i) U32_AT(p, i)
#define U32X4_AT(p, i) (((device uint4 *)(p))[i])
#define NATIVE_F16_AT(p, i) ((float)((device half *)(p))[i])
#define NATIVE_WIDENED(bits) ((float)as_type<half>((ushort)(bits)))
#define U16_AT(p, i) ((uint)((device ushort *)(p))[i])
#define U8_AT(p, i) ((uint)((device uchar *)(p))[i])
#define I8_AT(p, i) ((int)((device char *)(p))[i])
#define SET_U16(p, i, x) ((device ushort *)(p))[i] = (ushort)(x)
#define SET_U8(p, i, x) ((device uchar *)(p))[i] = (uchar)(x)
// A barrier orders these.
#define U8_SHARED_AT(p, i) U8_AT(p, i)
#define U32X4_SHARED_AT(p, i) U32X4_AT(p, i)
#define SET_U8_SHARED(p, i, x) SET_U8(p, i, x)

// What the other languages keep in globals travels as CTX.
#define CTX_ONLY                                                                              \
    threadgroup uint *group_memory, uint item_in_group, uint group_in_grid, uint groups_in_grid
#define CTX CTX_ONLY,
#define PASS_CTX_ONLY group_memory, item_in_group, group_in_grid, groups_in_grid
#define PASS_CTX PASS_CTX_ONLY,
#define GROUP_MEMORY(words) enum { GROUP_WORDS = words };
#define GROUP_VECTORS(vectors) enum { GROUP_WORDS = 4 * (vectors), VECTORS_AT = 0 };
#define GROUP_MEMORY_AND_VECTORS(words, vectors)                                              \
    enum { GROUP_WORDS = (words) + 4 * (vectors), VECTORS_AT = words };
#define GROUP_U32X4(i) ((threadgroup uint4 *)(group_memory + VECTORS_AT))[i]
#define GROUP_VECTOR_WORD(i) group_memory[VECTORS_AT + (i)]
#define GROUP_U32(i) group_memory[i]
#define GROUP_I32(i) ((int)group_memory[i])
#define GROUP_F32(i) as_type<float>(group_memory[i])
#define SET_GROUP_U32(i, x) group_memory[i] = (uint)(x)
#define SET_GROUP_I32(i, x) group_memory[i] = (uint)(x)
#define SET_GROUP_F32(i, x) group_memory[i] = as_type<uint>((float)(x))
#define GROUP_ADD(i, x)                                                                       \
    atomic_fetch_add_explicit((threadgroup atomic_uint *)(group_memory + (i)), x,             \
                              memory_order_relaxed)
#define GROUP_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define GLOBAL_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)

#define ITEM item_in_group
#define GROUP group_in_grid
#define GROUPS groups_in_grid

// The arguments of a launch.
struct LAUNCH {
    ulong scratch, inputs, packets;
    uint index;
};
#define LAUNCH_CTX constant LAUNCH &launch
#define INPUTS launch.inputs

FN ADDRESS address_of(LAUNCH_CTX, ulong stored) {
    const ulong offset = stored & OFFSET_MASK;
    if (stored & SCRATCH_MEMORY) return launch.scratch + offset;
    return stored & INPUT_MEMORY ? launch.inputs + offset : offset;
}

#define PACKET_STRUCT struct PACKET
#define LOAD_PACKET                                                                           \
    const device PACKET *packet = (const device PACKET *)launch.packets + launch.index
#define PACKET_FIELD(field) packet->field
#define PACKET_ADDRESS(i) address_of(launch, packet->operand[i])

#define KERNEL(name)                                                                          \
    kernel void launch_##name(constant LAUNCH &launch [[buffer(0)]],                          \
                              uint item_in_group [[thread_position_in_threadgroup]],          \
                              uint group_in_grid [[threadgroup_position_in_grid]],            \
                              uint groups_in_grid [[threadgroups_per_grid]])
#define OPEN const OP op = opened(launch)
#define OPEN_GROUP                                                                            \
    alignas(16) GROUP_STORAGE uint group_memory[GROUP_WORDS];                                             \
    OPEN

#include "packet.h"
