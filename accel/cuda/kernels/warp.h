// Instructions of a warp that have no C++ spelling: integer tensor cores, and copies to shared
// memory.

#ifndef WARP_H
#define WARP_H

#define ALL_LANES 0xFFFFFFFFu
#define WARP_LANES 32
#define DEVICE static __device__ __forceinline__
// A real call, so that it has its own registers and no caller keeps its values.
#define APART static __device__ __noinline__

// The bits of a binary16 as binary32.
DEVICE float half_bits(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

// Two integers of magnitude up to 2048 as binary16 in the halves of a word.
DEVICE unsigned half_pair(int low, int high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"((float)high), "f"((float)low));
    return pair;
}

// Byte k of a word, signed.
DEVICE int signed_byte(unsigned word, int k) {
    int value;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(word), "r"(0x8880 + 0x1111 * k));
    return value;
}

// a & mask | b & ~mask. The compiler makes two instructions of that where it knows more of b.
DEVICE unsigned selected_bits(unsigned a, unsigned b, unsigned mask) {
    unsigned word;
    asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(word) : "r"(a), "r"(mask), "r"(b));
    return word;
}

// sum += A B of a 16 x 32 and a 32 x 8 operand; A is signed or unsigned bytes, B signed ones.
template <bool SIGNED>
DEVICE void multiply_32(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 16 x 16 and 16 x 8.
#define MULTIPLY_16(types, sum, a0, a1, b)                                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.s32." types ".s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "    \
        "{%0,%1,%2,%3};"                                                                        \
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])                                \
        : "r"(a0), "r"(a1), "r"(b))
DEVICE void multiply_16(int (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    MULTIPLY_16("u8.s8", sum, a0, a1, b);
}

// The larger magnitude of two floats, NaN where either is one.
DEVICE float larger_magnitude(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(fabsf(a)), "f"(fabsf(b)));
    return most;
}

// The sum of the products of four signed 16-bit numbers with four bytes, signed or not.
template <bool SIGNED = false> DEVICE int add_pairs(unsigned first, unsigned second, unsigned bytes) {
    int sum;
    if (SIGNED)
        asm("dp2a.lo.s32.s32 %0, %1, %3, 0; dp2a.hi.s32.s32 %0, %2, %3, %0;"
            : "=&r"(sum) : "r"(first), "r"(second), "r"(bytes));
    else
        asm("dp2a.lo.s32.u32 %0, %1, %3, 0; dp2a.hi.s32.u32 %0, %2, %3, %0;"
            : "=&r"(sum) : "r"(first), "r"(second), "r"(bytes));
    return sum;
}

// Products of 16 x 16 operands of bytes, signed or not, and the high and the low bytes of 16 x 8
// sums: high bytes are signed, low ones are not.
template <bool SIGNED> DEVICE void multiply_sums(int (&high)[4], int (&low)[4], unsigned a0,
                                                 unsigned a1, unsigned b_high, unsigned b_low) {
    if (SIGNED) {
        MULTIPLY_16("s8.s8", high, a0, a1, b_high);
        MULTIPLY_16("s8.u8", low, a0, a1, b_low);
    } else {
        MULTIPLY_16("u8.s8", high, a0, a1, b_high);
        MULTIPLY_16("u8.u8", low, a0, a1, b_low);
    }
}

// Limits two signed 16-bit numbers each to at most that of `most` and at least that of `least`.
DEVICE unsigned limited_pair(unsigned pair, unsigned most, unsigned least) {
#if __CUDA_ARCH__ >= 900
    asm("min.s16x2 %0, %0, %1;" : "+r"(pair) : "r"(most));
    asm("max.s16x2 %0, %0, %1;" : "+r"(pair) : "r"(least));
    return pair;
#else
    return __vmaxs2(__vmins2(pair, most), least);
#endif
}

DEVICE unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copies of 16 and of 4 bytes to shared memory, in stages: each thread waits for its own copies,
// all but the latest `left` stages it ended.
DEVICE void begin_part(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
DEVICE void begin_word(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
DEVICE void end_parts() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left> DEVICE void await_parts() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// Prefetches 128 bytes into the device's cache.
DEVICE void call_near(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Four matrices of 8 rows of 16 bytes: lane i names row i % 8 of matrix i / 8 and gets word i % 4
// of row i / 4 of each matrix.
DEVICE void load_matrices(unsigned (&word)[4], const unsigned char *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The largest unsigned value of all lanes, for every lane.
DEVICE unsigned largest_of_warp(unsigned value) { return __reduce_max_sync(ALL_LANES, value); }

// The sum of all lanes, modulo 2^32, for every lane.
DEVICE unsigned total_of_warp(unsigned value) { return __reduce_add_sync(ALL_LANES, value); }

// Copies of multiples of 16 bytes to the shared memory of a warp, in order. All lanes must call with
// the same arguments. A slot has one copy at a time: `begin_copy` fills it, and `await_copy` returns when its latest copy has arrived; `phase` counts how often the slot was
// filled before. Copied data leaves the device's cache first, since a step reads a weight once.
// `begin_store` copies a slot that the warp has written to global memory; `await_slots` returns
// when all but the latest `left` slots may be filled again, `await_stores` when the stored data may
// be copied again. Sources are in memory of the device or mapped memory of the host.
#if __CUDA_ARCH__ >= 900
typedef unsigned long long COPY_BARRIER;

DEVICE void open_copies(COPY_BARRIER *barriers, int count) {
    if (threadIdx.x % WARP_LANES == 0) {
        for (int i = 0; i < count; i++)
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers + i))
                         : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
}

// One lane of a warp, the same every time. For it the compiler makes no loop over lanes.
DEVICE bool is_elected() {
    unsigned elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }"
                 : "=r"(elected));
    return elected;
}

DEVICE void begin_copy(COPY_BARRIER *barrier, void *slot, const void *source, unsigned bytes) {
    if (!is_elected()) return;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(slot)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

DEVICE void no_copy() {}

template <int slots> DEVICE void await_copy(COPY_BARRIER *barrier, unsigned phase) {
    unsigned done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(phase & 1)
            : "memory");
}

DEVICE void begin_store(void *target, const void *slot, unsigned bytes) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (!is_elected()) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; "
                 "cp.async.bulk.commit_group;" ::"l"(target),
                 "r"(shared_address(slot)), "r"(bytes)
                 : "memory");
}

template <int left> DEVICE void await_slots() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}

DEVICE void await_stores() {
    asm volatile("cp.async.bulk.wait_group 0; fence.proxy.async;" ::: "memory");
    __syncwarp();
}
#else
typedef unsigned long long COPY_BARRIER;

DEVICE void open_copies(COPY_BARRIER *, int) {}

// Keeps the count of groups where there is nothing left to copy.
DEVICE void no_copy() { asm volatile("cp.async.commit_group;" ::: "memory"); }

DEVICE void begin_copy(COPY_BARRIER *, void *slot, const void *source, unsigned bytes) {
    const unsigned to = shared_address(slot);
    for (unsigned at = threadIdx.x % WARP_LANES * 16; at < bytes; at += WARP_LANES * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at),
                     "l"((const char *)source + at)
                     : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int slots> DEVICE void await_copy(COPY_BARRIER *, unsigned) {
    asm volatile("cp.async.wait_group %0;" ::"n"(slots - 1) : "memory");
    __syncwarp();
}

DEVICE void begin_store(void *target, const void *slot, unsigned bytes) {
    __syncwarp();
    for (unsigned at = threadIdx.x % WARP_LANES * 16; at < bytes; at += WARP_LANES * 16)
        *(uint4 *)((char *)target + at) = *(const uint4 *)((const char *)slot + at);
    __syncwarp();
}

template <int left> DEVICE void await_slots() {}

DEVICE void await_stores() { __syncwarp(); }
#endif

// A barrier of warps that each arrive once, repeatedly. One thread calls `open_arrivals` with their
// number before a barrier of the block. What they wrote before is visible once `have_arrived`;
// `turn` counts how often all had arrived before.
DEVICE void open_arrivals(unsigned long long *address, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(address)), "r"(count)
                 : "memory");
}
DEVICE void close_arrivals(unsigned long long *address) {
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(address)) : "memory");
}
DEVICE void arrive(unsigned long long *address) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(
                     shared_address(address))
                 : "memory");
}
DEVICE bool have_arrived(unsigned long long *address, unsigned turn) {
    unsigned done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(address)), "r"(turn & 1)
        : "memory");
    return done;
}

// Words of global memory that running blocks send to each other, those of other devices too if
// SHARED_STEP: never read from a multiprocessor's cache; each word is whole, and several have no
// order.
#if SHARED_STEP
#define BLOCKS_SCOPE "sys"
#else
#define BLOCKS_SCOPE "gpu"
#endif
DEVICE void store_shared_word(unsigned *address, unsigned word) {
    asm volatile("st.relaxed." BLOCKS_SCOPE ".global.u32 [%0], %1;" ::"l"(address), "r"(word)
                 : "memory");
}
DEVICE unsigned load_shared_word(const unsigned *address) {
    unsigned word;
    asm volatile("ld.relaxed." BLOCKS_SCOPE ".global.u32 %0, [%1];"
                 : "=r"(word)
                 : "l"(address)
                 : "memory");
    return word;
}
DEVICE uint4 load_shared_words(const unsigned *address) {
    uint4 v;
    asm volatile("ld.relaxed." BLOCKS_SCOPE ".global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

// A word the host may write at any time.
DEVICE unsigned load_host_word(const unsigned *address) {
    unsigned word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    return word;
}

// Words by which devices tell each other that all earlier writes are complete, those of the whole
// block if its threads have met at a barrier.
DEVICE void release_to_system(unsigned *address, unsigned word) {
    asm volatile("fence.acq_rel.sys; st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(word)
                 : "memory");
}
DEVICE unsigned acquire_from_system(const unsigned *address) {
    unsigned word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    return word;
}

// A barrier of the four warps of a group; id from 1 on.
DEVICE void group_barrier(unsigned id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

#if __CUDA_ARCH__ >= 900
// A meeting ends when all threads of all blocks of the cluster have arrived; between two meetings
// each block may read the shared memory of the others, at its own addresses.
DEVICE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
// The same for data that arrives by counted copies and not by earlier writes: without a fence of
// all memory, for which every thread would wait.
DEVICE void arrive_unfenced() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE unsigned address_at_peer(const void *own, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(own)), "r"(rank));
    return address;
}
DEVICE float float_of_peer(const float *own, unsigned rank) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];"
                 : "=f"(value)
                 : "r"(address_at_peer(own, rank))
                 : "memory");
    return value;
}
DEVICE void store_at_peer(float *own, float value, unsigned rank) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_at_peer(own, rank)), "f"(value)
                 : "memory");
}
// Stores to the address `own` in another block's shared memory, where the barrier at the address of
// `barrier` counts the bytes.
DEVICE void word_at_peer(COPY_BARRIER *barrier, const unsigned *own, unsigned word, unsigned rank) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
            address_at_peer(own, rank)),
        "r"(word), "r"(address_at_peer(barrier, rank))
        : "memory");
}
// Adds to a word of another block, after this thread's earlier reads.
DEVICE void add_at_peer(const unsigned *own, unsigned more, unsigned rank) {
    asm volatile("red.release.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(
                     address_at_peer(own, rank)),
                 "r"(more)
                 : "memory");
}
// Copies may go where this thread wrote or read before.
DEVICE void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
DEVICE void show_to_copies() {}
// Named by code that is also compiled for devices without clusters, and never called there.
DEVICE void arrive_unfenced() {}
DEVICE void await_cluster() {}
DEVICE void word_at_peer(COPY_BARRIER *, const unsigned *, unsigned, unsigned) {}
DEVICE void add_at_peer(const unsigned *, unsigned, unsigned) {}
#endif

// The dynamic shared memory of a block.
#define BLOCK_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

// Orders what this thread wrote to shared memory before what it writes next, for the block.
DEVICE void block_fence() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
DEVICE void spin_pause() {}

// Orders what this thread wrote to global memory before what it writes next, for the device or all.
DEVICE void device_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void system_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

#endif
