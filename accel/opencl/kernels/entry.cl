// The kernels the host enqueues: with PERSISTENT run_packets, else a launch_ kernel for every op.
// FOR_EACH_OP(X) is X(number, name) for every op.

static MEMORY_MAP map_memory(
#if !SHARED_ADDRESSES
    GLOBAL uchar **banks,
#endif
    ulong scratch, ulong own, ulong own_bytes, ulong input, uint worker) {
    MEMORY_MAP map;
#if SHARED_ADDRESSES
    map.scratch = scratch;
    map.own = own + worker * own_bytes;
    map.input = input;
#else
    UNROLL for (int i = 0; i < BANKS; i++) map.bank[i] = banks[i];
    map.scratch = banks[scratch >> BANK_SHIFT] + (scratch & OFFSET_MASK);
    map.own = banks[own >> BANK_SHIFT] + (own & OFFSET_MASK) + worker * own_bytes;
    map.input = banks[input >> BANK_SHIFT] + (input & OFFSET_MASK);
#endif
    return map;
}

#if SHARED_ADDRESSES
#define MAP_MEMORY(worker) map_memory(scratch, own, own_bytes, input, worker)
#else
#define MAP_MEMORY(worker) map_memory(banks, scratch, own, own_bytes, input, worker)
#endif

#if SHARED_ADDRESSES
#define DECLARE_BANKS
#else
#define DECLARE_BANKS GLOBAL uchar *banks[BANKS] = BANK_POINTERS;
#endif

#if PERSISTENT

// Words of the block the workers of a persistent kernel meet in, a cache line apart.
#define ARRIVED 0
#define DEPARTED 32
#define FAILED 64
#define SLEEPERS 96

#if FUTEX_SYSCALL && defined(__x86_64__)
#define SLEEPS 1
#else
#define SLEEPS 0
#endif

// Orders global memory between workers. OpenCL 1.2 promises that within a group only.
static inline void fence_device(void) {
    mem_fence(CLK_GLOBAL_MEM_FENCE);
}

#if SLEEPS
// PoCL 4 to 6 take assembly in a kernel for an allocation of group memory and abort: what executes
// any is in functions that are OUTLINED.

// A worker is a thread of this Linux process. One that spins, or gives its core away without
// sleeping, is charged a time slice for each wait; one that slept is run again at once.
#define FUTEX_WAIT_PRIVATE 128
#define FUTEX_WAKE_PRIVATE 129
#define ALL_SLEEPERS 0x7fffffff
#define SLEEP_NANOSECONDS 10000000
#define SPINS_PER_SLEEP (1u << 20)  // what a sleep nobody ended counts for
#define TIMED_OUT (-110)
#define SPIN_CYCLES 50000           // about what falling asleep and waking up costs
#define SPIN_SHARE 2                // of the time of the work before; others may have more of it

OUTLINED ulong cycles(void) {
    uint low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (ulong)high << 32 | low;
}

static inline long futex(volatile GLOBAL uint *word, long operation, long value,
                         const long *timeout) {
    long result = FUTEX_SYSCALL;
    __asm__ volatile("movq %4, %%r10\n\tsyscall"
                     : "+a"(result)
                     : "D"(word), "S"(operation), "d"(value), "r"(timeout)
                     : "rcx", "r10", "r11", "memory");
    return result;
}

// False when the time for a short wait is over. `met` is when this worker last met the others.
static inline bool arrive_soon(volatile GLOBAL uint *meeting, uint target, ulong met) {
    const ulong begun = cycles(), patience = SPIN_CYCLES + (begun - met) / SPIN_SHARE;
    while (meeting[ARRIVED] < target) {
        if (cycles() - begun > patience) return false;
        __asm__ volatile("pause");
    }
    return true;
}

// Waits until `target` arrivals were counted; false when another worker gave up or this one did.
OUTLINED bool meet(volatile GLOBAL uint *meeting, uint target, uint spin_limit, ulong *met) {
    const long timeout[2] = {0, SLEEP_NANOSECONDS};
    fence_device();
    if (atomic_inc(meeting + ARRIVED) + 1 == target) {
        // Whoever counts itself as asleep after this look finds the last arrival counted.
        if (atomic_or(meeting + SLEEPERS, 0))
            futex(meeting + ARRIVED, FUTEX_WAKE_PRIVATE, ALL_SLEEPERS, 0);
    } else if (!arrive_soon(meeting, target, *met)) {
        uint arrived, spins = 0;
        atomic_inc(meeting + SLEEPERS);
        while ((arrived = atomic_or(meeting + ARRIVED, 0)) < target) {
            if (meeting[FAILED] || spins >= spin_limit) {
                meeting[FAILED] = 1;
                return false;
            }
            if (futex(meeting + ARRIVED, FUTEX_WAIT_PRIVATE, arrived, timeout) == TIMED_OUT)
                spins += SPINS_PER_SLEEP;
        }
        atomic_dec(meeting + SLEEPERS);
    }
    *met = cycles();
    fence_device();
    return true;
}

#else

#define SPINS_PER_LOOK 1000

static inline ulong cycles(void) { return 0; }

// As above.
static bool meet(volatile GLOBAL uint *meeting, uint target, uint spin_limit, ulong *met) {
    fence_device();
    atomic_inc(meeting + ARRIVED);
    for (uint spin = 1; meeting[ARRIVED] < target; spin++) {
        if (spin % SPINS_PER_LOOK) continue;
        if (meeting[FAILED] || spin >= spin_limit) {
            meeting[FAILED] = 1;
            return false;
        }
    }
    fence_device();
    return true;
}

#endif

#define DISPATCH(number, name)                         \
    case number:                                       \
        op_##name(&map, packet, worker, workers);      \
        break;

// The whole step in one launch: every worker walks the packets, meeting where one says so. Needs
// all of them at work at once; a worker that waits longer than spin_limit makes all of them give up.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void run_packets(
    BANK_PARAMETERS ulong scratch, ulong own, ulong own_bytes, ulong input, ulong packets,
    uint count, ulong meeting_address, uint spin_limit) {
    DECLARE_BANKS
    const uint my_worker = get_global_id(0), all_workers = get_global_size(0);
    MEMORY_MAP map = MAP_MEMORY(my_worker);
    volatile GLOBAL uint *meeting = (volatile GLOBAL uint *)at(&map, meeting_address);
    const GLOBAL PACKET *packet = (const GLOBAL PACKET *)at(&map, packets);
    uint meetings = 0;
    ulong met = cycles();
    for (uint i = 0; i < count; i++, packet++) {
        if (packet->wait && !meet(meeting, ++meetings * all_workers, spin_limit, &met)) return;
        const uint worker = packet->everyone ? 0 : my_worker;
        const uint workers = packet->everyone ? 1 : all_workers;
        switch (packet->op) { FOR_EACH_OP(DISPATCH) }
    }
    // The last to leave makes the block ready for the next launch.
    if (atomic_inc(meeting + DEPARTED) == all_workers - 1) {
        meeting[ARRIVED] = 0;
        meeting[DEPARTED] = 0;
    }
}

#else

// One packet per launch; every work-item is a worker.
#define LAUNCH(number, name)                                                                 \
    __kernel void launch_##name(BANK_PARAMETERS ulong scratch, ulong own, ulong own_bytes,   \
                                ulong input, ulong packets, uint index) {                    \
        DECLARE_BANKS                                                                        \
        MEMORY_MAP map = MAP_MEMORY(0);                                                      \
        op_##name(&map, (const GLOBAL PACKET *)at(&map, packets) + index, get_global_id(0),  \
                  get_global_size(0));                                                       \
    }
FOR_EACH_OP(LAUNCH)

#endif
