// A CUDA block on the CPU: every thread is a fiber, what lanes do together happens when all have
// come. Stands in for accel/cuda/kernels/warp.h and for what CUDA C++ has built in. All lanes of a
// warp must take part in every exchange, as the tuned kernels do.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

using std::max;
using std::min;
static inline unsigned min(unsigned a, int b) { return std::min(a, (unsigned)b); }

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)

struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

static dim3 blockIdx, gridDim, blockDim;
alignas(128) unsigned char shared[256 << 10];

namespace emulator {

constexpr int LANES = 32, WORDS = 8;
constexpr size_t STACK_BYTES = 128 << 10;

struct Message {
    uint32_t word[WORDS];
};
struct Warp {
    Message coming[LANES], there[2][LANES];
    int arrived = 0;
    unsigned round = 0;
};
struct Fiber {
    ucontext_t context;
    char *stack;
    bool done;
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static unsigned current, at_barrier, barrier_round;
static void (*body)();

static void yield() {
    const unsigned mine = current;
    swapcontext(&fibers[mine].context, &scheduler);
}

// What every lane of the warp brought.
static const Message *exchange(const Message &mine) {
    Warp &warp = warps[current / LANES];
    const unsigned round = warp.round;
    warp.coming[current % LANES] = mine;
    if (++warp.arrived == LANES) {
        memcpy(warp.there[round & 1], warp.coming, sizeof warp.coming);
        warp.arrived = 0;
        warp.round++;
    }
    while (warp.round == round) yield();
    return warp.there[round & 1];
}

static void block_barrier() {
    const unsigned round = barrier_round;
    if (++at_barrier == fibers.size()) at_barrier = 0, barrier_round++;
    while (barrier_round == round) yield();
}

// Of the four warps that name it.
static int at_group[16];
static unsigned group_round[16];
static void group_barrier(unsigned id) {
    const unsigned round = group_round[id];
    if (++at_group[id] == 4 * LANES) at_group[id] = 0, group_round[id]++;
    while (group_round[id] == round) yield();
}

static void enter() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

static void run_block(unsigned threads, void (*kernel)()) {
    body = kernel;
    fibers.assign(threads, Fiber{});
    warps.assign(threads / LANES, Warp{});
    at_barrier = barrier_round = 0;
    memset(shared, 0xFF, sizeof shared);
    for (Fiber &fiber : fibers) {
        getcontext(&fiber.context);
        fiber.stack = (char *)malloc(STACK_BYTES);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned left = threads; left;)
        for (current = 0; current < threads; current++) {
            if (fibers[current].done) continue;
            swapcontext(&scheduler, &fibers[current].context);
            left -= fibers[current].done;
        }
    for (Fiber &fiber : fibers) free(fiber.stack);
}

}  // namespace emulator

struct THREAD {
    struct {
        operator unsigned() const { return emulator::current; }
    } x;
};
static THREAD threadIdx;

static inline void __syncthreads() { emulator::block_barrier(); }
static inline void __syncwarp() { emulator::exchange({}); }
template <class T> static inline T __shfl_sync(unsigned, T value, int lane) {
    emulator::Message mine = {};
    memcpy(mine.word, &value, sizeof value);
    T result;
    memcpy(&result, emulator::exchange(mine)[lane].word, sizeof result);
    return result;
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return __shfl_sync(mask, value, (int)(emulator::current % emulator::LANES) ^ lanes);
}
static inline float __uint_as_float(unsigned bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline int __float2int_rn(float f) { return (int)rintf(f); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned atomicAdd(unsigned *place, unsigned value) {
    return (*place += value) - value;
}
static inline unsigned __ballot_sync(unsigned, bool value) {
    emulator::Message mine = {};
    mine.word[0] = value;
    const emulator::Message *all = emulator::exchange(mine);
    unsigned bits = 0;
    for (int i = 0; i < emulator::LANES; i++) bits |= all[i].word[0] << i;
    return bits;
}
static inline unsigned __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline void __threadfence() {}
static inline float __ldcg(const float *place) { return *place; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

#define WARP_H
#define ALL_LANES 0xFFFFFFFFu
#define WARP_LANES 32
#define DEVICE static inline

DEVICE float half_bits(unsigned bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31,
                   fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
    const float value =
        exponent ? ldexpf(1024 + fraction, (int)exponent - 25) : ldexpf(fraction, -24);
    return sign ? -value : value;
}

DEVICE int byte_at(unsigned word, int i, bool is_signed) {
    return is_signed ? (int)(signed char)(word >> 8 * i) : (int)(unsigned char)(word >> 8 * i);
}

// Operands of mma as its documentation lays them out, k columns of 16 rows and of 8 columns.
template <bool SIGNED, bool SIGNED_B = true>
DEVICE void multiply(int (&sum)[4], const unsigned *a, const unsigned *b, int k) {
    emulator::Message mine = {};
    for (int i = 0; i < k / 8; i++) mine.word[i] = a[i];
    for (int i = 0; i < k / 16; i++) mine.word[4 + i] = b[i];
    const emulator::Message *all = emulator::exchange(mine);
    const int lane = emulator::current % 32;
    for (int r = 0; r < 4; r++) {
        const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
        for (int n = 0; n < k; n++) {
            const int t = n % 16 / 4, half = n / 16;
            const unsigned x = all[row % 8 * 4 + t].word[half * 2 + row / 8];
            const unsigned y = all[column * 4 + t].word[4 + half];
            sum[r] += byte_at(x, n % 4, SIGNED) * byte_at(y, n % 4, SIGNED_B);
        }
    }
}
template <bool SIGNED>
DEVICE void multiply_32(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    multiply<SIGNED>(sum, a, b, 32);
}
DEVICE void multiply_16(int (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    const unsigned a[2] = {a0, a1};
    multiply<false>(sum, a, &b, 16);
}
template <bool SIGNED> DEVICE void multiply_sums(int (&high)[4], int (&low)[4], unsigned a0,
                                                 unsigned a1, unsigned b_high, unsigned b_low) {
    const unsigned a[2] = {a0, a1};
    multiply<SIGNED>(high, a, &b_high, 16);
    multiply<SIGNED, false>(low, a, &b_low, 16);
}
DEVICE void begin_part(void *to, const void *from) { memcpy(to, from, 16); }
DEVICE void begin_word(void *to, const void *from) { memcpy(to, from, 4); }
DEVICE void end_parts() {}
template <int left> DEVICE void await_parts() {}
DEVICE void call_near(const void *) {}
DEVICE void load_matrices(unsigned (&word)[4], const unsigned char *row) {
    emulator::Message mine = {};
    memcpy(mine.word, &row, sizeof row);
    const emulator::Message *all = emulator::exchange(mine);
    const int lane = emulator::current % 32;
    for (int i = 0; i < 4; i++) {
        const unsigned char *named;
        memcpy(&named, all[8 * i + lane / 4].word, sizeof named);
        memcpy(word + i, named + lane % 4 * 4, 4);
    }
}
DEVICE unsigned largest_of_warp(unsigned value) {
    for (int lanes = 16; lanes; lanes /= 2)
        value = max(value, __shfl_xor_sync(ALL_LANES, value, lanes));
    return value;
}

typedef unsigned long long COPY_BARRIER;
DEVICE void open_copies(COPY_BARRIER *, int) { __syncwarp(); }
DEVICE void begin_copy(COPY_BARRIER *, void *slot, const void *source, unsigned bytes) {
    if (emulator::current % 32 == 0) memcpy(slot, source, bytes);
}
DEVICE void no_copy() {}
template <int slots> DEVICE void await_copy(COPY_BARRIER *, unsigned) { __syncwarp(); }
DEVICE void block_fence() {}
DEVICE void spin_pause() { emulator::yield(); }

// groups.h: an operand is a place in shared memory and two strides; products are done at once.
#define GROUPS_H
#define GROUP_WARPS 4
DEVICE uint64_t group_operand(const unsigned char *place, unsigned lead, unsigned stride) {
    return (uint64_t)(place - shared) | (uint64_t)lead << 20 | (uint64_t)stride << 36;
}
DEVICE uint64_t operand_behind(uint64_t operand, unsigned bytes) { return operand + bytes; }
DEVICE void begin_group_product() {}
DEVICE void end_group_product() {}
template <int left> DEVICE void await_operands() {}
template <int N> DEVICE void take_sums(int (&)[N]) {}
DEVICE void show_to_products() {}
DEVICE void group_barrier(unsigned id) { emulator::group_barrier(id); }

// A barrier of copies counts how often its stage was filled above the bytes that have yet to come.
constexpr int FILLS = 40;
DEVICE void open_stages(COPY_BARRIER *barriers, int count) {
    for (int i = 0; i < count; i++) barriers[i] = 0;
}
DEVICE void announce(COPY_BARRIER *barrier, unsigned bytes) {
    *barrier += (1ull << FILLS) + bytes;
}
DEVICE void copy_to_stage(COPY_BARRIER *barrier, void *to, const void *from, unsigned bytes) {
    memcpy(to, from, bytes);
    *barrier -= bytes;
}
DEVICE void await_stage(COPY_BARRIER *barrier, unsigned phase) {
    while (*barrier >> FILLS <= phase || *barrier << (64 - FILLS)) emulator::yield();
}
template <bool SIGNED, int N>
DEVICE void multiply_rows_of_group(int (&sum)[N], const unsigned (&a)[4], uint64_t b, bool more) {
    emulator::Message mine = {};
    for (int i = 0; i < 4; i++) mine.word[i] = a[i];
    const emulator::Message *all = emulator::exchange(mine);
    const int lane = emulator::current % 32;
    const unsigned char *place = shared + (b & 0xFFFFF);
    const unsigned lead = b >> 20 & 0xFFFF, stride = b >> 36;
    for (int i = 0; i < N; i++) {
        const int row = lane / 4 + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const unsigned char *own = place + token / 8 * stride + token % 8 * 16;
        int total = more ? sum[i] : 0;
        for (int n = 0; n < 32; n++) {
            const unsigned x = all[row % 8 * 4 + n % 16 / 4].word[n / 16 * 2 + row / 8];
            total += byte_at(x, n % 4, SIGNED) * (int)(signed char)own[n / 16 * lead + n % 16];
        }
        sum[i] = total;
    }
    __syncwarp();
}
template <int N>
DEVICE void multiply_group(int (&sum)[N], const unsigned (&a)[4], uint64_t b, bool more) {
    multiply_rows_of_group<false>(sum, a, b, more);
}
template <int N>
DEVICE void multiply_signed_group(int (&sum)[N], const unsigned (&a)[4], uint64_t b, bool more) {
    multiply_rows_of_group<true>(sum, a, b, more);
}
