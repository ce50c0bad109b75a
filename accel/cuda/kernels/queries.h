// What the query records of a step say about its tokens: their slots, and which of them begin a
// sequence; and which steps a launch is for.

#ifndef QUERIES_H
#define QUERIES_H

#include "packets.h"
#include "warp.h"

#define ALL_STEPS 0
#define DECODING_STEPS 1
#define PROMPT_STEPS 2
#define LONE_TOKENS 4  // that a step of DECODING_STEPS may have besides those of its rows

// Whether a launch for `steps` has nothing to do in this one, told by its numbers of tokens and rows.
DEVICE bool leaves_out(const LAUNCH &launch, int steps) {
    if (steps == ALL_STEPS) return false;
    const bool decodes = U32_AT(launch.inputs, 0) <= U32_AT(launch.inputs, 1) + LONE_TOKENS;
    return decodes != (steps == DECODING_STEPS);
}

struct QUERIES {
    const unsigned *first;
    size_t stride;
    __device__ __forceinline__ unsigned slot(unsigned token) const {
        return first[token * stride + QUERY_SLOT];
    }
    __device__ __forceinline__ bool starts(unsigned token) const {
        return position(token) == 0;
    }
    __device__ __forceinline__ unsigned position(unsigned token) const {
        return first[token * stride + QUERY_POSITION];
    }
    // The row of a state that a token begins with, of `states` rows of each slot.
    __device__ __forceinline__ unsigned row_before(unsigned token, unsigned states) const {
        return slot(token) * states + (position(token) + states - 1) % states;
    }
    // The row for the state after a token.
    __device__ __forceinline__ unsigned row_after(unsigned token, unsigned states) const {
        return slot(token) * states + position(token) % states;
    }
    // Whether no later token of the step replaces the state after this one.
    __device__ __forceinline__ bool remains(unsigned token, unsigned tokens,
                                            unsigned states) const {
        const unsigned later = token + states;
        return later >= tokens || slot(later) != slot(token) ||
               position(later) != position(token) + states;
    }
};

// Appends to `own` those of the tokens `first` to `first` + threads - 1 whose slot has the remainder
// `part` modulo `parts`, behind the `found` there are, by the whole block; returns how many there are
// then. `counts` has a word for each warp.
DEVICE unsigned find_own(const QUERIES &queries, unsigned first, unsigned tokens, unsigned parts,
                         unsigned part, unsigned *own, unsigned found, unsigned *counts) {
    const unsigned token = first + threadIdx.x, warp = threadIdx.x / WARP_LANES;
    const bool is_own = token < tokens && queries.slot(token) % parts == part;
    const unsigned bits = __ballot_sync(ALL_LANES, is_own), lane = threadIdx.x % WARP_LANES;
    if (lane == 0) counts[warp] = __popc(bits);
    __syncthreads();
    unsigned at = found + __popc(bits & ((1u << lane) - 1));
    for (unsigned w = 0; w < blockDim.x / WARP_LANES; w++) {
        if (w < warp) at += counts[w];
        found += counts[w];
    }
    if (is_own) own[at] = token;
    __syncthreads();
    return found;
}

#endif
