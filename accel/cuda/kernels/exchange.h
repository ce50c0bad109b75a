// Floats that blocks of one launch send to each other. Each word tells whether its float has
// arrived.
//
// A word contains the float's inverted bits, so 0 means that the float has not arrived; the one NaN
// whose inverted bits are 0 is stored as another NaN. There are two or four banks, which steps use
// in turn. Step n uses bank n, modulo their number; its words are 0 when the step begins.
//
// One device has two banks: step n clears bank n + 1. Launches of one device follow each other, so
// nothing reads or writes that bank in step n.
//
// Several devices (SHARED_STEP) have four banks each. A block stores a float into the banks of all
// devices and reads those of its own device only. Step n clears bank n + 2, last used by step n - 2.
// One device may be ahead of another, but not by more than a step: a launch tells all devices that
// it has begun step n, and does not end before all others have told that they have begun it too.
// So while a device executes step n:
// - every other device has begun step n - 1, so it has ended step n - 2: no store to bank n - 2 is
//   on its way, and step n may clear that bank;
// - every other device has ended step n - 2, which cleared bank n there: step n may store to it;
// - every other device executes step n - 1, n or n + 1, which clear banks n + 1, n + 2 and n + 3,
//   and none of them is bank n.
// These orders do not depend on which floats a step exchanges; a step without rows waits for fewer.
// With two banks a device would clear what another one, a step ahead, has stored already. With
// three a step could clear a bank to which another device still stores what the step did not wait
// for.

#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "warp.h"

#define EXCHANGE_MEMORY (1ull << 60)  // of an operand: an offset in the bank, not an address
#define SPINS_BETWEEN_LOOKS 1024
#define MAX_PEERS 15

// The other devices that execute a launch together with this one, which is number `index` of all.
// All have workspaces of one layout; `apart` is how far another one is from this device's.
struct PEER_DEVICES {
    unsigned long long count, index, apart[MAX_PEERS];
};
template <class T> DEVICE T *at_peer(T *own, const PEER_DEVICES &peers, unsigned peer) {
    return (T *)((unsigned long long)own + peers.apart[peer]);
}
// Tells another device that this one has begun step `now`; `begun` has a word for every device.
DEVICE void tell_begun(unsigned *begun, unsigned now, const PEER_DEVICES &peers, unsigned peer) {
    release_to_system(at_peer(begun, peers, peer) + peers.index, now);
}
// Waits until the other device has begun step `now` or a later one, or *stop is not 0.
DEVICE void await_begun(const unsigned *begun, unsigned now, const PEER_DEVICES &peers,
                        unsigned peer, const unsigned *stop) {
    const unsigned device = peer + (peer >= peers.index);
    unsigned spins = 0;
    while ((int)(acquire_from_system(begun + device) - now) < 0) {
        spin_pause();
        if (++spins % SPINS_BETWEEN_LOOKS == 0 && load_host_word(stop)) return;
    }
}

DEVICE void publish(float *address, float value) {
    const unsigned bits = ~__float_as_uint(value);
    store_shared_word((unsigned *)address, bits ? bits : ~0x7FC00000u);
}

// How rows are read. `awaited` rows come from other blocks; a waiting thread continues with the
// current contents once *stop is not 0, which means that the host wants the launch to end. If
// `picked` is given, row t is row picked[t].
struct INCOMING {
    static constexpr bool waits_for_others = true;
    bool awaited;
    const unsigned *stop, *picked;

    __device__ __forceinline__ size_t row(unsigned token) const {
        return picked ? picked[token] : token;
    }
    __device__ __forceinline__ bool waits(bool missing, unsigned &spins) const {
        if (!awaited || !missing) return false;
        spin_pause();
        return ++spins % SPINS_BETWEEN_LOOKS || !load_host_word(stop);
    }
    __device__ __forceinline__ float one(const float *address) const {
        return one_of(load_shared_word((const unsigned *)address), address);
    }
    // The same where `word` was there before.
    __device__ __forceinline__ float one_of(unsigned word, const float *address) const {
        if (!awaited) return __uint_as_float(word);
        unsigned spins = 0;
        while (waits(word == 0, spins)) word = load_shared_word((const unsigned *)address);
        return __uint_as_float(~word);
    }
    // Waits for one float; returns whether the host wants the launch to end instead.
    __device__ __forceinline__ bool waits_in_vain(const float *address) const {
        unsigned spins = 0;
        while (load_shared_word((const unsigned *)address) == 0)
            if (!waits(true, spins)) return true;
        return false;
    }
    // Requests of many lanes for missing words overload the cache, so one lane of the warp waits
    // for one of its words first.
    __device__ __forceinline__ void watch(const float *address, int lane) const {
        if (!awaited) return;
        if (lane == 0) one(address);
        __syncwarp();
    }
    // Four floats as currently stored, and after all of them have arrived.
    __device__ __forceinline__ uint4 four(const float *address) const {
        return load_shared_words((const unsigned *)address);
    }
    __device__ __forceinline__ float4 settled(uint4 v, const float *address) const {
        unsigned spins = 0;
        while (waits(!v.x || !v.y || !v.z || !v.w, spins))
            v = load_shared_words((const unsigned *)address);
        const unsigned flip = awaited ? 0xFFFFFFFFu : 0u;
        return {__uint_as_float(v.x ^ flip), __uint_as_float(v.y ^ flip),
                __uint_as_float(v.z ^ flip), __uint_as_float(v.w ^ flip)};
    }
};

// Memory that is complete when a kernel begins.
struct STANDING {
    static constexpr bool waits_for_others = false;
    __device__ __forceinline__ size_t row(unsigned token) const { return token; }
};

#endif
