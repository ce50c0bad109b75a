// A CUDA block on the CPU: every thread is a fiber, what lanes do together happens when all have
// come. All lanes of a warp must take part in every exchange, as the tuned kernels do.

#ifndef BLOCK_EMULATOR_H
#define BLOCK_EMULATOR_H

#include <math.h>
#include <setjmp.h>
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
#define __cluster_dims__(...)
#define __grid_constant__
#define __builtin_assume(condition)
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
// Contexts begin a fiber only: to change one for another asks the kernel every time, a jump does not.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool begun = false, done = false;
    unsigned met;  // the meeting of the cluster it arrived for
    alignas(16) char stack[STACK_BYTES];
};

// One block. Of a launch whose blocks run at the same time there are several.
struct Block {
    std::vector<Fiber *> fibers;
    std::vector<Warp> warps;
    unsigned at_barrier = 0, barrier_round = 0, left = 0;
    unsigned at_part = 0, part_round = 0;
    int at_group[16] = {};
    unsigned group_round[16] = {};
    unsigned late = 0;  // the warp that stands still now
    unsigned char *memory = nullptr;
};
// A word on its way to where other blocks see it.
struct Store {
    unsigned *place, word;
};

static Block *block;
static jmp_buf scheduler;
static std::vector<Fiber *> idle;  // for the threads of the next block
static unsigned current;
static void (*body)();
static std::vector<Store> under_way;
static std::vector<Block> cluster;
static unsigned at_meeting, meetings;
static uint64_t random_state;

static void yield() {
    if (!_setjmp(block->fibers[current]->place)) _longjmp(scheduler, 1);
}

// What every lane of the warp brought.
static const Message *exchange(const Message &mine) {
    Warp &warp = block->warps[current / LANES];
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
    const unsigned round = block->barrier_round;
    if (++block->at_barrier == block->fibers.size()) block->at_barrier = 0, block->barrier_round++;
    while (block->barrier_round == round) yield();
}

// Of the four warps that name it.
static void group_barrier(unsigned id) {
    const unsigned round = block->group_round[id];
    if (++block->at_group[id] == 4 * LANES) block->at_group[id] = 0, block->group_round[id]++;
    while (block->group_round[id] == round) yield();
}

// Of the first `threads` threads.
static void part_barrier(unsigned threads) {
    const unsigned round = block->part_round;
    if (++block->at_part == threads) block->at_part = 0, block->part_round++;
    while (block->part_round == round) yield();
}

// Of all threads of the cluster, which arrive before any of them ends.
static void arrive_at_cluster() {
    block->fibers[current]->met = meetings;
    if (++at_meeting == cluster.size() * block->fibers.size()) at_meeting = 0, meetings++;
}
static void await_cluster() {
    while (meetings == block->fibers[current]->met) yield();
}

static void enter() {
    for (;;) {
        body();
        block->fibers[current]->done = true;
        yield();
    }
}

static Fiber *fiber_at_its_beginning() {
    if (!idle.empty()) {
        Fiber *fiber = idle.back();
        idle.pop_back();
        fiber->done = false;
        return fiber;
    }
    Fiber *fiber = new Fiber;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber->context, enter, 0);
    return fiber;
}

static void go_on(Fiber *fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber->begun) _longjmp(fiber->place, 1);
    fiber->begun = true;
    setcontext(&fiber->context);
}

static void open_block(Block &opened, unsigned threads, unsigned char *memory) {
    for (unsigned i = 0; i < threads; i++) opened.fibers.push_back(fiber_at_its_beginning());
    opened.warps.assign(threads / LANES, Warp{});
    opened.left = threads;
    opened.memory = memory;
}

static unsigned random_below(unsigned most) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) * most >> 31);
}

// Every thread of the block up to where it waits, by warps from a drawn one on; one of them is late
// for a while.
static void pass() {
    const unsigned warps = (unsigned)block->warps.size(), first = random_below(warps);
    if (random_below(32) == 0) block->late = random_below(warps);
    for (unsigned i = 0; i < warps; i++) {
        const unsigned warp = (first + i) % warps;
        if (warp == block->late && random_below(3)) continue;
        for (current = warp * LANES; current < (warp + 1) * LANES; current++) {
            Fiber *fiber = block->fibers[current];
            if (fiber->done) continue;
            go_on(fiber);
            block->left -= fiber->done;
        }
    }
}

static void close_block(Block &closed) {
    for (Fiber *fiber : closed.fibers)
        if (fiber->done)
            idle.push_back(fiber);
        else
            delete fiber;
}

static void run_block(unsigned threads, void (*kernel)()) {
    Block only;
    block = &only;
    body = kernel;
    random_state = threads;
    memset(shared, 0xFF, sizeof shared);
    open_block(only, threads, shared);
    while (only.left) pass();
    close_block(only);
}

static void run_blocks(unsigned blocks, unsigned threads, void (*kernel)()) {
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block(threads, kernel);
}

// Clusters from the last to the first, so that none has what one in front of it writes; the blocks of
// one in turns that are drawn.
static void run_clusters(unsigned clusters, unsigned size, unsigned threads, void (*kernel)()) {
    body = kernel;
    random_state = threads;
    for (unsigned number = clusters; number--;) {
        cluster.assign(size, Block{});
        for (Block &one : cluster) {
            unsigned char *memory = (unsigned char *)aligned_alloc(128, sizeof shared);
            memset(memory, 0xFF, sizeof shared);
            open_block(one, threads, memory);
        }
        at_meeting = meetings = 0;
        for (unsigned left = size; left;) {
            const unsigned next = random_below(size);
            block = &cluster[next];
            if (!block->left) continue;
            blockIdx.x = number * size + next;
            for (unsigned passes = 1 + random_below(24); passes && block->left; passes--) pass();
            left -= !block->left;
        }
        for (Block &one : cluster) {
            close_block(one);
            free(one.memory);
        }
    }
}

static void publish(unsigned *place, unsigned word) { under_way.push_back({place, word}); }

// What was stored arrives word by word, in any order; `hasty` out of 16 of it now.
static void arrive(unsigned hasty) {
    for (size_t i = 0; i < under_way.size();)
        if (random_below(16) < hasty) {
            *under_way[i].place = under_way[i].word;
            under_way[i] = under_way.back();
            under_way.pop_back();
        } else {
            i++;
        }
}

constexpr unsigned MOST_TURNS = 20000;

// All blocks of a launch at once, in turns that are drawn: one may go far ahead, another stand still for
// long. False when they do not come to an end.
static bool run_together(unsigned blocks, unsigned threads, uint64_t seed, void (*kernel)()) {
    std::vector<Block> all(blocks);
    body = kernel;
    random_state = seed;
    under_way.clear();
    for (Block &one : all) {
        unsigned char *memory = (unsigned char *)aligned_alloc(128, sizeof shared);
        memset(memory, 0xFF, sizeof shared);
        open_block(one, threads, memory);
    }
    unsigned left = blocks, late = random_below(blocks), turns = 0;
    for (; left && turns < MOST_TURNS; turns++) {
        if (random_below(64) == 0) late = random_below(blocks);
        const unsigned next = random_below(blocks);
        block = &all[next];
        if (!block->left || (next == late && random_below(8))) continue;
        blockIdx.x = next;
        for (unsigned passes = 1 + random_below(24); passes && block->left; passes--) pass();
        left -= !block->left;
        arrive(random_below(4) ? 4 : 0);
    }
    arrive(16);
    for (Block &one : all) {
        close_block(one);
        free(one.memory);
    }
    return turns < MOST_TURNS;
}

}  // namespace emulator

#endif
