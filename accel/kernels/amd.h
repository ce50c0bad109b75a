// The language of kernels for AMD's instruction sets: OpenCL C as clang compiles it without a library
// of the device. What cl.h takes from that library is here, and the arguments of a launch are those
// the AMD tiers write: no hidden ones.

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// Constant, so that the packet and what it points to come through the scalar cache.
#define PACKET_SPACE __constant
#define GROUPS_PARAMETER , uint groups
#define GROUPS (((__constant uint *)__builtin_amdgcn_kernarg_segment_ptr())[7])

#define get_local_id(dimension) __builtin_amdgcn_workitem_id_x()
#define get_group_id(dimension) __builtin_amdgcn_workgroup_id_x()
#define min(a, b) __builtin_elementwise_min(a, b)
#define max(a, b) __builtin_elementwise_max(a, b)
#define clz(x) __builtin_clzg(x, 32)
#define sqrt(x) __builtin_sqrtf(x)
#define vload_half(i, p) ((float)(p)[i])
#define NATIVE_WIDENED(bits) ((float)__builtin_astype((ushort)(bits), half))
#define NATIVE_SDOT4(a, b) __builtin_amdgcn_sudot4(true, (int)(a), true, (int)(b), 0, false)
#define NATIVE_SUDOT4(a, b) __builtin_amdgcn_sudot4(true, (int)(a), false, (int)(b), 0, false)
#define atomic_add(place, x)                                                                  \
    __scoped_atomic_fetch_add(place, x, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP)

// A barrier that orders global memory too has fences of all address spaces: what costs a cache
// nothing is then left out of the others.
#define barrier(flags)                                                                        \
    do {                                                                                      \
        if ((flags) & CLK_GLOBAL_MEM_FENCE) {                                                 \
            __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                            \
            __builtin_amdgcn_s_barrier();                                                     \
            __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");                            \
        } else {                                                                              \
            __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");                   \
            __builtin_amdgcn_s_barrier();                                                     \
            __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");                   \
        }                                                                                     \
    } while (0)

#include "cl.h"
