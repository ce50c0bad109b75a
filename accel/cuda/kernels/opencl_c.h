// As much of OpenCL C as the kernels that arrange stored weights use, in CUDA C++: every function is
// a device function (--device-as-default-execution-space).

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned short half;

#define __global
#define __local
#define __kernel extern "C" __global__
#define reqd_work_group_size(x, y, z)
#define as_uint __float_as_uint
#define as_float __uint_as_float
#define get_global_id(dimension) \
    ((dimension) ? blockIdx.y : blockIdx.x * blockDim.x + threadIdx.x)
#define get_global_size(dimension) ((dimension) ? gridDim.y : gridDim.x * blockDim.x)

inline float vload_half(int index, const half *bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits[index]));
    return value;
}
