// Results that a kernel stores on every device that shares the step, and the end of a launch behind
// which each device has those of all. With PEERS other devices, TO_ and the macro of a result is its
// number among the SENDS tensors that are sent. If MEETS is 0, the next launch also is the end of this.
//
// `words` has the number of the launch's blocks that have ended, the number of the latest step, and
// for each device the number of the latest step received from it. Steps are counted, never reset.

#ifndef SENDING_H
#define SENDING_H

#include "packets.h"
#include "warp.h"

#define ENDED_AT 0
#define STEP_AT 1
#define HEARD_AT 2
#define SPINS_BETWEEN_LOOKS 1024
#ifndef MEETS
#define MEETS 1
#endif

#ifndef TO_Y
#define TO_Y -1
#endif
#ifndef TO_Y_AT
#define TO_Y_AT -1
#endif
#ifndef TO_Y0
#define TO_Y0 -1
#endif
#ifndef TO_Y1
#define TO_Y1 -1
#endif
#ifndef TO_Y2
#define TO_Y2 -1
#endif
#ifndef TO_Y3
#define TO_Y3 -1
#endif
#ifndef TO_H
#define TO_H -1
#endif
#ifndef TO_SHARED_H
#define TO_SHARED_H -1
#endif

#ifndef TO_M
#define TO_M -1
#endif
#ifndef TO_SUMS
#define TO_SUMS -1
#endif
#ifndef TO_SCALE
#define TO_SCALE -1
#endif

#if PEERS

DEVICE const OTHERS &others_of(const LAUNCH &launch) {
    return ((const PACKETS *)launch.packets)->others;
}

// A result, which lies as many bytes apart on each peer; on none if `number` is -1.
struct SENT {
    long long apart[PEERS];

    __device__ __forceinline__ void open(const LAUNCH &launch, int number) {
#pragma unroll
        for (unsigned peer = 0; peer < PEERS; peer++)
            apart[peer] = number < 0 ? 0 : others_of(launch).of[peer].apart[number];
    }
    template <typename T> __device__ __forceinline__ void store(T *target, const T &value) const {
        *target = value;
#pragma unroll
        for (unsigned peer = 0; peer < PEERS; peer++)
            if (apart[peer]) *(T *)((char *)target + apart[peer]) = value;
    }
};

DEVICE void await_others(const OTHERS &others, unsigned now) {
    unsigned spins = 0;
    for (unsigned peer = 0; peer < PEERS; peer++) {
        // Peers are the devices in order, this one left out.
        const unsigned from = peer + (peer >= others.index);
        while ((int)(acquire_from_system((unsigned *)others.words + HEARD_AT + from) - now) < 0) {
            spin_pause();
            if (++spins % SPINS_BETWEEN_LOOKS == 0 && load_host_word((unsigned *)others.stop))
                return;
        }
    }
}

// All threads of all blocks call this once, behind everything they send. The last block tells the
// peers that the device's part is there, and waits for theirs.
DEVICE void meet_others(const LAUNCH &launch) {
    if (!MEETS) return;
    const OTHERS &others = others_of(launch);
    const unsigned blocks = gridDim.x * gridDim.y;
    unsigned *words = (unsigned *)others.words;
    __syncthreads();
    if (threadIdx.x) return;
    if (blocks > 1) {
        system_fence();
        if (atomicAdd(words + ENDED_AT, 1u) + 1 != blocks) return;
        words[ENDED_AT] = 0;
    }
    const unsigned now = words[STEP_AT] + 1;
    words[STEP_AT] = now;
    for (unsigned peer = 0; peer < PEERS; peer++)
        release_to_system((unsigned *)others.of[peer].words + HEARD_AT + others.index, now);
    await_others(others, now);
}

#else

struct SENT {
    __device__ __forceinline__ void open(const LAUNCH &, int) {}
    template <typename T> __device__ __forceinline__ void store(T *target, const T &value) const {
        *target = value;
    }
};
DEVICE void meet_others(const LAUNCH &) {}

#endif
#endif
