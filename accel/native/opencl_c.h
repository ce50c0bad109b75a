// The types and built-in functions of OpenCL C that the processor kernels use, as C for clang.
//
// A unit of the native library is this file, then kernel texts of accel/opencl/kernels. Compile with
// -ffp-contract=off: every floating-point line of the kernels is one rounding.

#ifndef OPENCL_C_H
#define OPENCL_C_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// packet.h leaves out what OpenCL C needs and C does not.
#define NATIVE_C 1

#define __kernel
#define __global
#define __private

_Static_assert((char)-1 < 0, "compile with -fsigned-char: OpenCL's char is signed");
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef uint64_t ulong;  // 64 bits on Windows as well, where long has 32
typedef _Float16 half;

// One name for several argument types, as OpenCL's built-ins have.
#define BUILTIN __attribute__((overloadable, always_inline)) static inline

#define VECTOR_TYPE(T, N) typedef T T##N __attribute__((ext_vector_type(N)));
#define VECTOR_TYPES(T) \
    VECTOR_TYPE(T, 2) VECTOR_TYPE(T, 4) VECTOR_TYPE(T, 8) VECTOR_TYPE(T, 16)
VECTOR_TYPES(char)
VECTOR_TYPES(uchar)
VECTOR_TYPES(short)
VECTOR_TYPES(ushort)
VECTOR_TYPES(int)
VECTOR_TYPES(uint)
VECTOR_TYPES(ulong)
VECTOR_TYPES(float)
VECTOR_TYPES(half)

// Vectors of equal parts, in the order of the arguments.
#define MAKE_OF_2(T, PART)                \
    BUILTIN T make_##T(PART a, PART b) {  \
        T whole;                          \
        whole.lo = a;                     \
        whole.hi = b;                     \
        return whole;                     \
    }
#define MAKE_OF_4(T, HALF, PART)                              \
    BUILTIN T make_##T(PART a, PART b, PART c, PART d) {      \
        return make_##T(make_##HALF(a, b), make_##HALF(c, d)); \
    }
#define MAKE_OF_8(T, HALF, PART)                                                          \
    BUILTIN T make_##T(PART a, PART b, PART c, PART d, PART e, PART f, PART g, PART h) {  \
        return make_##T(make_##HALF(a, b, c, d), make_##HALF(e, f, g, h));                \
    }
#define MAKE_VECTORS(T)              \
    MAKE_OF_2(T##4, T##2)            \
    MAKE_OF_2(T##8, T##4)            \
    MAKE_OF_2(T##16, T##8)           \
    MAKE_OF_4(T##8, T##4, T##2)      \
    MAKE_OF_4(T##16, T##8, T##4)     \
    MAKE_OF_8(T##16, T##8, T##2)
MAKE_VECTORS(float)
MAKE_VECTORS(int)
MAKE_VECTORS(uint)

BUILTIN uint4 make_uint4(uint a, uint b, uint c, uint d) { return (uint4){a, b, c, d}; }
#define MAKE_OF_8_SCALARS(T, S)                                              \
    BUILTIN T make_##T(S a, S b, S c, S d, S e, S f, S g, S h) {             \
        return (T){a, b, c, d, e, f, g, h};                                  \
    }
MAKE_OF_8_SCALARS(uint8, uint)
MAKE_OF_8_SCALARS(int8, int)
MAKE_OF_8_SCALARS(ulong8, ulong)
#define MAKE_OF_16_SCALARS(T, HALF, S)                                                  \
    BUILTIN T make_##T(S a, S b, S c, S d, S e, S f, S g, S h, S i, S j, S k, S l, S m, \
                       S n, S o, S p) {                                                 \
        return make_##T(make_##HALF(a, b, c, d, e, f, g, h),                            \
                        make_##HALF(i, j, k, l, m, n, o, p));                           \
    }
MAKE_OF_16_SCALARS(int16, int8, int)
MAKE_OF_16_SCALARS(uint16, uint8, uint)

// The same bits as another type.
#define __builtin_astype(value, T) AS_TYPE(T, value)
#define AS_TYPE(T, value)                                                        \
    ({                                                                           \
        __auto_type as_from = (value);                                           \
        _Static_assert(sizeof(T) == sizeof(as_from), "types of different size"); \
        T as_to;                                                                 \
        __builtin_memcpy(&as_to, &as_from, sizeof(T));                           \
        as_to;                                                                   \
    })
#define as_float(value) AS_TYPE(float, value)
#define as_int(value) AS_TYPE(int, value)
#define as_uint(value) AS_TYPE(uint, value)
#define as_float16(value) AS_TYPE(float16, value)
#define as_int16(value) AS_TYPE(int16, value)
#define as_short16(value) AS_TYPE(short16, value)
#define as_uint16(value) AS_TYPE(uint16, value)
#define as_uint4(value) AS_TYPE(uint4, value)
#define as_uint8(value) AS_TYPE(uint8, value)
#define as_ulong8(value) AS_TYPE(ulong8, value)

#define convert_int(value) ((int)(value))
#define convert_float(value) ((float)(value))
#define convert_char16(value) __builtin_convertvector(value, char16)
#define convert_short16(value) __builtin_convertvector(value, short16)
#define convert_ushort16(value) __builtin_convertvector(value, ushort16)
#define convert_int16(value) __builtin_convertvector(value, int16)
#define convert_uint16(value) __builtin_convertvector(value, uint16)
#define convert_float16(value) __builtin_convertvector(value, float16)

#define LOAD_AND_STORE(T, N)                                             \
    BUILTIN T##N vload##N(size_t index, const volatile T *from) {        \
        T##N value;                                                      \
        __builtin_memcpy(&value, (const T *)from + N * index, sizeof(value)); \
        return value;                                                    \
    }                                                                    \
    BUILTIN void vstore##N(T##N value, size_t index, T *to) {            \
        __builtin_memcpy(to + N * index, &value, sizeof(value));         \
    }
#define LOADS_AND_STORES(T) LOAD_AND_STORE(T, 4) LOAD_AND_STORE(T, 16)
LOADS_AND_STORES(char)
LOADS_AND_STORES(uchar)
LOADS_AND_STORES(short)
LOADS_AND_STORES(ushort)
LOADS_AND_STORES(int)
LOADS_AND_STORES(uint)
LOADS_AND_STORES(float)

// Halves in integers where the processor converts none: clang would call a function of its library.
#if defined(__x86_64__) && !defined(__F16C__)
#define HALF_EXPONENT_DISTANCE 0x1p112f
#define HALF_INFINITY 0x0F800000u  // bits of a half, without its sign, moved to those of a float
#define FLOAT_QUIET_BIT 0x00400000u

BUILTIN float float_of_half(ushort bits) {
    const uint magnitude = (bits & 0x7FFFu) << 13, sign = (bits & 0x8000u) << 16;
    if (magnitude < HALF_INFINITY)
        return as_float(as_uint(as_float(magnitude) * HALF_EXPONENT_DISTANCE) | sign);
    const uint quiet = magnitude > HALF_INFINITY ? FLOAT_QUIET_BIT : 0;
    return as_float(magnitude | 0x7F800000u | quiet | sign);
}

BUILTIN float16 float_of_half(ushort16 halves) {
    const uint16 bits = convert_uint16(halves), magnitude = (bits & 0x7FFFu) << 13u;
    const uint16 scaled = as_uint16(as_float16(magnitude) * HALF_EXPONENT_DISTANCE);
    const uint16 quiet = (magnitude > HALF_INFINITY) ? (uint16)FLOAT_QUIET_BIT : (uint16)0u;
    const uint16 value =
        (magnitude < HALF_INFINITY) ? scaled : (magnitude | 0x7F800000u | quiet);
    return as_float16(value | (bits & 0x8000u) << 16u);
}

BUILTIN ushort half_of_float(float value) {
    const uint magnitude = as_uint(value) & 0x7FFFFFFFu;
    uint half_bits;
    if (magnitude > 0x7F800000u)
        half_bits = 0x7E00u | (magnitude >> 13 & 0x3FFu);
    else if (magnitude >= 0x477FF000u)  // rounds to 2^16
        half_bits = 0x7C00u;
    else if (magnitude < 0x38800000u)  // below 2^-14: the sum rounds to multiples of 2^-24
        half_bits = as_uint(as_float(magnitude) + 0.5f) - as_uint(0.5f);
    else
        half_bits = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    return (ushort)(half_bits | (as_uint(value) >> 16 & 0x8000u));
}
#else
BUILTIN float float_of_half(ushort bits) { return (float)AS_TYPE(half, bits); }
BUILTIN float16 float_of_half(ushort16 bits) {
    return __builtin_convertvector(AS_TYPE(half16, bits), float16);
}
BUILTIN ushort half_of_float(float value) { return AS_TYPE(ushort, (half)value); }
#endif

BUILTIN float vload_half(size_t index, const half *from) {
    ushort bits;
    __builtin_memcpy(&bits, from + index, sizeof(bits));
    return float_of_half(bits);
}

BUILTIN float16 vload_half16(size_t index, const half *from) {
    return float_of_half(vload16(index, (const ushort *)from));
}

// Rounds to nearest even, as every conversion to a half does here.
BUILTIN void vstore_half_rte(float value, size_t index, half *to) {
    const ushort bits = half_of_float(value);
    __builtin_memcpy(to + index, &bits, sizeof(bits));
}

#define UINT_MAX 0xFFFFFFFFu

#define ORDER_SCALARS(T)                                   \
    BUILTIN T min(T a, T b) { return b < a ? b : a; }      \
    BUILTIN T max(T a, T b) { return a < b ? b : a; }      \
    BUILTIN T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define ORDER_VECTORS(V, T)                                                        \
    BUILTIN V min(V a, V b) { return __builtin_elementwise_min(a, b); }            \
    BUILTIN V max(V a, V b) { return __builtin_elementwise_max(a, b); }            \
    BUILTIN V min(V a, T b) { return __builtin_elementwise_min(a, (V)b); }         \
    BUILTIN V max(V a, T b) { return __builtin_elementwise_max(a, (V)b); }         \
    BUILTIN V clamp(V x, T low, T high) { return min(max(x, low), high); }
ORDER_SCALARS(int)
ORDER_SCALARS(ushort)
ORDER_SCALARS(uint)
ORDER_SCALARS(ulong)
ORDER_SCALARS(float)
#define ORDER_ALL_VECTORS(T) \
    ORDER_VECTORS(T##2, T) ORDER_VECTORS(T##4, T) ORDER_VECTORS(T##8, T) ORDER_VECTORS(T##16, T)
ORDER_VECTORS(uchar16, uchar)
ORDER_ALL_VECTORS(short)
ORDER_ALL_VECTORS(ushort)
ORDER_ALL_VECTORS(int)
ORDER_ALL_VECTORS(uint)

// Comparisons as the scalar ones have them: a NaN in x stays a NaN.
BUILTIN float16 clamp(float16 x, float low, float high) {
    const float16 raised = x < (float16)low ? (float16)low : x;
    return (float16)high < raised ? (float16)high : raised;
}

// Of scalars b where c is not 0, of vectors b in the lanes where c has its sign bit.
BUILTIN float select(float a, float b, int c) { return c ? b : a; }
BUILTIN int select(int a, int b, int c) { return c ? b : a; }
#define SELECT_LANES(V, C) \
    BUILTIN V select(V a, V b, C c) { return c < 0 ? b : a; }
SELECT_LANES(float2, int2)
SELECT_LANES(float4, int4)
SELECT_LANES(float8, int8)
SELECT_LANES(float16, int16)
SELECT_LANES(int2, int2)
SELECT_LANES(int4, int4)
SELECT_LANES(int8, int8)
SELECT_LANES(int16, int16)

BUILTIN int any(int16 c) { return __builtin_reduce_or(c) < 0; }
BUILTIN int any(short16 c) { return __builtin_reduce_or(c) < 0; }

BUILTIN float fabs(float x) { return __builtin_fabsf(x); }
BUILTIN float16 fabs(float16 x) { return __builtin_elementwise_abs(x); }
BUILTIN float sqrt(float x) { return __builtin_sqrtf(x); }
BUILTIN float rint(float x) { return __builtin_rintf(x); }
BUILTIN float16 rint(float16 x) { return __builtin_elementwise_rint(x); }

BUILTIN uint mul_hi(uint a, uint b) { return (uint)((ulong)a * b >> 32); }
BUILTIN ulong mul_hi(ulong a, ulong b) { return (ulong)((unsigned __int128)a * b >> 64); }
BUILTIN uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
BUILTIN ulong clz(ulong x) { return x ? (ulong)__builtin_clzll(x) : 64u; }

#endif
