// Floats that blocks of one launch send to each other. Each word tells whether its float has
// arrived.
//
// A word contains the float's inverted bits, so 0 means that the float has not arrived; the one NaN
// whose inverted bits are 0 is stored as another NaN. There are two banks, which steps use in turn:
// a step uses one bank, whose words are all 0 when it begins, and clears the other.

#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "warp.h"

#define EXCHANGE_MEMORY (1ull << 60)  // of an operand: an offset in the bank, not an address
#define SPINS_BETWEEN_LOOKS 1024

DEVICE void publish(float *place, float value) {
    const unsigned bits = ~__float_as_uint(value);
    store_shared_word((unsigned *)place, bits ? bits : ~0x7FC00000u);
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
    __device__ __forceinline__ float one(const float *place) const {
        return one_of(load_shared_word((const unsigned *)place), place);
    }
    // The same where `word` was there before.
    __device__ __forceinline__ float one_of(unsigned word, const float *place) const {
        if (!awaited) return __uint_as_float(word);
        unsigned spins = 0;
        while (waits(word == 0, spins)) word = load_shared_word((const unsigned *)place);
        return __uint_as_float(~word);
    }
    // Waits for one float; returns whether the host wants the launch to end instead.
    __device__ __forceinline__ bool waits_in_vain(const float *place) const {
        unsigned spins = 0;
        while (load_shared_word((const unsigned *)place) == 0)
            if (!waits(true, spins)) return true;
        return false;
    }
    // Requests of many lanes for missing words overload the cache, so one lane of the warp waits
    // for one of its words first.
    __device__ __forceinline__ void watch(const float *place, int lane) const {
        if (!awaited) return;
        if (lane == 0) one(place);
        __syncwarp();
    }
    // Four floats as currently stored, and after all of them have arrived.
    __device__ __forceinline__ uint4 four(const float *place) const {
        return load_shared_words((const unsigned *)place);
    }
    __device__ __forceinline__ float4 settled(uint4 v, const float *place) const {
        unsigned spins = 0;
        while (waits(!v.x || !v.y || !v.z || !v.w, spins))
            v = load_shared_words((const unsigned *)place);
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
