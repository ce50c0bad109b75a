// The worker pool: threads of this process execute steps of packets in the order of submission.
// This file is compiled after opencl_c.h, packet.h and the tables of ops that sources.py generates.

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_WIN32)
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#define MAX_WORKERS 1024
#define RING_STEPS 64              // most steps in flight
#define LINE_BYTES 64
#define STACK_BYTES (8u << 20)     // kernels keep tiles on the stack
#define SPIN_NANOSECONDS 20000     // about the cost of falling asleep and waking up
#define SPIN_SHARE 2               // a worker also spins for 1/2 of the time since it met the others
#define IDLE_SPIN_NANOSECONDS 50000
#define LOOKS_PER_CLOCK 16

typedef atomic_uint SHARED_UINT;

// ---- The clock, sleeping on a word, and threads, which differ between systems.

static ulong nanoseconds(void) {
#if defined(_WIN32)
    LARGE_INTEGER now, frequency;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return (ulong)((double)now.QuadPart * 1e9 / (double)frequency.QuadPart);
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (ulong)now.tv_sec * 1000000000u + (ulong)now.tv_nsec;
#endif
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

#if defined(__linux__)
// Sleeps while the word has this value, until a wake-up, a signal, or the limit in nanoseconds; 0 is
// no limit. Every implementation may return early, so callers check the word again.
static void sleep_on(SHARED_UINT *word, uint value, ulong limit) {
    const struct timespec time = {(time_t)(limit / 1000000000u), (long)(limit % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, limit ? &time : 0, 0, 0);
}

static void wake_all(SHARED_UINT *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, 0, 0, 0);
}
#elif defined(_WIN32)
static void sleep_on(SHARED_UINT *word, uint value, ulong limit) {
    WaitOnAddress((volatile VOID *)word, &value, sizeof(value),
                  limit ? (DWORD)(limit / 1000000u) + 1 : INFINITE);
}

static void wake_all(SHARED_UINT *word) { WakeByAddressAll((PVOID)word); }
#else
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

static void sleep_on(SHARED_UINT *word, uint value, ulong limit) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)(limit % 1000000000u);
    until.tv_sec += (time_t)(limit / 1000000000u) + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&sleeping);
    if (atomic_load(word) == value) {
        if (limit) pthread_cond_timedwait(&woken, &sleeping, &until);
        else pthread_cond_wait(&woken, &sleeping);
    }
    pthread_mutex_unlock(&sleeping);
}

static void wake_all(SHARED_UINT *word) {
    pthread_mutex_lock(&sleeping);
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&sleeping);
}
#endif

// Threads inherit the control register of their creator, which may flush subnormals to zero.
static void set_float_environment(void) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(0x1F80);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((ulong)0));
#endif
}

// ---- Counters that threads wait for.

typedef struct {
    SHARED_UINT value;
    SHARED_UINT sleepers;
    char rest[LINE_BYTES - 8];
} COUNTER;

static inline bool reached(COUNTER *counter, uint target) {
    return (int)(atomic_load(&counter->value) - target) >= 0;
}

static void wake_sleepers(COUNTER *counter) {
    // A thread that increments `sleepers` after this load reads the new value before it sleeps.
    if (atomic_load(&counter->sleepers)) wake_all(&counter->value);
}

static void set_counter(COUNTER *counter, uint value) {
    atomic_store(&counter->value, value);
    wake_sleepers(counter);
}

// True if the counter reaches the target while this thread spins for `patience` nanoseconds.
static bool reached_soon(COUNTER *counter, uint target, ulong patience) {
    const ulong begun = nanoseconds();
    for (;;) {
        for (uint look = 0; look < LOOKS_PER_CLOCK; look++) {
            if (reached(counter, target)) return true;
            pause_briefly();
        }
        if (nanoseconds() - begun > patience) return false;
    }
}

static void wait_for(COUNTER *counter, uint target, ulong patience) {
    if (reached(counter, target) || reached_soon(counter, target, patience)) return;
    atomic_fetch_add(&counter->sleepers, 1);
    for (uint value; (int)((value = atomic_load(&counter->value)) - target) < 0;)
        sleep_on(&counter->value, value, 0);
    atomic_fetch_sub(&counter->sleepers, 1);
}

// ---- Steps and the threads that execute them. pool.py mirrors JOB and COPY.

typedef struct {
    ulong source;
    ulong target;
    ulong bytes;
} COPY;

typedef struct {
    ulong scratch;    // address of the scratch memory that all workers share
    ulong own;        // address of the first worker's own scratch memory
    ulong own_bytes;  // bytes of each worker's own scratch memory
    ulong input;      // address of the step's inputs
    ulong packets;    // address of its packets
    ulong copies;     // address of the copies made after the packets
    ulong cancelled;  // address of a word that is not 0 once the step need not be finished, or 0
    uint count;       // number of packets
    uint copy_count;
    uint workers;
    uint reserved;
} JOB;

typedef struct {
    atomic_ullong head;  // number of the step << 32 | its workers; 0 while the slot changes
    JOB job;
    ulong begun;         // time in nanoseconds
} SLOT;

typedef struct POOL POOL;

typedef struct {
    COUNTER posted;  // the last step that this worker takes part in
    POOL *pool;
    uint index;
#if defined(_WIN32)
    HANDLE thread;
#else
    pthread_t thread;
#endif
} WORKER;

struct POOL {
    COUNTER completed;  // the last step that has ended
    COUNTER arrived;    // arrivals of workers at all barriers of this step
    COUNTER released;   // the barriers of this step that all workers have come to
    COUNTER departed;   // workers that have finished this step
    SLOT ring[RING_STEPS];
    ulong times[RING_STEPS];  // nanoseconds of each of the last steps
    uint submitted;
    uint workers;
    atomic_bool closing;
    WORKER *worker;
};

// A barrier for the workers of a step, its number counted from 1. Workers wait for another word than
// the one they count in: else each arrival would take the word from all that wait.
// `met` is the time when this worker left the last barrier.
static void meet(POOL *pool, uint workers, uint barrier, ulong *met) {
    if (atomic_fetch_add(&pool->arrived.value, 1) + 1 == barrier * workers)
        set_counter(&pool->released, barrier);
    else
        wait_for(&pool->released, barrier, SPIN_NANOSECONDS + (nanoseconds() - *met) / SPIN_SHARE);
    *met = nanoseconds();
}

static void run_packets(POOL *pool, const JOB *job, uint index) {
    const MEMORY_MAP map = {job->scratch, job->own + index * job->own_bytes, job->input};
    const PACKET *packet = (const PACKET *)job->packets;
    const atomic_uint *cancelled = (const atomic_uint *)job->cancelled;
    const bool meets = job->workers > 1;
    uint meetings = 0;
    ulong met = nanoseconds();
    for (uint i = 0; i < job->count; i++, packet++) {
        if (packet->wait && meets) meet(pool, job->workers, ++meetings, &met);
        // Who skips a packet here skips all behind it, and so do the others once they have met: an
        // op never reads what was not computed, such as the number of an expert.
        if (cancelled && atomic_load_explicit(cancelled, memory_order_relaxed)) continue;
        const uint worker = packet->everyone ? 0 : index;
        const uint workers = packet->everyone ? 1 : job->workers;
        op_of(packet)(&map, packet, worker, workers);
    }
    if (!job->copy_count) return;
    if (meets) meet(pool, job->workers, ++meetings, &met);
    const COPY *copy = (const COPY *)job->copies;
    for (uint i = 0; i < job->copy_count; i++, copy++) {
        const ulong first = copy->bytes * index / job->workers;
        const ulong end = copy->bytes * (index + 1) / job->workers;
        memcpy((uchar *)copy->target + first, (const uchar *)copy->source + first, end - first);
    }
}

static void take_part(POOL *pool, SLOT *slot, uint number, uint index) {
    wait_for(&pool->completed, number - 1, SPIN_NANOSECONDS);
    if (index == 0) slot->begun = nanoseconds();
    run_packets(pool, &slot->job, index);
    // Read before this worker departs: later the slot may hold another step.
    const uint workers = slot->job.workers;
    if (atomic_fetch_add(&pool->departed.value, 1) + 1 < workers) return;
    atomic_store(&pool->departed.value, 0);
    atomic_store(&pool->arrived.value, 0);
    atomic_store(&pool->released.value, 0);
    pool->times[number % RING_STEPS] = nanoseconds() - slot->begun;
    set_counter(&pool->completed, number);
}

static void work(WORKER *self) {
    POOL *pool = self->pool;
    set_float_environment();
    for (uint seen = 0; !atomic_load(&pool->closing);) {
        wait_for(&self->posted, seen + 1, IDLE_SPIN_NANOSECONDS);
        const uint posted = atomic_load(&self->posted.value);
        while (seen != posted) {
            SLOT *slot = &pool->ring[++seen % RING_STEPS];
            // The slot holds a later step when this worker has no part in step `seen`.
            const ulong head = atomic_load(&slot->head);
            if (head >> 32 == seen && self->index < (uint)head)
                take_part(pool, slot, seen, self->index);
        }
    }
}

#if defined(_WIN32)
static DWORD WINAPI thread_main(LPVOID self) {
    work(self);
    return 0;
}

static bool start_thread(WORKER *worker) {
    worker->thread = CreateThread(0, STACK_BYTES, thread_main, worker, 0, 0);
    return worker->thread != 0;
}

static void join_thread(WORKER *worker) {
    WaitForSingleObject(worker->thread, INFINITE);
    CloseHandle(worker->thread);
}
#else
static void *thread_main(void *self) {
    work(self);
    return 0;
}

static bool start_thread(WORKER *worker) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    const bool started = !pthread_create(&worker->thread, &attributes, thread_main, worker);
    pthread_attr_destroy(&attributes);
    return started;
}

static void join_thread(WORKER *worker) { pthread_join(worker->thread, 0); }
#endif

// ---- Functions that Python calls.

// Waits for all submitted steps, then ends the threads.
EXPORTED void zinc_close(POOL *pool) {
    wait_for(&pool->completed, pool->submitted, 0);
    atomic_store(&pool->closing, true);
    for (uint i = 0; i < pool->workers; i++)
        set_counter(&pool->worker[i].posted, pool->submitted + 1);
    for (uint i = 0; i < pool->workers; i++) join_thread(&pool->worker[i]);
    free(pool->worker);
    free(pool);
}

// A new pool of so many threads; 0 when the system cannot start them.
EXPORTED POOL *zinc_open(uint workers) {
    if (workers == 0 || workers > MAX_WORKERS) return 0;
    POOL *pool = calloc(1, sizeof(POOL));
    if (!pool) return 0;
    pool->worker = calloc(workers, sizeof(WORKER));
    if (!pool->worker) {
        free(pool);
        return 0;
    }
    for (; pool->workers < workers; pool->workers++) {
        WORKER *worker = &pool->worker[pool->workers];
        worker->pool = pool;
        worker->index = pool->workers;
        if (!start_thread(worker)) {
            zinc_close(pool);
            return 0;
        }
    }
    return pool;
}

// The address of the number of the last step that has ended, so that Python reads it without a
// call.
EXPORTED SHARED_UINT *zinc_completed(POOL *pool) { return &pool->completed.value; }

// Nanoseconds of the last RING_STEPS steps, each at its number modulo RING_STEPS.
EXPORTED ulong *zinc_times(POOL *pool) { return pool->times; }

// Queues a step and returns its number; waits while the ring is full.
EXPORTED uint zinc_submit(POOL *pool, const JOB *job) {
    const uint number = ++pool->submitted;
    wait_for(&pool->completed, number - RING_STEPS, 0);
    SLOT *slot = &pool->ring[number % RING_STEPS];
    atomic_store(&slot->head, 0);
    slot->job = *job;
    atomic_store(&slot->head, (ulong)number << 32 | job->workers);
    for (uint i = 0; i < job->workers; i++) set_counter(&pool->worker[i].posted, number);
    return number;
}

// Sleeps until the step has ended, a signal arrives, or so many nanoseconds have passed. Returns 1
// if the step has ended.
EXPORTED int zinc_wait(POOL *pool, uint number, ulong limit) {
    if (reached(&pool->completed, number)) return 1;
    const ulong begun = nanoseconds();
    atomic_fetch_add(&pool->completed.sleepers, 1);
    uint value = atomic_load(&pool->completed.value);
    while ((int)(value - number) < 0) {
        const ulong passed = nanoseconds() - begun;
        if (passed >= limit) break;
        sleep_on(&pool->completed.value, value, limit - passed);
        const uint now = atomic_load(&pool->completed.value);
        if (now == value) break;
        value = now;
    }
    atomic_fetch_sub(&pool->completed.sleepers, 1);
    return (int)(value - number) >= 0;
}
