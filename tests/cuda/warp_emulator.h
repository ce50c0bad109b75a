// What CUDA C++ has built in, and accel/cuda/kernels/warp.h, for threads of block_emulator.h.

#include "block_emulator.h"

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
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned atomicAdd(unsigned *place, unsigned value) {
    return (*place += value) - value;
}
static inline unsigned long long atomicAdd(unsigned long long *place, unsigned long long value) {
    return (*place += value) - value;
}
static inline unsigned long long atomicMax(unsigned long long *place, unsigned long long value) {
    const unsigned long long before = *place;
    *place = before > value ? before : value;
    return before;
}
static inline unsigned long long atomicExch(unsigned long long *place, unsigned long long value) {
    const unsigned long long before = *place;
    *place = value;
    return before;
}
static inline unsigned __ballot_sync(unsigned, bool value) {
    emulator::Message mine = {};
    mine.word[0] = value;
    const emulator::Message *all = emulator::exchange(mine);
    unsigned bits = 0;
    for (int i = 0; i < emulator::LANES; i++) bits |= all[i].word[0] << i;
    return bits;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
static inline unsigned __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline void __threadfence() {}
static inline float __ldcg(const float *place) { return *place; }
static inline void __stcg(float *place, float value) { *place = value; }
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
#define APART static

DEVICE float half_bits(unsigned bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31,
                   fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
    const float value =
        exponent ? ldexpf(1024 + fraction, (int)exponent - 25) : ldexpf(fraction, -24);
    return sign ? -value : value;
}

// The nearest binary16, of two the even one, of a finite number below 65,520.
DEVICE unsigned half_of(double value) {
    if (value == 0) return 0;
    const unsigned sign = value < 0 ? 0x8000u : 0;
    int exponent;
    frexp(value, &exponent);
    // The power of two of the last bit.
    const int last = max(exponent - 11, -24);
    const unsigned integer = (unsigned)rint(ldexp(fabs(value), -last));
    return sign | (integer + ((unsigned)(last + 24) << 10));
}
DEVICE unsigned half_pair(int low, int high) { return half_of(low) | half_of(high) << 16; }
DEVICE unsigned fused_halves(unsigned a, unsigned b, unsigned c) {
    unsigned pair = 0;
    for (int at = 0; at < 32; at += 16) {
        // Two binary16 and their product have few enough bits that the sum is exact.
        const double sum = (double)half_bits(a >> at & 0xFFFFu) * half_bits(b >> at & 0xFFFFu) +
                           half_bits(c >> at & 0xFFFFu);
        pair |= half_of(sum) << at;
    }
    return pair;
}
DEVICE unsigned multiply_halves(unsigned a, unsigned b) { return fused_halves(a, b, 0); }

DEVICE int signed_byte(unsigned word, int k) { return (signed char)(word >> 8 * k); }
DEVICE unsigned selected_bits(unsigned a, unsigned b, unsigned mask) { return (a & mask) | (b & ~mask); }

DEVICE int byte_at(unsigned word, int i, bool is_signed) {
    return is_signed ? (int)(signed char)(word >> 8 * i) : (int)(unsigned char)(word >> 8 * i);
}

// Operands of mma as its documentation lays them out, k columns of 16 rows and of 8 columns.
template <bool SIGNED, bool SIGNED_B = true>
DEVICE void multiply(int (&sum)[4], const unsigned *a, const unsigned *b, int k) {
    emulator::multiply(sum, a, b, k, SIGNED, SIGNED_B);
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
DEVICE float larger_magnitude(float a, float b) {
    a = fabsf(a), b = fabsf(b);
    return a != a ? a : b != b ? b : max(a, b);
}
template <bool SIGNED = false> DEVICE int add_pairs(unsigned first, unsigned second, unsigned bytes) {
    int sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (short)((i < 2 ? first : second) >> i % 2 * 16) * byte_at(bytes, i, SIGNED);
    return sum;
}
DEVICE unsigned limited_pair(unsigned pair, unsigned most, unsigned least) {
    unsigned limited = 0;
    for (int at = 0; at < 32; at += 16) {
        const short value = min((short)(pair >> at), (short)(most >> at));
        limited |= (unsigned)(unsigned short)max(value, (short)(least >> at)) << at;
    }
    return limited;
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

DEVICE unsigned total_of_warp(unsigned value) {
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
    return value;
}

typedef unsigned long long COPY_BARRIER;
DEVICE void open_copies(COPY_BARRIER *, int) { __syncwarp(); }
DEVICE void begin_copy(COPY_BARRIER *, void *slot, const void *source, unsigned bytes) {
    if (emulator::current % 32 == 0) memcpy(slot, source, bytes);
}
DEVICE void no_copy() {}
template <int slots> DEVICE void await_copy(COPY_BARRIER *, unsigned) { __syncwarp(); }
// How many are left, how many there are, and how often all have come.
DEVICE void open_arrivals(unsigned long long *place, unsigned count) {
    *place = count | (unsigned long long)count << 16;
}
DEVICE void close_arrivals(unsigned long long *) {}
DEVICE void arrive(unsigned long long *place) {
    if ((--*place & 0xFFFF) == 0) *place += (1ull << 32) + (*place >> 16 & 0xFFFF);
}
DEVICE bool have_arrived(unsigned long long *place, unsigned turn) {
    return (*place >> 32 & 1) != (turn & 1);
}
DEVICE void begin_store(void *target, const void *slot, unsigned bytes) {
    __syncwarp();
    if (emulator::current % 32 == 0) memcpy(target, slot, bytes);
}
template <int left> DEVICE void await_slots() {}
DEVICE void await_stores() { __syncwarp(); }
DEVICE void store_shared_word(unsigned *place, unsigned word) { emulator::publish(place, word); }
DEVICE unsigned load_shared_word(const unsigned *place) { return *place; }
DEVICE uint4 load_shared_words(const unsigned *place) { return *(const uint4 *)place; }
DEVICE unsigned load_host_word(const unsigned *place) { return *place; }
DEVICE void release_to_system(unsigned *place, unsigned word) { emulator::publish(place, word); }
DEVICE unsigned acquire_from_system(const unsigned *place) { return *place; }
#define BLOCK_MEMORY(name) unsigned char *const name = emulator::block->memory
DEVICE void block_fence() {}
DEVICE void device_fence() {}
DEVICE void system_fence() {}
DEVICE void arrive_at_cluster() { emulator::arrive_at_cluster(); }
DEVICE void arrive_unfenced() { emulator::arrive_at_cluster(); }
DEVICE void await_cluster() { emulator::await_cluster(); }
DEVICE float float_of_peer(const float *own, unsigned rank) {
    const ptrdiff_t at = (const unsigned char *)own - emulator::block->memory;
    return *(const float *)(emulator::cluster[rank].memory + at);
}
template <class T> static T *of_peer(T *own, unsigned rank) {
    return (T *)(emulator::cluster[rank].memory + ((unsigned char *)own - emulator::block->memory));
}
DEVICE void store_at_peer(float *own, float value, unsigned rank) { *of_peer(own, rank) = value; }
DEVICE void word_at_peer(COPY_BARRIER *barrier, unsigned *own, unsigned word, unsigned rank) {
    *of_peer(own, rank) = word;
    *of_peer(barrier, rank) -= sizeof word;
}
DEVICE void add_at_peer(unsigned *own, unsigned more, unsigned rank) { *of_peer(own, rank) += more; }
DEVICE void show_to_copies() {}
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

// half_products.h: the 16 columns of an operand are 16 bytes and as many `lead` bytes behind.
#define HALF_PRODUCTS_H
template <int N> DEVICE void take_sums(float (&)[N]) {}
template <int N>
DEVICE void add_halves(float (&sum)[N], const unsigned (&a)[4], uint64_t b) {
    const unsigned char *place = shared + (b & 0xFFFFF);
    const unsigned lead = b >> 20 & 0xFFFF, stride = b >> 36;
    emulator::multiply_halves(sum, N, a, place, lead, stride);
    __syncwarp();
}
template <int N>
DEVICE void set_halves(float (&sum)[N], const unsigned (&a)[4], uint64_t b) {
    for (float &of : sum) of = 0;
    add_halves(sum, a, b);
}

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
DEVICE bool have_come(COPY_BARRIER *barrier, unsigned phase) {
    // Negative where bytes came before they were announced.
    const int64_t fills = (int64_t)*barrier >> FILLS;
    return fills > (int64_t)phase + 1 || (fills == (int64_t)phase + 1 && *barrier << (64 - FILLS) == 0);
}
DEVICE void await_stage(COPY_BARRIER *barrier, unsigned phase) {
    while (!have_come(barrier, phase)) emulator::yield();
}
template <bool SIGNED, bool SIGNED_B = true, int N>
DEVICE void multiply_rows_of_group(int (&sum)[N], const unsigned (&a)[4], uint64_t b, bool more) {
    const unsigned char *place = shared + (b & 0xFFFFF);
    const unsigned lead = b >> 20 & 0xFFFF, stride = b >> 36;
    if (!more) memset(sum, 0, sizeof sum);
    emulator::multiply_rows(sum, N, a, place, lead, stride, SIGNED, SIGNED_B);
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
DEVICE unsigned hidden_zero() { return 0; }
template <int N>
DEVICE void multiply_unsigned_group(int (&sum)[N], const unsigned (&a)[4], uint64_t b, bool more) {
    multiply_rows_of_group<false, false>(sum, a, b, more);
}
// A lane's words of rows in shared memory.
struct ROWS_OF_GROUP {
    unsigned word[4];
    explicit ROWS_OF_GROUP(uint64_t a) {
        const unsigned lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
        const unsigned lead = a >> 20 & 0xFFFF, stride = a >> 36;
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = first + i % 2 * 8;
            memcpy(word + i, shared + (a & 0xFFFFF) + row / 8 * stride + row % 8 * 16 +
                             i / 2 * lead + lane % 4 * 4, 4);
        }
    }
};
#define GROUP_SUMS(NAME, SIGNED, SIGNED_B)                                       \
    template <int N>                                                             \
    DEVICE void set_##NAME(int (&sum)[N], const unsigned (&a)[4], uint64_t b) {  \
        multiply_rows_of_group<SIGNED, SIGNED_B>(sum, a, b, false);              \
    }                                                                            \
    template <int N>                                                             \
    DEVICE void add_##NAME(int (&sum)[N], const unsigned (&a)[4], uint64_t b) {  \
        multiply_rows_of_group<SIGNED, SIGNED_B>(sum, a, b, true);               \
    }                                                                            \
    template <int N> DEVICE void set_##NAME(int (&sum)[N], uint64_t a, uint64_t b) { \
        const ROWS_OF_GROUP rows(a);                                             \
        multiply_rows_of_group<SIGNED, SIGNED_B>(sum, rows.word, b, false);      \
    }                                                                            \
    template <int N> DEVICE void add_##NAME(int (&sum)[N], uint64_t a, uint64_t b) { \
        const ROWS_OF_GROUP rows(a);                                             \
        multiply_rows_of_group<SIGNED, SIGNED_B>(sum, rows.word, b, true);       \
    }
GROUP_SUMS(signed_sums, true, true)
GROUP_SUMS(mixed_sums, true, false)
GROUP_SUMS(sums, false, true)
GROUP_SUMS(unsigned_sums, false, false)
DEVICE void await_arrivals(unsigned long long *place, unsigned turn) {
    while (!have_arrived(place, turn)) emulator::yield();
}
template <int threads> DEVICE void part_barrier() { emulator::part_barrier(threads); }
template <int count> DEVICE void take_registers() {}
template <int count> DEVICE void give_registers() {}
