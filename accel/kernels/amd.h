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
#define ADD_SUDOT4(sum, a, b) \
    sum = __builtin_amdgcn_sudot4(true, (int)(a), false, (int)(b), sum, false)
#define atomic_add(target, x)                                                                 \
    __scoped_atomic_fetch_add(target, x, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP)

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

#ifdef NATIVE_MATRIX
// Matrices of matrices.k as WMMA of gfx12 wants them: 16 x 16 x 16, so two instructions a product. An
// item has half of a row, or of a column, which of its bytes are multiplied together being all the
// same; a column of bytes is a row to the instruction, so that an item's elements are in one row.
#define LANE (ITEM % 32u)
#define SUBGROUP (ITEM / 32u)
typedef int MATRIX_SUM __attribute__((ext_vector_type(8)));
#define MATRIX_ROWS int4
#define MATRIX_COLUMNS int4
#define LOAD_ROWS(m, at, stride) \
    m = as_int4(GROUP_U32X4((at) + (stride) * (LANE % 16u) + LANE / 16u))
#define LOAD_COLUMNS(m, at, stride) LOAD_ROWS(m, at, stride)
#define HALF_PRODUCT(columns, rows, sum) \
    __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, columns, true, rows, sum, false)
#define MULTIPLY(sum, rows, columns)                                 \
    sum = HALF_PRODUCT((columns).xy, (rows).xy, (MATRIX_SUM)(0)),    \
    sum = HALF_PRODUCT((columns).zw, (rows).zw, sum)
#define ELEMENT(sum, e) sum[e]
// In assembly, since no compiler sees that 24 bits are enough.
#define ADD_PRODUCT_24(sum, a, b) \
    __asm__("v_mad_i32_i24 %0, %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b))
// All steps of a unit one after the other would take more registers than there are.
#define UNROLL_STEPS _Pragma("nounroll")
#define ROW_KEYS 1u
#define COLUMN_KEYS 8u
#define ROW_KEY(e) 0u
#define COLUMN_KEY(e) (e)
#define KEYED_ROW(key) (LANE % 16u)
#define KEYED_COLUMN(key) ((key) + 8u * (LANE / 16u))
#endif

#include "cl.h"
