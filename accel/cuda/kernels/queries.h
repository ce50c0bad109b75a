// What the query records of a step say about its tokens: their slots, and which of them begin a
// sequence.

#ifndef QUERIES_H
#define QUERIES_H

#include "packets.h"

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

#endif
