// The language of kernels for Level Zero: OpenCL C as clang compiles it to SPIR-V without a header of
// OpenCL. What cl.h takes from that header is here: as instructions of SPIR-V, or as the functions by
// whose mangled names clang makes one.

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef uint uint4 __attribute__((ext_vector_type(4)));

#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2
#define SPIRV_FUNCTION __attribute__((overloadable, convergent))
void SPIRV_FUNCTION barrier(uint flags);
uint SPIRV_FUNCTION atomic_add(volatile __local uint *address, uint x);
float SPIRV_FUNCTION sqrt(float x);

// Functions of their own: inlined, clang loses the conversion to 32 bits in some kernels.
#define SPIRV_INDEX static __attribute__((noinline, const)) uint
SPIRV_INDEX item_in_group(void) { return (uint)__builtin_spirv_local_invocation_id(0); }
SPIRV_INDEX group_in_grid(void) { return (uint)__builtin_spirv_workgroup_id(0); }
SPIRV_INDEX groups_in_grid(void) { return (uint)__builtin_spirv_num_workgroups(0); }
#define get_local_id(dimension) item_in_group()
#define get_group_id(dimension) group_in_grid()
#define get_num_groups(dimension) groups_in_grid()

#define min(a, b) __builtin_elementwise_min(a, b)
#define max(a, b) __builtin_elementwise_max(a, b)
#define clz(x) __builtin_clzg(x, 32)
#define as_uint(x) __builtin_astype(x, uint)
#define as_int(x) __builtin_astype(x, int)
#define as_float(x) __builtin_astype(x, float)
#define vload_half(i, p) ((float)(p)[i])
#define NATIVE_WIDENED(bits) ((float)__builtin_astype((ushort)(bits), half))

#include "cl.h"
