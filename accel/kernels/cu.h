// The language of kernels in CUDA C++, as NVRTC compiles it without any header. What each macro means
// is the dialect of docs/kernels.md; vk.h and cl.h have the same ones. To be compiled with
// --fmad=false and without --use_fast_math.

#include "packet_constants.h"

// Bounds of loops are constants of a format, 0 for some.
#pragma nv_diag_suppress 186

typedef unsigned int uint;
typedef unsigned long long U64;
typedef U64 ADDRESS;
typedef uint4 U32X4;

#define FN static __device__ __forceinline__
#define STRUCT(T) struct T
#define INOUT(T) T &
#define INOUT_ARRAY(T, name, count) T (&name)[count]
#define REF(name) name
#define PASS(name) name
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

#define TO_F32(x) ((float)(x))
#define TO_I32(x) ((int)(x))
#define TO_U32(x) ((uint)(x))
#define TO_U64(x) ((U64)(x))
#define AS_F32(x) __uint_as_float((uint)(x))
#define AS_U32(x) __float_as_uint(x)
#define MAKE_U32X4(a, b, c, d) make_uint4(a, b, c, d)
#define MIN_I(a, b) min((int)(a), (int)(b))
#define MAX_I(a, b) max((int)(a), (int)(b))
#define MIN_U(a, b) min((uint)(a), (uint)(b))
#define MAX_U(a, b) max((uint)(a), (uint)(b))
#define HIGHEST_BIT(x) (31 - __clz((int)(x)))
#define NATIVE_QUOTIENT(a, b) __fdiv_rn(a, b)
#define NATIVE_SQUARE_ROOT(a) __fsqrt_rn(a)

FN float widened_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

#define F32_AT(p, i) (((float *)(p))[i])
#define I32_AT(p, i) (((int *)(p))[i])
#define U32_AT(p, i) (((uint *)(p))[i])
#define U32_SHARED_AT(p, i) (((volatile uint *)(p))[i])
#define U32_NEAR(p, i) U32_AT(p, i)
#define U32X4_AT(p, i) (((uint4 *)(p))[i])
#define NATIVE_F16_AT(p, i) widened_half(((unsigned short *)(p))[i])
#define NATIVE_WIDENED(bits) widened_half((unsigned short)(bits))
#define U16_AT(p, i) ((uint)((unsigned short *)(p))[i])
#define U8_AT(p, i) ((uint)((unsigned char *)(p))[i])
#define I8_AT(p, i) ((int)((signed char *)(p))[i])
#define SET_U16(p, i, x) ((unsigned short *)(p))[i] = (unsigned short)(x)
#define SET_U8(p, i, x) ((unsigned char *)(p))[i] = (unsigned char)(x)
// A barrier orders these.
#define U8_SHARED_AT(p, i) U8_AT(p, i)
#define U32X4_SHARED_AT(p, i) U32X4_AT(p, i)
#define SET_U8_SHARED(p, i, x) SET_U8(p, i, x)

#define CTX
#define CTX_ONLY
#define PASS_CTX
#define PASS_CTX_ONLY
#define GROUP_MEMORY(words) __shared__ uint group_memory[words];
#define GROUP_VECTORS(vectors) __shared__ uint4 group_vectors[vectors];
#define GROUP_MEMORY_AND_VECTORS(words, vectors)                                              \
    __shared__ uint group_memory[words];                                                      \
    __shared__ uint4 group_vectors[vectors];
#define GROUP_U32X4(i) group_vectors[i]
#define GROUP_VECTOR_WORD(i) ((uint *)group_vectors)[i]
#define GROUP_U32(i) group_memory[i]
#define GROUP_I32(i) ((int)group_memory[i])
#define GROUP_F32(i) __uint_as_float(group_memory[i])
#define SET_GROUP_U32(i, x) group_memory[i] = (uint)(x)
#define SET_GROUP_I32(i, x) group_memory[i] = (uint)(x)
#define SET_GROUP_F32(i, x) group_memory[i] = __float_as_uint(x)
#define GROUP_ADD(i, x) atomicAdd(group_memory + (i), x)
#define GROUP_BARRIER __syncthreads()
#define GLOBAL_BARRIER __syncthreads()

#define ITEM threadIdx.x
#define GROUP blockIdx.x
#define GROUPS gridDim.x

FN int packed_sdot(uint a, uint b) {
    int sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(0));
    return sum;
}

FN int packed_sudot(uint a, uint b) {
    int sum;
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(0));
    return sum;
}
#define NATIVE_SDOT4(a, b) packed_sdot(a, b)
#define NATIVE_SUDOT4(a, b) packed_sudot(a, b)

// The arguments of a launch.
struct LAUNCH {
    ADDRESS scratch, inputs, packets;
    uint index;
};
#define LAUNCH_CTX const LAUNCH &launch
#define INPUTS launch.inputs

FN ADDRESS address_of(LAUNCH_CTX, U64 stored) {
    const U64 offset = stored & OFFSET_MASK;
    if (stored & SCRATCH_MEMORY) return launch.scratch + offset;
    return stored & INPUT_MEMORY ? launch.inputs + offset : offset;
}

#define PACKET_STRUCT struct PACKET
#define LOAD_PACKET const PACKET *packet = (const PACKET *)launch.packets + launch.index
#define PACKET_FIELD(field) packet->field
#define PACKET_ADDRESS(i) address_of(launch, packet->operand[i])

// A launch has its packet with it: where arguments lie it is read at once, without a detour through
// memory.
#define KERNEL(name)                                                                          \
    extern "C" __global__ void __launch_bounds__(GROUP_SIZE)                                  \
        launch_##name(U64 scratch, U64 inputs, const __grid_constant__ PACKET packet)

// A kernel may be launched before the one in front of it has ended, from where that one allows it:
// what is read before this line was written before the step.
#if __CUDA_ARCH__ >= 900
#define PRECEDING_DONE asm volatile("griddepcontrol.wait;" ::: "memory")
#define FOLLOWING_MAY_START asm volatile("griddepcontrol.launch_dependents;")
#else
#define PRECEDING_DONE
#define FOLLOWING_MAY_START
#endif
#define OPEN                                                                                  \
    const LAUNCH launch = {scratch, inputs, (U64)&packet, 0u};                                \
    const OP op = opened(launch);                                                             \
    PRECEDING_DONE
#define OPEN_GROUP OPEN

#include "packet.h"
