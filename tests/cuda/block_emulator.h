// A CUDA block on the CPU: every thread is a fiber, what lanes do together happens when all have
// come. All lanes of a warp must take part in every exchange, as the tuned kernels do. What kernels
// call: block_emulator.cpp does it, which is compiled once for all of them.

#ifndef BLOCK_EMULATOR_H
#define BLOCK_EMULATOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }

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

// Every library has its own.
#pragma GCC visibility push(hidden)
extern dim3 blockIdx, gridDim, blockDim;
alignas(128) extern unsigned char shared[256 << 10];

namespace emulator {

constexpr int LANES = 32, WORDS = 8;

struct Message {
    uint32_t word[WORDS];
};
struct Warp {
    Message coming[LANES], there[2][LANES];
    int arrived = 0;
    unsigned round = 0;
};
struct Fiber;

// One block. Of a launch whose blocks run at the same time there are several.
struct Block {
    Fiber **fibers = nullptr;
    Warp *warps = nullptr;
    unsigned threads = 0;
    unsigned at_barrier = 0, barrier_round = 0, left = 0;
    unsigned at_part = 0, part_round = 0;
    int at_group[16] = {};
    unsigned group_round[16] = {};
    unsigned late = 0;  // the warp that stands still now
    unsigned char *memory = nullptr;
};

extern Block *block, *cluster;
extern unsigned current;

void yield();
// What every lane of the warp brought.
const Message *exchange(const Message &mine);
void block_barrier();
// Of the four warps that name it.
void group_barrier(unsigned id);
// Of the first `threads` threads.
void part_barrier(unsigned threads);
// Of all threads of the cluster, which arrive before any of them ends.
void arrive_at_cluster();
void await_cluster();
void publish(unsigned *place, unsigned word);
// To four sums of a lane the products of its warp's 16 rows and 8 columns of k bytes.
void multiply(int *sum, const unsigned *a, const unsigned *b, int k, bool is_signed,
              bool is_signed_b);
// The same of 32 bytes with count / 2 columns: 16 bytes of eight of them lie one after the other, the
// next 16 `lead` bytes behind, the next eight columns `stride`.
void multiply_rows(int *sum, int count, const unsigned (&a)[4], const unsigned char *columns,
                   unsigned lead, unsigned stride, bool is_signed, bool is_signed_b);

// The same of 16 binary16 with count / 2 columns, eight of a column in 16 bytes.
void multiply_halves(float *sum, int count, const unsigned (&a)[4], const unsigned char *columns,
                     unsigned lead, unsigned stride);

void run_blocks(unsigned blocks, unsigned threads, void (*kernel)());
// Clusters from the last to the first, so that none has what one in front of it writes; the blocks of
// one in turns that are drawn.
void run_clusters(unsigned clusters, unsigned size, unsigned threads, void (*kernel)());
// All blocks of a launch at once, in turns that are drawn: one may go far ahead, another stand still for
// long. Blocks stand still in groups of `device`, which are those of a device. False when they have
// not come to an end after `max_turns` turns.
bool run_together(unsigned blocks, unsigned threads, uint64_t seed, unsigned device,
                  unsigned max_turns, void (*kernel)());
// Ends a launch of the blocks from `first` on, for one that follows it on their device: all that they
// published has arrived.
void end_launch(unsigned first, unsigned blocks);

}  // namespace emulator
#pragma GCC visibility pop

#endif
