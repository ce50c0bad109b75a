// The exact primitives (rules R0 to R5 and R9 of arithmetic.md). Every floating-point line is one
// rounding; the order of the lines is that of reference/exact and must not change.
//
// Build options: NATIVE_DIVIDE and NATIVE_SQRT are 1 where the start-up self-test found the device's
// operations correctly rounded, 0 where the integer remedies are needed.

#ifndef EXACT_H
#define EXACT_H

#pragma OPENCL FP_CONTRACT OFF

#define SEGMENT 256
#define SPAN_SEGMENTS 4

#define SIGN_BIT 0x80000000u
#define INFINITY_BITS 0x7F800000u
#define QUIET_NAN 0x7FC00000u
#define LOG2E 1.44269504088896341f
#define HALF_QUIET_NAN 0x7E00

// Significand with 24 bits and exponent of a finite non-zero |x| = significand * 2^exponent.
static inline uint unpack_magnitude(uint bits, int *exponent) {
    uint significand = bits & 0x7FFFFFu;
    int field = (int)(bits >> 23 & 0xFFu);
    if (field == 0) {
        int shift = (int)clz(significand) - 8;
        *exponent = -149 - shift;
        return significand << shift;
    }
    *exponent = field - 150;
    return significand | 0x800000u;
}

// Nearest-even binary32 of value * 2^exponent; value has at least 26 bits and its lowest bit is
// sticky.
static inline uint pack_magnitude(ulong value, int exponent) {
    int drop = 64 - (int)clz(value) - 24;
    if (exponent + drop < -149) drop = -149 - exponent;
    if (drop > 62) return 0;
    ulong kept = value >> drop;
    ulong rest = value & (((ulong)1 << drop) - 1), middle = (ulong)1 << (drop - 1);
    if (rest > middle || (rest == middle && (kept & 1))) kept++;
    int unit = exponent + drop;
    if (kept >> 24) {
        kept >>= 1;
        unit++;
    }
    if (kept < 0x800000u) return (uint)kept;
    int field = unit + 150;
    return field >= 255 ? INFINITY_BITS : (uint)field << 23 | ((uint)kept & 0x7FFFFFu);
}

static inline float integer_divide(float a, float b) {
    uint sign = (as_uint(a) ^ as_uint(b)) & SIGN_BIT;
    uint x = as_uint(a) & ~SIGN_BIT, y = as_uint(b) & ~SIGN_BIT;
    if (x > INFINITY_BITS || y > INFINITY_BITS) return as_float(QUIET_NAN);
    if (x == INFINITY_BITS) return as_float(y == INFINITY_BITS ? QUIET_NAN : sign | INFINITY_BITS);
    if (y == INFINITY_BITS) return as_float(sign);
    if (y == 0) return as_float(x == 0 ? QUIET_NAN : sign | INFINITY_BITS);
    if (x == 0) return as_float(sign);
    int ex, ey;
    ulong numerator = (ulong)unpack_magnitude(x, &ex) << 28;
    ulong denominator = unpack_magnitude(y, &ey);
    ulong quotient = numerator / denominator;
    quotient = quotient << 1 | (quotient * denominator != numerator);
    return as_float(sign | pack_magnitude(quotient, ex - ey - 29));
}

static inline float integer_sqrt(float a) {
    uint x = as_uint(a);
    if ((x & ~SIGN_BIT) == 0) return a;
    if (x > INFINITY_BITS) return as_float(QUIET_NAN);
    if (x == INFINITY_BITS) return a;
    int exponent;
    ulong value = (ulong)unpack_magnitude(x, &exponent) << 28;
    exponent -= 28;
    if (exponent & 1) {
        value <<= 1;
        exponent--;
    }
    ulong root = 0;
    for (ulong bit = 1u << 26; bit; bit >>= 1)
        if ((root | bit) * (root | bit) <= value) root |= bit;
    root = root << 1 | (root * root != value);
    return as_float(pack_magnitude(root, exponent / 2 - 1));
}

static inline float divide1(float a, float b) {
#if NATIVE_DIVIDE
    return a / b;
#else
    return integer_divide(a, b);
#endif
}

static inline float16 divide16(float16 a, float16 b) {
#if NATIVE_DIVIDE
    return a / b;
#else
    float x[16], y[16];
    vstore16(a, 0, x);
    vstore16(b, 0, y);
    for (int i = 0; i < 16; i++) x[i] = integer_divide(x[i], y[i]);
    return vload16(0, x);
#endif
}

static inline float sqrt1(float a) {
#if NATIVE_SQRT
    return sqrt(a);
#else
    return integer_sqrt(a);
#endif
}

// Nearest-even integer of |x| < 2^22: the sum has no bits left for a fraction. NaN stays NaN.
#define ROUNDER 12582912.0f
static inline float rint_small1(float x) {
    return (x + ROUNDER) - ROUNDER;
}

static inline float16 rint_small16(float16 x) {
    return (x + ROUNDER) - ROUNDER;
}

#define EXP2_C3 as_float(0x3D61FBB0u)
#define EXP2_C2 as_float(0x3E786F0Du)
#define EXP2_C1 as_float(0x3F31798Du)
#define EXP2_C0 as_float(0x3F7FFB49u)

// R2 for one float (W = 1) and for sixteen. Comparisons, not fmin and fmax: a NaN stays a NaN.
#define DEFINE_ELEMENTARY(F, I, W)                                  \
    static inline F exp##W(F x) {                                   \
        F c = select(x, (F)(-87.0f), (I)(x < (F)(-87.0f)));         \
        c = select(c, (F)(87.0f), (I)(c > (F)(87.0f)));             \
        F n = rint_small##W(c * (F)(1.44269504088896341f));         \
        F r = c - n * (F)(0.693359375f);                            \
        r = r - n * (F)(-2.12194440e-4f);                           \
        F y = r * (F)(1.9875691500e-4f) + (F)(1.3981999507e-3f);    \
        y = y * r + (F)(8.3334519073e-3f);                          \
        y = y * r + (F)(4.1665795894e-2f);                          \
        y = y * r + (F)(1.6666665459e-1f);                          \
        y = y * r + (F)(5.0000001201e-1f);                          \
        y = y * (r * r);                                            \
        y = y + r;                                                  \
        y = y + (F)(1.0f);                                          \
        F m = select(n, (F)(0.0f), (I)(n != n));                    \
        I e = (convert_##I(m) + (I)(127)) << (I)(23);               \
        y = y * as_##F(e);                                          \
        return select(y, (F)(0.0f), (I)(x < (F)(-87.0f)));          \
    }                                                               \
    /* R6's 2^x, for x from -80 to 2^20. */                         \
    static inline F exp2_##W(F x) {                                 \
        F n = x + (F)(ROUNDER);                                     \
        F f = x - (n - (F)(ROUNDER));                               \
        F y = f * (F)(EXP2_C3) + (F)(EXP2_C2);                      \
        y = y * f + (F)(EXP2_C1);                                   \
        y = y * f + (F)(EXP2_C0);                                   \
        return as_##F(as_##I(y) + (as_##I(n) << (I)(23)));          \
    }                                                               \
    static inline F tanh##W(F x) {                                  \
        return (F)(1.0f) - divide##W((F)(2.0f), exp##W(x + x) + (F)(1.0f)); \
    }                                                               \
    static inline F sigmoid##W(F x) {                               \
        return divide##W((F)(1.0f), (F)(1.0f) + exp##W(-x));        \
    }                                                               \
    static inline F silu##W(F x) { return divide##W(x, (F)(1.0f) + exp##W(-x)); } \
    static inline F gelu##W(F x) {                                  \
        F cube = (x * x) * x;                                       \
        F inner = (F)(0.7978845608028654f) * (x + (F)(0.044715f) * cube); \
        return ((F)(0.5f) * x) * ((F)(1.0f) + tanh##W(inner));      \
    }                                                               \
    static inline F soft_cap##W(F x, F cap) { return cap * tanh##W(divide##W(x, cap)); } \
    /* Of a positive finite x. A subnormal is its significand, an integer, times 2^-149. */ \
    static inline F log##W(F x) {                                   \
        I tiny = (I)(as_##I(x) < (I)(0x800000));                    \
        I bits = select(as_##I(x), as_##I(convert_##F(as_##I(x))), tiny); \
        I n = (bits >> (I)(23)) - select((I)(126), (I)(126 + 149), tiny); \
        F m = as_##F((bits & (I)(0x7FFFFF)) | (I)(0x3F000000));     \
        I small = (I)(m < (F)(0.707106781186547524f));              \
        F e = convert_##F(select(n, n - (I)(1), small));            \
        F f = select(m, m + m, small) - (F)(1.0f);                  \
        F z = f * f;                                                \
        F y = f * (F)(7.0376836292e-2f) + (F)(-1.1514610310e-1f);   \
        y = y * f + (F)(1.1676998740e-1f);                          \
        y = y * f + (F)(-1.2420140846e-1f);                         \
        y = y * f + (F)(1.4249322787e-1f);                          \
        y = y * f + (F)(-1.6668057665e-1f);                         \
        y = y * f + (F)(2.0000714765e-1f);                          \
        y = y * f + (F)(-2.4999993993e-1f);                         \
        y = y * f + (F)(3.3333331174e-1f);                          \
        y = y * f;                                                  \
        y = y * z;                                                  \
        y = y + (F)(-2.12194440e-4f) * e;                           \
        y = y - (F)(0.5f) * z;                                      \
        y = f + y;                                                  \
        return y + (F)(0.693359375f) * e;                           \
    }                                                               \
    static inline F softplus##W(F x) {                              \
        F e = exp##W(-fabs(x));                                     \
        F u = (F)(1.0f) + e;                                        \
        F positive = select(x, (F)(0.0f), (I)(x < (F)(0.0f)));      \
        return positive + (log##W(u) + (e - (u - (F)(1.0f))));      \
    }

DEFINE_ELEMENTARY(float, int, 1)
DEFINE_ELEMENTARY(float16, int16, 16)

static inline float larger(float a, float b) {
    return a != a ? a : (b != b ? b : (a > b ? a : b));
}

static inline float16 larger16(float16 a, float16 b) {
    float16 m = select(b, a, (int16)(a > b));
    return select(m, a, (int16)(a != a));
}

static inline float largest_of_16(float16 v) {
    v = larger16(v, v.s89abcdef01234567);
    v = larger16(v, v.s456789abcdef0123);
    v = larger16(v, v.s23456789abcdef01);
    return larger(v.s0, v.s1);
}

// The last steps of R4's halving: 16 values become one.
INLINE float fold16(float16 v) {
    float8 a = v.lo + v.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
}

// R4's last halvings for 16 rows at once: lane i is the fold of row i.
INLINE float16 fold_rows(const float16 *row) {
    float16 a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = make_float16(row[2 * i].lo, row[2 * i + 1].lo) +
               make_float16(row[2 * i].hi, row[2 * i + 1].hi);
    UNROLL for (int i = 0; i < 4; i++) {
        float16 p = a[2 * i], q = a[2 * i + 1];
        b[i] = make_float16(p.s0123, p.s89ab, q.s0123, q.s89ab) +
               make_float16(p.s4567, p.scdef, q.s4567, q.scdef);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        float16 p = b[2 * i], q = b[2 * i + 1];
        c[i] = make_float16(p.s01, p.s45, p.s89, p.scd, q.s01, q.s45, q.s89, q.scd) +
               make_float16(p.s23, p.s67, p.sab, p.sef, q.s23, q.s67, q.sab, q.sef);
    }
    return make_float16(c[0].even, c[1].even) + make_float16(c[0].odd, c[1].odd);
}

// R4: 256 products in 16 vectors; v[i] holds products 16 i to 16 i + 15.
INLINE float fold_segment(float16 *v) {
    UNROLL for (int i = 0; i < 8; i++) v[i] = v[i] + v[i + 8];
    UNROLL for (int i = 0; i < 4; i++) v[i] = v[i] + v[i + 4];
    return fold16((v[0] + v[2]) + (v[1] + v[3]));
}

// Up to 16 floats, the rest +0.
static inline float16 load_padded(const GLOBAL float *x, int count) {
    if (count >= 16) return vload16(0, x);
    float lane[16];
    UNROLL for (int i = 0; i < 16; i++) lane[i] = i < count ? x[i] : 0.0f;
    return vload16(0, lane);
}

// Sixteen floats anywhere. PoCL makes four stores of a vstore16.
#ifdef __clang__
typedef float16 UNALIGNED_FLOAT16 __attribute__((aligned(4)));
#define STORE16(value, y) (*(GLOBAL UNALIGNED_FLOAT16 *)(y) = (value))
#else
#define STORE16(value, y) vstore16(value, 0, y)
#endif

static inline void store_partial(float16 value, GLOBAL float *y, int count) {
    if (count >= 16) {
        STORE16(value, y);
        return;
    }
    float lane[16];
    vstore16(value, 0, lane);
    for (int i = 0; i < count; i++) y[i] = lane[i];
}

// R3's left fold, one segment value at a time.
typedef struct {
    float total;
    float span;
    uint segments;
} SPAN_FOLD;

static inline void fold_next(SPAN_FOLD *fold, float segment) {
    fold->span = fold->span + segment;
    fold->segments++;
    if (fold->segments % SPAN_SEGMENTS == 0) {
        fold->total = fold->total + fold->span;
        fold->span = 0.0f;
    }
}

static inline float fold_end(const SPAN_FOLD *fold) {
    if (fold->segments % SPAN_SEGMENTS == 0) return fold->total;
    return fold->total + fold->span;
}

// Binary32 to binary16, to nearest even and saturating (R1); NaN stays NaN.
static inline void store_half(float value, GLOBAL half *target) {
    float v = value > 65504.0f ? 65504.0f : value;
    v = v < -65504.0f ? -65504.0f : v;
    vstore_half_rte(v, 0, target);
}

// Philox4x32-10 (Salmon et al., SC11): the number that samples `position` under a 64-bit seed.
static inline uint philox_draw(uint seed_low, uint seed_high, uint position) {
    uint k0 = seed_low, k1 = seed_high, c0 = position, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint high0 = mul_hi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        uint high1 = mul_hi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

#endif
