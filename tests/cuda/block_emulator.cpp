// What block_emulator.h says, in the library of each kernel.

#include "block_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <vector>

dim3 blockIdx, gridDim, blockDim;
alignas(128) unsigned char shared[256 << 10];

namespace emulator {

constexpr size_t STACK_BYTES = 128 << 10;

// Contexts begin a fiber only: to change one for another asks the kernel every time, a jump does not.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool begun = false, done = false;
    unsigned met;  // the meeting of the cluster it arrived for
    alignas(16) char stack[STACK_BYTES];
};

// A word on its way to where other blocks see it.
struct Store {
    unsigned *place, word, block;
};

Block *block, *cluster;
unsigned current;
static jmp_buf scheduler;
static std::vector<Fiber *> idle;  // for the threads of the next block
static void (*body)();
static std::vector<Store> under_way;
static unsigned at_meeting, expected, meetings;
static uint64_t random_state;

void yield() {
    if (!_setjmp(block->fibers[current]->place)) _longjmp(scheduler, 1);
}

const Message *exchange(const Message &mine) {
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

void block_barrier() {
    const unsigned round = block->barrier_round;
    if (++block->at_barrier == block->threads) block->at_barrier = 0, block->barrier_round++;
    while (block->barrier_round == round) yield();
}

void group_barrier(unsigned id) {
    const unsigned round = block->group_round[id];
    if (++block->at_group[id] == 4 * LANES) block->at_group[id] = 0, block->group_round[id]++;
    while (block->group_round[id] == round) yield();
}

void part_barrier(unsigned threads) {
    const unsigned round = block->part_round;
    if (++block->at_part == threads) block->at_part = 0, block->part_round++;
    while (block->part_round == round) yield();
}

void arrive_at_cluster() {
    block->fibers[current]->met = meetings;
    if (++at_meeting == expected) at_meeting = 0, meetings++;
}
void await_cluster() {
    while (meetings == block->fibers[current]->met) yield();
}

// 16 bits of every byte, which compilers multiply several at a time.
static void widen(const unsigned char *bytes, int count, bool is_signed, int16_t *to) {
    if (is_signed)
        for (int i = 0; i < count; i++) to[i] = (signed char)bytes[i];
    else
        for (int i = 0; i < count; i++) to[i] = bytes[i];
}

static int product(const int16_t *a, const int16_t *b, int count) {
    int sum = 0;
    for (int i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

// Of the rows that a lane has sums of.
static void widen_rows(const Message *all, int k, bool is_signed, int16_t (&rows)[2][32]) {
    const int lane = current % LANES;
    unsigned char bytes[32];
    for (int i = 0; i < 2; i++) {
        for (int n = 0; n < k; n += 4)
            memcpy(bytes + n, &all[lane / 4 * 4 + n % 16 / 4].word[n / 16 * 2 + i], 4);
        widen(bytes, k, is_signed, rows[i]);
    }
}

void multiply(int *sum, const unsigned *a, const unsigned *b, int k, bool is_signed,
              bool is_signed_b) {
    Message mine = {};
    memcpy(mine.word, a, k / 2);
    memcpy(mine.word + 4, b, k / 4);
    const Message *all = exchange(mine);
    int16_t rows[2][32], column[32];
    widen_rows(all, k, is_signed, rows);
    for (int i = 0; i < 2; i++) {
        unsigned char bytes[32];
        for (int n = 0; n < k; n += 4)
            memcpy(bytes + n, &all[(current % 4 * 2 + i) * 4 + n % 16 / 4].word[4 + n / 16], 4);
        widen(bytes, k, is_signed_b, column);
        for (int r = 0; r < 2; r++) sum[2 * r + i] += product(rows[r], column, k);
    }
}

void multiply_rows(int *sum, int count, const unsigned (&a)[4], const unsigned char *columns,
                   unsigned lead, unsigned stride, bool is_signed, bool is_signed_b) {
    Message mine = {};
    memcpy(mine.word, a, sizeof a);
    int16_t rows[2][32], column[32];
    widen_rows(exchange(mine), 32, is_signed, rows);
    for (int i = 0; i < count; i++) {
        if (i & 2) continue;
        const unsigned char *own = columns + i / 4 * stride + (current % 4 * 2 + i % 2) * 16;
        widen(own, 16, is_signed_b, column);
        widen(own + lead, 16, is_signed_b, column + 16);
        for (int r = 0; r < 2; r++) sum[i + 2 * r] += product(rows[r], column, 32);
    }
}

// Of a finite binary16.
static float of_half(unsigned bits) {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float value =
        exponent ? ldexpf(1024 + fraction, (int)exponent - 25) : ldexpf(fraction, -24);
    return bits & 0x8000u ? -value : value;
}

void multiply_halves(float *sum, int count, const unsigned (&a)[4], const unsigned char *columns,
                     unsigned lead, unsigned stride) {
    Message mine = {};
    memcpy(mine.word, a, sizeof a);
    const Message *all = exchange(mine);
    float rows[2][16];
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++)
            rows[r][k] = of_half(all[current % LANES / 4 * 4 + k % 8 / 2].word[k / 8 * 2 + r] >>
                                 k % 2 * 16);
    for (int i = 0; i < count; i++) {
        if (i & 2) continue;
        const unsigned char *own = columns + i / 4 * stride + (current % 4 * 2 + i % 2) * 16;
        for (int k = 0; k < 16; k++) {
            uint16_t bits;
            memcpy(&bits, own + k / 8 * lead + k % 8 * 2, 2);
            const float column = of_half(bits);
            for (int r = 0; r < 2; r++) sum[i + 2 * r] += rows[r][k] * column;
        }
    }
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
    opened.fibers = new Fiber *[threads];
    for (unsigned i = 0; i < threads; i++) opened.fibers[i] = fiber_at_its_beginning();
    opened.warps = new Warp[threads / LANES]();
    opened.threads = opened.left = threads;
    opened.memory = memory;
}

static unsigned random_below(unsigned most) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) * most >> 31);
}

// Every thread of the block up to where it waits, by warps from a drawn one on; one of them is late
// for a while.
static void pass() {
    const unsigned warps = block->threads / LANES, first = random_below(warps);
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
    for (unsigned i = 0; i < closed.threads; i++)
        if (closed.fibers[i]->done)
            idle.push_back(closed.fibers[i]);
        else
            delete closed.fibers[i];
    delete[] closed.fibers;
    delete[] closed.warps;
}

// The stacks of every library of kernels together would be gigabytes.
static void free_idle() {
    for (Fiber *fiber : idle) delete fiber;
    idle.clear();
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

void run_blocks(unsigned blocks, unsigned threads, void (*kernel)()) {
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block(threads, kernel);
    free_idle();
}

void run_clusters(unsigned clusters, unsigned size, unsigned threads, void (*kernel)()) {
    body = kernel;
    random_state = threads;
    for (unsigned number = clusters; number--;) {
        std::vector<Block> all(size);
        cluster = all.data();
        expected = size * threads;
        for (Block &one : all) {
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
        for (Block &one : all) {
            close_block(one);
            free(one.memory);
        }
    }
    free_idle();
}

void publish(unsigned *place, unsigned word) { under_way.push_back({place, word, blockIdx.x}); }

static void arrive_at(size_t i) {
    *under_way[i].place = under_way[i].word;
    under_way[i] = under_way.back();
    under_way.pop_back();
}

void end_launch(unsigned first, unsigned blocks) {
    for (size_t i = 0; i < under_way.size();)
        if (under_way[i].block - first < blocks)
            arrive_at(i);
        else
            i++;
}

// What was stored arrives word by word, in any order; `hasty` out of 16 of it now.
static void arrive(unsigned hasty) {
    for (size_t i = 0; i < under_way.size();)
        if (random_below(16) < hasty)
            arrive_at(i);
        else
            i++;
}

bool run_together(unsigned blocks, unsigned threads, uint64_t seed, unsigned device,
                  unsigned max_turns, void (*kernel)()) {
    std::vector<Block> all(blocks);
    body = kernel;
    random_state = seed;
    under_way.clear();
    for (Block &one : all) {
        unsigned char *memory = (unsigned char *)aligned_alloc(128, sizeof shared);
        memset(memory, 0xFF, sizeof shared);
        open_block(one, threads, memory);
    }
    // Of a device longer, so that others are as far ahead as they can be.
    const unsigned devices = blocks / device, often = device > 1 ? 256 : 64;
    unsigned left = blocks, late = random_below(devices), turns = 0;
    for (; left && turns < max_turns; turns++) {
        if (random_below(often) == 0) late = random_below(devices);
        const unsigned next = random_below(blocks);
        block = &all[next];
        if (!block->left || (next / device == late && random_below(device > 1 ? 32 : 8))) continue;
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
    free_idle();
    return turns < max_turns;
}

}  // namespace emulator
